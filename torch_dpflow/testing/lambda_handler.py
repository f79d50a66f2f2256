"""The handler of a function that runs what the suite of launchers has its workers run."""

from __future__ import annotations

from typing import Any

from torch_dpflow.remote.worker.aws_lambda import answer_of
from torch_dpflow.testing.remote_workers import run


def handler(event: Any, context: Any) -> dict[str, Any]:
    return answer_of(run, event, context)

"""Handler of an AWS Lambda function whose invocations are workers.

Each worker is a fork of the runtime's process, which imports torch once. The invocation's answer contains how the
worker ended.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

from msgspec.structs import asdict

from torch_dpflow.errors import MessageError
from torch_dpflow.remote.launchers.function_settings import WorkerAnswer
from torch_dpflow.remote.worker import remote_batches  # noqa: F401  (torch, before the first fork)
from torch_dpflow.remote.worker.forking import Fork, age_s
from torch_dpflow.remote.worker.program import SAMPLES, run
from torch_dpflow.workers.platform import End

import_module(SAMPLES)  # as torch: before the first fork

#: How long before the end of an invocation's time its worker is ended, so that there is an answer, in seconds.
MARGIN_S = 2.0
#: How long this environment has taken from its process's start until it can take an invocation, in seconds. It is
#: billed with the first invocation.
_init_s = age_s()


def handler(event: Any, context: Any) -> dict[str, Any]:
    """Run one worker: the function that Lambda calls. Raises MessageError for an event without a launch spec."""
    return answer_of(run, event, context)


def answer_of(run: Callable[[bytes], Any], event: Any, context: Any) -> dict[str, Any]:
    """Run a worker in a fork until it ends or the invocation's time is up; return a `WorkerAnswer` as a dict."""
    launch_spec = event.get("launch_spec") if isinstance(event, dict) else None
    if not isinstance(launch_spec, str):
        raise MessageError("the event has no launch spec: only a loader or a cluster starts workers")
    global _init_s
    init_s, _init_s = _init_s, 0.0
    fork = Fork(run, launch_spec.encode())
    why = ""
    while (end := fork.poll()) is None:
        left_s = context.get_remaining_time_in_millis() / 1000 - MARGIN_S
        if left_s <= 0 and not why:
            why = "its invocation's time is up"
            fork.kill()
        timeout_s = left_s if fork.timeout_s is None else min(left_s, fork.timeout_s)
        select.select(fork.descriptors, (), (), max(0.0, timeout_s) if not why else fork.timeout_s)
    return _answer(end, why, init_s, context.aws_request_id)


def _answer(end: End, why: str, init_s: float, request: str) -> dict[str, Any]:
    report = f"{end.report}\n{why}".strip()
    ran_s = init_s + (end.ran_s or 0.0)
    place = f"{end.place} of invocation {request}"
    return asdict(WorkerAnswer.of(replace(end, report=report, place=place, ran_s=ran_s)))

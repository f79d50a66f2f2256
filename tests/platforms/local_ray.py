"""A Ray cluster for the tests of one module."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from torch_dpflow.platforms.ray import RayAdapter

#: How the processes are called that run members, in their command lines.
MEMBER = "torch_dpflow.platforms.ray_member"


@contextmanager
def ray_of(start: Callable[[Any, str], str]) -> Iterator[Any]:
    """Ray, as `start` starts it, given the module and a directory; it returns the address, and `RAY_ADDRESS` is it."""
    with (
        tempfile.TemporaryDirectory(prefix="r-", ignore_cleanup_errors=True) as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", "t" * 40)  # else one is written to the home directory
        patch.delenv("RAY_ADDRESS", raising=False)
        import ray

        patch.setenv("RAY_ADDRESS", start(ray, directory))
        yield ray
        ray.shutdown()


def members() -> dict[int, int]:
    """The processes that run members on this machine, and their actors'."""
    found = {}
    for process in psutil.process_iter(["cmdline", "ppid"]):
        if MEMBER in (process.info["cmdline"] or ()):
            found[process.pid] = process.info["ppid"]
    return found


def names_in(adapter: RayAdapter) -> list[str]:
    """The members of all that Ray has."""
    return [*adapter.list("")]

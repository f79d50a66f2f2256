"""Tries again what may pass: pauses that grow, with full jitter, within one deadline."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

from torch_dpflow.datasets.storage.base import ByteRange, Storage
from torch_dpflow.datasets.storage.failures import may_pass
from torch_dpflow.datasets.storage.options import ReadOptions
from torch_dpflow.errors import StorageError

# Not the global generator, whose seed belongs to the user, and whose state forked workers share.
_RANDOM = random.SystemRandom()


def pause_s(options: ReadOptions, failures: int, jitter: float) -> float:
    """Seconds to wait after so many failures (from 1); `jitter` in [0, 1) spreads many readers out."""
    longest: float = min(options.longest_backoff_s, options.backoff_s * 2.0 ** (failures - 1))
    return jitter * longest


def fetch_with_retries(
    storage: Storage,
    span: ByteRange,
    options: ReadOptions,
    *,
    deadline: float = math.inf,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> bytes:
    """Read `span`, again where the failure may pass, until `options` forbid it or `deadline` is over on the clock.

    Raises the last attempt's StorageError; its message tells of the attempts.
    """
    begun = clock()
    deadline = min(deadline, begun + options.deadline_s)
    failures = 0
    while True:
        try:
            return storage.fetch(span, deadline)
        except StorageError as error:
            failures += 1
            pause = pause_s(options, failures, _RANDOM.random())
            is_last = failures >= options.attempts or clock() + pause >= deadline
            if not may_pass(error):
                raise
            if is_last:
                text = f"{error} (attempt {failures} of {options.attempts}, {clock() - begun:.1f} s)"
                raise type(error)(text) from error
        sleep(pause)

"""Retries transient failures with exponential back-off and full jitter, within one deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from torch_dpflow._core.backoff import Backoff
from torch_dpflow.datasets.storage.base import ByteRange, Storage
from torch_dpflow.datasets.storage.failures import is_transient
from torch_dpflow.datasets.storage.options import ReadOptions
from torch_dpflow.errors import StorageError


def fetch_with_retries(
    storage: Storage,
    span: ByteRange,
    options: ReadOptions,
    *,
    deadline: float = math.inf,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> bytes:
    """Read `span`; retry transient failures until the attempts of `options` or the time to `deadline` are used up.

    Raises the last attempt's StorageError, with the number of attempts in its message.
    """
    begun = clock()
    deadline = min(deadline, begun + options.deadline_s)
    backoff: Backoff | None = None
    while True:
        try:
            return storage.fetch(span, deadline)
        except StorageError as error:
            backoff = backoff or Backoff(options.backoff_s, options.longest_backoff_s)
            pause = backoff.pause_s()
            is_last = backoff.failures >= options.attempts or clock() + pause >= deadline
            if not is_transient(error):
                raise
            if is_last:
                text = f"{error} (attempt {backoff.failures} of {options.attempts}, {clock() - begun:.1f} s)"
                raise type(error)(text) from error
        sleep(pause)

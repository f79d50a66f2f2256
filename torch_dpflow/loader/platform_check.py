"""Test of a platform with one real worker: whether it connects, its versions, round-trip time and bandwidth."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch
from torch.utils.data import Dataset

from torch_dpflow.errors import DPFlowError
from torch_dpflow.loader.loader import DPFlowDataLoader
from torch_dpflow.options import LoaderOptions
from torch_dpflow.remote.launchers.contract import Finding, PlatformSpec
from torch_dpflow.remote.launchers.registry import resolve
from torch_dpflow.remote.shipping.compatibility import versions_here, warnings_of

#: Number of small samples that measure the round trip; number of large samples, and their bytes, for the bandwidth.
SMALL, LARGE, LARGE_BYTES = 32, 8, 2**24
#: The timeout of a sample, the worker's start included, seconds.
TIMEOUT_S = 300.0


class Probe(Dataset[Any]):
    """Dataset for the test: sample 0 describes the worker; then small samples, a large warm-up, large samples."""

    _large: torch.Tensor | None = None

    def __len__(self) -> int:
        return 2 + SMALL + LARGE

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            return {"host": socket.gethostname(), "pid": os.getpid(), "versions": versions_here()}
        if index <= SMALL:
            return torch.zeros(1)
        if self._large is None:  # random, so that nothing compresses it
            self._large = torch.randint(0, 256, (LARGE_BYTES,), dtype=torch.uint8)
        return self._large


def check_platform(platform: str | PlatformSpec, *, listen: str | None = None) -> Iterator[Finding]:
    """Yield the findings about a platform; if all are good, start a worker there and yield the findings about it.

    An error of the platform or the worker is yielded as the last finding.

    listen: as in `LoaderOptions`.

    Raises OptionError or OptionTypeError: there is no such platform, or a setting is wrong.
    """
    spec = resolve(platform)
    options = LoaderOptions(listen=listen, shared_memory=0)
    try:
        with closing(spec.launcher()) as launcher:
            findings = launcher.check()
        yield from findings
        if all(finding.good for finding in findings):
            yield from _try_worker(spec, options)
    except DPFlowError as error:
        yield Finding(False, str(error))


def _try_worker(spec: PlatformSpec, options: LoaderOptions) -> Iterator[Finding]:
    # One sample at a time, so that the time between two is a round trip.
    loader = DPFlowDataLoader(
        Probe(),
        batch_size=None,
        num_workers=1,
        prefetch_factor=1,
        timeout=TIMEOUT_S,
        platform=spec,
        options=options,
    )
    begun = time.perf_counter()
    samples = iter(loader)
    there = next(samples)
    yield Finding(True, f"a worker on {there['host']} has sent a sample after {time.perf_counter() - begun:.1f} s")
    differing = warnings_of(there["versions"], versions_here())
    yield Finding(
        not differing,
        "; ".join(differing) or "it has the same versions of Python, torch and what decodes samples",
    )
    times_s = [_timed(samples) for _ in range(SMALL)]
    yield Finding(True, f"a small sample takes {1000 * sorted(times_s)[SMALL // 2]:.1f} ms from request to arrival")
    next(samples)
    took_s = sum(_timed(samples) for _ in range(LARGE))
    yield Finding(True, f"one worker sends {LARGE * LARGE_BYTES / took_s / 1e6:.0f} MB/s")
    next(samples, None)  # ends the worker


def _timed(samples: Iterator[Any]) -> float:
    begun = time.perf_counter()
    next(samples)
    return time.perf_counter() - begun

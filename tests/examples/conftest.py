"""What examples leave behind in a process that they have for themselves, and a test has not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tqdm import tqdm

# Made once a process and kept: the lock. No monitoring thread: it only repaints bars that stand still.
tqdm.get_lock()
tqdm.monitor_interval = 0


@pytest.fixture(autouse=True)
def torch_as_before() -> Iterator[None]:
    """Training sets process-wide switches of torch, as a script may and a test may not."""
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = benchmark
    torch.use_deterministic_algorithms(False)

"""What examples leave behind in a process that they have for themselves, and a test has not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tqdm import tqdm

# Made once a process and kept: the lock. No monitoring thread: it only repaints bars that stand still.
tqdm.get_lock()
tqdm.monitor_interval = 0


def torch_as_before() -> Iterator[None]:
    """Training sets process-wide switches of torch, as a script may and a test may not."""
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    determinism = torch.get_deterministic_debug_mode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = benchmark
    torch.set_deterministic_debug_mode(determinism)


torch_as_before_test = pytest.fixture(autouse=True)(torch_as_before)
torch_as_before_module = pytest.fixture(autouse=True, scope="module")(torch_as_before)

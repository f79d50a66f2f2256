"""Workers keep the memory that samples have freed."""

from __future__ import annotations

import ctypes
import resource

import pytest
from torch.utils.data import Dataset

from tests.new_process import in_fork
from torch_dpflow import DPFlowDataLoader

MEBIBYTES, PAGE = 32, resource.getpagesize()


class Faults(Dataset[int]):
    """Item `i` is how many pages were new where 32 MiB were taken, in parts, that the item had freed just before."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            parts = [bytearray(1 << 20) for _ in range(MEBIBYTES)]
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            del parts
        return faults


def faults_of_a_worker() -> list[int]:
    """In a process that has glibc's thresholds at its start, which they leave as memory is freed."""
    for parameter in (-1, -3):
        ctypes.CDLL(None).mallopt(parameter, 128 << 10)
    return [int(faults) for faults in DPFlowDataLoader(Faults(), batch_size=None, num_workers=1)]


@pytest.fixture(autouse=True)
def _settings_of_glibc_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)


def test_freed_memory_is_taken_again_without_faults() -> None:
    assert max(in_fork(faults_of_a_worker)) * PAGE < 1 << 20


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072")],
)
def test_what_the_environment_sets_stays(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert min(in_fork(faults_of_a_worker)) * PAGE > MEBIBYTES << 19

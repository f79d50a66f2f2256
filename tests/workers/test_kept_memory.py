"""Workers keep the memory that samples have freed, and share what they were forked with."""

from __future__ import annotations

import resource

import pytest

from tests.new_process import run_interpreter

MEBIBYTES, PAGE = 32, resource.getpagesize()

#: Prints how many pages are new where a worker takes 32 MiB, in parts, that it has freed just before. The process has
#: glibc's thresholds at its start, which they leave as memory is freed.
FAULTS_OF_A_WORKER = f"""
import ctypes, resource
from torch_dpflow import DPFlowDataLoader

class Faults:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            parts = [bytearray(1 << 20) for _ in range({MEBIBYTES})]
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            del parts
        return faults

for parameter in (-1, -3):
    ctypes.CDLL(None).mallopt(parameter, 128 << 10)
print(*DPFlowDataLoader(Faults(), batch_size=None, num_workers=1))
"""

OBJECTS = 200_000

#: Prints how many pages a full garbage collection of a forked worker copies. The script holds `OBJECTS` containers.
FAULTS_OF_A_COLLECTION = f"""
import gc, resource
from torch_dpflow import DPFlowDataLoader

held = [[number] for number in range({OBJECTS})]

class Faults:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        gc.collect()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        own = []
        own.append(own)
        del own
        assert gc.collect() == 1, "what a sample leaves is collected"
        return faults

print(*DPFlowDataLoader(Faults(), batch_size=None, num_workers=1, multiprocessing_context="fork"))
"""


def bytes_of_new_pages(program: str = FAULTS_OF_A_WORKER) -> int:
    run = run_interpreter(program, fresh=True)
    assert run.returncode == 0, run.stderr
    return int(run.stdout) * PAGE


@pytest.fixture(autouse=True)
def _settings_of_glibc_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)


def test_freed_memory_is_taken_again_without_faults() -> None:
    assert bytes_of_new_pages() < 1 << 20


def test_a_collection_in_a_forked_worker_copies_nothing_of_its_parent() -> None:
    # A header of the collector, to which it would write, is 16 bytes in front of each object.
    assert bytes_of_new_pages(FAULTS_OF_A_COLLECTION) < OBJECTS * 16


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072")],
)
def test_what_the_environment_sets_stays(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert bytes_of_new_pages() > MEBIBYTES << 19

"""What the kernel counts as killed for lack of memory, in each layout of control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.new_process import run_interpreter
from torch_dpflow.workers.platform import End
from torch_dpflow.workers.process_control import oom_kills

FILES = {
    "proc/vmstat": "nr_free_pages 5\noom_kill 9\n",
    "sys/fs/cgroup/job/memory.events": "low 0\noom 3\noom_kill 2\noom_group_kill 0\n",
    "sys/fs/cgroup/memory/old/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
}


@pytest.mark.parametrize(
    ("groups", "expected"),
    [("0::/job\n", 2), ("5:memory:/old\n4:cpu,cpuacct:/a:b\n", 4), ("0::/other\n", 9), ("", 9)],
)
def test_the_nearest_count_is_read(tmp_path: Path, groups: str, expected: int) -> None:
    for name, text in {**FILES, "proc/self/cgroup": groups}.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert oom_kills(tmp_path) == expected


def test_a_kernel_without_counts_has_killed_none(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) == 0


def test_an_end_for_lack_of_memory_says_so() -> None:
    assert "memory ran out" in str(End(signal=9, is_short_of_memory=True))
    assert "memory ran out" not in str(End(signal=9))


#: Enters a control group, starts a process there that takes more memory than the group has, and prints how it ended.
PROGRAM = """
import multiprocessing, os, select, sys
from pathlib import Path
from torch_dpflow.workers.local_platform import LocalPlatform
from torch_dpflow.workers.platform import ProcessSpec

def take_memory():
    taken = []
    while True:
        taken.append(b"1" * 2**20)

if __name__ == "__main__":
    Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
    platform = LocalPlatform(multiprocessing.get_context("fork"))
    platform.launch(ProcessSpec(name="greedy", incarnation=0, target=take_memory))
    while not (ended := platform.take_ended()):
        select.select([platform.wakeup_fd], [], [])
    print(ended[0].describe())
    platform.close()
"""


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group with 128 MiB of memory and no swap."""
    for top, limits in (
        (Path("/sys/fs/cgroup"), ("memory.max", "memory.swap.max")),
        (Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")),
    ):
        group = top / f"dpflow-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / limits[0]).exists():
                (group / limits[0]).write_text(str(128 * 2**20))
                with suppress(OSError):  # a kernel without swap has no such limit
                    (group / limits[1]).write_text("0" if limits[1] == "memory.swap.max" else str(128 * 2**20))
                yield group
                return
        finally:
            group.rmdir()
    pytest.skip("no control group with a limit of memory can be made here")


def test_a_worker_that_the_kernel_kills_for_lack_of_memory_is_reported_so(small_group: Path) -> None:
    done = run_interpreter(PROGRAM, str(small_group))
    assert "was ended by SIGKILL" in done.stdout, done.stderr
    assert "memory ran out" in done.stdout

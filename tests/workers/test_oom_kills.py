"""What the kernel counts as killed for lack of memory, in each layout of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

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

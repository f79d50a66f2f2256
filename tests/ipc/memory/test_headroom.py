"""How much memory is left: the machine's, and the control groups'."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from torch_dpflow.errors import OptionError
from torch_dpflow.ipc.memory.headroom import Headroom, check_memory, of_machine

MIB = 1 << 20
#: Of each version of control groups: its line, where its groups lie, its files, and what can be dropped.
VERSIONS = {
    "v1": (
        "8:cpu,memory:/outer/inner",
        "memory",
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        "total_inactive_file",
    ),
    "v2": ("0::/outer/inner", "", ("memory.max", "memory.current"), "inactive_file"),
}


class Machine:
    """A directory that looks like the control groups of a machine."""

    def __init__(self, root: Path, version: str) -> None:
        line, below, self.names, self.droppable = VERSIONS[version]
        self.root = root
        self.mount = root / below
        (root / "memberships").write_text(f"3:cpuset:/\n{line}\n")

    def group(self, path: str, limit: object, usage: int) -> None:
        folder = self.mount / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.names[0]).write_text(f"{limit}\n")
        (folder / self.names[1]).write_text(f"{usage}\n")
        (folder / "memory.stat").write_text(f"anon 5\n{self.droppable} {3 * MIB}\n")

    def headroom(self) -> Headroom:
        return Headroom(memberships=self.root / "memberships", mount=self.root)


@pytest.fixture(params=VERSIONS)
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    return Machine(tmp_path, request.param)


def test_the_tightest_group_decides(machine: Machine) -> None:
    machine.group("outer", 64 * MIB, 60 * MIB)
    machine.group("outer/inner", 32 * MIB, 16 * MIB)
    assert machine.headroom().available() == 7 * MIB
    machine.group("outer", 64 * MIB, 16 * MIB)
    assert machine.headroom().available() == 19 * MIB


def test_nobody_has_more_than_the_tightest_group_allows(machine: Machine) -> None:
    machine.group("outer", 64 * MIB, 60 * MIB)
    machine.group("outer/inner", 32 * MIB, 16 * MIB)
    assert machine.headroom().total() == 32 * MIB
    assert Headroom(memberships=machine.root / "none").total() <= of_machine("MemTotal")
    check_memory("x", 1)
    with pytest.raises(OptionError, match=r"x=1,152,921,504,606,846,976 bytes: .* give fewer"):
        check_memory("x", 1 << 60)


def test_a_container_sees_its_own_group_only(machine: Machine) -> None:
    machine.group("", 16 * MIB, 8 * MIB)
    assert machine.headroom().available() == 11 * MIB


def test_usage_is_asked_anew(machine: Machine) -> None:
    machine.group("outer", 16 * MIB, 8 * MIB)
    headroom = machine.headroom()
    machine.group("outer", 16 * MIB, 9 * MIB)
    assert headroom.available() == 10 * MIB


@pytest.mark.parametrize("limit", ["max", 1 << 62])
def test_groups_without_a_limit_do_not_count(machine: Machine, limit: object) -> None:
    machine.group("outer/inner", limit, 1 << 61)
    assert machine.headroom().available() > 0


def test_the_machine_s_own_memory_is_the_most_there_is(tmp_path: Path) -> None:
    assert of_machine("MemTotal") == psutil.virtual_memory().total
    assert 0 < Headroom().available() <= psutil.virtual_memory().total
    assert Headroom(memberships=tmp_path / "none", mount=tmp_path).available() > 0

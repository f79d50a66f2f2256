"""How much memory is left: the machine's, and the control groups'."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from tests.loader_cases import Indices
from torch_dpflow import DPFlowDataLoader
from torch_dpflow.errors import OptionError
from torch_dpflow.ipc.memory import headroom
from torch_dpflow.ipc.memory.headroom import Headroom, check_memory, machine_total

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
    assert Headroom(memberships=machine.root / "none").total() <= machine_total()
    check_memory("x", 1)
    with pytest.raises(OptionError, match=r"x=1,152,921,504,606,846,976 bytes .* give fewer"):
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
    assert machine_total() == psutil.virtual_memory().total
    assert 0 < Headroom().available() <= psutil.virtual_memory().total
    assert Headroom(memberships=tmp_path / "none", mount=tmp_path).available() > 0


#: What sandboxes and containers have as /proc/meminfo; None: they have none.
MEMINFO = {
    "old kernel": "MemTotal: 8000 kB\nMemFree: 3000 kB\nBuffers: 50 kB\nCached: 950 kB\n",
    "gVisor": "MemTotal: 8000 kB\nMemFree: 4000 kB\n",
    "zero": "MemTotal: 0 kB\nMemFree: 0 kB\nMemAvailable: 0 kB\n",
    "damaged": "MemTotal\n\nMemAvailable: many kB\n: 3 kB\n",
    "empty": "",
    "absent": None,
}


@pytest.fixture(params=MEMINFO)
def meminfo(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    file = tmp_path / "meminfo"
    if (content := MEMINFO[request.param]) is not None:
        file.write_text(content)
    monkeypatch.setattr(headroom, "_MEMINFO", file)
    return str(request.param)


def test_a_machine_that_says_little_of_its_memory_has_some(meminfo: str, tmp_path: Path) -> None:
    free = Headroom(memberships=tmp_path / "none", mount=tmp_path)
    if meminfo in ("old kernel", "gVisor"):
        assert machine_total() == free.total() == 8000 << 10
        assert free.available() == 4000 << 10
    else:  # the kernel is asked
        assert machine_total() == free.total() == psutil.virtual_memory().total
        assert 0 < free.available() <= psutil.virtual_memory().total


def test_a_machine_that_says_nothing_of_its_memory_has_some(
    meminfo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr("os.sysconf", refuses)
    free = Headroom(memberships=tmp_path / "none", mount=tmp_path)
    assert 0 < free.available() <= free.total() == machine_total()
    if meminfo in ("old kernel", "gVisor"):
        with pytest.raises(OptionError):
            check_memory("x", 1 << 50)
    else:
        check_memory("x", 1 << 50)  # as nothing is known


@pytest.mark.usefixtures("meminfo")
def test_a_loader_needs_no_figures_of_memory() -> None:
    assert torch.equal(torch.cat([*DPFlowDataLoader(Indices(8), batch_size=2, num_workers=1)]), torch.arange(8))


@pytest.mark.parametrize("lost", ["limit", "usage", "memory.stat"])
@pytest.mark.parametrize("content", [None, "", "no number\n"])
def test_groups_that_say_less_do_no_harm(machine: Machine, lost: str, content: str | None) -> None:
    machine.group("outer", 64 * MIB, 60 * MIB)
    file = machine.mount / "outer" / {"limit": machine.names[0], "usage": machine.names[1]}.get(lost, lost)
    file.unlink()
    if content is not None:
        file.write_text(content)
    memberships = machine.root / "memberships"
    memberships.write_text(f"malformed\n:\n{memberships.read_text()}\n")
    if lost == "memory.stat":
        assert machine.headroom().available() == 4 * MIB
    else:  # only the machine's own memory counts
        assert machine.headroom().available() > 64 * MIB

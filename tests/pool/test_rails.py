"""Which network cards a server's addresses are read over, and servers of several addresses."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.datasets.samples_source import Numbered, numbers, publish
from tests.pool.pool_servers import inner_server
from tests.shared_cluster import PATIENCE_S, wait
from torch_dpflow.cluster.security.connection_file import generate_keys, write_connection_file
from torch_dpflow.datasets import DatasetStore
from torch_dpflow.pool import DataClient
from torch_dpflow.pool.lanes import lane_reader, railed_reader
from torch_dpflow.pool.lanes.pool_address import PoolAddress, find_address
from torch_dpflow.pool.lanes.rail_knocks import RailKnocks
from torch_dpflow.pool.lanes.railed_reader import RailedReader
from torch_dpflow.pool.lanes.rails import (
    Place,
    ServerRails,
    choose_rails,
    device_towards,
    place_of_process,
    rails_to,
)
from torch_dpflow.pool.lanes.stream_lane import WantedRecord
from torch_dpflow.pool.sources.set_names import identity_of

KEYS = generate_keys("", certificates=True)


class Machine:
    """A tree as the kernel shows it under /sys."""

    def __init__(self, sysfs: Path) -> None:
        self.sysfs = sysfs
        for folder in ("class/net", "bus/pci/devices"):
            (sysfs / folder).mkdir(parents=True)

    def node(self, number: int, processors: str) -> None:
        folder = self.sysfs / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{processors}\n")

    def device(self, path: str, node: int | None, kind: str = "0x020000", vendor: str = "0x15b3") -> Path:
        folder = self.sysfs / "devices" / path
        folder.mkdir(parents=True)
        (folder / "class").write_text(f"{kind}\n")
        (folder / "vendor").write_text(f"{vendor}\n")
        if node is not None:
            (folder / "numa_node").write_text(f"{node}\n")
        (self.sysfs / "bus/pci/devices" / folder.name).symlink_to(folder)
        return folder

    def gpu(self, path: str, node: int) -> None:
        self.device(path, node, kind="0x030200", vendor="0x10de")

    def card(self, name: str, path: str, node: int | None) -> None:
        folder = self.device(path, node)
        (folder / "net" / name).mkdir(parents=True)
        (folder / "net" / name / "device").symlink_to(folder)
        (self.sysfs / "class/net" / name).symlink_to(folder / "net" / name)

    def virtual(self, name: str) -> None:
        (self.sysfs / "devices/virtual/net" / name).mkdir(parents=True)
        (self.sysfs / "class/net" / name).symlink_to(self.sysfs / "devices/virtual/net" / name)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "sys")


def eight_gpus(machine: Machine) -> list[str]:
    """Two sockets, on each four switches, below each a GPU and a card; the names of the cards."""
    for node, processors in enumerate(("0-3,8-11", "4-7")):
        machine.node(node, processors)
    names = []
    for number in range(8):
        switch = f"pci0000:{number:x}0/0000:{number:x}0:01.0/0000:{number:x}1:00.0"
        machine.gpu(f"{switch}/0000:{number:x}2:00.0/0000:{number:x}3:00.0", number // 4)
        machine.card(f"eth{number}", f"{switch}/0000:{number:x}2:01.0/0000:{number:x}4:00.0", number // 4)
        names.append(f"eth{number}")
    return names


def addresses(names: list[str]) -> list[str]:
    return [f"tcp://{name}:1" for name in names]


@pytest.mark.parametrize("rank", range(8))
def test_each_gpu_has_the_card_of_its_switch(machine: Machine, rank: int) -> None:
    names = eight_gpus(machine)
    here = place_of_process({"LOCAL_RANK": f"{rank}"}, {0}, machine.sysfs)
    chosen = choose_rails(addresses(names), names, here, (), machine.sysfs)
    assert chosen.together == (f"tcp://eth{rank}:1",)
    own = set(names[rank // 4 * 4 : rank // 4 * 4 + 4]) - {names[rank]}
    assert set(chosen.spare[:3]) == set(addresses([*own]))
    assert len(chosen.spare) == 7


def test_the_gpus_that_a_process_sees_are_counted_anew(machine: Machine) -> None:
    names = eight_gpus(machine)

    def card(**environment: str) -> tuple[str, ...]:
        here = place_of_process(environment, {0}, machine.sysfs)
        return choose_rails(addresses(names), names, here, (), machine.sysfs).together

    assert card(LOCAL_RANK="0", CUDA_VISIBLE_DEVICES="6,7") == ("tcp://eth6:1",)
    nearest = tuple(addresses(names[:4]))
    for shown in ("GPU-5e3c", "", "6"):  # names, none and too few: then processors say it
        assert card(LOCAL_RANK="9" if not shown else "1", CUDA_VISIBLE_DEVICES=shown) == nearest


def test_without_a_gpu_the_cards_of_its_processors_are_used(machine: Machine) -> None:
    names = eight_gpus(machine)
    for processors, expected in (({4, 5}, names[4:]), ({9}, names[:4]), ({0, 4}, names)):
        here = place_of_process({}, processors, machine.sysfs)
        chosen = choose_rails(addresses(names), names, here, (), machine.sysfs)
        assert chosen.together == tuple(addresses(expected))
        assert {*chosen.together, *chosen.spare} == set(addresses(names))


def test_what_is_not_known_is_as_near_as_all_else(machine: Machine) -> None:
    machine.card("eth0", "pci0000:00/0000:00:01.0", -1)
    machine.card("eth1", "pci0000:10/0000:10:01.0", None)
    machine.virtual("bond0")
    names = ["eth0", "eth1", "bond0"]
    for here in (Place(), Place(nodes=frozenset({1})), place_of_process({}, {0}, machine.sysfs)):
        assert choose_rails(addresses(names), names, here, (), machine.sysfs) == ServerRails(
            tuple(addresses(names))
        )


def test_named_cards_are_used_and_the_others_kept_in_reserve(machine: Machine) -> None:
    names = eight_gpus(machine)
    here = place_of_process({"LOCAL_RANK": "0"}, {0}, machine.sysfs)
    chosen = choose_rails(addresses(names), names, here, ("eth3", "eth5"), machine.sysfs)
    assert chosen.together == tuple(addresses(["eth3", "eth5"]))
    assert len(chosen.spare) == 6
    unknown = choose_rails(addresses(names), names, here, ("ib0",), machine.sysfs)
    assert unknown.together == ("tcp://eth0:1",)


@pytest.fixture(scope="module")
def three_cards(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """Cards a, b and c, each at a NUMA node of its own."""
    machine = Machine(tmp_path_factory.mktemp("cards") / "sys")
    for number, name in enumerate("abc"):
        machine.card(name, f"pci0000:0{number}/0000:0{number}:01.0", number)
    return machine


@given(
    devices=st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=6),
    wanted=st.sets(st.sampled_from(["a", "b", "c", "d"])),
    nodes=st.frozensets(st.integers(0, 2)),
)
def test_any_choice_has_each_address_with_a_route_once(
    three_cards: Machine,
    devices: list[str | None],
    wanted: set[str],
    nodes: frozenset[int],
) -> None:
    own = [f"tcp://host{number}:1" for number in range(len(devices))]
    chosen = choose_rails(own, devices, Place(nodes=nodes), wanted, three_cards.sysfs)
    routed = [address for address, device in zip(own, devices) if device is not None]
    assert chosen.together
    assert sorted([*chosen.together, *chosen.spare]) == sorted(routed or own)
    if named := [address for address, device in zip(own, devices) if device in wanted]:
        assert sorted(chosen.together) == sorted(named)


def test_the_kernel_says_which_device_leads_somewhere() -> None:
    assert device_towards("127.0.0.1") == device_towards("localhost") == "lo"
    assert device_towards("no.such.host.invalid") is None
    both = "tcp://127.0.0.1:1", "tcp://127.0.0.2:2"
    assert rails_to(both) == ServerRails(both)


class Counting(RailedReader):
    """Tells which addresses records were asked of."""

    def __init__(self, pool: PoolAddress) -> None:
        super().__init__(pool, PATIENCE_S)
        self.asked: list[set[str]] = []

    def _deal(self, *arguments):  # type: ignore[no-untyped-def]
        dealt = super()._deal(*arguments)
        self.asked.append(set(dealt))
        return dealt


@pytest.mark.parametrize("pause_s", [0.0, 60.0])
def test_records_come_over_all_rails_and_over_the_other_when_one_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> None:
    """Also where the one that is cut may be tried again at once."""
    monkeypatch.setattr(lane_reader, "_FIRST_PAUSE_S", pause_s)
    monkeypatch.setattr(railed_reader, "_RAIL_SILENCE_S", PATIENCE_S)  # a slow machine is no silent rail
    keys, count = tmp_path / "keys", 40
    write_connection_file(keys, KEYS)
    stored = publish(DatasetStore.create(str(tmp_path / "datasets")), Numbered(count))
    doors = [find_address(f"tcp://127.0.0.{last}:0", keys, trust_network=True) for last in (1, 2)]
    with inner_server(tmp_path / "p", 1 << 20, listen=doors) as serving:
        address = find_address(serving.addresses[0], keys, trust_network=True)
        DataClient(address, silence_s=PATIENCE_S).preload(stored)
        both, expected = ServerRails(serving.addresses), [content for content, _ in numbers(count)]
        with closing(Counting(address)) as reader:

            def read() -> list[bytes | None]:
                wanted = [WantedRecord(number, len(one)) for number, one in enumerate(expected)]
                return reader.read(identity_of(stored), [both] * count, wanted)

            assert read() == expected
            assert reader.asked == [set(serving.addresses)]
            serving._doors[1].close()
            wait(lambda: not len(serving._doors[1]._lanes), what="the end of its lanes")
            assert read() == expected
            assert reader.asked[-1] == {serving.addresses[0]}
            assert read() == expected
            assert reader.asked[-1] == {serving.addresses[0]}


def test_a_rail_that_has_failed_is_used_again_when_it_answers() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))  # where nobody listens yet
        rail = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        with closing(RailKnocks(PoolAddress())) as knocks:
            assert not knocks.silent()
            knocks.failed({rail, "tcp://no.such.host.invalid:1"})
            for _ in range(3):
                assert rail in knocks.silent()
            listening.listen()
            wait(lambda: rail not in knocks.silent(), what="its answer")
            assert knocks.silent() == {"tcp://no.such.host.invalid:1"}

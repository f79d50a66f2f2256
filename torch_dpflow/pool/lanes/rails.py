"""Rails: the network cards through which a server's addresses are reached, and which of them lie near to this process.

A server that listens at several addresses is read over those whose card is nearest: to the GPU of this rank
(`LOCAL_RANK`) by steps between the two in the PCI tree, where that is known, else to the NUMA nodes of the processors
that this process may run on. Equally near ones are used together. The others are used when these fail.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from torch_dpflow.log import DATASETS

#: The environment variable with the devices that are to be used, such as "eth0,eth1".
RAILS_VARIABLE = "DPFLOW_RAILS"
SYSFS = Path("/sys")
_NVIDIA, _DISPLAY = "0x10de", "0x03"
#: rtnetlink(7): asking for the route to an address, the answer, and its attributes.
_GET_ROUTE, _NEW_ROUTE, _REQUEST, _TO, _DEVICE = 26, 24, 1, 1, 4
_MESSAGE, _ROUTE, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=8BI"), struct.Struct("=HH")


class ServerRails(NamedTuple):
    """Addresses of one server: those that are used together, and those that are used when they fail."""

    together: tuple[str, ...]
    spare: tuple[str, ...] = ()


class Place(NamedTuple):
    """Where a device or a process is: its path in the PCI tree, () if it has none, and NUMA nodes, none if unknown."""

    path: tuple[str, ...] = ()
    nodes: frozenset[int] = frozenset()


def choose_rails(
    addresses: Sequence[str],
    devices: Sequence[str | None],
    here: Place,
    wanted: Iterable[str] = (),
    sysfs: Path = SYSFS,
) -> ServerRails:
    """Which of a server's addresses to use.

    devices: through which each is reached; None: there is no route.
    here: this process, or its GPU.
    wanted: names of devices that are to be used; none: the nearest.
    """
    found = [(address, device) for address, device in zip(addresses, devices) if device is not None]
    if not found:
        return ServerRails(tuple(addresses))
    far = {device: _distance(here, device_place(device, sysfs)) for _, device in found}
    if named := far.keys() & set(wanted):
        far = {device: (0, 0) if device in named else (2, 0) for device in far}
    nearest = min(far.values())
    spare = sorted((one for one in found if far[one[1]] != nearest), key=lambda one: far[one[1]])
    together = tuple(address for address, device in found if far[device] == nearest)
    return ServerRails(together, tuple(address for address, _ in spare))


def rails_to(addresses: Sequence[str]) -> ServerRails:
    """Which of a server's addresses this process uses, each tcp://HOST:PORT."""
    hosts = [address.removeprefix("tcp://").rpartition(":")[0].strip("[]") for address in addresses]
    wanted = [one for one in os.environ.get(RAILS_VARIABLE, "").split(",") if one]
    here = place_of_process(os.environ, os.sched_getaffinity(0))
    chosen = choose_rails(addresses, [device_towards(host) for host in hosts], here, wanted)
    DATASETS.info("a server of the pool is read over %s; in reserve: %s", *chosen)
    return chosen


def device_place(device: str, sysfs: Path = SYSFS) -> Place:
    """Where a network device is; one that is no hardware is nowhere."""
    return _place(sysfs / "class/net" / device / "device", sysfs)


def place_of_process(environment: Mapping[str, str], processors: Iterable[int], sysfs: Path = SYSFS) -> Place:
    """The GPU of this rank, where that is known, else the NUMA nodes of these processors.

    GPUs are numbered by their PCI addresses, as CUDA numbers those of one kind.
    """
    rank, shown = environment.get("LOCAL_RANK", ""), environment.get("CUDA_VISIBLE_DEVICES", "")
    names = [one.strip() for one in shown.split(",")] if shown else None
    if rank.isdecimal() and (names is None or all(one.isdecimal() for one in names)):
        gpus = _gpus(sysfs)
        visible = gpus if names is None else [gpus[int(one)] for one in names if int(one) < len(gpus)]
        if int(rank) < len(visible):
            return _place(visible[int(rank)], sysfs)
    own = set(processors)
    nodes = (sysfs / "devices/system/node").glob("node[0-9]*")
    return Place(nodes=frozenset(int(one.name[4:]) for one in nodes if own & _processors_of(one)))


def device_towards(host: str) -> str | None:
    """The network device through which the kernel reaches a host; None: there is no route, or no such name."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        address = socket.inet_pton(family, str(where[0]))
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as kernel:
            kernel.settimeout(1.0)
            attribute = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(address), _TO) + address
            route = _ROUTE.pack(family, 8 * len(address), 0, 0, 0, 0, 0, 0, 0) + attribute
            kernel.send(_MESSAGE.pack(_MESSAGE.size + len(route), _GET_ROUTE, _REQUEST, 1, 0) + route)
            return _device_in(kernel.recv(1 << 12))
    except OSError:
        return None


# -- inside ------------------------------------------------------------------------------------------------------------


def _device_in(answer: bytes) -> str | None:
    length, kind, *_ = _MESSAGE.unpack_from(answer)
    at = _MESSAGE.size + _ROUTE.size
    while kind == _NEW_ROUTE and at + _ATTRIBUTE.size <= length:
        size, name = _ATTRIBUTE.unpack_from(answer, at)
        if name == _DEVICE:
            return socket.if_indextoname(struct.unpack_from("=I", answer, at + _ATTRIBUTE.size)[0])
        at += max(_ATTRIBUTE.size, -(-size // 4) * 4)
    return None


def _distance(here: Place, there: Place) -> tuple[int, int]:
    """Under one root of the PCI tree the steps between them; else whether they share a NUMA node, as far as known."""
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(here.path, there.path)))
    if common:
        return 0, len(here.path) + len(there.path) - 2 * common
    is_near = not here.nodes or not there.nodes or bool(here.nodes & there.nodes)
    return (1 if is_near else 2), 0


def _place(device: Path, sysfs: Path) -> Place:
    if not device.exists():
        return Place()
    path = device.resolve().relative_to(sysfs.resolve()).parts[1:]
    node = _read(device / "numa_node")
    # What is behind no bridge of PCI, such as a virtual device, has no path there.
    is_pci = bool(path) and path[0].startswith("pci")
    return Place(path if is_pci else (), frozenset({int(node)} if node.isdecimal() else ()))


def _gpus(sysfs: Path) -> list[Path]:
    found = sorted((sysfs / "bus/pci/devices").glob("*"))
    return [
        one for one in found if _read(one / "vendor") == _NVIDIA and _read(one / "class").startswith(_DISPLAY)
    ]


def _processors_of(node: Path) -> set[int]:
    """The processors of a NUMA node, of a list such as 0-3,8."""
    spans = (one.partition("-") for one in _read(node / "cpulist").split(",") if one)
    return {one for first, _, last in spans for one in range(int(first), int(last or first) + 1)}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

"""Listener for remote workers, each of which authenticates with its own CURVE key, and the listener's addresses."""

from __future__ import annotations

import errno
import os
import re
import socket
from contextlib import suppress

from torch_dpflow._core.checks import MAX_PORT
from torch_dpflow.errors import OptionError, TransportError
from torch_dpflow.ipc.messages.remote_worker import LaunchSpec, encode_launch_spec
from torch_dpflow.ipc.transport import TransportOptions
from torch_dpflow.ipc.transport.base import WorkerKeys
from torch_dpflow.ipc.transport.zeromq import ZeroMQListener, draw_key_pair
from torch_dpflow.remote.fleet.content import WorkerKind
from torch_dpflow.remote.fleet.worker_states import FleetWorker

#: An address of no host, to which nothing is sent: the route there shows which of this host's addresses others see.
_ELSEWHERE = ("192.0.2.1", 9)
_PORTS = re.compile(r"tcp://\S+:(\*|\d{1,5})(?:-(\d{1,5}))?", re.ASCII)


def check_ports(name: str, listen: str) -> None:
    """Raise OptionError if `listen` is not tcp://HOST:PORT or tcp://HOST:FIRST-LAST of this host, with a free port.

    name: name of the option, for messages.
    """
    found = _PORTS.fullmatch(listen)
    if found is None or any(int(port) > MAX_PORT for port in found.groups() if port and port != "*"):
        raise OptionError(
            f"{name} {listen!r}: must be tcp://HOST:PORT, or tcp://HOST:FIRST-LAST for a range of ports, as "
            f"tcp://10.0.0.5:7000-7099; ports are 0 to {MAX_PORT}"
        )
    first, last = found.groups()
    if last and (first == "*" or not 0 < int(first) <= int(last)):
        raise OptionError(f"{name} {listen!r}: of a range of ports the first is above 0, and the last no lower")
    refused = ""
    for address in addresses_of(to_bind(listen)):
        if not (refused := _why_not(address)):
            return
    raise OptionError(f"{name} {listen!r}: {refused}; give an address of this host with a port that is free")


def _why_not(address: str) -> str:
    """Return why this process cannot listen at the address; empty if it can."""
    host, port = _split(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server(
            ("" if host == "*" else host.strip("[]"), 0 if port == "*" else int(port)), family=family
        ).close()
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)  # `strerror` repeats the address
    return ""


def addresses_of(listen: str) -> list[str]:
    """Return one address for each port of `tcp://HOST:FIRST-LAST`; only `listen` itself if it has no range."""
    host, ports = _split(listen)
    first, dash, last = ports.partition("-")
    return [f"tcp://{host}:{port}" for port in range(int(first), int(last) + 1)] if dash else [listen]


def ports_in(listen: str) -> int | None:
    """Return the number of ports in an address, more than 1 for a range; None if any free port may be used."""
    ports = _split(listen)[1]
    return None if ports in ("", "0", "*") else len(addresses_of(listen))


def to_bind(listen: str) -> str:
    """Return the address with its host name resolved, as libzmq requires. Raises OptionError if that fails."""
    host, port = _split(listen)
    if _is_literal(host) or host == "*":
        return listen
    try:
        return f"tcp://{socket.gethostbyname(host)}:{port}"
    except OSError as error:
        raise OptionError(
            f"listen={listen!r}: {host} has no address here ({error.strerror}); give an address of this host"
        ) from error


def to_tell(listen: str, bound: str) -> list[str]:
    """Return the addresses to give to workers; if the listener is on all interfaces, 127.0.0.1 is one of them.

    listen: the configured address; bound: the actual address.
    """
    host, _ = _split(listen)
    own, port = _split(bound)
    if own in ("0.0.0.0", "[::]", "*"):
        return [f"tcp://{address}:{port}" for address in _own_addresses()]
    return [f"tcp://{host}:{port}"]


def _own_addresses() -> list[str]:
    found = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ELSEWHERE)
        found.append(str(probe.getsockname()[0]))
    return [*dict.fromkeys([*found, "127.0.0.1"])]


def _split(address: str) -> tuple[str, str]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, port


def _is_literal(host: str) -> bool:
    for family, text in ((socket.AF_INET, host), (socket.AF_INET6, host.strip("[]"))):
        with suppress(OSError):
            socket.inet_pton(family, text)
            return True
    return False


#: Time without a message from its shard after which a worker ends, in seconds.
SILENCE_S = 30.0


class PortsInUseError(TransportError):
    """Error: no configured port is free."""


class WorkerListener:
    """Listener to which remote workers connect, each with a different key. It creates the workers' launch specs.

    Args:
        listen_at: `tcp://HOST:PORT`, or `tcp://HOST:FIRST-LAST` for the first port that is free.

    Raises:
        OptionError: the host's name cannot be resolved.
        PortsInUseError: all ports are in use.
        TransportError: the address cannot be bound.
    """

    def __init__(self, listen_at: str) -> None:
        public, secret = draw_key_pair()
        self._keys = WorkerKeys(public=public, secret=secret)
        self.listener = _listen(listen_at, TransportOptions(keys=self._keys))
        #: Addresses at which workers reach this listener.
        self.addresses = to_tell(listen_at, self.listener.address)

    def launch_spec(self, worker: FleetWorker, *, kind: WorkerKind, within_s: float, lifetime_s: float | None) -> bytes:
        """Encode a worker's launch spec, with a new key.

        The key expires if the worker does not connect within `within_s` seconds.
        """
        public, secret = draw_key_pair()
        self._keys.expect(worker.user, public, within_s)
        return encode_launch_spec(
            LaunchSpec(
                name=worker.name,
                role=kind.role,
                number=worker.number,
                incarnation=worker.incarnation,
                addresses=self.addresses,
                server_public=self._keys.public.decode(),
                public=public.decode(),
                secret=secret.decode(),
                lifetime_s=lifetime_s,
                silence_s=SILENCE_S,
            )
        )

    def keep(self, worker: FleetWorker) -> None:
        """Accept this worker's key until `drop`, because it has connected."""
        self._keys.keep(worker.user)

    def drop(self, worker: FleetWorker) -> None:
        """Reject this worker's key and its messages from now on."""
        self._keys.drop(worker.user)


def _listen(requested: str, options: TransportOptions) -> ZeroMQListener:
    *others, last = addresses_of(to_bind(requested))
    for address in others:
        with suppress(TransportError):
            return ZeroMQListener(address, options)
    try:
        return ZeroMQListener(last, options)
    except TransportError as error:
        if getattr(error.__cause__, "errno", 0) != errno.EADDRINUSE:
            raise
        raise PortsInUseError(
            f"no port of {requested} is free ({len(others) + 1} in all); give a wider range"
        ) from error

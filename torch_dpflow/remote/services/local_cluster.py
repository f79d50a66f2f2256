"""A cluster on this machine: a node with a directory of its own, and the file by which jobs find it."""

from __future__ import annotations

import ipaddress
import multiprocessing
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from torch_dpflow.descriptors import raise_limit
from torch_dpflow.directory import PrivateDirectory
from torch_dpflow.errors import OptionError, StateError, UsageError
from torch_dpflow.log import LogOptions, write_lines
from torch_dpflow.platforms.fork_server import ForkServerPlatform
from torch_dpflow.remote.access.announcement import Announcement, check_vacant, lock_file
from torch_dpflow.remote.access.cluster_address import default_connection_file
from torch_dpflow.remote.access.connection_file import generate_keys, read_key_file
from torch_dpflow.remote.control.supervision import START_S
from torch_dpflow.remote.observe.metrics_server import check_metrics_address
from torch_dpflow.remote.process.roles import COORDINATOR, PRELOAD
from torch_dpflow.remote.process.spec import ClusterPlace
from torch_dpflow.remote.services.node import LEASE_S, WISHED_DESCRIPTORS, Node, most_workers
from torch_dpflow.remote.services.state_store import open_store
from torch_dpflow.remote.wire.coordinator import ClusterLimits, CoordinatorArguments
from torch_dpflow.remote.wire.flow_spec import MAX_WORKERS


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """How a cluster is to be.

    Args:
        connection_file: where to leave the file by which jobs find it. None: where "auto" looks.
        state: a state store's address; None: one that goes with the cluster.
        listen: tcp://HOST:PORT, with keys; None: sockets on this machine that only this user can reach.
        keys: a connection file whose keys to take, with `listen`; None: new ones are drawn.
        limits: what all flows have together at most.
        metrics: HOST:PORT where Prometheus finds metrics; None: nowhere.
        metrics_public: whether `metrics` may be reached from other hosts, without a key.
        log: how its processes log.
        preload: modules that are imported once and not by each worker, as "torchvision": workers start at once
            and share their memory. Not for modules that start threads when they are imported.

    Raises:
        OptionError: `listen` or `metrics` is no such address, or cannot be had; no module of `preload` is installed
            under that name; or something is given that would have no effect.
        MissingExtraError: a package for `metrics` is not installed.
    """

    connection_file: str | None = None
    state: str | None = None
    listen: str | None = None
    keys: str | None = None
    limits: ClusterLimits = field(default_factory=ClusterLimits)
    metrics: str | None = None
    metrics_public: bool = False
    log: LogOptions = field(default_factory=LogOptions)
    preload: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.keys is not None and self.listen is None:
            raise OptionError(
                f"keys={self.keys!r} without listen: keys are for jobs on other hosts, and without --listen only this "
                "user on this host can reach the cluster; give both, or neither"
            )
        if self.metrics_public and self.metrics is None:
            raise OptionError(
                "metrics_public without metrics: say where, by --metrics HOST:PORT, or leave it out"
            )
        if self.listen is not None:
            _check_listen(self.listen)
        if self.metrics is not None:
            check_metrics_address(self.metrics, public=self.metrics_public)
        for module in self.preload:
            _check_installed(module)

    @property
    def path(self) -> Path:
        """Of the connection file."""
        return Path(self.connection_file or default_connection_file()).absolute()


class LocalCluster:
    """Owns a node's directory and its connection file; `serve` runs the node. One for each process.

    Raises:
        OptionError: the connection file cannot be written, or `keys` cannot be read.
        UsageError: a cluster is up that has left its connection file there.
        StateError: the state store cannot be used.
        TransportError: the address cannot be had.
        DescriptorLimitError: the limit of open files allows no worker.
    """

    def __init__(self, options: ClusterOptions) -> None:
        self._path = options.path
        self._log = options.log
        self.address = ""
        self._announcement: Announcement | None = None
        check_vacant(self._path)
        raise_limit(WISHED_DESCRIPTORS)
        #: How many workers the flows may have, by what was given and by the limit of open files.
        self.workers = min(options.limits.workers or MAX_WORKERS, most_workers())
        self._state = options.state
        #: Who has the state store; where that is a file, it is locked for as long as this process lives.
        self._owner = secrets.token_hex(16)
        self._state_lock = None if options.state is None else _hold_state(options.state, self._owner)
        self._directory = _private_directory()
        try:
            self.node = self._prepare(options)
        except BaseException:
            self._clean_up()
            raise

    def serve(self, ready: Callable[[], None] | None = None) -> None:
        """Run the node until it is told to stop; then nothing is left. From now on this process logs as it is told.

        ready: called once, in this thread, when the cluster answers.
        """
        write_lines(self._log, {"process": "node", "pid": os.getpid()})
        _keep_fork_server_in(self._directory.path)
        try:
            self.node.serve(ready)
        finally:
            self._clean_up()

    def _prepare(self, options: ClusterOptions) -> Node:
        folder = self._directory.path
        keys = generate_keys("") if options.keys is None else read_key_file(options.keys)
        keys.server_keys()
        place = ClusterPlace(
            directory=folder,
            host=None if options.listen is None else _host_of(options.listen),
            keys=None if options.listen is None else keys,
            log=options.log,
        )
        self.address = options.listen or place.address_for(COORDINATOR)
        self._announcement = Announcement(self._path, msgspec.structs.replace(keys, address=self.address))
        arguments = CoordinatorArguments(
            options.state or f"{folder}/state",
            self._owner,
            options.listen or "",
            None if options.limits.workers is None and self.workers == MAX_WORKERS else self.workers,
            options.limits.memory_bytes,
            options.metrics or "",
        )
        # Services start by a fork of one process that has imported what they need. The node waits for it, and nothing
        # else of the cluster goes on meanwhile.
        platform = ForkServerPlatform(
            preload=[*PRELOAD, *options.preload], patience_s=(LEASE_S, START_S), outlived=True
        )
        node = Node(place, msgspec.msgpack.encode(arguments), platform)
        self._announcement.follow(lambda: node.address_of(COORDINATOR))
        return node

    def _clean_up(self) -> None:
        if self._announcement is not None:
            self._announcement.remove()
        self._directory.remove()
        if self._state_lock is not None:
            os.close(self._state_lock)
        if self._state is not None:
            with suppress(StateError):  # else its lease lapses
                _release_state(self._state, self._owner)


def _keep_fork_server_in(directory: str) -> None:
    """Have multiprocessing put its fork server's socket there, and not into a directory of its own.

    That one would stay for good where this process is killed; what is in ours goes with the last service.
    """
    process: Any = multiprocessing.current_process()
    process._config.setdefault("tempdir", directory)


def _check_installed(module: str) -> None:
    """Raise OptionError unless a module may be imported under this name. Imports nothing."""
    top = module.partition(".")[0]
    if not module.replace(".", "_").isidentifier() or find_spec(top) is None:
        raise OptionError(f"preload={module!r}: no such module is installed; install it, or leave it out")


def _hold_state(url: str, owner: str) -> int | None:
    """Have a state store to oneself: a descriptor that locks its file, None for what is no file.

    Raises OptionError or StateError where it cannot be used, UsageError where another cluster does.
    """
    with closing(open_store(url)) as store:
        store.claim(owner)
    if urlsplit(url).scheme not in ("", "sqlite"):
        return None
    lock = lock_file(Path(url.removeprefix("sqlite://")))
    if lock is None:
        raise UsageError(f"state={url!r}: another cluster keeps its flows there; give another path")
    return lock


def _release_state(url: str, owner: str) -> None:
    with closing(open_store(url)) as store:
        store.release(owner)


def _private_directory() -> PrivateDirectory:
    try:
        return PrivateDirectory()
    except OSError as error:
        raise OptionError(
            f"no directory for sockets can be made in {tempfile.gettempdir()!r}: {error.strerror}; set TMPDIR"
        ) from error


def _host_of(listen: str) -> str:
    parts = urlsplit(listen)
    try:
        port = parts.port
        host = ipaddress.ip_address(parts.hostname or "")
    except ValueError:
        port = host = None
    if parts.scheme != "tcp" or host is None or not port:
        raise OptionError(f"listen={listen!r}: must be tcp://ADDRESS:PORT, an IP address and a port above 0")
    if host.is_unspecified:
        raise OptionError(f"listen={listen!r}: give the address of this host by which jobs reach it")
    return parts.netloc.rpartition(":")[0]


def _check_listen(listen: str) -> None:
    """Raise OptionError unless this host can be reached there and nobody else has the port."""
    host, port = _host_of(listen).strip("[]"), urlsplit(listen).port
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise OptionError(f"listen={listen!r}: {error.strerror or error}; give another address") from error

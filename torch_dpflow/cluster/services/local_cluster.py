"""Cluster on this host: a node, its private directory, and the connection file by which jobs find the cluster."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from torch_dpflow._core.descriptors import raise_limit
from torch_dpflow.cluster.messages.coordinator import (
    MAX_WORKERS,
    AutoscaleLimits,
    ClusterLimits,
    CoordinatorArguments,
    NodeLimits,
)
from torch_dpflow.cluster.messages.node import END_NOTICE_S, MAX_NODES, Launch
from torch_dpflow.cluster.monitoring.metrics_server import check_metrics_address
from torch_dpflow.cluster.monitoring.page_access import PagePlace, check_page, listen_at
from torch_dpflow.cluster.security.announcement import Announcement, check_vacant, lock_file
from torch_dpflow.cluster.security.connection_file import (
    default_connection_file,
    find_cluster,
    generate_keys,
    read_key_file,
)
from torch_dpflow.cluster.services.node import Node
from torch_dpflow.cluster.services.node_host import (
    WISHED_DESCRIPTORS,
    fork_platform,
    keep_fork_server_in,
    max_workers,
    private_directory,
)
from torch_dpflow.cluster.services.service import (
    COORDINATOR,
    PAGE,
    POOL,
    PROVISIONER,
    ClusterPlace,
    WorkerPlatform,
)
from torch_dpflow.cluster.services.state_store import open_store
from torch_dpflow.errors import DPFlowError, OptionError, StateError, UsageError
from torch_dpflow.log import LogOptions, write_lines
from torch_dpflow.remote.fleet.worker_listener import check_ports
from torch_dpflow.remote.launchers import registry
from torch_dpflow.remote.launchers.contract import PlatformSpec
from torch_dpflow.remote.launchers.registry import as_nodes, check_reachable, resolve


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options of a cluster.

    Args:
        connection_file: path of the file by which jobs find the cluster; None: the default path of this user.
        state: address of the state store, as in `open_store`; None: a store that is removed with the cluster.
        listen: address at which to listen, tcp://HOST:PORT, with keys. None: sockets on this host that only this user
            can reach; with `nodes`, a free port of the address by which the platform reaches this host.
        keys: with `listen`, path of a key file that `dpflow keygen` has written; None: generate new keys.
        limits: limits of all flows together.
        metrics: HOST:PORT at which to serve metrics for Prometheus; None: no metrics.
        metrics_public: whether `metrics` may be an address that other hosts can reach, without a key.
        web: HOST:PORT of the live page; None: no page.
        web_token_file: path of a file with the page's token, required if other machines can reach HOST; None: no token.
        pool_memory: bytes of memory of a pool server, which holds datasets for this user on this host; None: no server.
        platform: name of a platform that runs the workers, such as "ray"; None: processes of this host.
        autoscale: MIN:MAX, limits between which the number of workers of all flows follows the demand of jobs. If
            `limits` has a number of workers, MAX must equal it. If None, the limits in the settings apply; without
            these, flows get the number of workers that they request.
        nodes: with `platform`, how many nodes the platform runs, each with shards and their workers: N, or MIN:MAX to
            follow the demand of jobs. None: the platform runs single workers.
        worker_listen: with `platform`, the address at which shards listen for workers: tcp://HOST:PORT, port 0 for a
            free one, or tcp://HOST:FIRST-LAST with one port for each shard. None: the default of the platform.

    Raises:
        OptionError: an option is invalid, cannot be used or would have no effect.
        MissingExtraError: a package for `metrics`, `web` or `platform` is not installed.
    """

    connection_file: str | None = None
    state: str | None = None
    listen: str | None = None
    keys: str | None = None
    limits: ClusterLimits = field(default_factory=ClusterLimits)
    metrics: str | None = None
    metrics_public: bool = False
    web: str | None = None
    web_token_file: str | None = None
    pool_memory: int | None = None
    log: LogOptions = field(default_factory=LogOptions)
    platform: str | None = None
    nodes: str | None = None
    worker_listen: str | None = None
    autoscale: str | None = None

    def __post_init__(self) -> None:
        if self.keys is not None and self.listen is None:
            raise OptionError(
                f"--keys {self.keys!r} without --listen: keys are for jobs on other hosts, and without --listen only "
                "this user on this host can reach the cluster; give both, or neither"
            )
        if self.metrics_public and self.metrics is None:
            raise OptionError("--metrics-public without --metrics: give --metrics HOST:PORT too, or leave it out")
        if self.listen is not None:
            _check_listen(self.listen)
        if self.metrics is not None:
            check_metrics_address(self.metrics, public=self.metrics_public)
        if self.web_token_file is not None and self.web is None:
            raise OptionError("--web-token-file without --web: give --web HOST:PORT too, or leave it out")
        self.page_place()
        object.__setattr__(self, "limits", scaled_limits(self.limits, self.autoscale))
        self._check_platform()

    def _check_platform(self) -> None:
        if self.nodes is not None:
            self._check_nodes(self.nodes)
            return
        if self.worker_listen is not None:
            if self.platform is None:
                raise OptionError(
                    f"--worker-listen {self.worker_listen!r} without --platform: workers of this host do not use it; "
                    "give both, or neither"
                )
            check_ports("--worker-listen", self.worker_listen)
        if self.platform is not None:
            platform = resolve(self.platform)
            platform.check_workers(self.limits.workers or MAX_WORKERS)
            platform.check_installed()
            check_reachable(self.platform, self.worker_listen or "")

    def _check_nodes(self, text: str) -> None:
        _parse_nodes(text)
        able = f"a platform that runs nodes: {', '.join(registry.with_nodes())}"
        if self.platform is None:
            raise OptionError(
                f"--nodes {text!r} without --platform: give {able}; or leave it out, and run `dpflow node --join` on "
                "each host"
            )
        if self.worker_listen is not None:
            raise OptionError(
                f"--worker-listen {self.worker_listen!r} with --nodes: workers connect to shards of their own node; "
                "leave it out"
            )
        platform = as_nodes(resolve(self.platform))
        if platform is None:
            raise OptionError(
                f"--nodes {text!r} with --platform {self.platform!r}, which runs single workers; give {able}"
            )
        platform.check_installed()
        address = check_reachable(self.platform, self.listen or "", nodes=True)
        if self.listen is None:
            object.__setattr__(self, "listen", _free_address(address))

    @property
    def node_limits(self) -> NodeLimits | None:
        """Limits of the number of nodes that the platform runs; None: it runs no nodes."""
        if self.nodes is None or self.platform is None:
            return None
        platform = as_nodes(resolve(self.platform))
        assert platform is not None
        return NodeLimits(*_parse_nodes(self.nodes), platform.workers_each, registry.autoscale().hold_s)

    def page_place(self, *, vacant: bool = True) -> PagePlace | None:
        """Return the checked address of the live page; None without a page. `vacant` and errors: see `check_page`."""
        return None if self.web is None else check_page("web", self.web, self.web_token_file, vacant=vacant)

    @property
    def worker_platform(self) -> PlatformSpec | None:
        """Platform that runs workers or nodes; None: this host runs the workers. Raises the errors of `resolve`."""
        return None if self.platform is None else resolve(self.platform)

    @property
    def path(self) -> Path:
        return Path(self.connection_file or default_connection_file()).absolute()


class LocalCluster:
    """Cluster that `serve` runs: a node, its directory and its connection file. Create only one in a process.

    Raises:
        OptionError: the connection file cannot be written, `keys` cannot be used, or `state` is not an address.
        UsageError: another cluster uses the connection file's path, or the state store's file.
        StateError: the state store cannot be used, for example because it is leased to another cluster.
        DescriptorLimitError: the limit of open files allows no worker.
    """

    def __init__(self, options: ClusterOptions) -> None:
        self._path = options.path
        self._log = options.log
        self.address = ""
        self._announcement: Announcement | None = None
        check_vacant(self._path)
        raise_limit(WISHED_DESCRIPTORS)
        #: Maximum number of workers of all flows together, by the options and the limit of open files.
        self.workers = min(options.limits.workers or MAX_WORKERS, max_workers())
        autoscale = options.limits.autoscale
        # The scaling law must know the limit of open files.
        self._autoscale = autoscale and msgspec.structs.replace(
            autoscale, least=min(autoscale.least, self.workers), most=min(autoscale.most, self.workers)
        )
        self._state = options.state
        #: Identifies this cluster in the state store. A store in a file is locked while this process runs.
        self._owner = secrets.token_hex(16)
        self._state_lock = None if options.state is None else _hold_state(options.state, self._owner)
        self._directory = private_directory()
        #: Ends the cluster through the coordinator, which notifies nodes of other hosts.
        self._ending: threading.Thread | None = None
        self._may_have_nodes, self._has_ended = options.listen is not None, threading.Event()
        try:
            self.node = self._prepare(options)
        except BaseException:
            self._clean_up()
            raise

    def serve(self, ready: Callable[[], None] | None = None) -> None:
        """Run the node until it is stopped, then clean up. Sets up this process's logging by the options.

        ready: called once, in this thread, when the cluster answers calls.

        Raises the errors of `Node.serve`; UsageError if another cluster has meanwhile written its connection file to
        the same path; OptionError if the file cannot be written.
        """
        write_lines(self._log, {"process": "node", "pid": os.getpid()})
        keep_fork_server_in(self._directory.path)
        try:
            self.node.serve(lambda: self._begin(ready))
        finally:
            self._has_ended.set()
            if self._ending is not None:
                self._ending.join()
            self._clean_up()

    def stop(self) -> None:
        """Stop the cluster as `dpflow down` does: first notify nodes of other hosts. On a second call, stop at once.

        Any thread and any signal handler may call.
        """
        if self._may_have_nodes and self._ending is None:
            self._ending = threading.Thread(target=self._end, name="dpflow-end", daemon=True)
            self._ending.start()
        else:
            self.node.stop()

    def _end(self) -> None:
        """End the cluster through the coordinator; if that fails, stop the node."""
        with suppress(DPFlowError):
            with find_cluster(self._path).connect(timeout_s=END_NOTICE_S) as coordinator:
                coordinator.call("stop")
            self._has_ended.wait(2 * END_NOTICE_S)
        self.node.stop()

    def _prepare(self, options: ClusterOptions) -> Node:
        folder = self._directory.path
        keys = generate_keys("") if options.keys is None else read_key_file(options.keys)
        keys.server_keys()
        platform, worker_place, nodes = options.worker_platform, None, options.node_limits
        if platform is not None and nodes is None:
            worker_place = WorkerPlatform(
                name=platform.name, listen_at=options.worker_listen or "", max_workers=self.workers
            )
        place = ClusterPlace(
            directory=folder,
            host=None if options.listen is None else _host_of(options.listen),
            keys=None if options.listen is None else keys,
            log=options.log,
            worker_platform=worker_place,
        )
        self.address = options.listen or place.address_for(COORDINATOR)
        self._connection = msgspec.structs.replace(keys, address=self.address, sends_code=platform is not None)
        is_unlimited = options.limits.workers is None and self.workers == MAX_WORKERS
        arguments = CoordinatorArguments(
            options.state or f"{folder}/state",
            self._owner,
            replace(options.limits, workers=None if is_unlimited else self.workers, autoscale=self._autoscale),
            options.listen or "",
            options.metrics or "",
            getattr(platform, "price_per_hour", 0.0),
            nodes,
        )
        own = [Launch(COORDINATOR, COORDINATOR, msgspec.msgpack.encode(arguments))]
        if nodes is not None:
            own.append(Launch(PROVISIONER, "node-fleet"))
        elif platform is not None:
            own.append(Launch(PROVISIONER, PROVISIONER))
        page = options.page_place(vacant=False)
        if page is not None:
            own.append(Launch(PAGE, PAGE, msgspec.msgpack.encode(page)))
        if options.pool_memory is not None:
            own.append(Launch(POOL, POOL, msgspec.msgpack.encode(options.pool_memory)))
        return Node(place, own, fork_platform(), worker_platform=platform)

    def _begin(self, ready: Callable[[], None] | None) -> None:
        """Write the connection file, so that jobs can connect, and call `ready`."""

        def address() -> str:
            return self.node.address_of(COORDINATOR)

        connection = msgspec.structs.replace(self._connection, address=address())
        self._announcement = Announcement(self._path, connection, address)
        if ready is not None:
            ready()

    def _clean_up(self) -> None:
        if self._announcement is not None:
            self._announcement.remove()
        self._directory.remove()
        if self._state_lock is not None:
            os.close(self._state_lock)
        if self._state is not None:
            with suppress(StateError), closing(open_store(self._state)) as store:  # otherwise its lease expires
                store.release(self._owner)


def scaled_limits(limits: ClusterLimits, text: str | None) -> ClusterLimits:
    """Return `limits` with bounds of autoscaling from `text` (MIN:MAX) or, without a text, from the settings, if any.

    Raises OptionError if `text` is invalid, or the bounds contradict `limits`.
    """
    table = registry.autoscale()
    if text is not None:
        least, most = _parse_autoscale(text)
        if limits.workers not in (None, most):
            raise OptionError(
                f"--workers {limits.workers} and --autoscale {text!r} differ in the maximum: leave out "
                f"--workers, or give --workers {most}"
            )
    elif table.max is not None:
        least, most = table.min, min(table.max, limits.workers or table.max)
        if least > most:
            raise OptionError(
                f"--workers {most} is below autoscale.min={least} of the settings: give more, or --autoscale 0:{most}"
            )
    else:
        return limits
    return replace(limits, workers=most, autoscale=AutoscaleLimits(least, most, table.hold_s))


def _parse_autoscale(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text, re.ASCII)
    least, most = (int(found[1]), int(found[2])) if found else (1, 0)
    if not least <= most or not 1 <= most <= MAX_WORKERS:
        raise OptionError(
            f"--autoscale {text!r:.80}: give MIN:MAX, bounds of the number of workers, 0 <= MIN <= MAX and MAX from "
            f"1 to {MAX_WORKERS}, as 0:16"
        )
    return least, most


def _parse_nodes(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,4})(?::([0-9]{1,4}))?", text, re.ASCII)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if not 1 <= least <= most <= MAX_NODES:
        raise OptionError(f"--nodes {text!r:.80}: give N or MIN:MAX with 1 <= MIN <= MAX <= {MAX_NODES}, as 4 or 1:4")
    return least, most


def _hold_state(url: str, owner: str) -> int | None:
    """Claim a state store exclusively. Return a descriptor that locks the store's file; None if it is not a file.

    Raises OptionError or StateError if the store cannot be used, UsageError if another cluster uses it.
    """
    with closing(open_store(url)) as store:
        store.claim(owner)
    if urlsplit(url).scheme not in ("", "sqlite"):
        return None
    lock = lock_file(Path(url.removeprefix("sqlite://")))
    if lock is None:
        raise UsageError(f"--state {url!r}: another cluster stores its flows there; give another path")
    return lock


def _host_of(listen: str) -> str:
    try:
        parts = urlsplit(listen)
        port = parts.port
        host = ipaddress.ip_address(parts.hostname or "")
    except ValueError:
        port = host = None
    if host is None or not port or "@" in listen or listen != f"tcp://{parts.netloc}":
        raise OptionError(f"--listen {listen!r}: must be tcp://ADDRESS:PORT, an IP address and a port above 0")
    if host.is_unspecified:
        raise OptionError(f"--listen {listen!r}: give the address of this host by which jobs reach it")
    return parts.netloc.rpartition(":")[0]


def _free_address(host: str) -> str:
    """Return tcp://HOST:PORT with a free port of this address of this host. Raises OptionError if there is none."""
    try:
        with listen_at(host, 0) as listener:
            port = listener.getsockname()[1]
    except OSError as error:
        raise OptionError(
            f"{host}, the address of this host on the platform: {error.strerror or error}; give --listen another one"
        ) from error
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _check_listen(listen: str) -> None:
    """Raise OptionError unless this host has the address and the port is free."""
    host, port = _host_of(listen).strip("[]"), urlsplit(listen).port
    assert port is not None
    try:
        listen_at(host, port).close()
    except OSError as error:
        raise OptionError(f"--listen {listen!r}: {error.strerror or error}; give another address") from error

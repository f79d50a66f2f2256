"""Workers as actors of a Ray cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from torch_dpflow._core.checks import (
    BYTES_ALLOWED,
    check_fields,
    check_int,
    check_number,
    check_seconds,
    check_type,
    is_loopback,
    parse_bytes,
)
from torch_dpflow.errors import (
    AnswerLostError,
    OptionError,
    OptionTypeError,
    PlatformError,
    QuotaError,
    RejectedError,
    UnavailableError,
)
from torch_dpflow.log import SERVICE
from torch_dpflow.remote.launchers.contract import (
    AdoptingPlatform,
    Fate,
    Finding,
    Launcher,
    Ref,
    RemotePlatform,
    check_tcp,
    require,
)
from torch_dpflow.remote.launchers.processes import LOOK_S, MODULE
from torch_dpflow.remote.launchers.ray_cluster import (
    REQUIRED,
    RayCapacity,
    WorkerActor,
    amount,
    check_address,
    connect,
    nodes_of,
    ray_error,
)
from torch_dpflow.remote.launchers.threaded_platform import ThreadedPlatform
from torch_dpflow.workers.platform import MAX_REPORT_CHARS, End, Limits

#: Ray namespace of all workers' actors, in which Ray refuses a second actor of the same name.
NAMESPACE = "dpflow"
#: Smallest amount of a resource that an actor can request.
MIN_SHARE = 0.0001
_MEMORY_ALLOWED = f"{BYTES_ALLOWED}, or their number as an int"
_LEFT = "this process has left Ray, by ray.shutdown()"
#: How long a start may take beyond the wait for capacity, in seconds.
START_S = 40.0


@dataclass(frozen=True, kw_only=True)
class Ray:
    """`platform="ray"`: workers as actors of the Ray cluster that this process is in, or that `RAY_ADDRESS` names.

    With `dpflow up --nodes`, each actor runs a node of that dpflow cluster: shards and their workers.

    Actors are placed outside the placement group of the task or actor that starts them, such as a trial of Ray Tune, so
    the cluster needs additional capacity. A loader's actors end with the loader's process.

    Args:
        cpus: CPUs of each actor; fractions are allowed.
        memory: memory that Ray reserves for each actor, such as "2GiB", or a number of bytes; empty: none.
        resources: custom resources of each actor, as defined in the Ray cluster.
        address: the Ray cluster's address, such as "10.0.0.5:6379"; empty: this process's cluster, else the cluster at
            `RAY_ADDRESS`, else this host's cluster.
        runtime_env: Ray's option, for each actor. With "working_dir" or "py_modules", the user's modules are not sent.
        wait_s: seconds after which an actor counts as refused if it does not run because the cluster is full. Raise it
            for a slow `runtime_env`, and for an autoscaler, which adds nodes for waiting actors. Without an autoscaler
            the loader fails after this time if no node is large enough for an actor.

    Raises:
        OptionError: a value is out of range, or the address is malformed or an address of Ray Client (`ray://`).
        OptionTypeError: a value is of the wrong type.
    """

    cpus: float = 1.0
    memory: int | str = ""
    resources: Mapping[str, float] = field(default_factory=dict)
    address: str = ""
    #: Not shown: its variables may be keys.
    runtime_env: Mapping[str, Any] = field(default_factory=dict, repr=False)
    wait_s: float = 20.0

    name = "ray"

    def __post_init__(self) -> None:
        check_fields(self, check_number, "cpus", minimum=MIN_SHARE, unit="a number of CPUs")
        check_fields(self, check_seconds, "wait_s", zero=True)
        check_type("address", self.address, str, "text")
        for table in ("resources", "runtime_env"):
            check_type(table, getattr(self, table), Mapping, "a dict")
        _bytes_of(self.memory)
        for kind, share in self.resources.items():
            if not isinstance(kind, str):
                raise OptionTypeError(f"resources has {kind!r}, of type {type(kind).__name__}; give text")
            check_number(f"resources[{kind!r}]", share, minimum=MIN_SHARE)
            if kind in ("", "CPU", "GPU", "memory", "object_store_memory"):
                raise OptionError(
                    f"resources has {kind!r}, and takes the cluster's own kinds, as in `ray start --resources`: "
                    "name one of these, or give cpus or memory"
                )
        check_address(self.address)

    @property
    def sends_code(self) -> bool:
        return not {"working_dir", "py_modules"} & self.runtime_env.keys()

    @property
    def needs(self) -> dict[str, float]:
        """Resources that each actor needs, by Ray's names."""
        memory = _bytes_of(self.memory)
        return {"CPU": self.cpus, **self.resources, **({"memory": float(memory)} if memory else {})}

    def check_installed(self) -> None:
        require(*REQUIRED)

    def check_workers(self, workers: int) -> None:
        """Do nothing: the cluster's resources are the only limit."""

    def launcher(self) -> Launcher:
        return RayLauncher(self)

    def open(self, *, outlived: bool = False) -> AdoptingPlatform:
        return self._open(RayLauncher(self, detached=outlived, owns_process=outlived))

    def _open(self, launcher: Launcher) -> AdoptingPlatform:
        return ThreadedPlatform(launcher, deadline_s=self.wait_s + START_S, sweep_s=LOOK_S)

    @property
    def workers_each(self) -> int:
        return max(1, int(self.cpus))

    def check_nodes(self) -> str:
        ray = connect(self.address)
        if misfit := RayCapacity(ray, self.needs).misfit():
            raise OptionError(f"no node fits into the Ray cluster: {misfit}")
        return str(ray.util.get_node_ip_address())

    def open_nodes(self, module: str) -> RemotePlatform:
        return self._open(RayLauncher(self, module=module, owns_process=True))

    def listen_at(self) -> str:
        return f"tcp://{connect(self.address).util.get_node_ip_address()}:0"

    def check_listen(self, address: str) -> None:
        check_tcp(address)
        if is_loopback(address):
            ray = connect(self.address)
            mine = ray.util.get_node_ip_address()
            others = {str(node["NodeManagerAddress"]) for node in nodes_of(ray)} - {mine}
            if others:
                raise OptionError(
                    f"listen={address!r} cannot be reached from other nodes of the Ray cluster, as {min(others)}: give "
                    f"an address of this host, as tcp://{mine}:0"
                )


class RayLauncher:
    """Launcher of workers as actors of a Ray cluster.

    Args:
        settings: settings of the actors and the cluster.
        module: the module whose `run(launch_spec)` workers run.
        detached: whether actors outlive the process that starts them.
        owns_process: whether `start` ends this process if its Ray node has ended, so that the service's next process
            connects to another node. Otherwise, `start` raises RejectedError then.

    Raises:
        MissingExtraError: Ray is not installed.
        OptionError, PlatformError: see `connect`.
    """

    limits = Limits(
        # Every start that waits for capacity is a call, and shows an autoscaler how much is missing.
        calls_at_once=64,
        start_timeout_s=(30.0, 300.0),
    )

    def __init__(
        self, settings: Ray, *, module: str = MODULE, detached: bool = False, owns_process: bool = False
    ) -> None:
        self._ray = connect(settings.address)
        self._node = self._ray.get_runtime_context().get_node_id()
        self._owns_process = owns_process
        self._wait_s = settings.wait_s
        self._module = module
        self._needs = settings.needs
        self._capacity = RayCapacity(self._ray, self._needs)
        self._options: dict[str, Any] = {
            "namespace": NAMESPACE,
            "lifetime": "detached" if detached else "non_detached",
            "max_restarts": 0,
            "num_cpus": settings.cpus,
            "resources": dict(settings.resources),
            "runtime_env": dict(settings.runtime_env) or None,
            # Out of the placement group of this task or actor, whose capacity is the trial's own.
            "scheduling_strategy": self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(None),
            "memory": self._needs.get("memory"),
        }
        self._class = self._ray.remote(WorkerActor)
        #: The actors that were started here, which live as long as their handles, and the results of their `run`.
        self._started: dict[str, tuple[Any, Any]] = {}
        #: Actors that were seen to run.
        self._running: set[str] = set()
        #: The places that should be filled: names without incarnations.
        self._wanted: set[str] = set()
        #: Until when the cluster is taken for full.
        self._full_until = 0.0
        #: Whether a node could hold one: if it is lost, another may be added.
        self._has_fit = False

    def check(self) -> Sequence[Finding]:
        total, nodes = self._ray.cluster_resources(), len(nodes_of(self._ray))
        has = ", ".join(amount(kind, total.get(kind, 0.0)) for kind in self._needs)
        fitting, lacking = self._capacity.fitting(), self._capacity.lacking()
        each = ", ".join(amount(kind, need) for kind, need in self._needs.items())
        capacity = f"room for {fitting} workers in all, of {each} each"
        if fitting and lacking:
            free = self._ray.available_resources().get(lacking, 0.0)
            capacity += f", and for none now, with {amount(lacking, free)} free"
        return [
            Finding(True, f"Ray {self._ray.__version__} at {self._ray.get_runtime_context().gcs_address} answers"),
            Finding(
                fitting > 0 and not lacking, f"{nodes} {'node has' if nodes == 1 else 'nodes have'} {has}: {capacity}"
            ),
        ]

    def start(self, name: str, launch_spec: bytes, *, deadline_s: float) -> Ref:
        self._check_connected()
        self._check_node()
        if name in self._started:
            return name
        self._wanted.add(_parent(name))
        if time.monotonic() < self._full_until and (kind := self._capacity.lacking()):
            raise self._full(name, kind)
        actor = self._create(name)
        if actor is not None:
            ready = actor.ready.remote()
            # Not as an argument of its class, which the cluster's store would keep: the launch spec has a key.
            self._started[name] = actor, actor.run.remote(self._module, launch_spec)
            self._await_place(name, ready, min(self._wait_s, deadline_s))
        return name

    def look(self, workers: Mapping[str, Ref | None]) -> Mapping[str, Fate]:
        if not self._ray.is_initialized():
            end = End(report=_LEFT, place="its actor")
            return {name: Fate(end=end) for name in workers if name in self._started}
        runs = {one[1]: name for name in workers if (one := self._started.get(name))}
        ended = self._ray.wait([*runs], num_returns=len(runs), timeout=0)[0] if runs else []
        fates = {name: Fate() for name in runs.values()}
        fates |= {runs[run]: Fate(end=self._end_of(runs[run], run)) for run in ended}
        if unknown := workers.keys() - fates.keys():
            fates |= {name: Fate() for name in self.list("") if name in unknown}
        return fates

    def stop(self, name: str, ref: Ref | None) -> None:
        self._wanted.discard(_parent(name))
        self._end(name)

    def _end(self, name: str) -> None:
        self._running.discard(name)
        if not self._ray.is_initialized():
            return  # actors end with the connection of who has started them
        with _translated(f"{name} cannot be stopped"), suppress(ValueError):  # there is none of this name
            self._ray.kill(self._ray.get_actor(name, namespace=NAMESPACE))

    def list(self, prefix: str) -> Mapping[str, Ref]:
        self._check_connected()
        with _translated("workers cannot be listed"):
            actors = self._ray.util.list_named_actors(all_namespaces=True)
        names = [one["name"] for one in actors if one["namespace"] == NAMESPACE]
        return {name: name for name in names if name.startswith(prefix)}

    def close(self) -> None:
        """Do nothing: the connection belongs to the process, which may use Ray for other work."""

    def _check_connected(self) -> None:
        """Raise RejectedError if there is no connection: Ray would otherwise connect again, or start a cluster."""
        if not self._ray.is_initialized():
            raise RejectedError(f"{_LEFT}: call it once loaders are closed")

    def _check_node(self) -> None:
        """Raise RejectedError, or end this process if `owns_process`, when its Ray node has ended."""
        if any(node["NodeID"] == self._node for node in nodes_of(self._ray)):
            return
        text = "the Ray node to which this process is connected has ended"
        if self._owns_process:
            SERVICE.error("%s; connecting again in a new process", text)
            os._exit(1)
        raise RejectedError(f"{text}: call ray.shutdown() once loaders are closed, and start Ray on this host again")

    def _create(self, name: str) -> Any:
        """Create and return an actor of this name, without a launch spec yet; None if the actor exists already."""
        from_ray = self._ray.exceptions
        try:
            return self._class.options(name=name, **self._options).remote()
        except from_ray.ActorAlreadyExistsError:
            return None
        except Exception as error:
            lost = ray_error(f"{name} cannot be started", error)
            if not isinstance(lost, AnswerLostError):
                raise lost from error
            return self._find(name, lost)

    def _find(self, name: str, lost: PlatformError) -> Any:
        """Return the actor whose creation was not answered. Raises UnavailableError if it does not exist."""
        try:
            return self._ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            raise UnavailableError(str(lost)) from lost
        except Exception:
            raise lost from None

    def _await_place(self, name: str, ready: Any, wait_s: float) -> None:
        """Wait until an actor runs. If it fails or the cluster is full, end the actor and raise PlatformError."""
        if self._ray.wait([ready], timeout=wait_s)[0]:
            try:
                self._ray.get(ready)
                self._running.add(name)
                self._has_fit = True
                return
            except Exception as error:
                refusal = ray_error(f"{name} cannot be started", error)
        elif not self._has_fit and (misfit := self._capacity.misfit()):
            refusal = RejectedError(f"{name} has no room in Ray: {misfit}")
        elif kind := self._capacity.lacking():
            refusal = self._full(name, kind)
            self._full_until = time.monotonic() + self._wait_s
        else:
            return  # there is room, so it is being prepared
        self._end(name)
        self._started.pop(name, None)
        raise refusal

    def _full(self, name: str, kind: str) -> QuotaError:
        fleet = f"{_parent(_parent(name))}-"
        running, wanted = (sum(one.startswith(fleet) for one in [*names]) for names in (self._running, self._wanted))
        return QuotaError(f"{name} has no room in Ray: {self._capacity.explain(kind, running, wanted)}")

    def _end_of(self, name: str, run: Any) -> End:
        """Drop the actor of a worker whose `run` has ended, and return how it ended."""
        try:
            pid, code, report = self._ray.get(run)
        except Exception as error:
            end = End(report=str(error).strip()[-MAX_REPORT_CHARS:], place="its actor")
        else:
            is_signal = code < 0
            end = End(
                code=None if is_signal else code, signal=-code if is_signal else None, report=report, place=f"pid {pid}"
            )
        with suppress(PlatformError):
            self.stop(name, None)  # it ends by itself a little later, and keeps the name until then
        self._started.pop(name, None)
        return end


def _bytes_of(memory: int | str) -> int:
    """Return a number of bytes; 0 for empty text. Raises OptionError or OptionTypeError for anything else."""
    if isinstance(memory, str):
        return parse_bytes("memory", memory, _MEMORY_ALLOWED) if memory else 0
    check_type("memory", memory, Integral, _MEMORY_ALLOWED.removeprefix("give "))
    return check_int("memory", memory, minimum=1)


def _parent(name: str) -> str:
    """Return the name without its last part: the place of a worker, or the fleet of a place."""
    return name.rpartition("-")[0]


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Translate errors of Ray to ours. what: begins their texts."""
    try:
        yield
    except Exception as error:
        raise ray_error(what, error) from error

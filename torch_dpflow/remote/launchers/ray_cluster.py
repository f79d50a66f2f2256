"""Connection to a Ray cluster, its capacity, and the actor that runs there. No other module imports ray.

The actor runs the worker in a child process, for two reasons. The worker's torch needs the main thread and its signals,
which Ray uses in the actor's process. User code may also call os._exit or crash: the actor survives that, and reports
the exit code and the last output. `python -m torch_dpflow.remote.launchers.ray_cluster MODULE PID` is that child; it
imports `MODULE` and calls its `run(launch_spec)`.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import IO, Any

from torch_dpflow._core.checks import MAX_PORT
from torch_dpflow.errors import (
    AnswerLostError,
    DeniedError,
    OptionError,
    PlatformError,
    RejectedError,
    UnavailableError,
)
from torch_dpflow.remote.launchers.contract import require
from torch_dpflow.remote.launchers.processes import take_launch_spec
from torch_dpflow.workers.platform import MAX_REPORT_CHARS
from torch_dpflow.workers.process_control import at_parents_end, exit_with

_CLIENT = "ray://"
_NO_CLIENT = (
    "Ray Client (ray://) is not supported: its process is outside the cluster's network, where workers cannot call it; "
    "run the script on a node of the cluster, as with `ray job submit`"
)
#: Arguments of `require`: the library, what needs it, and the extra that installs it.
REQUIRED = ("ray", "platform='ray' needs Ray", "ray")
_ADDRESS = re.compile(r"[^\s/]+:[0-9]{1,5}")
_TOLERANCE = 1e-6
#: Label of nodes in clusters with node groups, to which Ray or KubeRay can add nodes.
_NODE_GROUP = "ray.io/node-group"
#: Name, for messages, of the file with the address of this host's latest Ray cluster, even if that was killed.
FILE = "ray_current_cluster in Ray's temporary directory"
#: How long the cluster may take to accept a connection, in seconds.
PROBE_S = 5.0


def check_address(address: str, name: str = "address") -> None:
    """Raise OptionError for a malformed address, or an address of Ray Client; empty and "auto" are allowed."""
    if address.startswith(_CLIENT):
        raise OptionError(f"{name}={address!r}: {_NO_CLIENT}")
    if address in ("", "auto"):
        return
    if not _ADDRESS.fullmatch(address) or not 0 < int(_split(address)[1]) <= MAX_PORT:
        raise OptionError(f"{name}={address!r} is no address of a Ray cluster; give HOST:PORT, as 10.0.0.5:6379")


def connect(address: str) -> Any:
    """Connect to a Ray cluster and return the module `ray`.

    Uses the first of these that exists: this process's connection, `address` (empty and "auto": none), `RAY_ADDRESS`,
    this host's cluster.

    Raises:
        MissingExtraError: Ray is not installed.
        OptionError: this process is a Ray client or is connected to another cluster, or `RAY_ADDRESS` is malformed.
        PlatformError: there is no cluster, or it rejects the connection.
    """
    require(*REQUIRED)
    import ray
    from ray.util import client, scheduling_strategies  # noqa: F401  (the latter is used through `ray`)

    if client.ray.is_connected():
        raise OptionError(f"this process is connected by ray://: {_NO_CLIENT}")
    if ray.is_initialized():
        connected = ray.get_runtime_context().gcs_address
        if address not in ("", "auto", connected) and not _is_same(ray, address, connected):
            raise OptionError(
                f"address={address!r}, and this process is in the Ray cluster at {connected!r}: give no address, or "
                "call ray.shutdown() before"
            )
        return ray
    _join(ray, address)
    return ray


def _join(ray: Any, address: str) -> None:
    named_by = ""
    if address in ("", "auto"):
        address, named_by = os.environ.get("RAY_ADDRESS") or "auto", "RAY_ADDRESS"
        check_address(address, named_by)
    found, where = address, f"at {address!r}{named_by and f', as {named_by} says'}"
    try:
        if address == "auto":
            where = "on this host"
            if found := _found():
                where = f"at {found!r}, as {FILE} says"
        if found:
            _probe(found)
        # Not the address that was found: Ray looks a token up on its own only when no address is given.
        with _own_sigterm():
            ray.init(address=address, logging_level=logging.WARNING)
    except Exception as error:
        raise _no_connection(where, error) from error


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Restore SIGTERM's handler after the body: Ray's would print a stack, abort after 3 s, and replace the user's."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)


def _found() -> str:
    """Return the address that Ray's "auto" resolves to; empty if it cannot be determined.

    Raises ConnectionError if it resolves to no cluster.
    """
    try:
        from ray._private.services import canonicalize_bootstrap_address, find_gcs_addresses

        find_gcs_addresses.cache_clear()
    except (ImportError, AttributeError):  # another version's
        return ""
    return canonicalize_bootstrap_address("auto") or ""


def _is_same(ray: Any, address: str, connected: str) -> bool:
    """Return whether two addresses belong to the same cluster: Ray replaces localhost by this node's IP."""
    (host, port), (other, its_port) = _split(address), _split(connected)
    return int(port) == int(its_port) and not _ips(ray, host).isdisjoint(_ips(ray, other))


def _ips(ray: Any, host: str) -> set[str]:
    host = host.strip("[]")
    try:
        ips = {str(one[4][0]) for one in socket.getaddrinfo(host, None)}
    except OSError:
        ips = {host}
    return ips | {ray.util.get_node_ip_address()} if ips & {"127.0.0.1", "::1"} else ips


def _no_connection(where: str, error: Exception) -> PlatformError:
    """Return the error for a cluster that cannot be reached. where: its address, for display."""
    chain: list[BaseException] = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(cause)
    if any("AuthenticationError" in f"{type(one).__name__} {one}" for one in chain):
        # Ray looks a token up on its own only when no address is given.
        return DeniedError(
            f"the Ray cluster {where} refuses this process: set RAY_AUTH_MODE=token, and have the cluster's token in "
            "RAY_AUTH_TOKEN or ~/.ray/auth_token"
        )
    if isinstance(error, OSError):
        return UnavailableError(
            f"no Ray cluster answers {where}: start one with `ray start --head`, name one by RAY_ADDRESS, or call "
            f"ray.init() before ({_line_of(error)})"
        )
    return ray_error(f"the Ray cluster {where} cannot be used", error)  # another version, or no address


def _probe(address: str) -> None:
    """Test a connection to the address, because Ray itself retries for minutes and then ends the process.

    Raises OSError.
    """
    host, port = _split(address)
    socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()


def _split(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    return host, port


def ray_error(what: str, error: Exception) -> PlatformError:
    """Translate an error of Ray. AnswerLostError: the call may have been executed. what: beginning of the text."""
    from ray import exceptions

    text = f"{what}: {_line_of(error)}"
    if isinstance(error, exceptions.AuthenticationError):
        return DeniedError(f"{text}; see RAY_AUTH_MODE and ~/.ray/auth_token")
    if isinstance(error, exceptions.RuntimeEnvSetupError | ValueError | TypeError | RuntimeError):
        return RejectedError(text)
    if isinstance(error, exceptions.RayActorError):
        if "No module named 'torch_dpflow'" in str(error):
            return RejectedError(
                f"{what}: the cluster's nodes have no torch_dpflow; install it there, or give "
                "Ray(runtime_env={'pip': ['torch_dpflow']})"
            )
        return UnavailableError(text)
    return AnswerLostError(text)


def nodes_of(ray: Any) -> list[Mapping[str, Any]]:
    """Return the live nodes of the cluster, as Ray describes them."""
    return [node for node in ray.nodes() if node["Alive"]]


class RayCapacity:
    """Capacity of a Ray cluster for actors. needs: the resources that each actor needs, by Ray's names."""

    def __init__(self, ray: Any, needs: Mapping[str, float]) -> None:
        self._ray = ray
        self._needs = dict(needs)

    def fitting(self) -> int:
        """Return how many actors fit on the nodes if nothing else runs there."""
        return sum(
            min(int(node["Resources"].get(kind, 0.0) / need + _TOLERANCE) for kind, need in self._needs.items())
            for node in nodes_of(self._ray)
        )

    def misfit(self) -> str:
        """Return why no node is large enough for an actor; empty if one is, or if an autoscaler may add nodes."""
        nodes = nodes_of(self._ray)
        if self.fitting() or any(_NODE_GROUP in node.get("Labels", ()) for node in nodes):
            return ""
        largest = self._largest()
        each = ", ".join(amount(kind, need) for kind, need in self._needs.items())
        short = [kind for kind, need in self._needs.items() if largest[kind] < need - _TOLERANCE]
        most = " and ".join(f"more than {amount(kind, largest[kind])}" for kind in short) or "all of that"
        return f"it takes {each}, and no node of the cluster has {most}: give less, or add such a node"

    def _largest(self) -> dict[str, float]:
        """Return the largest amount on any node, for each resource that an actor needs."""
        nodes = nodes_of(self._ray)
        return {kind: max((node["Resources"].get(kind, 0.0) for node in nodes), default=0.0) for kind in self._needs}

    def lacking(self) -> str:
        """Return the name of a resource that is too scarce now for another actor; empty if none is."""
        # First what no node has at all: what others hold may be free a moment later.
        resources = (self._largest(), self._ray.available_resources())
        return next(
            (kind for has in resources for kind, need in self._needs.items() if has.get(kind, 0.0) < need - _TOLERANCE),
            "",
        )

    def explain(self, kind: str, running: int, wanted: int) -> str:
        """Return a text: how many of the `wanted` actors run, how scarce the resource `kind` is, and what to do."""
        total, free = (self._ray.cluster_resources().get(kind, 0.0), self._ray.available_resources().get(kind, 0.0))
        need = self._needs[kind]
        text = f"{running} of {wanted} actors run; the cluster has {amount(kind, total)}"
        if kind != "CPU":
            return f"{text}, {amount(kind, free)} free, and each takes {amount(kind, need)}: give less or add nodes"
        share = int((free + running * need) / wanted * 100) / 100
        advice = f"cpus={share:g} or more nodes" if 0 < share < need else "add nodes"
        return f"{text}, {free:g} free, and each takes {need:g}: {advice}"


def amount(kind: str, quantity: float) -> str:
    """Return a quantity of a resource, for display."""
    if kind == "memory":
        return f"{quantity / 2**30:.3g} GiB of memory"
    return f"{quantity:g} CPUs" if kind == "CPU" else f"{quantity:g} of {kind!r}"


def _line_of(error: Exception) -> str:
    """Return the text of an error on one line, without the traceback of another process."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    is_traceback = any(line.startswith("Traceback") for line in lines)
    return f"{type(error).__name__}: {lines[-1] if is_traceback else ' '.join(lines)[:600]}" if lines else repr(error)


#: How long an actor waits for its launch spec, and for the last output of a child that has ended, in seconds.
LAUNCH_SPEC_S, OUTPUT_S = 60.0, 2.0


class WorkerActor:
    """Ray actor that runs one worker. Not decorated with `ray.remote`, so that importing this module needs no Ray."""

    def __init__(self) -> None:
        # Its starter may be killed before it sends the launch spec.
        self._idle = threading.Timer(LAUNCH_SPEC_S, os._exit, (1,))
        self._idle.daemon = True
        self._idle.start()

    def ready(self) -> None:
        """Do nothing: Ray answers this call once the actor runs."""

    def run(self, module: str, launch_spec: bytes) -> tuple[int, int, str]:
        """Run a worker until it ends; return (pid, status, output).

        The status is the exit code, or minus the signal's number; the output is the end of standard error.
        """
        self._idle.cancel()
        try:
            return _run(module, launch_spec)
        finally:
            sys.modules[
                "ray"
            ].get_runtime_context().current_actor.__ray_terminate__.remote()  # after this method's answer


def _run(module: str, launch_spec: bytes) -> tuple[int, int, str]:
    # Ray has put `runtime_env` and the driver's directories into this process's path.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", __name__, module, str(os.getpid())]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdin is not None
        assert child.stderr is not None
        output = bytearray()
        reader = threading.Thread(target=_forward, args=(child.stderr, output), daemon=True)
        reader.start()
        child.stdin.write(launch_spec)  # not by its environment or arguments, which others may read: it has a key
        child.stdin.close()
        code = child.wait()
        reader.join(OUTPUT_S)  # which what the worker has started may hold open
        return child.pid, code, bytes(output).decode(errors="replace").strip()


def _forward(source: IO[bytes], output: bytearray) -> None:
    """Copy `source` to this process's standard error, which Ray shows, and keep its end."""
    while chunk := os.read(source.fileno(), 65536):
        output += chunk
        del output[:-MAX_REPORT_CHARS]
        sys.stderr.write(chunk.decode(errors="replace"))
        sys.stderr.flush()


def main(module: str, parent: int) -> Any:
    """Run the worker whose launch spec is on standard input, by `module.run`; return the exit code.

    This process ends with process `parent`.
    """
    at_parents_end(signal.SIGKILL)
    exit_with(parent)
    return import_module(module).run(take_launch_spec())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))

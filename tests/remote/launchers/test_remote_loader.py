"""A loader whose workers call over tcp: the same batches as with workers of this host, through kills and strangers."""

from __future__ import annotations

import hashlib
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.loader_cases import Stream, Unhurried, WhoLoads, assert_same, epochs
from tests.remote_cases import lose_one, names_of
from torch_dpflow import DPFlowDataLoader, LoaderOptions
from torch_dpflow.errors import OptionError, PeerLostError, WorkerStartError
from torch_dpflow.ipc.messages.headers import WorkerRefused, decode, encode
from torch_dpflow.ipc.messages.remote_worker import (
    FetchPiece,
    LaunchSpec,
    Piece,
    RemoteHandshake,
    RemoteWelcome,
    decode_launch_spec,
    encode_launch_spec,
)
from torch_dpflow.ipc.transport import TransportOptions, connect, listen
from torch_dpflow.ipc.transport.base import ClientKeys, WorkerKeys
from torch_dpflow.ipc.transport.zeromq import draw_key_pair
from torch_dpflow.remote.fleet.worker_listener import addresses_of, to_bind, to_tell
from torch_dpflow.remote.launchers.contract import AdoptingPlatform, Ended
from torch_dpflow.remote.launchers.processes import LAUNCH_SPEC_VARIABLE, Processes

#: Enough for workers to start on a busy machine, seconds.
PATIENCE_S = 200.0
SOCKET_ONLY = LoaderOptions(shared_memory=0, seeding="batch")


@dataclass(frozen=True, kw_only=True)
class Recording(Processes):
    """Keeps what its workers are told."""

    launch_specs: list[bytes] = field(default_factory=list)

    def open(self, *, outlived: bool = False) -> AdoptingPlatform:
        platform = super().open(outlived=outlived)
        start = platform.start

        def recorded(name: str, launch_spec: bytes) -> None:
            self.launch_specs.append(launch_spec)
            start(name, launch_spec)

        platform.start = recorded  # type: ignore[method-assign]
        return platform


pytestmark = pytest.mark.usefixtures("preloaded_workers")


@pytest.fixture(autouse=True, scope="module")
def no_leaks(no_leaks_of_module: None) -> None:
    """The loader that the tests share replaces a worker in one of them."""


@pytest.fixture(scope="module")
def recording(no_leaks: None) -> Recording:
    return Recording()


def shuffled(size: int, **options: Any) -> DPFlowDataLoader[Any]:
    arguments: dict[str, Any] = {
        "batch_size": 2,
        "shuffle": True,
        "num_workers": 2,
        "persistent_workers": True,
    }
    generator = torch.Generator().manual_seed(7)
    return DPFlowDataLoader(Unhurried(size), generator=generator, **{**arguments, **options})


@pytest.fixture(scope="module")
def remote(recording: Recording) -> Iterator[DPFlowDataLoader[Any]]:
    """One loader for all tests of this module: its workers take seconds to start."""
    loader = shuffled(24, platform=recording, options=SOCKET_ONLY)
    list(loader)  # whichever test comes first, its workers have started
    yield loader
    loader._iterator._shutdown_workers()


def workers(recording: Recording) -> dict[str, int]:
    """The pids of the workers that run, by name."""
    return {
        launch_spec.name: pid
        for launch_spec in map(decode_launch_spec, recording.launch_specs)
        if (pid := pid_of(launch_spec.name))
    }


def pid_of(name: str) -> int:
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"DPFLOW_WORKER_NAME={name}".encode() in (entry / "environ").read_bytes():
                return int(entry.name)
        except OSError:
            continue
    return 0


def test_batches_equal_those_of_local_workers_through_a_kill() -> None:
    recording = Recording()
    remote = shuffled(24, platform=recording, options=SOCKET_ONLY)
    local = shuffled(24, options=LoaderOptions(seeding="batch"))
    assert_same(epochs(remote), epochs(local))
    iterator, expected = iter(remote), list(local)
    seen = [next(iterator)]
    lose_one(remote, lambda: next(iter(workers(recording).values())))
    assert_same([*seen, *iterator], expected)
    assert remote.stats().restarts >= 1
    for loader in (remote, local):
        loader._iterator._shutdown_workers()


def test_an_explanation_knows_how_many_workers_work(
    remote: DPFlowDataLoader[Any], eventually: Callable[..., None]
) -> None:
    """Processors of other hosts are not looked at."""
    eventually(lambda: remote._iterator._shard.processes.working == 2)
    assert str(remote.explain()).startswith("Measured: ")
    workload = remote._runtime.workload
    assert (workload.working, workload.refused, workload.watched_s) == (2, "", 0.0)


def test_what_a_worker_was_told_is_found_nowhere(
    remote: DPFlowDataLoader[Any], recording: Recording, eventually: Callable[..., None]
) -> None:
    eventually(lambda: remote._iterator._shard.processes.working == 2)
    for launch_spec in map(decode_launch_spec, recording.launch_specs):
        pid = pid_of(launch_spec.name)
        if pid:
            assert launch_spec.secret.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
            assert launch_spec.secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert launch_spec.secret not in repr(launch_spec)


def test_a_launch_spec_used_again_is_refused(
    remote: DPFlowDataLoader[Any], recording: Recording, eventually: Callable[..., None]
) -> None:
    """One whose worker works, and one whose worker is gone."""
    expected = len(list(remote))
    eventually(lambda: len(names_of(remote)) == 2)
    if len(recording.launch_specs) == 2:  # alone: no test before has lost one
        lose_one(remote, lambda: next(iter(workers(recording).values())))
        eventually(lambda: len(names_of(remote)) == 2)
    running = workers(recording)
    launch_specs = {
        launch_spec.name: data for data in recording.launch_specs if (launch_spec := decode_launch_spec(data))
    }
    again = next(data for name, data in launch_specs.items() if name in running)
    copy = subprocess.run(
        [sys.executable, "-m", "torch_dpflow.remote.worker"],
        env={**os.environ, LAUNCH_SPEC_VARIABLE: again.decode()},
        stderr=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=False,
    )
    assert copy.returncode == 0, copy.stderr
    assert b"another process is" in copy.stderr
    gone = next(decode_launch_spec(data) for name, data in launch_specs.items() if name not in running)
    assert not answered(gone, f"{gone.number}/{gone.incarnation}/feed/line", gone.addresses[0], within_s=0.5)
    assert len(list(remote)) == expected
    assert workers(recording) == running


def answered(launch_spec: LaunchSpec, identity: str, address: str, *, within_s: float) -> Any:
    """What the listener answers to garbage from a connection with a launch spec's key; None if it does not hear it.

    within_s: how long to wait for it, seconds.
    """
    keys = ClientKeys(
        public=launch_spec.public.encode(),
        secret=launch_spec.secret.encode(),
        server_public=launch_spec.server_public.encode(),
    )
    options = TransportOptions(keys=keys, send_timeout_s=within_s)
    connection = connect(address, identity=identity.encode(), options=options)
    try:
        with suppress(PeerLostError):  # it may be refused before it has sent anything
            connection.send([b"garbage"])
        frames = connection.receive(within_s)
        return None if frames is None else decode(frames[0])
    finally:
        connection.close()


def test_strangers_and_garbage_change_nothing(
    remote: DPFlowDataLoader[Any], recording: Recording, eventually: Callable[..., None]
) -> None:
    expected = len(list(remote))
    eventually(lambda: len(names_of(remote)) == 2)
    running = workers(recording)
    own, other = (
        launch_spec for launch_spec in map(decode_launch_spec, recording.launch_specs) if launch_spec.name in running
    )
    address = own.addresses[0]
    identity, others = (f"{one.number}/{one.incarnation}/feed/line" for one in (own, other))
    assert isinstance(answered(own, identity, address, within_s=PATIENCE_S), WorkerRefused)
    assert answered(own, others, address, within_s=0.5) is None  # another's name
    naked = connect(address)
    naked.send([b"let me in"])
    assert naked.receive(0.2) is None
    naked.close()
    assert len(list(remote)) == expected
    assert workers(recording) == running


def test_streams_equal_torchs_through_a_kill_and_go_on_from_a_state() -> None:
    recording = Recording()
    arguments: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "persistent_workers": True}
    torch.manual_seed(3)
    torchs = epochs(DataLoader(Stream(18, augment=True), **arguments))
    torch.manual_seed(3)
    ours = DPFlowDataLoader(Stream(18, augment=True), platform=recording, **arguments)
    first = list(ours)
    iterator = iter(ours)
    begun = [next(iterator) for _ in range(3)]
    state = ours.state_dict()
    os.kill(next(iter(workers(recording).values())), signal.SIGKILL)
    assert_same([first, [*begun, *iterator]], torchs)
    ours._iterator._shutdown_workers()
    rest = DPFlowDataLoader(Stream(18, augment=True), batch_size=2, num_workers=2)
    rest.load_state_dict(state)
    assert_same(list(rest), torchs[1][3:])


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module that only this process has in its path."""
    (tmp_path / "squares_of_mine.py").write_text(
        "class Squares:\n    def __len__(self): return 4\n    def __getitem__(self, index): return index * index\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("squares_of_mine")
    del sys.modules["squares_of_mine"]


def test_the_users_modules_are_sent_and_closing_leaves_no_worker(own_module: Any) -> None:
    recording = Recording(python=sys.executable)
    loader = DPFlowDataLoader(own_module.Squares(), batch_size=None, num_workers=1, platform=recording)
    assert list(loader) == [0, 1, 4, 9]
    assert not workers(recording)


def test_a_module_that_is_missing_is_told_of_with_what_to_do(own_module: Any) -> None:
    platform = Processes(python=sys.executable)
    options = LoaderOptions(code=None)
    loader = DPFlowDataLoader(own_module.Squares(), num_workers=1, platform=platform, options=options)
    with pytest.raises(WorkerStartError, match=r"squares_of_mine.*code=\["):
        next(iter(loader))


@pytest.mark.slow
def test_a_frozen_worker_is_replaced_and_leaves_once_it_is_thawed(eventually: Callable[..., None]) -> None:
    recording = Recording()
    loader = DPFlowDataLoader(WhoLoads(40), batch_size=None, num_workers=2, persistent_workers=True, platform=recording)
    assert len(list(loader)) == 40
    processes = loader._iterator._shard.processes
    eventually(lambda: processes.working == 2)
    name, frozen = next(iter(workers(recording).items()))
    # Its platform cannot end it: as where that is cut off too.
    processes._platform.stop = lambda *_: None
    os.kill(frozen, signal.SIGSTOP)
    eventually(lambda: processes._fleet.get(name) is None)
    assert [row[0] for row in loader] == list(range(40))
    os.kill(frozen, signal.SIGCONT)
    eventually(lambda: name not in workers(recording))
    loader._iterator._shutdown_workers()


@pytest.mark.slow
def test_workers_end_by_themselves_where_the_training_process_is_killed(
    eventually: Callable[..., None], tmp_path: Path
) -> None:
    """Nobody is left who could stop them."""
    recording = Recording()
    told = tmp_path / "launch specs"
    child = os.fork()
    if not child:
        try:
            loader = DPFlowDataLoader(WhoLoads(40), batch_size=None, num_workers=1, platform=recording)
            iterator = iter(loader)
            next(iterator)
            told.write_bytes(b"\n".join(recording.launch_specs))
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    recording.launch_specs.extend(told.read_bytes().split(b"\n"))
    assert workers(recording)
    eventually(lambda: not workers(recording))


@pytest.mark.parametrize(
    ("asked", "bound", "told"),
    [
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:71", ["tcp://127.0.0.1:71"]),
        ("tcp://localhost:0", "tcp://127.0.0.1:71", ["tcp://localhost:71"]),
        ("tcp://[::1]:0", "tcp://[::1]:71", ["tcp://[::1]:71"]),
    ],
)
def test_workers_are_told_an_address_that_they_can_call(asked: str, bound: str, told: list[str]) -> None:
    assert to_tell(asked, bound) == told


def test_a_name_is_bound_by_its_address_and_all_addresses_are_told_one_by_one() -> None:
    assert to_bind("tcp://localhost:71") == "tcp://127.0.0.1:71"
    assert to_bind("tcp://0.0.0.0:71") == "tcp://0.0.0.0:71"
    everywhere = to_tell("tcp://0.0.0.0:0", "tcp://0.0.0.0:71")
    assert everywhere[-1] == "tcp://127.0.0.1:71"
    assert not any("0.0.0.0" in address for address in everywhere)
    with pytest.raises(OptionError, match="has no address here"):
        to_bind("tcp://nowhere.invalid:71")
    assert addresses_of(to_bind("tcp://localhost:70-71")) == ["tcp://127.0.0.1:70", "tcp://127.0.0.1:71"]


@pytest.mark.parametrize("reason", ["it is not needed", ""])
def test_a_worker_that_is_refused_while_it_imports_torch_ends_and_says_why_if_there_is_a_reason(
    reason: str, eventually: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # of `preloaded_workers`
    public, secret = draw_key_pair()
    keys = WorkerKeys(public=public, secret=secret)
    own_public, own_secret = draw_key_pair()
    keys.expect("0/1", own_public, PATIENCE_S)
    name, content = "dpf-0c0ffee0-0123456789-0-1", b"N."
    digest = hashlib.sha256(content).hexdigest()
    platform = Processes().open()
    head = listen("tcp://127.0.0.1:0", options=TransportOptions(keys=keys))
    launch_spec = LaunchSpec(
        name=name,
        role="worker",
        number=0,
        incarnation=1,
        addresses=[head.address],
        server_public=public.decode(),
        public=own_public.decode(),
        secret=own_secret.decode(),
        lifetime_s=None,
        silence_s=PATIENCE_S,
    )
    platform.start(name, encode_launch_spec(launch_spec))
    while True:
        peer, frames = head.receive(PATIENCE_S)  # type: ignore[misc]
        if isinstance(decode(frames[0]), RemoteHandshake):
            head.send(peer, [encode(RemoteWelcome(digest, len(content), "", 0))])
        elif isinstance(decode(frames[0]), FetchPiece):
            break
    head.send(peer, [encode(Piece(digest, 0)), content])
    head.send(peer, [encode(WorkerRefused(reason))])

    ends: list[Ended] = []

    def ended() -> bool:
        platform.suspect(name)
        ends.extend(outcome for outcome in platform.take() if isinstance(outcome, Ended))
        return bool(ends)

    eventually(ended, within_s=PATIENCE_S)
    platform.close()
    head.close()
    said = f"{name} ends: the shard refuses it: {reason}" if reason else ""
    assert [one.end.report for one in ends] == [said]

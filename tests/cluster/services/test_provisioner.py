"""A provisioner and what its shards have of it: its death, theirs, how many there may be, and what is left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.cluster.services.kept_processes import MEMBERS, service_of
from tests.new_process import Interpreter, interpreter
from tests.shared_cluster import PATIENCE_S, wait
from tests.worker_cases import has_ended
from torch_dpflow.cluster.shard import provisioned_workers
from torch_dpflow.cluster.shard.provisioned_workers import ProvisionedPlatform
from torch_dpflow.errors import OptionError, RejectedError, RemoteCallError, ThrottledError, UnavailableError
from torch_dpflow.remote.launchers.contract import Accepted, Ended, Outcome, Refused, prefix_of
from torch_dpflow.remote.launchers.processes import SubprocessLauncher

PROGRAM = "import sys; from tests.cluster.services.kept_processes import keep; keep(sys.argv[1:])"
Attached = Callable[..., ProvisionedPlatform]


class Keeping:
    """A provisioner that can be killed and started again, and a listener for members."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = str(folder)
        self._stack = stack
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.order = json.dumps({"address": listener.getsockname()}).encode()
        self.process: Interpreter
        self.cluster = service_of(self.folder, "provisioner").place.cluster

    def up(self, *, workers: int = 4, sweep_s: float = 60.0, broken: bool = False) -> None:
        arguments = [self.folder, str(workers), str(sweep_s), *(["broken"] if broken else [])]
        self.process = interpreter(PROGRAM, *arguments)
        self._stack.callback(self.down, self.process, signal.SIGTERM)

    def down(self, process: Interpreter | None = None, number: int = signal.SIGKILL) -> None:
        process = process or self.process
        process.send_signal(number)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()

    def attach(self, shard: str = "f:v1/shard-000", incarnation: int = 1) -> ProvisionedPlatform:
        return self._stack.enter_context(closing(ProvisionedPlatform(service_of(self.folder, shard, incarnation))))

    def name(self, number: int, group: str = "0123456789") -> str:
        return f"{prefix_of(self.cluster, group)}{number}-{number + 1}"


@pytest.fixture
def keeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeping]:
    monkeypatch.setattr(provisioned_workers, "RELEASE_S", 0.3)
    with ExitStack() as stack:
        yield Keeping(tmp_path, stack)


def take(platform: ProvisionedPlatform, count: int) -> list[Outcome]:
    """Wait for so many outcomes; the descriptor says when there are some."""
    poller = select.poll()
    poller.register(platform.wakeup_fd, select.POLLIN)
    outcomes: list[Outcome] = []
    while len(outcomes) < count:
        assert poller.poll(PATIENCE_S * 1000), outcomes
        outcomes += platform.take()
    assert len(outcomes) == count
    return outcomes


def started(
    platform: ProvisionedPlatform, keeping: Keeping, *numbers: int, group: str = "0123456789"
) -> dict[str, int]:
    """Start members; their pids by name."""
    for number in numbers:
        platform.start(keeping.name(number, group), keeping.order)
    outcomes = take(platform, len(numbers))
    assert all(isinstance(outcome, Accepted) for outcome in outcomes), outcomes
    return {outcome.name: int(outcome.ref) for outcome in outcomes if isinstance(outcome, Accepted)}


def test_members_live_through_the_provisioners_death_and_the_next_one_tells_of_their_ends(
    keeping: Keeping,
) -> None:
    keeping.up()
    platform = keeping.attach()
    pids = started(platform, keeping, 0, 1)
    keeping.down()
    platform.start(keeping.name(2), keeping.order)
    assert not any(map(has_ended, pids.values()))
    keeping.up()
    (third,) = take(platform, 1)
    assert isinstance(third, Accepted)
    first, second = pids
    os.kill(pids[first], signal.SIGKILL)
    platform.suspect(first)
    assert [type(outcome) for outcome in take(platform, 1) if outcome.name == first] == [Ended]
    platform.stop(second, "a test")
    (ended,) = take(platform, 1)
    assert isinstance(ended, Ended)
    assert (ended.name, ended.end.killed_for) == (second, "a test")
    assert has_ended(pids[second])
    keeping.down(number=signal.SIGTERM)
    assert keeping.process.returncode == 0
    assert has_ended(int(third.ref))


def test_what_an_earlier_provisioner_has_started_is_not_started_twice(keeping: Keeping) -> None:
    with closing(SubprocessLauncher(MEMBERS)) as before:
        ref = before.start(keeping.name(0), keeping.order, deadline_s=PATIENCE_S)
        keeping.up()
        platform = keeping.attach()
        platform.start(keeping.name(0), keeping.order)
        assert take(platform, 1) == [Accepted(keeping.name(0), ref)]
        platform.stop(keeping.name(0))
        assert isinstance(take(platform, 1)[0], Ended)
        before.look({keeping.name(0): ref})  # reaps it


def test_members_that_no_shard_knows_are_ended(keeping: Keeping) -> None:
    with closing(SubprocessLauncher(MEMBERS)) as before:
        stray, foreign = keeping.name(0), f"{prefix_of('00c0ffee', '0123456789')}0-1"
        pids = [int(before.start(name, keeping.order, deadline_s=PATIENCE_S)) for name in (stray, foreign)]
        keeping.up(sweep_s=0.3)
        platform = keeping.attach()
        mine = started(platform, keeping, 1)
        wait(lambda: has_ended(pids[0]), what="the end of the stray")
        assert not any(map(has_ended, [pids[1], *mine.values()]))
        before.stop(foreign, None)
        before.look({stray: None})


def test_two_shards_share_one_maximum_and_a_restarted_shard_has_none_left(keeping: Keeping) -> None:
    keeping.up(workers=2)
    first, second = keeping.attach(), keeping.attach("g:v1/shard-000")
    pids = started(first, keeping, 0, 1, 2)  # one more, for successors
    other = keeping.name(3, "abcdefabcd")
    second.start(other, keeping.order)
    (refused,) = take(second, 1)
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, ThrottledError)
    assert "the cluster has 3 workers; 2 are allowed" in str(refused.error)
    second.stop(keeping.name(0))  # which is not its own
    successor = keeping.attach(incarnation=2)
    wait(lambda: all(map(has_ended, pids.values())), what="the end of those of the shard before")
    wait(lambda: _may_start(second, keeping, other), what="room")
    assert successor.take() == []
    with pytest.raises(RemoteCallError, match="incarnation 2 has replaced"):
        keeping.attach(incarnation=1)
    second.start("dpf-00c0ffee-0123456789-0-1", keeping.order)
    (rejected,) = take(second, 1)
    assert isinstance(rejected, Refused)
    assert isinstance(rejected.error, RejectedError)
    assert "is no member of this cluster" in str(rejected.error)
    with pytest.raises(OptionError, match="bytes; at most 8192"):
        second.start(keeping.name(4), bytes(8193))


def _may_start(platform: ProvisionedPlatform, keeping: Keeping, name: str) -> bool:
    platform.start(name, keeping.order)
    return isinstance(take(platform, 1)[0], Accepted)


def test_shards_are_told_why_a_platform_cannot_be_used(keeping: Keeping) -> None:
    keeping.up(broken=True)
    with pytest.raises(RemoteCallError, match=r"^the key has no teeth: give another one$"):
        keeping.attach()
    keeping.down(number=signal.SIGTERM)
    assert keeping.process.returncode == 0
    keeping.up()
    platform = keeping.attach()
    pids = started(platform, keeping, 0)
    keeping.down()
    keeping.up(broken=True)
    platform.start(keeping.name(1), keeping.order)
    (refused,) = take(platform, 1)
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, UnavailableError)
    assert "the key has no teeth" in str(refused.error)
    assert not any(map(has_ended, pids.values()))
    keeping.down()
    keeping.up()
    platform.stop(keeping.name(0))
    assert isinstance(take(platform, 1)[0], Ended)

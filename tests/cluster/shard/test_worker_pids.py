"""A process number that a worker tells of is its process only where shared memory has proved it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cluster.shard.driven_workers import Workers
from tests.new_process import in_fork, interpreter
from tests.shared_cluster import TestCluster, open_job, wait
from tests.shared_datasets import Hanging
from torch_dpflow._version import __version__
from torch_dpflow.cluster.cache.objects import Load
from torch_dpflow.cluster.client.open_job import JobOptions
from torch_dpflow.cluster.messages.shard import SAMPLE
from torch_dpflow.cluster.shard.sample_source import SampleAssignment, TwoStageDataset
from torch_dpflow.errors import MessageError, PoisonTaskError
from torch_dpflow.ipc.memory.arena import Arena
from torch_dpflow.ipc.memory.arena_reader import ArenaReader
from torch_dpflow.ipc.messages.headers import (
    PROTOCOL_VERSION,
    BlockRef,
    NoSession,
    ProbeRef,
    WorkerHandshake,
    WorkerRefused,
    WorkerWelcome,
    decode,
    encode,
)
from torch_dpflow.ipc.rpc import RpcServer
from torch_dpflow.ipc.transport import connect, listen


@pytest.fixture(params=["ipc"])
def workers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Workers]:
    driven = Workers("tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{tmp_path}/shard")
    with closing(driven.listener):
        yield driven


def test_a_number_that_is_not_proved_is_neither_watched_nor_killed(workers: Workers) -> None:
    with subprocess.Popen(["sleep", "60"]) as bystander:
        peer = b"0/7/token"
        workers.shard.on_message(peer, [encode(WorkerHandshake(0, 7, bystander.pid, None))])
        assert workers.shard.figures()["workers"] == 1
        assert workers.shard.unwatched == {0: 7}
        workers.shard.on_message(peer, [encode(NoSession())])  # which no worker says: it is to be replaced
        workers.shard.on_message(peer, [b"nor this"])
        assert workers.to_end == [(0, 7)]
        assert bystander.poll() is None
        bystander.kill()
        bystander.wait()
        workers.turn()
        assert workers.shard.figures()["workers"] == 1, "the end of a process that may be any is nobody's"
    workers.shard.ended(0, 6)
    assert workers.shard.figures()["workers"] == 1
    workers.shard.ended(0, 7)
    assert workers.shard.figures()["workers"] == 0


def test_a_worker_that_does_not_belong_is_told_so_and_ends(workers: Workers, caplog: pytest.LogCaptureFixture) -> None:
    def answer(hello: WorkerHandshake, own: bytes = b"hello") -> Any:
        identity = f"{hello.worker}/{hello.incarnation}/token".encode()
        with closing(connect(workers.listener.address, identity=identity)) as connection:
            connection.send([encode(hello) if own == b"hello" else own])
            answers: list[Any] = []

            def answered() -> bool:
                frames = connection.receive(0)
                answers.extend([] if frames is None else [decode(frames[0])])
                return bool(answers)

            workers.until(answered)
        return answers[0]

    def hello(incarnation: int, version: int = PROTOCOL_VERSION) -> WorkerHandshake:
        return WorkerHandshake(0, incarnation, os.getpid(), None, None, version)

    older = answer(hello(1, PROTOCOL_VERSION + 1))
    assert isinstance(older, WorkerRefused)
    assert f"version {PROTOCOL_VERSION + 1}" in older.reason
    *known, _, is_ready = msgspec.msgpack.decode(encode(hello(1)))
    later = [*known, PROTOCOL_VERSION + 1, is_ready, {"of": "a later release"}]
    longer = answer(hello(1), msgspec.msgpack.encode(later))
    assert isinstance(longer, WorkerRefused)
    assert f"version {PROTOCOL_VERSION + 1}" in longer.reason
    assert f"torch_dpflow {__version__}" in longer.reason
    assert isinstance(answer(hello(1), b"a message of the next century"), WorkerRefused)
    assert "b'0/1' dropped" in caplog.text
    assert "tok" not in caplog.text
    assert isinstance(answer(hello(3)), WorkerWelcome)
    late = answer(hello(2))
    assert isinstance(late, WorkerRefused)
    assert "incarnation 3 has replaced it" in late.reason
    assert workers.shard.unwatched == {0: 3}
    # A real one: started long ago, and here only now.
    with interpreter(ELSEWHERE, workers.listener.address, "1", "nowhere", "60") as worker:
        workers.until(lambda: worker.poll() is not None)
        assert worker.returncode == 0, worker.communicate()
        worker.communicate()
    assert workers.shard.unwatched == {0: 3}


def test_nothing_but_a_segment_is_opened_of_a_process_that_is_told_of(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    descriptor = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        reader = ArenaReader(os.getpid())
        with pytest.raises(MessageError, match=r"not a segment, but .*pipe"):
            reader.view(BlockRef(0, descriptor, 64, 16, 1, 0))
    finally:
        os.close(descriptor)


#: A worker whose process has another number here than it knows of.
ELSEWHERE = """
import sys
from functools import partial
from torch_dpflow.cluster.shard import sample_worker
from torch_dpflow.cluster.shard.sample_worker import SampleWorker
from torch_dpflow.ipc.transport import connect
sample_worker.IDLE_S, sample_worker.SILENCE_S = 0.2, float(sys.argv[4])
number, incarnation = 0, int(sys.argv[2])
connection = connect(sys.argv[1], identity=f"{number}/{incarnation}/token".encode())
SampleWorker(connection, number, incarnation, lambda digest, going_on: open(sys.argv[3], "rb")).work()
"""


#: Two of them, of one process that imports torch for both.
TWO_ELSEWHERE = f"""
import os, sys, torch
other = os.fork()
sys.argv[1:] = sys.argv[1:5] if other else sys.argv[5:]
{ELSEWHERE}
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


@pytest.mark.parametrize("workers", ["ipc", pytest.param("tcp", marks=pytest.mark.slow)], indirect=True)
def test_a_worker_in_another_pid_namespace_loads_and_is_replaced(workers: Workers, tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-fp", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no namespace for processes can be made here")
    packed = tmp_path / "packed"
    packed.write_bytes(SampleAssignment(dataset=TwoStageDataset(Hanging(9, sleeps=1)), worker_init_fn=None).pack())

    def start(incarnation: int) -> subprocess.Popen[str]:
        command = (workers.listener.address, str(incarnation), str(packed), "60")
        return interpreter(ELSEWHERE, *command, prefix=("unshare", "-fp", "--kill-child"))

    def end(worker: subprocess.Popen[str]) -> None:
        worker.kill()
        worker.communicate()

    first = start(1)
    try:
        workers.shard.load([Load(0, 0, 0)])
        workers.until(lambda: 0 in workers.loaded)
        assert workers.loaded[0].kind == SAMPLE
        assert workers.shard.unwatched == {0: 1}
        workers.shard.load([Load(1, 1, 0)])
        workers.turn()
        workers.shard.failed(0, "a test ends it")
        assert workers.to_end == [(0, 1)], "it is for its node to end"
    finally:
        end(first)
    workers.shard.ended(0, 1)
    assert workers.shard.figures()["workers"] == 0
    workers.shard.cancel([1])
    second = start(2)
    try:
        workers.shard.load([Load(2, 2, 0)])
        workers.until(lambda: 2 in workers.loaded)
        assert workers.shard.unwatched == {0: 2}
        # Another shard takes the place of this one, at the same address: the worker is not to send it what it has.
        workers.listener.close()
        other = Workers(workers.listener.address)
        with closing(other.listener):
            other.until(lambda: second.poll() is not None)
        assert second.returncode == 0
    finally:
        end(second)


def test_a_worker_ends_where_no_shard_of_its_node_answers(tmp_path: Path) -> None:
    # As a shard of another node, to which it is a stranger.
    server = RpcServer(listen(f"ipc://{tmp_path}/other"))
    stranger = (server.address, "1", "nowhere", "60")
    lonely = (f"ipc://{tmp_path}/nobody", "1", "nowhere", "2")
    with interpreter(TWO_ELSEWHERE, *stranger, *lonely) as both:
        wait(lambda: [server.step(0.02), both.poll()][1] == 0)
        said = both.communicate()[1]
    assert "another node" in said
    assert "has not answered for 2 s" in said
    server.close()


def proved(pid: int, probe: ProbeRef) -> bool:
    return ArenaReader(pid).probe(probe)


#: Reads shared memory in a namespace of its own, with the /proc of the one around it.
BELOW = """
import sys
import msgspec
from torch_dpflow.ipc.memory.arena import ArenaReader
from torch_dpflow.ipc.messages.headers import ProbeRef
print(ArenaReader(int(sys.argv[1])).probe(msgspec.json.decode(sys.argv[2], type=ProbeRef)))
"""


def test_memory_proves_no_number_to_a_process_whose_numbers_are_others() -> None:
    prefix = ("unshare", "-fp")
    if subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no namespace for processes can be made here")
    arena = Arena(budget_bytes=1 << 20)
    probe = arena.probe_ref()
    with interpreter(BELOW, str(os.getpid()), msgspec.json.encode(probe).decode(), prefix=prefix) as reader:
        assert reader.communicate() == ("False\n", "")
    assert in_fork(proved, os.getpid(), probe) is True


@pytest.mark.slow
def test_a_cluster_whose_kernel_has_no_descriptors_of_processes_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import errno, os\n"
        "def pidfd_open(pid, flags=0):\n"
        "    raise OSError(errno.ENOSYS, 'Function not implemented')\n"
        "os.pidfd_open = pidfd_open\n"
    )
    cluster = TestCluster.start(tmp_path, path=tmp_path)
    try:
        options = JobOptions(idle_s=30.0, task_timeout_s=1.0)
        dataset = Hanging(200, sleeps=150)
        with open_job("a", dataset, address=cluster.address, workers=2, options=options) as job:
            batches: Any = job.read([[key] for key in range(200)], 0)
            seen = [int(key) for _ in range(3) for key in next(batches)[1]]
            killed = cluster.kill("/worker-0")
            with pytest.raises(PoisonTaskError, match="sample 150"):
                seen.extend(int(key) for _, keys in batches for key in keys)
            seen += [int(key) for _, keys in batches for key in keys]
            assert seen == [key for key in range(200) if key != 150]
            assert killed not in {view.pid for view in cluster.processes("/worker-0")}
            shard = cluster.process("/shard-000", role="shard").pid
            os.kill(shard, signal.SIGKILL)
            again = [int(key) for _, keys in job.read([[key] for key in range(100)], 1) for key in keys]
            assert again == list(range(100))
    finally:
        cluster.stop()

"""Every call of every service runs twice, and again after later ones: the second changes nothing, and answers alike.

A server remembers nothing of a call that it has answered, so a call whose answer is lost runs again.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.cluster.services.kept_processes import Waiting, service_of
from tests.new_process import in_fork
from torch_dpflow._version import __version__
from torch_dpflow.cluster.messages.coordinator import (
    Access,
    ClusterLimits,
    ContentPiece,
    ContentRequest,
    CostRequest,
    FlowSpec,
    NodeLimits,
    Scale,
)
from torch_dpflow.cluster.messages.node import Desire, Ending, Heartbeat, NodeFleet, NodeJoin, NodeReport, ProcessView
from torch_dpflow.cluster.messages.provisioner import (
    Attach,
    EventsRequest,
    OwnedWorker,
    Release,
    Requests,
    StartRequest,
    StopRequest,
    SuspectRequest,
)
from torch_dpflow.cluster.messages.router import (
    DrawSamples,
    EpochPlace,
    JobHeartbeat,
    JobId,
    Join,
    LookaheadRequest,
    ReadByAll,
    RegisterShard,
    ReportOrder,
    RouterSettings,
    StartEpoch,
)
from torch_dpflow.cluster.messages.shard import Ask, ShardSettings
from torch_dpflow.cluster.security.connection_file import generate_keys, node_proof
from torch_dpflow.cluster.services.contents import Contents
from torch_dpflow.cluster.services.coordinator import Coordinator
from torch_dpflow.cluster.services.joined_nodes import JoinedNodes, node_table
from torch_dpflow.cluster.services.node import Node
from torch_dpflow.cluster.services.provisioner import Provisioner
from torch_dpflow.cluster.services.router import Router
from torch_dpflow.cluster.services.service import ClusterPlace, ask_in
from torch_dpflow.cluster.services.state_store import WriteBehindStore, open_store
from torch_dpflow.cluster.shard.server import SampleShard
from torch_dpflow.errors import RemoteCallError
from torch_dpflow.ipc.rpc import PendingCall, RpcClient, RpcServer
from torch_dpflow.ipc.transport import listen
from torch_dpflow.remote.launchers.contract import prefix_of
from torch_dpflow.remote.shipping.compatibility import versions_here
from torch_dpflow.samplers.indices import compact
from torch_dpflow.workers.fork_server import ForkServerPlatform

SIZE = 24
CONTENT = b"what workers load"
SPEC = FlowSpec(name="f", version=1, size=SIZE, content=hashlib.sha256(CONTENT).hexdigest(), fingerprint={})
LOWER, HIGHER = (SPEC, FlowSpec(**{**{name: getattr(SPEC, name) for name in SPEC.__struct_fields__}, "version": 2}))
#: What a call was answered with, by its place in the script.
Said = dict[int, Any]


@dataclass
class Step:
    """A call. body: made of the earlier answers. held: whether its answer needs what the script does not have."""

    method: str
    body: Any = None
    frames: Sequence[bytes] = ()
    held: bool = False
    #: Whether it may run again after later calls: the same caller makes no other call before this one is answered.
    late: bool = True

    def made_of(self, said: Said) -> Any:
        return self.body(said) if callable(self.body) else self.body


@dataclass
class Service:
    """A service that serves in a thread. state: what calls may have changed."""

    server: RpcServer
    script: list[Step]
    state: Callable[[], Any]
    #: Methods that this test leaves out, with the reason.
    left_out: dict[str, str] = field(default_factory=dict)


def normal(value: Any) -> Any:
    """Return an answer without times and process ids."""
    if isinstance(value, float):
        return 0.0
    if isinstance(value, dict):
        return {key: normal(one) for key, one in value.items()}
    return [normal(one) for one in value] if isinstance(value, list | tuple) else value


def answer_of(call: PendingCall) -> Any:
    try:
        answer = call.result()
    except RemoteCallError as error:
        return ("refused", error.kind)
    return normal(answer.body), [bytes(frame) for frame in answer.frames]


def played(service: Service, repeats: Callable[[int], Sequence[int]]) -> tuple[list[Any], Any]:
    """Make the calls of the script, each followed by repeated ones; return the first answers and the state.

    Raises AssertionError if a call that runs again at once is answered otherwise.
    """
    answers: list[Any] = []
    said: Said = {}
    held: list[PendingCall] = []
    with RpcClient(service.server.address) as client:

        def begin(number: int) -> PendingCall:
            step = service.script[number]
            return client.begin(step.method, step.made_of(said), step.frames, timeout_s=60.0)

        for number, step in enumerate(service.script):
            call = begin(number)
            if step.held:
                held.append(call)
            else:
                answers.append(answer_of(call))
                said[number] = answers[-1][0]
            for earlier in repeats(number):
                again = begin(earlier)
                if service.script[earlier].held:
                    held.append(again)
                elif earlier == number:
                    assert answer_of(again) == answers[-1], step.method
                else:
                    answer_of(again)
        return answers, normal(ask_in(service.server, service.state))


@contextmanager
def serving(server: RpcServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield
    finally:
        server.stop()
        thread.join()
        server.close()


# -- the services and their calls ----------------------------------------------------------------------------


@contextmanager
def router(folder: Path) -> Iterator[Service]:
    server = RpcServer(listen(f"ipc://{folder}/router"))
    one = Router(server, SPEC, RouterSettings(["s"]), token="t", incarnation=1, clock=lambda: 0.0)
    nothing = bytes(-(-SIZE // 8))

    def me(said: Said) -> JobId:
        return JobId("a", said[1][0], SPEC.instance)

    def other(said: Said) -> JobId:
        return JobId("b", said[2][0], SPEC.instance)

    def place(epoch: int) -> Callable[[Said], Any]:
        return lambda said: StartEpoch(me(said), [EpochPlace(epoch, 0, False)], epoch == 0)

    def draw(epoch: int, position: int) -> Callable[[Said], Any]:
        return lambda said: DrawSamples(me(said), epoch, position, 5)

    script = [
        Step("register_shard", RegisterShard("s", 1, "ipc:///s", "t")),
        Step("join", Join("a", SPEC.instance, 7, 3, 4)),
        Step("join", Join("b", SPEC.instance, 8, 3, 4), late=False),
        Step("table"),
        Step("holders", "a"),
        Step("start", place(0), late=False),
        Step("draw", draw(0, 0)),
        Step("read_by_all", lambda said: ReadByAll(me(said), 0, 3)),
        Step("draw", draw(0, 5)),
        Step("start", lambda said: StartEpoch(other(said), [EpochPlace(0, 0, False)], True), late=False),
        Step("draw", lambda said: DrawSamples(other(said), 0, 0, 5)),
        *[Step("lookahead", LookaheadRequest(SPEC.instance, "a", 0, SIZE, 0, SIZE))] * 2,
        Step("announce", lambda said: ReportOrder(me(said), 0), [np.arange(5, dtype=compact(SIZE)).tobytes()]),
        Step("lookahead", LookaheadRequest(SPEC.instance, "a", 0, SIZE, 0, SIZE)),
        Step("draw", draw(0, 10)),
        Step("heartbeat", lambda said: JobHeartbeat(me(said), None, False)),
        Step("start", place(1), late=False),
        Step("draw", draw(1, 0)),
        Step("leave", other),
        Step("draw", draw(1, 5)),
    ]
    for step in script:
        if step.method == "start":
            step.frames = [nothing]
    with serving(server):
        # A heartbeat that runs again says that the job rests, until the next one, 2 s later.
        yield Service(server, script, lambda: {**one.status(), "reading": None})


@contextmanager
def shard(folder: Path) -> Iterator[Service]:
    one = SampleShard(
        listen(f"ipc://{folder}/shard"), SPEC, ShardSettings(1, 1 << 20), token="t", end_worker=lambda *_: None
    )
    me, numbers = JobId("a", 1, SPEC.instance), iter(range(1, 100))

    def ask(tickets: Sequence[int], taken: Sequence[int] = (), ahead: int = 0) -> Ask:
        return Ask(me, 1, 0, 0, [*tickets], [ticket % SIZE for ticket in tickets], [*taken], ahead, next(numbers))

    script = [
        Step("heartbeat", me),
        Step("want", ask(range(1, 9))),
        Step("fetch", ask(range(1, 5), ahead=1), held=True),
        Step("want", ask(range(9, 12))),
        Step("want", ask([], taken=range(5, 9))),
        Step("fetch", ask([12, 13, 14], taken=[9], ahead=2), held=True),
        Step("want", ask([], taken=[13, 14])),
        Step("leave", JobId("b", 1, SPEC.instance)),
        Step("heartbeat", me),
    ]
    with serving(one.server):
        yield Service(
            one.server,
            script,
            lambda: {name: value for name, value in one.status().items() if name in ("requested", "jobs", "keys")},
        )


@contextmanager
def coordinator(folder: Path) -> Iterator[Service]:
    (folder / "contents").mkdir()
    with ExitStack() as stack:
        state = WriteBehindStore(lambda: open_store(str(folder / "state")), "owner")
        state.load(lambda: time.sleep(0.01))
        keys = generate_keys("tcp://127.0.0.1:0")
        server = RpcServer(listen(f"ipc://{folder}/coordinator"))
        place = ClusterPlace(directory=str(folder), host="127.0.0.1", keys=keys, token="t" * 32)
        table = node_table(place, 1)
        limits, contents = ClusterLimits(workers=8), Contents(folder / "contents")
        one = Coordinator(server, state, contents, limits, clock=lambda: 0.0, nodes=table)
        JoinedNodes(server, state, place, table, one, limits=NodeLimits(0, 2, 2))
        one.observe(
            [ProcessView(f"f:v{version}/router", "router", 1, 1, "ipc:///r", {"jobs": 0}) for version in (1, 2)]
        )
        join = NodeJoin("n", "process", __version__, versions_here(), node_proof(keys, "n"), "127.0.0.1", 1)

        def report(said: Said) -> NodeReport:
            return NodeReport("n", said[6][0], place.token, "here", [])

        script = [
            Step("register", LOWER),
            Step("register", HIGHER),
            Step("store", ContentPiece(SPEC.content, 0, len(CONTENT)), [CONTENT]),
            Step("content", ContentRequest(SPEC.content, 3)),
            Step("access", Access("f", 1), held=True),
            Step("scale", Scale("f:v1", 2, 4)),
            Step("join_node", join),
            Step("report_node", report),
            Step("node_fleet", NodeFleet(place.token, "other", [], [])),
            Step("delete", "f:v2"),
            Step("delete", "none:v1"),
            *(Step(method) for method in ("flows", "ended", "nodes", "processes")),
            Step("cost", CostRequest("f:v1", "a")),
            Step("report_node", lambda said: NodeReport("n", said[6][0], place.token, "leaving", [])),
        ]
        # A registration that comes late is one by a job that returns: it adds the deleted version again.
        script[1].late = script[0].late = False
        stack.enter_context(serving(server))
        yield Service(server, script, lambda: ([*one.views()], one.desired()))


@contextmanager
def provisioner(folder: Path) -> Iterator[Service]:
    service = service_of(str(folder), "provisioner")
    server = RpcServer(listen(f"ipc://{folder}/provisioner"))
    prefix, platform = prefix_of(service.place.cluster), service.place.worker_platform
    assert platform is not None
    one = Provisioner(server, Waiting(), platform, prefix, clock=lambda: 0.0)
    names = [f"{prefix_of(service.place.cluster, '0123456789')}{number}-{number + 1}" for number in range(2)]
    script = [
        Step("attach", Attach("s", 1, [])),
        Step("request", Requests("s", 1, [StartRequest(names[0], b"{}"), StartRequest(names[1], b"{}")])),
        Step("request", Requests("s", 1, [SuspectRequest(names[0])])),
        Step("attach", Attach("s", 1, [OwnedWorker(name, None) for name in names])),
        Step("request", Requests("s", 1, [StopRequest("none", "a test")])),
        Step("events", EventsRequest("s", 1, 0), held=True),
        Step("release", Release("s", 1, 60.0)),
        Step("release", Release("other", 1, 60.0)),
    ]
    with serving(server):
        try:
            yield Service(server, script, lambda: len(one._owners))
        finally:
            one.close()


@contextmanager
def node(folder: Path) -> Iterator[Service]:
    one = Node(ClusterPlace(directory=str(folder)), [], ForkServerPlatform())
    thread = threading.Thread(target=one.serve)
    thread.start()
    script = [
        Step("heartbeat", Heartbeat("f:v1/router", 1, "ipc:///r", {})),
        Step("desire", Desire([], {"x": "ipc:///x"})),
        Step("changes", 0),
        Step("end", Ending("f:v1/shard-000/worker-0", 1)),
    ]
    try:
        yield Service(one._server, script, lambda: one._elsewhere, {"stop": "it ends the node, by a flag"})
    finally:
        one.stop()
        thread.join()


SERVICES = [router, shard, coordinator, provisioner, node]


@pytest.mark.parametrize("make", SERVICES)
def test_calls_that_run_twice_change_nothing_and_are_answered_alike(make: Any, tmp_path: Path) -> None:
    in_fork(run_twice, make, tmp_path)


def run_twice(make: Any, folder: Path) -> None:
    results = []
    for number, repeats in enumerate((lambda number: [], lambda number: [number, number])):
        (own := folder / str(number)).mkdir()
        with make(own) as service:
            methods = {step.method for step in service.script}
            assert methods | service.left_out.keys() == service.server._calls._methods.keys()
            results.append(played(service, repeats))
    assert results[0] == results[1], results


@pytest.mark.parametrize("make", [router, shard, coordinator])
@settings(max_examples=15, deadline=None)
@example(chosen=[[]] * 14 + [[10, 11]] + [[]] * 6)  # the order again, and then the lookahead that it is read from
@example(chosen=[[]] * 11 + [[7]] + [[]] * 9)  # a draw again, between two requests of one lookahead
@given(chosen=st.lists(st.lists(st.integers(0, 50), max_size=3), min_size=21, max_size=21))
def test_calls_that_run_again_after_later_ones_change_nothing(
    make: Any, chosen: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As where the caller has sent the next call already, or others have."""
    in_fork(run_late, make, chosen, tmp_path_factory.mktemp("late"))


def run_late(make: Any, chosen: list[list[int]], folder: Path) -> None:
    results = []
    for number in range(2):
        (own := folder / str(number)).mkdir()
        with make(own) as service:

            def repeats(at: int, script: list[Step] = service.script, any_: bool = bool(number)) -> list[int]:
                late = [one for one in range(at + 1) if script[one].late or one == at]
                return [late[one % len(late)] for one in chosen[at]] if any_ else []

            results.append(played(service, repeats))
    assert results[0] == results[1], results

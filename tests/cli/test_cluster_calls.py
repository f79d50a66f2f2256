"""What a command gets of a coordinator that is not ready."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from torch_dpflow.cli import cluster_views
from torch_dpflow.errors import UsageError
from torch_dpflow.ipc.messages.fields import OverloadedError
from torch_dpflow.ipc.rpc import IncomingCall, Result, RpcClient, RpcServer
from torch_dpflow.ipc.transport import listen


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[Callable[[float], RpcClient]]:
    """A client of a server that serves its method after so many calls."""
    address, calls, needed = f"ipc://{tmp_path}/coordinator", [], [0.0]

    def serve(call: IncomingCall) -> Result:
        calls.append(call.method)
        if len(calls) <= needed[0]:
            raise OverloadedError("the coordinator is starting; call again")
        return Result(len(calls))

    def after(count: float) -> RpcClient:
        needed[0] = count
        return client

    server = RpcServer(listen(address))
    server.register("flows", serve)
    thread = threading.Thread(target=server.serve)
    thread.start()
    with closing(RpcClient(address)) as client:
        yield after
    server.stop()
    thread.join()
    server.close()


def test_a_coordinator_that_starts_is_asked_again(starting: Callable[[float], RpcClient]) -> None:
    assert cluster_views.ask(starting(2), "flows", int) == 3


def test_a_coordinator_that_never_starts_says_why(
    starting: Callable[[float], RpcClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_views, "READY_S", 0.3)
    with pytest.raises(UsageError, match="the coordinator is starting"):
        cluster_views.ask(starting(float("inf")), "flows", int)


def test_an_address_in_a_directory_that_is_closed_to_this_user_is_refused_as_such(tmp_path: Path) -> None:
    user = os.geteuid()
    tmp_path.chmod(0)
    try:
        if user == 0:  # which may enter all directories
            os.seteuid(65534)
        with pytest.raises(UsageError, match="Permission denied; a cluster is for the user who started it"):
            cluster_views.connect(f"ipc://{tmp_path}/coordinator")
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)

"""AWS Lambda: its launcher, AWS's client and its runtime client keep the contract over a control plane of ours."""

from __future__ import annotations

import pickle
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest

from tests.contracts.launchers import LauncherContract, caller, launch_spec_to, name_of
from tests.remote.launchers.fates import end_of
from tests.remote.launchers.lambda_server import LambdaServer
from tests.remote.launchers.lambda_server.account import credentials, kept_server, no_leaks  # noqa: F401 - fixtures
from tests.remote.launchers.lambda_server.signatures import Credentials
from tests.shared_cluster import PATIENCE_S, free_port
from torch_dpflow import DPFlowDataLoader, LoaderOptions
from torch_dpflow.errors import (
    AnswerLostError,
    DeniedError,
    ExpiredError,
    MissingExtraError,
    OptionError,
    OptionTypeError,
    PlatformError,
    QuotaError,
    RejectedError,
    ThrottledError,
    UnavailableError,
)
from torch_dpflow.remote import Lambda
from torch_dpflow.remote.launchers.aws_lambda import LambdaLauncher
from torch_dpflow.remote.launchers.contract import Launcher, Ref

#: Seconds after which tests take a start for accepted.
ACCEPTED_S = 0.2
SUITE = "tests.contracts.processes.handler"


@pytest.fixture(scope="module", autouse=True)
def functions(server: LambdaServer) -> None:
    server.create("suite", handler=SUITE)
    server.create("hasty", handler=SUITE, timeout_s=3)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is waited for as long as tests wait."""
    monkeypatch.setattr("torch_dpflow.remote.launchers.aws_lambda.REFUSED_S", PATIENCE_S)


def settings_of(function: str = "suite", **settings: Any) -> Lambda:
    return Lambda(**{"function": function, "max_workers": 8, **settings})


def launcher_of(**settings: Any) -> LambdaLauncher:
    return LambdaLauncher(settings_of(**settings))


class Hurried(LambdaLauncher):
    """Waits no longer for a refusal than it takes mostly."""

    def start(self, name: str, launch_spec: bytes, *, deadline_s: float) -> Ref:
        return super().start(name, launch_spec, deadline_s=ACCEPTED_S)


class TestLambda(LauncherContract):
    def new_launcher(self, module: str) -> Launcher:
        return Hurried(settings_of())

    def refusing(self) -> Mapping[type[PlatformError], Callable[[], Launcher]]:
        return {RejectedError: lambda: launcher_of(function="nowhere")}


@pytest.fixture
def launcher() -> Iterator[LambdaLauncher]:
    with closing(launcher_of()) as launcher:
        yield launcher


def start(launcher: LambdaLauncher, listener: socket.socket, number: int = 0, **told: Any) -> None:
    launcher.start(name_of(number), launch_spec_to(listener, **told), deadline_s=ACCEPTED_S)


def start_in_vain(launcher: LambdaLauncher, listener: socket.socket, number: int = 0) -> None:
    """Start what is refused, however long that takes."""
    launcher.start(name_of(number), launch_spec_to(listener), deadline_s=PATIENCE_S)


# --- refusals ---


@pytest.mark.parametrize(
    ("fault", "kind", "told"),
    [
        ("throttle", ThrottledError, "429 CallerRateLimitExceeded"),
        ("break", UnavailableError, "500 ServiceException: oh"),
    ],
)
def test_a_refusal_is_of_its_kind(
    server: LambdaServer, launcher: LambdaLauncher, listener: socket.socket, fault: str, kind: type, told: str
) -> None:
    server.faults.append(fault)
    with pytest.raises(kind, match=f"{name_of(0)} cannot be started: {told}") as raised:
        start_in_vain(launcher, listener)
    again = pickle.loads(pickle.dumps(raised.value))
    assert str(again) == str(raised.value)
    assert getattr(again, "retry_after_s", 1.0) == 1.0


def test_nothing_is_tried_twice(server: LambdaServer, launcher: LambdaLauncher, listener: socket.socket) -> None:
    before = server.requests["POST invocations"]
    for fault in ("throttle", "break"):
        server.faults.append(fault)
        with pytest.raises(PlatformError):
            start_in_vain(launcher, listener)
    assert server.requests["POST invocations"] == before + 2


def test_a_full_account_is_a_quota(
    server: LambdaServer, launcher: LambdaLauncher, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "quota", 1)
    start(launcher, listener)
    with caller(listener):
        with pytest.raises(QuotaError, match="429 ConcurrentInvocationLimitExceeded"):
            start_in_vain(launcher, listener, 1)
        finding = launcher.check()[-1]
        assert not finding.good
        assert "the account has room for 1 workers at once: fewer than max_workers=8" in finding.text


def test_a_process_holds_so_many_calls(
    launcher: LambdaLauncher, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_dpflow.remote.launchers.aws_lambda.MAX_HELD", 1)
    start(launcher, listener)
    with caller(listener), pytest.raises(QuotaError, match="this process holds 1 invocations"):
        start_in_vain(launcher, listener, 1)


def test_expired_credentials_are_looked_up_again(
    server: LambdaServer, launcher: LambdaLauncher, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(launcher, listener)
    with caller(listener):
        monkeypatch.setattr(server, "credentials", Credentials("AKIDNEXT", "an0ther", None))
        with pytest.raises(DeniedError, match=r"403 UnrecognizedClientException.*AWS_\* variables"):
            start_in_vain(launcher, listener, 1)
        for variable, text in server.env.items():
            monkeypatch.setenv(variable, text)
        start(launcher, listener, 1)
        with caller(listener):
            assert launcher.look(dict.fromkeys([name_of(0), name_of(1)])).keys() == {name_of(0), name_of(1)}


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "403 InvalidSignatureException"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "NoCredentialsError"),
        ({"AWS_PROFILE": "nobody"}, "ProfileNotFound"),
    ],
)
def test_credentials_that_are_none_are_denied(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], told: str
) -> None:
    for variable, text in env.items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(DeniedError, match=told), closing(launcher_of()) as launcher:
        start_in_vain(launcher, listener)


def test_expired_ones_are_told_as_such(
    server: LambdaServer, launcher: LambdaLauncher, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.credentials, "expired", True)
    with pytest.raises(ExpiredError, match="403 ExpiredTokenException"):
        start_in_vain(launcher, listener)


def test_a_service_that_does_not_answer_is_unavailable(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_LAMBDA", f"http://127.0.0.1:{free_port()}")
    with closing(launcher_of()) as launcher, pytest.raises(UnavailableError, match="EndpointConnectionError"):
        start_in_vain(launcher, listener)


def test_an_answer_that_is_lost_leaves_open_what_was_done(
    server: LambdaServer, launcher: LambdaLauncher, listener: socket.socket
) -> None:
    server.faults.append("lose")
    with pytest.raises(AnswerLostError, match="ConnectionClosedError"):
        start_in_vain(launcher, listener)
    with caller(listener):
        assert launcher.look({name_of(0): None}) == {}


# --- ends ---


def test_a_crash_costs_no_environment(server: LambdaServer, launcher: LambdaLauncher, listener: socket.socket) -> None:
    """Its worker is a fork."""
    start(launcher, listener)
    with caller(listener):
        before = {one for one in server.sandboxes if not one.is_dead}
    end_of(launcher, name_of(0))
    for number in range(1, 3):
        start(launcher, listener, number, leave=True)
        assert end_of(launcher, name_of(number)).code == 7
    alive = {one for one in server.sandboxes if not one.is_dead}
    assert before <= alive


@pytest.mark.slow
def test_a_worker_ends_before_lambda_ends_its_environment(listener: socket.socket) -> None:
    with closing(launcher_of(function="hasty")) as launcher:
        start(launcher, listener)
        with caller(listener) as (connection, _):
            end = end_of(launcher, name_of(0))
            assert connection.recv(1) == b""
    assert end.signal == 9
    assert "its invocation's time is up" in end.report


def test_an_environment_that_dies_is_an_end(
    server: LambdaServer, launcher: LambdaLauncher, listener: socket.socket
) -> None:
    start(launcher, listener)
    with caller(listener) as (connection, _):
        server.end_environments()
        assert connection.recv(1) == b""
        assert "Runtime.ExitError" in end_of(launcher, name_of(0)).report


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"lifetime": "15m"}, OptionError, "lifetime='15m' is too long; give at most 870 s"),
        ({"lifetime": "soon"}, OptionError, "lifetime='soon' is no time"),
        ({"max_workers": -1}, OptionError, "max_workers=-1 is out of range"),
        ({"memory": "20GiB"}, OptionError, "memory='20GiB': Lambda has whole MiB, from 128 to 10240"),
        ({"memory": "200kB"}, OptionError, "memory='200kB': Lambda has whole MiB"),
        ({"function": ""}, OptionError, "function='' is no name"),
        ({"region": 3}, OptionTypeError, "region=3 is of type int"),
        ({"vpc": {"subnet": []}}, OptionError, "vpc has 'subnet'; it takes 'subnets' and 'security_groups'"),
        ({"vpc": {"subnets": "subnet-1"}}, OptionTypeError, "give a list of ids"),
    ],
)
def test_settings_are_checked_when_they_are_made(settings: dict[str, Any], error: type, told: str) -> None:
    with pytest.raises(error, match=told):
        Lambda(**settings)


def loader(**arguments: Any) -> DPFlowDataLoader[Any]:
    return DPFlowDataLoader([1, 2], **{"num_workers": 2, "platform": "lambda", **arguments})


def test_a_loader_is_told_of_limits_and_addresses_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"bills each worker: .*DPFLOW_PLATFORM_LAMBDA_MAX_WORKERS"):
        loader()
    monkeypatch.setenv("DPFLOW_PLATFORM_LAMBDA_MAX_WORKERS", "1")
    with pytest.raises(OptionError, match="2 workers on platform='lambda' are more than max_workers=1: give at most 1"):
        loader()
    monkeypatch.setenv("DPFLOW_PLATFORM_LAMBDA_MAX_WORKERS", "1000")
    with pytest.raises(OptionError, match="calls that a process can hold: give at most 256"):
        loader(num_workers=300)
    here = LoaderOptions(listen="tcp://127.0.0.1:0")
    loader(options=here)  # an emulator of this host
    monkeypatch.delenv("AWS_ENDPOINT_URL_LAMBDA")
    with pytest.raises(OptionError, match=r"listen='tcp://127.0.0.1:0': functions cannot reach it: give the add"):
        loader(options=here)
    with pytest.raises(OptionError, match=r"not given, and by default functions cannot reach it"):
        Lambda(max_workers=1).listen_at()
    monkeypatch.setenv("AWS_ENDPOINT_URL_LAMBDA", "http://lambda.example.com")
    with pytest.raises(OptionError, match=r"'http://lambda\.example\.com' as the service: give https://"):
        loader(options=here)
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with pytest.raises(OptionError, match="no region is set; give `region`"):
        launcher_of()
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'torch_dpflow\[aws\]'"):
        loader()


def test_the_check_tells_of_a_function_that_ends_too_early(server: LambdaServer) -> None:
    with closing(launcher_of(function="hasty")) as launcher:
        bad, room = launcher.check()
    assert room.good
    assert "its timeout of 3 s ends workers before 14 m: give it 870 s, as `dpflow deploy lambda` does" in bad.text
    assert not bad.good
    with (
        closing(launcher_of(function="nowhere")) as launcher,
        pytest.raises(RejectedError, match="dpflow deploy"),
    ):
        launcher.check()

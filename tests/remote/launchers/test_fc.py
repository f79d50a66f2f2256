"""Function Compute's launcher, by the vendor's own client, on a control plane of ours that starts real processes."""

from __future__ import annotations

import multiprocessing
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.launchers import PROGRAM, LauncherContract, caller, launch_spec_to, name_of
from tests.contracts.processes import CODE
from tests.remote.launchers.fates import end_of
from tests.remote.launchers.fc_server.account import CONFIG, KEYS, keys, no_leaks  # noqa: F401 - fixtures
from tests.remote.launchers.fc_server.server import Fault, FunctionServer, Key
from tests.shared_cluster import wait
from torch_dpflow import DPFlowDataLoader, LoaderOptions
from torch_dpflow.errors import (
    AnswerLostError,
    DeniedError,
    ExpiredError,
    OptionError,
    OptionTypeError,
    PlatformError,
    QuotaError,
    RejectedError,
    ThrottledError,
    UnavailableError,
)
from torch_dpflow.remote import FunctionCompute
from torch_dpflow.remote.launchers.contract import Launcher
from torch_dpflow.remote.launchers.fc import FunctionComputeLauncher
from torch_dpflow.remote.launchers.registry import resolve

pytest.importorskip("alibabacloud_fc20230330", reason="pip install 'torch_dpflow[fc]'")

#: What `dpflow deploy fc` makes, with what the contract's workers run.
DEPLOYED = {
    "runtime": "custom-container",
    "cpu": 1.0,
    "memorySize": 2048,
    "timeout": 3660,
    "instanceConcurrency": 1,
    "customContainerConfig": {
        "image": "r/i:1",
        "command": ["python", "-m", "torch_dpflow.remote.worker.fc", PROGRAM],
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[FunctionServer]:
    with FunctionServer(KEYS, cold_start_s=0.0) as server:
        server.functions["contract"] = {"functionName": "contract", **DEPLOYED}
        server.configs["contract"] = CONFIG
        yield server


class LauncherOf:
    """Makes launchers, in other processes too."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def __call__(self, module: str = PROGRAM, **settings: Any) -> FunctionComputeLauncher:
        given = {"function": "contract", "max_workers": 100, "endpoint": self.endpoint, **settings}
        return FunctionComputeLauncher(FunctionCompute(**given))


class TestFunctionCompute(LauncherContract):
    starter = multiprocessing.get_context("spawn")  # the vendor's connections do not survive a fork

    @pytest.fixture(autouse=True)
    def there(self, server: FunctionServer) -> None:
        self.new_launcher = LauncherOf(server.endpoint)  # type: ignore[method-assign]
        self.server = server

    @pytest.mark.slow
    def test_others_find_and_end_what_a_killed_starter_has_left(
        self, launcher: Launcher, listener: socket.socket
    ) -> None:
        super().test_others_find_and_end_what_a_killed_starter_has_left(launcher, listener)

    def refusing(self) -> Mapping[type[PlatformError], Callable[[], Launcher]]:
        def after(*faults: Fault, **settings: Any) -> Callable[[], Launcher]:
            def make() -> Launcher:
                self.server.fault("InvokeFunction", *faults)
                return self.new_launcher(**settings)

            return make

        return {
            RejectedError: after(function="nobody"),
            ThrottledError: after(Fault(429, "Throttling.User", retry_after_ms=1500)),
            QuotaError: after(Fault(429, "ResourceExhausted")),
            DeniedError: after(Fault(403, "AccessDenied")),
            UnavailableError: after(Fault(503, "ServiceUnavailable")),
        }


# --- what the control plane says ---


@pytest.fixture
def launcher(server: FunctionServer) -> FunctionComputeLauncher:
    return LauncherOf(server.endpoint)()


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        (Fault(429, "Throttling.User", 1500), ThrottledError, "429 Throttling.User"),
        (Fault(429, "ResourceExhausted"), QuotaError, "Quota Center"),
        (Fault(400, "LimitExceededError"), QuotaError, "LimitExceededError"),
        (Fault(403, "AccessDenied"), DeniedError, "the environment"),
        (Fault(400, "SignatureDoesNotMatch"), DeniedError, "the environment"),
        (Fault(404, "FunctionNotFound"), RejectedError, "dpflow deploy fc"),
        (Fault(400, "InvalidArgument"), RejectedError, "400 InvalidArgument"),
        (Fault(500, "InternalServerError"), UnavailableError, "500"),
        (Fault(503, "ServiceUnavailable"), UnavailableError, "503"),
        (Fault(504, "GatewayTimeout"), AnswerLostError, "504"),
        (Fault(lose=True), AnswerLostError, "cannot be started"),
    ],
)
def test_a_refusal_is_of_its_kind_and_is_not_tried_again(
    server: FunctionServer,
    launcher: FunctionComputeLauncher,
    fault: Fault,
    kind: type[PlatformError],
    says: str,
) -> None:
    server.fault("InvokeFunction", fault)
    before = len(server.log)
    with pytest.raises(kind, match=says) as raised:
        launcher.start(name_of(0), b'{"leave": true}', deadline_s=60)
    assert len(server.log) == before + 1
    assert name_of(0) in str(raised.value)
    assert getattr(raised.value, "retry_after_s", 1.5) == 1.5
    assert raised.value.__cause__ is None, "the vendor's error has the launch spec in it"


def test_a_start_whose_answer_was_lost_is_found_and_not_started_twice(
    server: FunctionServer, launcher: FunctionComputeLauncher, listener: socket.socket
) -> None:
    server.fault("InvokeFunction", Fault(lose=True))
    with pytest.raises(AnswerLostError):
        launcher.start(name_of(0), launch_spec_to(listener), deadline_s=60)
    assert launcher.start(name_of(0), launch_spec_to(listener), deadline_s=60) == name_of(0)
    with caller(listener):
        assert [*launcher.list("dpf-")] == [name_of(0)]
        server.fault("StopAsyncTask", Fault(lose=True))
        with suppress(AnswerLostError):  # told unless the worker has ended by then
            launcher.stop(name_of(0), None)
    wait(lambda: not server.live(), what="its end")
    launcher.stop(name_of(0), None)  # it may be told of what has ended


def test_a_worker_that_has_ended_has_run_for_as_long_as_the_platform_says(
    server: FunctionServer, launcher: FunctionComputeLauncher
) -> None:
    launcher.start(name_of(0), b'{"leave": true}', deadline_s=60)
    task = server.tasks[name_of(0)]
    wait(lambda: task.ended, what="its end")
    task.begun -= 1000.0
    end = end_of(launcher, name_of(0))
    assert end.ran_s is not None
    assert 1000.0 <= end.ran_s < 1200.0, "not the time that the instance has told"


def test_nobody_answers() -> None:
    launcher = LauncherOf("http://127.0.0.1:9")()
    with pytest.raises(UnavailableError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        launcher.start(name_of(0), b"{}", deadline_s=5)


def test_expired_credentials_are_looked_up_again(
    server: FunctionServer, launcher: FunctionComputeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launcher.look({name_of(1): None}) == {}
    server.keys["AKnext"] = Key("sk-of-the-next", "sts-token-2")
    server.keys["AKtest"].expired = True
    try:
        with pytest.raises(ExpiredError, match="Expired"):
            launcher.look({name_of(1): None})
        monkeypatch.setenv("ALIBABA_CLOUD_ACCESS_KEY_ID", "AKnext")
        monkeypatch.setenv("ALIBABA_CLOUD_ACCESS_KEY_SECRET", "sk-of-the-next")
        monkeypatch.setenv("ALIBABA_CLOUD_SECURITY_TOKEN", "sts-token-2")
        assert launcher.look({name_of(1): None}) == {}
    finally:
        server.keys["AKtest"].expired = False


def test_credentials_of_the_vendors_file_are_found(
    server: FunctionServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the vendor's chain, in a process of its own: it reads the environment when it is imported."""
    server.keys["AKfile"] = Key("sk-of-the-file")
    (tmp_path / "keys.ini").write_text(
        "[default]\ntype = access_key\naccess_key_id = AKfile\naccess_key_secret = sk-of-the-file\n"
    )
    for name in ("ID", "SECRET"):
        monkeypatch.delenv(f"ALIBABA_CLOUD_ACCESS_KEY_{name}")
    monkeypatch.setenv("ALIBABA_CLOUD_CREDENTIALS_FILE", str(tmp_path / "keys.ini"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ALIBABA_CLOUD_ECS_METADATA_DISABLED", "true")
    program = (
        "from torch_dpflow.remote import FunctionCompute\n"
        f"one = FunctionCompute(max_workers=1, function='contract', endpoint={server.endpoint!r}).launcher()\n"
        "print(one.look({'dpf-1': None}))"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "{}\n"


def test_many_are_looked_up_by_pages_of_a_list(
    server: FunctionServer, launcher: FunctionComputeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_dpflow.remote.launchers.fc.PAGE", 3)
    for number in range(10):
        launcher.start(name_of(number), b'{"leave": true}', deadline_s=60)
    wait(lambda: not server.live(), what="their end")
    before = len(server.log)
    fates = launcher.look({name_of(number): None for number in range(12)})
    assert {name: fate.end and fate.end.code for name, fate in fates.items()} == {
        name_of(number): CODE for number in range(10)
    }
    assert len(server.log) == before + 4


def test_who_waits_for_an_instance_in_vain_is_told_why(
    server: FunctionServer, launcher: FunctionComputeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "queues", True)
    monkeypatch.setattr(server, "quota", 0)
    monkeypatch.setitem(server.configs, "contract", {**CONFIG, "maxAsyncEventAgeInSeconds": 0.1})
    launcher.start(name_of(0), b"{}", deadline_s=60)
    assert launcher.list("dpf-") == {name_of(0): name_of(0)}
    wait(lambda: not server.live(), what="its end")
    end = launcher.look({name_of(0): None})[name_of(0)].end
    assert "quota" in str(end)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"runtime": "python3.12"}, "image none"),
        ({"timeout": 60}, "after 60 s, before their lifetime"),
        ({"instanceConcurrency": 10}, "run 10 workers each"),
    ],
)
def test_a_check_says_what_is_wrong_with_the_function(
    server: FunctionServer, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], says: str
) -> None:
    function = {**server.functions["contract"], **change}
    if "runtime" in change:
        del function["customContainerConfig"]
    monkeypatch.setitem(server.functions, "contract", function)
    findings = LauncherOf(server.endpoint)().check()
    assert [one for one in findings if says in one.text and not one.good]


def test_a_check_says_that_invocations_are_tried_again(
    server: FunctionServer, launcher: FunctionComputeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(server.configs, "contract", {**CONFIG, "maxAsyncRetryAttempts": 3})
    assert "tries them again" in launcher.check()[-1].text
    monkeypatch.delitem(server.configs, "contract")
    assert not launcher.check()[-1].good


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_workers": -1}, "max_workers=-1"),
        ({"cpu": 0}, "cpu=0"),
        ({"memory": "100MiB"}, "memory"),
        ({"memory": "1000MiB"}, "64 MiB"),
        ({"lifetime": "2d"}, "lifetime"),
        ({"lifetime": "an hour"}, "is no time"),
        ({"vpc": {"id": "vpc-1"}}, "security_group"),
        ({"region": ""}, "cn-hangzhou"),
        ({"endpoint": "http://fc.example.com"}, "https://HOST"),
        ({"function": 3}, "function=3"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises((OptionError, OptionTypeError), match=says):
        FunctionCompute(**settings)


def test_settings_come_from_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "dpflow.toml"
    path.write_text(
        '[platform.fc]\nregion = "cn-beijing"\ncpu = 2\nmemory = "4GiB"\nlifetime = "30m"\nmax_workers = 7\n'
        'vpc = { id = "vpc-1", vswitches = ["vsw-1"], security_group = "sg-1" }\nprice_per_hour = 0.12\n'
    )
    monkeypatch.setenv("DPFLOW_CONFIG", str(path))
    spec = resolve("fc")
    assert isinstance(spec, FunctionCompute)
    assert (spec.region, spec.memory_mib, spec.lifetime_s, spec.max_workers) == (
        "cn-beijing",
        4096,
        1800.0,
        7,
    )
    assert spec.launcher().limits.max_lifetime_s == 1800.0
    assert spec.launcher().limits.max_workers == 7
    path.write_text('[platform.fc]\naccess_key_secret = "x"\n')
    with pytest.raises(OptionError, match=r"platform\.fc has no 'access_key_secret'"):
        resolve("fc")


def loader(**settings: Any) -> DPFlowDataLoader:
    options = LoaderOptions(listen=settings.pop("listen", None))
    return DPFlowDataLoader([1, 2], num_workers=2, platform=FunctionCompute(**settings), options=options)


def test_workers_without_a_limit_are_refused() -> None:
    with pytest.raises(OptionError, match="by max_workers in"):
        loader()
    with pytest.raises(OptionError, match="2 workers on platform='fc' are more than max_workers=1"):
        loader(max_workers=1)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://localhost:7700"])
def test_an_address_that_functions_cannot_reach_is_refused(address: str) -> None:
    with pytest.raises(OptionError, match=r"give the address of this host in the function's VPC"):
        loader(max_workers=2, listen=address)
    with pytest.raises(OptionError, match=r"give the address of this host in the function's VPC"):
        iter(loader(max_workers=2))

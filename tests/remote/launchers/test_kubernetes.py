"""Pods of Kubernetes as workers: the launcher keeps the contract, with Kubernetes' own client and a server of ours."""

from __future__ import annotations

import base64
import json
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contracts.launchers import PROGRAM, SECRET, LauncherContract, caller, launch_spec_to, name_of
from tests.holdings import own_threads
from tests.loader_cases import Unhurried, assert_same, epochs
from tests.remote.launchers.fates import end_of
from tests.remote.launchers.kube_server import RULES, KubeServer, kube_server
from tests.remote_cases import names_of
from tests.shared_cluster import PATIENCE_S, free_port, wait
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
from torch_dpflow.remote import Kubernetes
from torch_dpflow.remote.launchers.contract import Fate, Launcher
from torch_dpflow.remote.launchers.kubernetes import KubernetesLauncher

pytestmark = pytest.mark.skipif(find_spec("kubernetes") is None, reason="pip install 'torch_dpflow[kubernetes]'")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install 'torch_dpflow[test]'")

#: The releases of Kubernetes whose published schemas are kept.
RELEASES = ("1.25", "1.37")


@pytest.fixture(scope="module")
def server(no_leaks_of_module: None) -> Iterator[KubeServer]:
    with kube_server(start_s=0.0) as server:
        yield server


@pytest.fixture(autouse=True)
def kubeconfig(server: KubeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(server.kubeconfig()))
    monkeypatch.setenv("KUBECONFIG", str(path))
    return path


@pytest.fixture(autouse=True)
def no_leaks(server: KubeServer, kubeconfig: Path) -> Iterator[None]:
    """Instead of the check of all tests: no pod is left, and no launch spec."""
    before = own_threads()
    yield
    wait(lambda: not own_threads() - before, what="the end of the test's threads")
    for pod in [*server.pods.values()]:
        if not pod.is_live:  # it ended before the test's `list`, which leaves it to the next look
            pod.delete(0.0)
    wait(lambda: not server.pods, what="the end of all pods")
    assert not server.secrets
    server.faults.clear()
    server.secret_faults.clear()


def settings_of(**settings: Any) -> Kubernetes:
    return Kubernetes(**{"image": "registry/dpflow:1", **settings})


def launcher_of(**settings: Any) -> KubernetesLauncher:
    return KubernetesLauncher(settings_of(**settings), module=PROGRAM)


class TestKubernetes(LauncherContract):
    def new_launcher(self, module: str) -> Launcher:
        return KubernetesLauncher(settings_of(), module=module)

    def refusing(self) -> Mapping[type[PlatformError], Callable[[], Launcher]]:
        return {DeniedError: lambda: Elsewhere(settings_of(namespace="elsewhere"), module=PROGRAM)}


class Elsewhere(KubernetesLauncher):
    """In a namespace where its user may do nothing, not even look."""

    def look(self, workers: Any) -> Mapping[str, Fate]:
        with pytest.raises(DeniedError, match='pods is forbidden: User "me" cannot list resource "pods"'):
            super().look(workers)
        return {}


@pytest.fixture
def launcher() -> Iterator[KubernetesLauncher]:
    with closing(launcher_of()) as launcher:
        yield launcher
        for name in launcher.list(""):
            launcher.stop(name, None)


def start(launcher: KubernetesLauncher, listener: socket.socket, number: int = 0, **told: Any) -> None:
    launcher.start(name_of(number), launch_spec_to(listener, **told), deadline_s=PATIENCE_S)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (429, ThrottledError),
        (500, UnavailableError),
        (409, UnavailableError),
        (401, DeniedError),
        (403, RejectedError),
        (404, RejectedError),  # no such namespace
        (422, RejectedError),
    ],
)
@pytest.mark.parametrize("faults", ["faults", "secret_faults"])
def test_a_refusal_is_of_its_kind_and_leaves_nothing(
    server: KubeServer,
    launcher: KubernetesLauncher,
    listener: socket.socket,
    status: int,
    kind: type[PlatformError],
    faults: str,
) -> None:
    before = server.requests["create pods"]
    getattr(server, faults).append(status)
    with pytest.raises(kind, match=f"{name_of(0)} cannot be .*: {status} as it was asked for") as raised:
        start(launcher, listener)
    assert getattr(raised.value, "retry_after_s", 1.0) == 1.0
    assert server.requests["create pods"] == before + 1, "nothing is tried again"
    wait(lambda: not server.pods, what="no pod without a launch spec")


def test_a_full_namespace_is_a_quota(
    server: KubeServer, launcher: KubernetesLauncher, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "quota", 1)
    start(launcher, listener)
    with caller(listener), pytest.raises(QuotaError, match="exceeded quota: pods"):
        start(launcher, listener, 1)


def test_a_pod_whose_answer_was_lost_is_found_and_gets_its_launch_spec(
    server: KubeServer, launcher: KubernetesLauncher, listener: socket.socket
) -> None:
    server.faults.append("lose")
    start(launcher, listener)
    with caller(listener):
        assert launcher.look({name_of(0): None}) == {name_of(0): Fate()}


def test_an_answer_that_is_lost_leaves_open_what_was_done(
    server: KubeServer, launcher: KubernetesLauncher, listener: socket.socket
) -> None:
    server.secret_faults.append("lose")
    with pytest.raises(AnswerLostError):
        start(launcher, listener)
    with caller(listener):
        start(launcher, listener)  # is that one
        assert len(server.pods) == 1


def test_an_api_server_that_is_not_there_is_unavailable(
    server: KubeServer, listener: socket.socket, kubeconfig: Path
) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    kubeconfig.write_text(json.dumps(server.kubeconfig()).replace(server.url, nobody))
    with closing(launcher_of()) as launcher, pytest.raises(UnavailableError):
        start(launcher, listener)


def test_credentials_are_looked_up_again_once_they_were_refused(
    server: KubeServer,
    launcher: KubernetesLauncher,
    listener: socket.socket,
    kubeconfig: Path,
) -> None:
    server.token += "-renewed"
    with pytest.raises(DeniedError, match="401 Unauthorized; give the user of the kubeconfig") as raised:
        start(launcher, listener)
    assert not isinstance(raised.value, ExpiredError), "the server has never known it"
    kubeconfig.write_text(json.dumps(server.kubeconfig()))
    start(launcher, listener)
    with caller(listener):
        server.token += "-again"
        with pytest.raises(ExpiredError):
            launcher.stop(name_of(0), None)
        kubeconfig.write_text(json.dumps(server.kubeconfig()))
        launcher.stop(name_of(0), None)


def test_ends_are_told_with_what_kubernetes_says(
    server: KubeServer, launcher: KubernetesLauncher, listener: socket.socket
) -> None:
    start(launcher, listener)
    with caller(listener) as (connection, _):
        server.pods[name_of(0)].evict()
        assert connection.recv(1) == b""
    end = end_of(launcher, name_of(0))
    assert "Evicted\nThe node was low on resource: memory." in end.report
    assert end.signal == 9
    assert f"pod {name_of(0)} on node-1" in str(end)
    wait(lambda: not server.pods, what="pods that have ended are removed")


def test_a_pod_that_others_end_is_announced(
    server: KubeServer, launcher: KubernetesLauncher, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "second_s", 1.0)
    start(launcher, listener)
    with caller(listener):
        server.pods[name_of(0)].delete(None)  # as `kubectl drain` does
        assert launcher.look({name_of(0): None}) == {name_of(0): Fate(until_s=25.0)}
        launcher.stop(name_of(0), None)


def test_a_pod_does_not_outlive_its_time(
    server: KubeServer, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "second_s", 1e-4)  # 901 of them
    with closing(launcher_of(lifetime="1s")) as launcher:
        start(launcher, listener)
        assert "DeadlineExceeded" in end_of(launcher, name_of(0)).report


def test_pods_that_a_killed_head_has_left_are_removed_by_whoever_lists(
    server: KubeServer, launcher: KubernetesLauncher, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(launcher, listener, 0, leave=True)
    wait(lambda: not server.pods[name_of(0)].is_live, what="its end")
    with closing(launcher_of(image="nowhere")) as other:
        start(other, listener, 1)
    start(launcher, listener, 2)
    with caller(listener):
        monkeypatch.setattr(server, "ahead_s", 3600.0)
        assert [*launcher.list("")] == [name_of(2)]
        assert name_of(0) in server.pods, "its end may not have been read yet"
        monkeypatch.setattr(server, "ahead_s", -3600.0)
        assert [*launcher.list("")] == [name_of(2)]
        wait(lambda: {*server.pods} == {*server.secrets} == {name_of(2)}, what="what runs alone is left")
        launcher.stop(name_of(2), None)


def test_what_keeps_a_pod_from_starting_is_told(
    server: KubeServer, listener: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(launcher_of(image="nowhere")) as launcher:
        start(launcher, listener)
        assert "ErrImagePull: no such image" in end_of(launcher, name_of(0)).report
    with closing(launcher_of(node_selector={"pool": "none"})) as launcher:
        start(launcher, listener, 1)
        for _ in range(2):
            assert launcher.look({name_of(1): None}) == {name_of(1): Fate()}, "a node may be added"
        launcher.stop(name_of(1), None)
    assert caplog.text.count("workers wait for a node of Kubernetes: 0/3 nodes are available") == 1


def test_a_pod_is_what_was_asked_for_and_kubernetes_takes_it(server: KubeServer, listener: socket.socket) -> None:
    settings = {
        "requests": {"cpu": "2", "memory": "4Gi"},
        "node_selector": {"pool": "spot"},
        "service_account": "data",
        "lifetime": "1h",
        "pod": {
            "tolerations": [{"key": "spot", "operator": "Exists"}],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "images"}}],
            "securityContext": {"supplementalGroups": [7]},
        },
        "container": {
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            "env": [{"name": "SESAME", "value": "open"}],
        },
    }
    with closing(launcher_of(**settings)) as launcher:
        start(launcher, listener)
        with caller(listener):
            pod, secret = server.pods[name_of(0)].body, server.secrets[name_of(0)]
            launcher.stop(name_of(0), None)
    for release in RELEASES:
        for body in (pod, secret):
            kubernetes_validate.validate(body, release, strict=True)
    spec = pod["spec"]
    assert spec["restartPolicy"] == "Never"
    assert spec["activeDeadlineSeconds"] == 4500
    assert spec["nodeSelector"] == {"pool": "spot"}
    assert spec["serviceAccountName"] == "data"
    assert spec["tolerations"] == [{"key": "spot", "operator": "Exists"}]
    assert [volume["name"] for volume in spec["volumes"]] == ["launch-spec", "tmp", "data"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["supplementalGroups"] == [7]
    (container,) = spec["containers"]
    assert container["resources"] == {"requests": settings["requests"], "limits": {"memory": "4Gi"}}
    assert container["env"][-1] == {"name": "SESAME", "value": "open"}
    (owner,) = secret["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Pod", pod["metadata"]["uid"])


def test_a_launch_spec_is_in_its_secret_alone(
    server: KubeServer,
    launcher: KubernetesLauncher,
    listener: socket.socket,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    launch_spec = launch_spec_to(listener)
    launcher.start(name_of(0), launch_spec, deadline_s=PATIENCE_S)
    with caller(listener) as (_, received):
        assert received == launch_spec
        pod, secret = server.pods[name_of(0)], server.secrets[name_of(0)]
        assert pod.process is not None
        process = Path(f"/proc/{pod.process.pid}")
        texts = [json.dumps(pod.view()), json.dumps(secret["metadata"]), caplog.text]
        texts += [(process / file).read_bytes().decode() for file in ("environ", "cmdline")]
        caplog.clear()
        launcher.stop(name_of(0), None)
    assert base64.b64decode(secret["data"]["launch-spec"]) == launch_spec
    for hidden in (SECRET, secret["data"]["launch-spec"]):
        assert not [text for text in texts if hidden in text]


def test_a_check_asks_for_a_pod_and_starts_none(
    server: KubeServer, launcher: KubernetesLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    (finding,) = launcher.check()
    assert finding.good
    assert "would create pods in namespace 'training', where 0 workers are" in finding.text
    assert not server.pods
    for rule in RULES:
        for verb in rule["verbs"]:
            (kind,) = rule["resources"]
            less = [
                {**one, "verbs": [other for other in one["verbs"] if (one, other) != (rule, verb)]} for one in RULES
            ]
            monkeypatch.setattr(server, "rules", less)
            with pytest.raises(DeniedError, match=f'cannot {verb} resource "{kind}"'):
                launcher.check()


def test_a_field_that_kubernetes_does_not_know_is_refused_with_its_name(listener: socket.socket) -> None:
    said = r'unknown field "spec\.tolerration"|: spec\.tolerration: Extra inputs'  # by the server, or by its client
    with closing(launcher_of(pod={"tolerration": []})) as launcher:
        for begin in (launcher.check, partial(start, launcher, listener)):
            with pytest.raises(RejectedError, match=said):
                begin()


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"requests": {"cpu": 1}}, OptionTypeError, r"requests\['cpu'\]=1: give text"),
        ({"requests": {"memory": "2 GB"}}, OptionError, r"requests\['memory'\]='2 GB': give a quantity"),
        ({"node_selector": "spot"}, OptionTypeError, "node_selector='spot' is of type str"),
        ({"pod": []}, OptionTypeError, r"pod=\[\] is of type list"),
        (
            {"pod": {"containers": []}},
            OptionError,
            r"pod\['containers'\] is set by .*: add to it by container",
        ),
        ({"pod": {"restartPolicy": "Always"}}, OptionError, r"pod\['restartPolicy'\] is set by torch_dpflow"),
        (
            {"pod": {"volumes": {}}},
            OptionTypeError,
            r"pod\['volumes'\] is of type dict: give a list of dicts",
        ),
        (
            {"pod": {"volumes": ["data"]}},
            OptionTypeError,
            r"pod\['volumes'\]\[0\] is of type str: give a dict",
        ),
        (
            {"pod": {"volumes": [{"name": "launch-spec"}]}},
            OptionError,
            "named 'launch-spec', as one of torch_dpflow's",
        ),
        ({"pod": {"securityContext": []}}, OptionTypeError, "is of type list: give a dict"),
        ({"pod": {3: 4}}, OptionTypeError, r"pod\[3\]: give the name of a field"),
        ({"container": {"command": ["sh"]}}, OptionError, r"container\['command'\] is set by torch_dpflow"),
        (
            {"container": {"image": "mine"}},
            OptionError,
            r"container\['image'\] .*\(give image\): leave it out",
        ),
        ({"container": {"env": [{"value": SECRET}]}}, OptionError, r"container\['env'\]\[0\] has no name"),
        ({"lifetime": "long"}, OptionError, "lifetime='long' is no time"),
        ({"max_workers": -1}, OptionError, "max_workers=-1"),
        ({"user": 0}, OptionError, "user=0"),
    ],
)
def test_settings_are_checked_when_they_are_made(settings: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told) as raised:
        Kubernetes(**settings)
    assert SECRET not in str(raised.value)


def test_settings_pickle_and_show_no_variables() -> None:
    settings = settings_of(container={"env": [{"name": "KEY", "value": SECRET}]})
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert SECRET not in repr(settings)


def test_a_loader_is_told_what_is_missing_when_it_is_made(server: KubeServer, kubeconfig: Path) -> None:
    with pytest.raises(OptionError, match="needs an image with torch_dpflow"):
        DPFlowDataLoader([1], num_workers=1, platform="kubernetes")
    with pytest.raises(OptionError, match="2 workers on platform='kubernetes' with max_workers=1"):
        DPFlowDataLoader([1], num_workers=2, platform=settings_of(max_workers=1))
    options = LoaderOptions(listen="tcp://127.0.0.1:0")
    with pytest.raises(OptionError, match="pods cannot reach it"):
        DPFlowDataLoader([1], num_workers=1, platform=settings_of(), options=options)
    kubeconfig.write_text(json.dumps(server.kubeconfig()).replace("http://127.0.0.1", "http://192.0.2.1"))
    with pytest.raises(OptionError, match="as its server: give https://HOST"):
        launcher_of()
    kubeconfig.unlink()
    with pytest.raises(OptionError, match="no Kubernetes cluster is known"):
        launcher_of()


def test_batches_equal_those_of_local_workers_through_an_eviction(server: KubeServer) -> None:
    def shuffled(**arguments: Any) -> DPFlowDataLoader[Any]:
        options = LoaderOptions(seeding="batch")
        return DPFlowDataLoader(
            Unhurried(24), batch_size=2, num_workers=2, persistent_workers=True, options=options, **arguments
        )

    remote, local = shuffled(platform=settings_of()), shuffled()
    try:
        torch.manual_seed(3)
        expected = epochs(local)
        torch.manual_seed(3)
        seen = [list(remote)]
        iterator = iter(remote)
        begun = [next(iterator)]
        wait(lambda: remote._iterator._shard.processes.working == 2, what="both workers")  # type: ignore[union-attr]
        before = set(names_of(remote).values())
        next(iter(server.pods.values())).evict()
        wait(lambda: before - set(names_of(remote).values()), what="its loss")
        assert_same([*seen, [*begun, *iterator]], expected)
        assert remote.stats().restarts >= 1
    finally:
        for loader in (remote, local):
            loader._iterator._shutdown_workers()  # type: ignore[union-attr]

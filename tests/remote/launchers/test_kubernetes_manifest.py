"""`dpflow manifest kubernetes`: Kubernetes takes what it prints, and a head runs by that on an API server of ours."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.shared.test_shared_platform import keys
from tests.remote.launchers.kube_server import NAMESPACE, RULES, kube_server
from tests.shared_cluster import TestCluster, free_port, open_job, wait
from tests.shared_datasets import SlowNumbers
from torch_dpflow.cli.main import root
from torch_dpflow.cluster.security.connection_file import generate_keys, read_key_file, write_connection_file
from torch_dpflow.remote.launchers.kubernetes_manifest import toml_of
from torch_dpflow.remote.launchers.registry import autoscale, resolve

yaml = pytest.importorskip("yaml", reason="pip install 'torch_dpflow[kubernetes]'")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install 'torch_dpflow[test]'")

RELEASES = ("1.25", "1.37")
NEEDED = ("--image", "registry/dpflow:1", "--autoscale", "0:4")
TOML = """
[platform.kubernetes]
image = "registry/dpflow:1"
namespace = "training"
context = "mine"
requests = { cpu = "500m", memory = "1Gi" }
lifetime = "2h"
max_workers = 8
pod = { imagePullSecrets = [{ name = "registry" }], tolerations = [{ key = "s\\"pot", operator = "Exists" }] }
container = { env = [{ name = "WHERE", value = "$(HOME)/é" }] }
[autoscale]
min = 1
max = 6
hold = "5m"
"""


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Those of a file that is empty at first, and nobody's."""
    path = tmp_path / "dpflow.toml"
    path.touch()
    monkeypatch.setenv("DPFLOW_CONFIG", str(path))
    return path


def said(*arguments: str) -> str:
    done = CliRunner().invoke(root, ["manifest", "kubernetes", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def printed(*arguments: str) -> list[dict[str, Any]]:
    return [*yaml.safe_load_all(said(*arguments))]


def of(objects: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    found = [one for one in objects if one["kind"] == kind and one["metadata"]["name"].endswith(name)]
    return found[0]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--state-size", "1Gi", "--storage-class", "fast.ssd", "--jobs-in", "a", "--jobs-in", "b"),
        ("--state", "redis://redis.default.svc:6379/0", "--name", "n" * 52, "--worker-ports", "7700"),
        ("--state-secret", "redis", "--namespace", "1e3", "--memory", "1GiB", "--cpu", "1500m"),
        ("--metrics-to", "monitoring", "--page"),
        ("--metrics-to", "monitoring", "--nodes", "2"),
    ],
)
def test_kubernetes_takes_what_is_printed(arguments: tuple[str, ...]) -> None:
    objects = printed(*NEEDED, *arguments)
    for one in objects:
        for release in RELEASES:
            kubernetes_validate.validate(one, release, strict=True)
    kinds = [
        "ConfigMap",
        "NetworkPolicy",
        "Role",
        "RoleBinding",
        "Secret",
        "Service",
        "ServiceAccount",
        "StatefulSet",
    ]
    if "--nodes" in arguments:
        kinds = sorted({*kinds, "Deployment"} - {"Role", "RoleBinding"})
    else:
        assert of(objects, "Role")["rules"] == RULES
    assert sorted({one["kind"] for one in objects}) == kinds
    spec = of(objects, "StatefulSet")["spec"]["template"]["spec"]
    for text in ("hostNetwork", "hostPID", "hostIPC", "hostPath", "privileged"):
        assert text not in json.dumps(spec)
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "fsGroup": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"].keys() == {"memory"}


def test_keys_are_in_secrets_alone_and_jobs_get_none_by_which_services_listen(tmp_path: Path) -> None:
    write_connection_file(path := tmp_path / "keys", generate_keys(""))
    given = read_key_file(path)
    objects = printed(*NEEDED, "--keys", str(path), "--jobs-in", "a", "--jobs-in", "b")
    (own,) = of(objects, "Secret", "-keys")["stringData"].values()
    head = read_key_file(written(tmp_path, own))
    assert head.server_keys() == given.server_keys()
    jobs = [one for one in objects if one["kind"] == "Secret" and one["metadata"]["name"] == "dpflow-jobs"]
    assert [one["metadata"]["namespace"] for one in jobs] == ["a", "b"]
    for one in jobs:
        (text,) = one["stringData"].values()
        connection = read_key_file(written(tmp_path, text))
        assert connection.client_keys() == given.client_keys()
        assert connection.address == "tcp://dpflow-0.dpflow.default.svc:7600"
        assert connection.sends_code
        assert connection.server_secret is None
    rest = json.dumps([one for one in objects if one["kind"] != "Secret"])
    assert not [text for text in (given.server_secret, given.client_secret) if json.dumps(text)[1:-1] in rest]
    assert printed(*NEEDED, "--keys", str(path), "--without-secrets") == json.loads(
        json.dumps([one for one in printed(*NEEDED, "--keys", str(path)) if one["kind"] != "Secret"])
    )
    assert not [one for one in printed(*NEEDED, "--without-secrets") if one["kind"] == "Secret"]
    assert said(*NEEDED) != said(*NEEDED), "keys are drawn anew"


def written(folder: Path, text: str) -> Path:
    (path := folder / "file").touch(0o600)
    path.write_text(text)
    return path


def test_workers_have_the_settings_of_whoever_prints(no_settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_settings.write_text(TOML)
    mine = resolve("kubernetes")
    objects = printed()
    assert {one["metadata"]["namespace"] for one in objects} == {NAMESPACE}
    spec = of(objects, "StatefulSet")["spec"]["template"]["spec"]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert "--autoscale 1:6" in " ".join(spec["containers"][0]["args"])
    (text,) = of(objects, "ConfigMap")["data"].values()
    no_settings.write_text(text)
    there = resolve("kubernetes")
    for name in ("image", "requests", "lifetime", "max_workers", "pod", "container"):
        assert getattr(there, name) == getattr(mine, name) != "", name  # type: ignore[comparison-overlap]
    assert autoscale().hold_s == 300.0
    # The head's own, there.
    assert (there.namespace, there.context) == ("", "")  # type: ignore[attr-defined]


_scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=5)


@given(st.recursive(_scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5))
def test_a_value_is_written_as_it_is_read(value: Any) -> None:
    tomllib = pytest.importorskip("tomllib")
    assert tomllib.loads(f"key = {toml_of(value)}")["key"] == value


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--autoscale", "0:4"], "needs an image with torch_dpflow"),
        (["--image", "r/i 1", "--autoscale", "0:4"], "image='r/i 1': give REGISTRY/NAME:TAG"),
        (["--image", "r/i:1"], "--autoscale MIN:MAX, such as 0:16, or --workers MAX"),
        ([*NEEDED, "--workers", "9"], "--workers 9 and --autoscale '0:4' differ"),
        (["--image", "r/i:1", "--autoscale", "4:0"], "give MIN:MAX"),
        ([*NEEDED, "--name", "n" * 53], "--name='nnn.*give at most 52 small letters"),
        ([*NEEDED, "--name", "1st"], "beginning with a letter and ending"),
        ([*NEEDED, "--name", "Mine"], "small letters"),
        ([*NEEDED, "--name", ""], "give at most 52"),
        ([*NEEDED, "--namespace", "a/../b"], "namespace='a/../b': give at most 63"),
        ([*NEEDED, "--namespace", "n" * 64], "give at most 63"),
        ([*NEEDED, "--jobs-in", "a b"], "namespace='a b'"),
        ([*NEEDED, "--cpu", "two"], "--cpu='two': give a quantity"),
        ([*NEEDED, "--cpu", "0.0"], "--cpu='0.0': give a quantity above 0"),
        ([*NEEDED, "--memory", "much"], "is no size"),
        ([*NEEDED, "--state", "/var/lib"], "--state: give redis://HOST"),
        ([*NEEDED, "--state", "redis://:s3same@h/0"], "belongs in a secret"),
        ([*NEEDED, "--state", "redis://h/0?password=s3same"], "belongs in a secret"),
        ([*NEEDED, "--state", "redis://"], "--state: give redis://HOST"),
        ([*NEEDED, "--state", "redis://h:x/0"], "--state: give redis://HOST"),
        ([*NEEDED, "--state", "redis://h/0", "--state-size", "1Gi"], "exclude each other"),
        ([*NEEDED, "--state-size", "1 GB"], "--state-size='1 GB': give a quantity"),
        ([*NEEDED, "--storage-class", "fast"], "without --state-size"),
        ([*NEEDED, "--state-size", "1Gi", "--storage-class", "_"], "--storage-class='_'"),
        ([*NEEDED, "--state-secret", "a..b"], "--state-secret='a..b'"),
        ([*NEEDED, "--port", "0"], "port=0 is out of range"),
        ([*NEEDED, "--port", "7750"], "--port 7750 is one of --worker-ports 7700-7799"),
        ([*NEEDED, "--worker-ports", "9-8"], "give FIRST-LAST from 1024 to 65535"),
        ([*NEEDED, "--worker-ports", "\uff17-\uff18"], "give FIRST-LAST from 1024"),
        ([*NEEDED, "--worker-ports", "7700-70000"], "give FIRST-LAST from 1024"),
        ([*NEEDED, "--worker-ports", "7700-"], "give FIRST-LAST from 1024"),
        ([*NEEDED, "--worker-ports", "80-90"], "give FIRST-LAST from 1024"),
        ([*NEEDED, "--metrics-to", "a b"], "namespace='a b'"),
        ([*NEEDED, "--metrics-to", "m", "--port", "9400"], "port 9400 is that of metrics"),
        ([*NEEDED, "--page", "--worker-ports", "8000-9000"], "port 8265 is that of the page"),
        ([*NEEDED, "--keys", "/nowhere"], "No such file.*dpflow keygen"),
    ],
)
def test_what_is_not_possible_is_refused_with_what_to_give(arguments: list[str], told: str) -> None:
    done = CliRunner().invoke(root, ["manifest", "kubernetes", *arguments])
    assert done.exit_code != 0
    assert not done.stdout
    assert re.search(told, " ".join(done.output.split())), done.output
    assert "s3same" not in done.output


def test_only_the_given_namespace_reaches_the_metrics_and_nothing_the_page() -> None:
    objects = printed(*NEEDED, "--metrics-to", "monitoring", "--page", "--worker-ports", "7700")
    ingress = of(objects, "NetworkPolicy")["spec"]["ingress"]
    (metrics,) = (one for one in ingress if {"protocol": "TCP", "port": 9400} in one.get("ports", []))
    assert metrics["from"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}},
    ]
    template = of(objects, "StatefulSet")["spec"]["template"]
    assert template["metadata"]["annotations"].items() >= {"prometheus.io/port": "9400"}.items()
    (container,) = template["spec"]["containers"]
    arguments = " ".join(container["args"])
    assert "--metrics $(POD_IP):9400 --metrics-public --web 127.0.0.1:8265" in arguments
    assert [one["name"] for one in container["ports"]] == ["jobs", "metrics"]
    plain = printed(*NEEDED)
    assert "9400" not in json.dumps(plain)
    assert "8265" not in json.dumps(plain)


def test_fewer_workers_than_are_asked_for_are_refused(no_settings: Path) -> None:
    no_settings.write_text(TOML)
    done = CliRunner().invoke(root, ["manifest", "kubernetes", "--autoscale", "0:9"])
    assert "9 workers on platform='kubernetes' with max_workers=8" in done.output


@pytest.fixture
def own_address() -> str:
    """One of this host that is not loopback, at which pods could not call."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no address but loopback")
        return str(probe.getsockname()[0])


def answers(host: str, port: int) -> bool:
    with suppress(OSError):
        socket.create_connection((host, port)).close()
        return True
    return False


def may_isolate() -> bool:
    return os.geteuid() == 0 and not subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode


@pytest.mark.slow
def test_a_job_reads_through_the_head_that_is_printed_also_when_that_is_killed(
    own_address: str, tmp_path: Path
) -> None:
    isolates = may_isolate()
    with kube_server(start_s=0.0, second_s=1.0, ip=own_address, isolates=isolates) as server:
        port, ports = free_port(own_address), free_port(own_address)
        arguments = (*NEEDED, "--namespace", NAMESPACE, "--port", str(port), "--worker-ports", str(ports))
        objects = printed(*arguments, "--memory", "64MiB")
        server.apply(*objects)
        (text,) = of(objects, "Secret", "-jobs")["stringData"].values()
        # What the cluster's DNS would do.
        connection = written(tmp_path, text.replace("dpflow-0.dpflow.training.svc", own_address))
        if os.geteuid() == 0:
            connection.chmod(0o440)
        head = server.pods["dpflow-0"]
        wait(lambda: answers(own_address, port) or head.restarts, what="the head")
        assert not head.restarts, head.view()["status"]
        assert head.process is not None
        if isolates:
            status = Path(f"/proc/{head.process.pid}/status").read_text()
            assert re.search(r"Uid:\t1000\t.*Groups:\t1000 .*CapEff:\t0{16}", status, re.DOTALL), status
        with closing(open_job("a/b", SlowNumbers(96, 0.01), address=str(connection), batch_size=8, workers=2)) as job:
            batches = job.traverse(0)
            read = keys([next(batches)])
            assert len(server.pods) > 1, "its workers"
            head.process.kill()
            read += keys(batches)
            assert sorted(read) == [*range(96)]
            assert head.restarts == 1
        assert head.is_well()
        coordinator = TestCluster(str(connection), head.process.pid, tmp_path).process("coordinator").pid
        for pid in (head.process.pid, coordinator):  # alone, a coordinator that hangs is replaced
            os.kill(pid, signal.SIGSTOP)
        assert not head.is_well()
        for pid in (head.process.pid, coordinator):
            os.kill(pid, signal.SIGCONT)
        wait(head.is_well, what="a coordinator that answers")
        head.delete(None)
        wait(lambda: not [pod for pod in server.pods.values() if pod.is_live], what="the end of all")

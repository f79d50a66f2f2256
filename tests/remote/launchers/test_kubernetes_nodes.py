"""`dpflow manifest kubernetes --nodes`: Kubernetes takes it, and nodes run by it on an API server of ours."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.cluster.shared.test_shared_platform import keys
from tests.joined_nodes import nodes_of
from tests.remote.launchers.kube_server import NAMESPACE, kube_server
from tests.remote.launchers.test_kubernetes_manifest import (
    NEEDED,
    RELEASES,
    answers,
    kubernetes_validate,
    may_isolate,
    no_settings,
    of,
    own_address,
    printed,
    written,
)
from tests.shared_cluster import TestCluster, free_port, open_job, wait
from tests.shared_datasets import SlowNumbers
from torch_dpflow.cli.main import root
from torch_dpflow.cluster.security.connection_file import read_key_file
from torch_dpflow.cluster.services.joining_node import LEAVE_S

__all__ = ["no_settings", "own_address"]

TOML = """
[platform.kubernetes]
image = "registry/dpflow:1"
namespace = "training"
node_selector = { pool = "loading" }
pod.imagePullSecrets = [{ name = "registry" }]
pod.volumes = [{ name = "data", persistentVolumeClaim = { claimName = "images" } }]
container.volumeMounts = [{ name = "data", mountPath = "/data", readOnly = true }]
[autoscale]
max = 6
"""


def ingress(policy: dict[str, Any]) -> list[tuple[str, str]]:
    """Whom it lets in, by the pods' labels, and at which ports."""
    found = []
    for rule in policy["spec"]["ingress"]:
        for peer in rule["from"]:
            labels = peer["podSelector"]["matchLabels"]
            name = labels.get("app.kubernetes.io/name") or "jobs of " + labels["dpflow-cluster"]
            found.append((name, json.dumps(rule.get("ports", "all"))))
    return found


def test_kubernetes_takes_nodes_as_they_are_printed(no_settings: Path) -> None:
    no_settings.write_text(TOML)
    objects = printed("--nodes", "3", "--node-cpu", "8", "--node-memory", "32Gi")
    for one in objects:
        for release in RELEASES:
            kubernetes_validate.validate(one, release, strict=True)
    # A head that creates no pods has no rights, and no token by which somebody could use them.
    assert not [one for one in objects if one["kind"] in ("Role", "RoleBinding")]
    head = of(objects, "StatefulSet")["spec"]["template"]["spec"]
    assert head["automountServiceAccountToken"] is False
    assert "--platform" not in head["containers"][0]["args"]
    assert "[platform" not in json.dumps(of(objects, "ConfigMap")["data"])
    nodes = of(objects, "Deployment")["spec"]
    assert nodes["replicas"] == 3
    pod = nodes["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["terminationGracePeriodSeconds"] > LEAVE_S, "jobs leave a node's shards before it is killed"
    assert pod["nodeSelector"] == {"pool": "loading"}
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert [one["name"] for one in pod["volumes"]] == ["keys", "tmp", "data"]
    assert pod["securityContext"] == head["securityContext"]
    (container,) = pod["containers"]
    assert container["securityContext"] == head["containers"][0]["securityContext"]
    assert container["resources"] == {
        "requests": {"cpu": "8", "memory": "32Gi"},
        "limits": {"memory": "32Gi"},
    }
    assert [one["mountPath"] for one in container["volumeMounts"]] == ["/var/run/dpflow", "/tmp", "/data"]
    assert nodes["selector"]["matchLabels"] == nodes["template"]["metadata"]["labels"]


def test_jobs_reach_nodes_and_nodes_the_head_and_nobody_else_does(tmp_path: Path) -> None:
    objects = printed(*NEEDED, "--nodes", "1")
    head, nodes = (one for one in objects if one["kind"] == "NetworkPolicy")
    assert ingress(head) == [("jobs of dpflow", '"all"'), ("dpflow-node", '"all"')]
    assert ingress(nodes) == [("jobs of dpflow", '"all"')]
    labels = of(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert nodes["spec"]["podSelector"]["matchLabels"] == labels
    assert head["spec"]["podSelector"]["matchLabels"] != labels
    (own,) = of(objects, "Secret", "-keys")["stringData"].values()
    (jobs,) = of(objects, "Secret", "-jobs")["stringData"].values()
    assert read_key_file(written(tmp_path, own)).address == "tcp://dpflow-0.dpflow.default.svc:7600"
    assert not json.loads(jobs)["sends_code"], "workers import what their image has"
    assert json.loads(jobs)["server_secret"] is None, "no job can join as a node"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--nodes", "257"], "256"),
        (["--nodes", "1", "--node-cpu", "many"], "--node-cpu='many': give a quantity"),
        (["--nodes", "1", "--node-memory", "16GB"], "--node-memory='16GB': give a quantity"),
        (["--nodes", "1", "--node-memory", "16ki"], "--node-memory='16ki': give a quantity"),
    ],
)
def test_nodes_that_cannot_be(arguments: list[str], told: str) -> None:
    done = CliRunner().invoke(root, ["manifest", "kubernetes", *NEEDED, *arguments])
    assert done.exit_code != 0
    assert told in done.output


@pytest.mark.parametrize("memory", ["16777216Ki", "16000000k", "16G", "17179869184"])
def test_amounts_as_kubernetes_writes_them(memory: str) -> None:
    done = CliRunner().invoke(root, ["manifest", "kubernetes", *NEEDED, "--nodes", "1", "--node-memory", memory])
    assert done.exit_code == 0, done.output
    assert memory in done.output


@pytest.mark.slow
def test_a_job_reads_through_nodes_that_are_killed_and_removed(own_address: str, tmp_path: Path) -> None:
    with kube_server(start_s=0.0, second_s=1.0, ip=own_address, isolates=may_isolate()) as server:
        port = free_port(own_address)
        arguments = (*NEEDED, "--namespace", NAMESPACE, "--port", str(port), "--nodes", "2")
        objects = printed(*arguments, "--memory", "64MiB")
        # What the cluster's DNS would do.
        objects = json.loads(json.dumps(objects).replace("dpflow-0.dpflow.training.svc", own_address))
        server.apply(*objects)
        (text,) = of(objects, "Secret", "-jobs")["stringData"].values()
        connection = written(tmp_path, text)
        connection.chmod(0o400)
        head = server.pods["dpflow-0"]
        wait(lambda: answers(own_address, port) or head.restarts, what="the head")
        assert not head.restarts, head.view()["status"]

        cluster = TestCluster(str(connection), 0, tmp_path / "log")

        def incarnation(node: str) -> int:
            """Of its shard; 0: there is none."""
            views = cluster.processes()
            return max((view.incarnation for view in views if (view.node, view.role) == (node, "shard")), default=0)

        def pods() -> list[str]:
            return sorted(name for name in [*server.pods] if name.startswith("dpflow-nodes-"))

        wait(lambda: sorted(nodes_of(cluster)) == pods(), what="both nodes")
        with closing(open_job("a/b", SlowNumbers(400, 0.01), address=str(connection), batch_size=8, workers=2)) as job:
            batches = job.traverse(0)
            read = keys([next(batches)])
            wait(lambda: [one.shards for one in nodes_of(cluster).values()] == [1, 1], what="a shard on each")
            killed, removed = (server.pods[name] for name in pods())
            assert killed.process is not None
            before = incarnation(killed.name)
            killed.process.kill()
            read += keys(batches)
            assert sorted(read) == [*range(400)]
            wait(lambda: incarnation(killed.name) > before > 0, what="that it joins again")
            assert killed.restarts == 1
            batches = job.traverse(1)
            read = keys([next(batches)])
            server.scale(of(objects, "Deployment"), 1)
            read += keys(batches)
            assert sorted(read) == [*range(400)]
        wait(lambda: len(pods()) == 1, what="the end of one that was too many")
        gone = killed if killed.is_ending else removed
        assert gone.process is not None
        assert gone.process.returncode == 0, "it has left, and was not killed"
        wait(lambda: sorted(nodes_of(cluster)) == pods(), what="that it is none of the cluster's")
        assert not server.requests, "the head has asked Kubernetes for nothing"

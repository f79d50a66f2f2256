"""Strangers at a cluster that listens over tcp: whatever they send, no service hears a word of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.shared.hostile import Fiend, Fuzzer, raw_noise, send_raw
from tests.cluster.shared.test_shared_fuzz import (
    READER,
    ROLES,
    SIZE,
    Reader,
    counted,
    services,
    still_answers,
)
from tests.shared_cluster import TestCluster, wait
from tests.shared_datasets import Numbers
from torch_dpflow.cluster.client.open_job import SharedJob
from torch_dpflow.cluster.security.connection_file import find_cluster, generate_keys
from torch_dpflow.ipc.transport import TransportOptions


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestCluster]:
    """A cluster that listens over tcp."""
    started = TestCluster.start_over_tcp(tmp_path_factory.mktemp("c"))
    yield started
    started.stop()


def test_a_stranger_gets_nothing_of_any_service(
    cluster: TestCluster, join: Callable[..., SharedJob], flow: str
) -> None:
    chance = random.Random(3)
    job = join(flow, Numbers(SIZE), batch_size=10, name=READER)
    reader = Reader(job)
    wait(lambda: set(services(cluster, flow)) == set(ROLES), what="all services")
    views = services(cluster, flow)
    fuzzer = Fuzzer(chance, cluster.flows()[f"{flow}:v1"].spec, READER, views["shard"].id)
    for view in views.values():
        others = generate_keys(view.address).client_keys()
        for keys in (None, others):
            options = TransportOptions(send_timeout_s=0.05, keys=keys)
            stranger = Fiend(view.address, options, chance)
            assert stranger.say([fuzzer.message(view.role) for _ in range(20)]) == 0
            stranger.close()
        for _ in range(20):
            send_raw(view.address, raw_noise(chance))
        friend = Fiend(view.address, find_cluster(cluster.address).transport, chance)
        friend.say([[b"nonsense"]])
        still_answers(cluster, view)
        friend.close()
    assert reader.finish() > 0
    wait(lambda: all(counted(cluster, flow).values()), what="a count of what was malformed")
    after = services(cluster, flow)
    assert {role: view.pid for role, view in after.items()} == {role: view.pid for role, view in views.items()}
    # The friend's one message, and none before it.
    assert counted(cluster, flow) == dict.fromkeys(ROLES, 1)
    assert all(view.status["without_session"] == 0 for view in after.values())

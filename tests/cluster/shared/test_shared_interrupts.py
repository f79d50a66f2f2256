"""Control-C wherever Python looks for signals in a flow's iterator: no batch is lost, and none comes twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.interruption import Interruption
from tests.shared_cluster import TestCluster
from tests.shared_datasets import Numbers
from torch_dpflow import DPFlowDataLoader, JobOptions

SIZE = 400


@pytest.fixture
def make(cluster: TestCluster, flow: str) -> Iterator[Any]:
    def make(**arguments: Any) -> DPFlowDataLoader[Any]:
        job = JobOptions(idle_s=3.0, patience_s=60.0)
        return DPFlowDataLoader(
            Numbers(SIZE),
            batch_size=2,
            flow=flow,
            address=cluster.address,
            job=job,
            num_workers=2,
            **arguments,
        )

    return make


def position_of(state: dict[str, Any]) -> int:
    shared = state["shared"]
    return state["samples"] if shared is None else shared["position"]


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_interruption_anywhere_loses_no_batch(make: Any, shuffle: bool) -> None:
    loader = make(shuffle=shuffle)
    iterator, seen, interrupted = iter(loader), list[int](), 0
    for number in range(SIZE // 2 + 1):
        # At each place in turn; then at another one while what was interrupted is made up for.
        for place in (number % 100, number // 4):
            try:
                with Interruption(place):
                    batch = next(iterator, None)
                break
            except KeyboardInterrupt:
                interrupted += 1
                assert position_of(loader.state_dict()) == len(seen)
        else:
            batch = next(iterator, None)
        seen += [] if batch is None else batch[1].tolist()
    assert batch is None
    assert interrupted > 50
    assert sorted(seen) == list(range(SIZE))
    assert loader.state_dict()["fresh"]

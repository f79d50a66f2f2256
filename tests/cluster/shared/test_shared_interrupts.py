"""Control-C wherever Python looks for signals in a flow's iterator: no batch is lost, and none comes twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from tests.interruption import Interruption
from tests.shared_cluster import TestCluster
from tests.shared_datasets import Numbers
from torch_dpflow import DPFlowDataLoader, JobOptions
from torch_dpflow.errors import WorkerError

SIZE = 400


@pytest.fixture
def make(cluster: TestCluster, flow: str) -> Iterator[Any]:
    def make(**arguments: Any) -> DPFlowDataLoader[Any]:
        job = JobOptions(idle_s=3.0)
        return DPFlowDataLoader(
            Numbers(SIZE),
            flow=flow,
            address=cluster.address,
            job=job,
            num_workers=2,
            **arguments,
        )

    return make


def position_of(state: dict[str, Any]) -> int:
    shared = json.loads(state["state"])["shared"]
    return state["samples"] if shared is None else shared["plain"]["position"]


class Own:
    """Batches of a class that the loader does not know, so that it draws them as it goes."""

    def __len__(self) -> int:
        return SIZE // 2

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[key, key + 1] for key in range(0, SIZE, 2)])


@pytest.mark.parametrize("order", ["shuffled", "fixed", "own"])
def test_an_interruption_anywhere_loses_no_batch(make: Any, order: str) -> None:
    own = order == "own"
    loader = make(batch_sampler=Own()) if own else make(batch_size=2, shuffle=order == "shuffled")
    iterator, seen, interrupted = iter(loader), list[int](), 0
    for number in range(SIZE // 2 + 1):
        # At each place in turn; then at another one while what was interrupted is made up for.
        places = [number // 4, number % 100]
        while True:
            try:
                with Interruption(places.pop()) if places else nullcontext():
                    batch = next(iterator, None)
                break
            except KeyboardInterrupt:
                interrupted += 1
                assert position_of(loader.state_dict()) == len(seen)
            except WorkerError:  # the sampler was interrupted, which may end it
                assert own
                loader.load_state_dict(loader.state_dict())
                iterator = iter(loader)
        seen += [] if batch is None else batch[1].tolist()
    assert batch is None
    assert interrupted > 50
    assert sorted(seen) == list(range(SIZE))
    assert loader.state_dict()["fresh"]

"""Control-C wherever Python looks for signals in a loader's iterator: no batch is lost, and none comes twice."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.interruption import Interruption
from tests.loader_cases import Failing, Indices, Stream
from torch_dpflow.epoch.rng import loading_epoch
from torch_dpflow.errors import WorkerError

SIZE = 240


def delivered(state: dict[str, Any]) -> int:
    held = json.loads(state["state"])
    return int(state["samples"]) + (len(held["ahead"]) if held["kind"] == "map" else 0)


def interrupted(loader: Any) -> list[int]:
    """What a loader of batches of one sample gives if it is interrupted once or twice at every batch."""
    iterator, seen, interruptions = iter(loader), list[int](), 0
    for number in range(SIZE + 1):
        # At each place in turn; then at another one while what was interrupted is made up for. The end is spared: who
        # interrupts the closing of workers leaves that to the end of the process.
        places = [number // 4, number % 80] if number < SIZE else []
        while True:
            try:
                if places:
                    with Interruption(places.pop()):
                        batch = next(iterator, None)
                else:
                    batch = next(iterator, None)
                break
            except KeyboardInterrupt as error:
                interruptions += 1
                if isinstance(error.__context__, LookupError):  # on its way to the training loop
                    batch = [100]
                    break
                assert delivered(loader.state_dict()) == len(seen)
            except LookupError:
                batch = [100]
                break
            except WorkerError:  # the sampler's generator was interrupted, which ends it
                loader.load_state_dict(loader.state_dict())
                iterator = iter(loader)
        seen += [] if batch is None else [int(batch[0])]
    assert batch is None
    assert interruptions > 50
    assert loader.state_dict()["fresh"]
    assert loading_epoch() is None
    return seen


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_interruption_anywhere_loses_no_batch(OurLoader: Any, num_workers: int) -> None:
    dataset = Failing(SIZE, {100: LookupError(100)})
    assert interrupted(OurLoader(dataset, num_workers=num_workers)) == list(range(SIZE))


def test_an_interruption_loses_no_batch_out_of_order(OurLoader: Any) -> None:
    assert sorted(interrupted(OurLoader(Indices(SIZE), num_workers=2, in_order=False))) == list(range(SIZE))


def test_an_interruption_loses_no_batch_of_a_stream(OurLoader: Any) -> None:
    loader = OurLoader(Stream(SIZE), num_workers=3)
    assert interrupted(loader) == [int(batch) for batch in loader]

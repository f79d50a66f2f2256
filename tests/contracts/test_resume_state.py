"""The state itself: what it is made of, where it can be kept, and what is refused."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler, WeightedRandomSampler

from tests.loader_cases import Indices, StatefulSampler, StatefulStream, Stream
from tests.new_process import run_interpreter
from torch_dpflow.errors import StateError

KEEPING: dict[str, Callable[[Any], Any]] = {
    "json": lambda state: json.loads(json.dumps(state)),
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "torch.save": lambda state: through_torch(state),
    "deepcopy": copy.deepcopy,
}


def through_torch(state: Any) -> Any:
    file = io.BytesIO()
    torch.save({"loader": state}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["loader"]


def loaders(loader_class: Any, log: str) -> list[Callable[[], Any]]:
    return [
        lambda: loader_class(Indices(20), batch_size=3, shuffle=True, num_workers=2),
        lambda: loader_class(Indices(20), batch_size=3, shuffle=True),
        lambda: loader_class(Indices(20), shuffle=True, num_workers=1, generator=torch.Generator()),
        lambda: loader_class(Indices(20), batch_size=3, sampler=StatefulSampler(20), num_workers=2),
        lambda: loader_class(Stream(20), batch_size=3, num_workers=2),
        lambda: loader_class(StatefulStream(20, log), batch_size=3, num_workers=2),
    ]


def test_the_state_survives_being_kept(OurLoader: Any, tmp_path: Any) -> None:
    for make in loaders(OurLoader, str(tmp_path / "log")):
        loader = make()
        iterator = iter(loader)
        next(iterator)
        next(iterator)
        state = loader.state_dict()
        rest = [batch.tolist() for batch in iterator]
        for way, keep in KEEPING.items():
            kept = keep(state)
            assert (repr(kept), type(kept)) == (repr(state), type(state)), way
        again = make()
        again.load_state_dict(kept)
        assert [batch.tolist() for batch in again] == rest


def test_a_snapshot_is_the_callers_to_change(OurLoader: Any) -> None:
    loader = OurLoader(Indices(20), batch_size=3, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    spoilt = loader.state_dict()
    intact = copy.deepcopy(spoilt)
    for key in list(spoilt):
        del spoilt[key]
    assert loader.state_dict() == intact
    assert next(iterator).tolist() == [3, 4, 5]


def test_a_loaded_state_is_not_changed(OurLoader: Any) -> None:
    loader = OurLoader(Indices(20), batch_size=3, num_workers=2)
    next(iter(loader))
    state = loader.state_dict()
    intact = copy.deepcopy(state)
    loader.load_state_dict(state)
    list(loader)
    assert state == intact


def test_the_state_does_not_grow_with_the_epoch(OurLoader: Any) -> None:
    loader = OurLoader(Indices(100_000), batch_size=100, shuffle=True, num_workers=1, in_order=False)
    iterator = iter(loader)
    next(iterator)
    early = len(json.dumps(loader.state_dict()))
    for _ in range(500):
        next(iterator)
    assert abs(len(json.dumps(loader.state_dict())) - early) < 200


@pytest.mark.parametrize(
    ("state", "hint"),
    [
        (None, "NoneType"),
        ([], "list"),
        ({}, "state_dict"),
        ({"_sampler_iter_yielded": 3, "_num_yielded": 3}, "state_dict"),
        ({"version": 99, "position": 1}, "99"),
    ],
    ids=["none", "list", "empty", "torchdata", "version"],
)
def test_what_is_not_a_state_is_refused(OurLoader: Any, state: Any, hint: str) -> None:
    loader = OurLoader(Indices(4), num_workers=1)
    with pytest.raises(StateError, match=hint):
        loader.load_state_dict(state)
    assert len(list(loader)) == 4


def test_damaged_states_are_refused_whole(OurLoader: Any) -> None:
    """Whatever value is replaced, the loader either resumes or says what is wrong: never half of it."""
    loader = OurLoader(Indices(12), batch_size=2, shuffle=True, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    intact = loader.state_dict()
    refused = []
    held = json.loads(intact["state"])
    for key in [*intact, *held]:
        for wrong in (None, -1, "x", [], {}, 10**9):
            again = OurLoader(Indices(12), batch_size=2, shuffle=True)
            damaged = {**intact, key: wrong} if key in intact else intact
            if key in held:
                damaged = {**damaged, "state": json.dumps({**held, key: wrong})}
            try:
                again.load_state_dict(damaged)
                list(again)
            except StateError as error:
                refused.append(str(error))
                assert len(list(again)) == 6, f"after the refusal of {key}={wrong!r} the loader starts afresh"
    assert len(refused) > len(intact)
    assert min(map(len, refused)) > 20


@pytest.mark.parametrize(("place", "wrong"), [(2, 2**70), (2, 10**6), (2, -2), (3, 2**70)])
def test_a_damaged_state_of_numpys_generator_is_refused(OurLoader: Any, place: int, wrong: int) -> None:
    loader = OurLoader(Indices(12), batch_size=2, shuffle=True)
    next(iter(loader))
    state = loader.state_dict()
    held = json.loads(state["state"])
    held["plan_rng"]["numpy"][place] = wrong
    state["state"] = json.dumps(held)
    loader.load_state_dict(state)
    with pytest.raises(StateError, match="random number generators is damaged"):
        iter(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_other_data_is_refused(OurLoader: Any, num_workers: int) -> None:
    loader = OurLoader(Indices(20), batch_size=2, num_workers=num_workers)
    iterator = iter(loader)
    for _ in range(6):
        next(iterator)
    state = loader.state_dict()
    for other in (
        OurLoader(Indices(30), batch_size=2, num_workers=num_workers),
        OurLoader(Indices(20), batch_size=2, drop_last=True, num_workers=num_workers),
        OurLoader(Stream(20), batch_size=2, num_workers=num_workers),
    ):
        with pytest.raises(StateError) as raised:
            other.load_state_dict(state)
        assert "state" in str(raised.value)


@pytest.mark.parametrize(
    ("other", "hint"),
    [
        ({"shuffle": False}, "RandomSampler"),
        ({"dataset": Indices(21)}, "20"),
        ({"dataset": Indices(21), "batch_size": 7}, "length is 9"),
        ({"dataset": Indices(21), "batch_size": 6}, "length is 20"),
    ],
    ids=["sampler", "length", "another length", "length and batch size"],
)
def test_a_loader_made_otherwise_is_refused(OurLoader: Any, other: dict[str, Any], hint: str) -> None:
    """It may have as many batches, and still deliver others."""
    made = {"dataset": Indices(20), "batch_size": 7, "shuffle": True, "num_workers": 1}
    loader = OurLoader(**made)
    next(iter(loader))
    if other.get("batch_size") == 7:
        loader = OurLoader(**{**made, "dataset": Indices(9), "batch_size": 3})
        next(iter(loader))
    again = OurLoader(**{**made, **other})
    with pytest.raises(StateError, match=hint):
        again.load_state_dict(loader.state_dict())
    assert len(list(again)) == -(-len(again.dataset) // again.batch_size)


class InterruptedOnce(StatefulSampler):
    """One that Control-C comes in, the first time: while its state is brought back, or it is asked for an index."""

    def __init__(self, size: int, where: str) -> None:
        super().__init__(size)
        self.where = where

    def _meet(self, where: str) -> None:
        if self.where == where:
            self.where = ""
            raise KeyboardInterrupt

    def load_state_dict(self, state: Any) -> None:
        self._meet("state")
        super().load_state_dict(state)

    def __iter__(self) -> Iterator[int]:
        for number, index in enumerate(super().__iter__()):
            if number == 1:
                self._meet("index")
            yield index


@pytest.mark.parametrize(("num_workers", "where"), [(0, "state"), (1, "state"), (1, "index")])
@pytest.mark.parametrize("persists", [False, True])
def test_an_interruption_while_it_is_brought_back_leaves_it_to_the_next_iteration(
    OurLoader: Any, num_workers: int, where: str, persists: bool
) -> None:
    def make(where: str) -> Any:
        persistent = persists and num_workers > 0
        sampler = InterruptedOnce(12, where)
        return OurLoader(
            Indices(12),
            sampler=sampler,
            batch_size=None,
            num_workers=num_workers,
            persistent_workers=persistent,
        )

    begun = make("")
    iterator = iter(begun)
    for _ in range(4):
        next(iterator)
    resumed, state = make(where), begun.state_dict()
    resumed.load_state_dict(state)
    with pytest.raises(KeyboardInterrupt):
        iter(resumed)
    assert resumed.state_dict() == state
    assert list(resumed) == list(iterator)
    assert sorted(resumed) == list(range(12))


RESUMING = """
import json, sys
import torch
from torch_dpflow import DPFlowDataLoader
from tests.loader_cases import Augmented

torch.manual_seed(12345)
for num_workers in (1, 3):
    loader = DPFlowDataLoader(Augmented(30), batch_size=4, shuffle=True, num_workers=num_workers,
                              generator=torch.Generator())
    loader.load_state_dict(json.load(open(sys.argv[1])))
    print(json.dumps([[[column.tolist() for column in batch] for batch in loader] for _ in range(2)]))
"""


def test_a_state_file_is_read_by_a_fresh_interpreter(OurLoader: Any, tmp_path: Any) -> None:
    from tests.loader_cases import Augmented

    own = torch.Generator().manual_seed(4)
    loader = OurLoader(Augmented(30), batch_size=4, shuffle=True, num_workers=2, generator=own)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    file = tmp_path / "state.json"
    file.write_text(json.dumps(loader.state_dict()))
    expected = [[[column.tolist() for column in batch] for batch in part] for part in (iterator, loader)]
    done = run_interpreter(RESUMING, str(file))
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [expected] * 2


def test_a_sampler_with_other_generators_than_the_states_is_refused(OurLoader: Any) -> None:
    held = OurLoader(range(8), sampler=RandomSampler(range(8), generator=torch.Generator()))
    next(iter(held))
    other = OurLoader(range(8), sampler=RandomSampler(range(8)))
    other.load_state_dict(held.state_dict())
    with pytest.raises(StateError, match="with 1 generators in the loader's samplers, and there are 0"):
        iter(other)
    assert len(list(other)) == 8


DRAWING: dict[str, Callable[..., Any]] = {
    "without replacement": lambda **given: RandomSampler(range(12), **given),
    "with replacement": lambda **given: RandomSampler(range(12), replacement=True, **given),
    "equal weights": lambda **given: WeightedRandomSampler([1.0] * 12, 12, **given),
    "other weights": lambda **given: WeightedRandomSampler([1.0] * 11 + [2.0], 12, **given),
    "weights without replacement": lambda **given: WeightedRandomSampler([1.0] * 12, 12, replacement=False, **given),
}


@pytest.mark.parametrize("kind", DRAWING)
def test_a_sampler_that_draws_otherwise_than_the_states_is_refused(OurLoader: Any, kind: str) -> None:
    def make(other: str) -> Any:
        return OurLoader(range(12), batch_size=2, sampler=DRAWING[other](generator=torch.Generator().manual_seed(1)))

    held = make(kind)
    batches = iter(held)
    next(batches)
    state, rest = held.state_dict(), [batch.tolist() for batch in batches]
    for other in DRAWING:
        loader = make(other)
        if other == kind:
            loader.load_state_dict(state)
            assert [batch.tolist() for batch in loader] == rest
        else:
            with pytest.raises(
                StateError, match=r"sampler is \w+RandomSampler|sampler is RandomS|sampler's drawing is"
            ):
                loader.load_state_dict(state)
            loader.load_state_dict(held.state_dict())  # between epochs it may be another one


def test_one_device_and_several_of_lightning_resume_each_other_between_epochs_only(OurLoader: Any) -> None:
    one = OurLoader(range(12), batch_size=2, shuffle=True)
    several = OurLoader(range(12), batch_size=2, sampler=DistributedSampler(range(12), 2, 0))
    for before, after in [(one, several), (several, one)]:
        batches = iter(before)
        next(batches)
        with pytest.raises(StateError, match="change the number of devices between epochs"):
            after.load_state_dict(before.state_dict())
        assert len([*batches]) == len(before) - 1
        after.load_state_dict(before.state_dict())
        assert len([*after]) == len(after)

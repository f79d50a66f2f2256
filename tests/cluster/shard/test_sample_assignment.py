"""What a flow's workers load travels whole, or the user hears what of it cannot."""

from __future__ import annotations

import functools
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.new_process import in_fork
from torch_dpflow.cluster.messages.shard import FAILED, SAMPLE, pack_task
from torch_dpflow.cluster.shard.sample_source import (
    KeylessTransform,
    SampleAssignment,
    SampleSource,
    TwoStageDataset,
)
from torch_dpflow.cluster.shard.worker_messages import text_payload
from torch_dpflow.errors import NotPicklableError
from torch_dpflow.flows.stage import SampleTransform, Stage
from torch_dpflow.remote.shipping.content_pack import pack, unpack


class Locked:
    """As datasets are that guard a file or a cache of theirs."""

    def __init__(self) -> None:
        self.paths = ["a", "b"]
        self.guards = {"reads": threading.Lock()}


class Refusing:
    """Pickles when it is looked at by itself, and not beside others."""

    refusals = 1

    def __reduce__(self) -> Any:
        if Refusing.refusals:
            Refusing.refusals -= 1
            raise ValueError("not now")
        return Refusing, ()


def taking(something: Any) -> Callable[[int], Any]:
    return lambda worker: something


class Outer:
    """Stands for what a script defines."""

    class Inner:
        """Is named after it."""


def found(packed: bytes) -> bool:
    """Whether a sample of what the unpacked stage makes can be pickled by its name, and its class is that there."""
    sample = unpack(io.BytesIO(packed)).apply(None)
    return type(sample).__qualname__ == "Outer.Inner" and type(pickle.loads(pickle.dumps(sample))) is type(sample)


def test_a_module_that_is_not_where_the_cluster_runs_is_told_of_with_what_to_do() -> None:
    packed = io.BytesIO(b"cnowhere_at_all\nDataset\n.")

    def load() -> tuple[int, str]:
        kind, wrapped = SampleSource(packed, 0, 1).load(memoryview(pack_task(0, 0, text_payload(SAMPLE, "").payload)))
        return kind, wrapped.exc_msg

    kind, text = in_fork(load)
    assert kind == FAILED
    assert "No module named 'nowhere_at_all': what the script and the modules next to it define is sent" in text


def test_a_task_that_its_flow_cannot_have_is_told_of_as_such() -> None:
    """Also where Python leaves assertions out."""
    packed = io.BytesIO(SampleAssignment(dataset=TwoStageDataset([1, 2]), worker_init_fn=None).pack())
    value = text_payload(SAMPLE, "of a first part")

    def load() -> tuple[int, str]:
        kind, wrapped = SampleSource(packed, 0, 1).load(memoryview(pack_task(0, 0, value.payload)))
        return kind, wrapped.exc_msg

    kind, text = in_fork(load)
    assert kind == FAILED
    assert "MessageError: a task has an input, but the flow has no per-draw stage" in text


UNPICKLABLE: dict[str, tuple[TwoStageDataset, Any, str]] = {
    "dataset": (
        TwoStageDataset(Locked()),
        None,
        r"^dataset\.guards\['reads'\] of type _thread.lock .* where the first sample is read, .*__getstate__",
    ),
    "transform": (
        TwoStageDataset([1], KeylessTransform(threading.Lock())),
        None,
        r"^transform\.transform of type _thread.lock",
    ),  # type: ignore[arg-type]
    "stand_in": (TwoStageDataset([1], stand_in=threading.Lock()), None, r"^stand_in of type _thread.lock"),  # type: ignore[arg-type]
    "worker_init_fn": (
        TwoStageDataset([1]),
        taking(threading.Lock()),
        r"^worker_init_fn of type builtins.function .* make inside the function what it takes along",
    ),
    "chain": (
        TwoStageDataset(functools.reduce(lambda inner, _: [inner], range(5_000), [0])),
        None,
        "^dataset.* a chain that is too long for pickle",
    ),
    "nothing": (
        TwoStageDataset(Refusing()),
        None,
        "^dataset and transform and stand_in and worker_init_fn .* not now",
    ),
}


@pytest.mark.parametrize(("dataset", "init", "message"), UNPICKLABLE.values(), ids=UNPICKLABLE)
def test_what_cannot_travel_to_the_workers_is_named(dataset: TwoStageDataset, init: Any, message: str) -> None:
    with pytest.raises(NotPicklableError, match=message) as caught:
        SampleAssignment(dataset=dataset, worker_init_fn=init).pack()
    assert caught.value.__cause__ is not None
    pickle.loads(pickle.dumps(caught.value))


def test_functions_of_a_script_travel() -> None:
    packed = SampleAssignment(dataset=TwoStageDataset([1]), worker_init_fn=taking("along")).pack()
    assert unpack(io.BytesIO(packed)).worker_init_fn(0) == "along"


def test_a_stage_takes_along_what_the_script_defines(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Outer.Inner
    monkeypatch.setattr(inner, "__module__", "__main__")
    assert in_fork(found, pack(Stage("makes", lambda _: inner(), SampleTransform(), "never")))


class Told:
    """Keeps which samples it is to be asked for; refuses those of a number."""

    def __init__(self) -> None:
        self.keys: list[int] = []

    def __getitem__(self, index: int) -> int:
        return index

    def announce_order(self, order: Any, spread: int, extends: bool) -> None:
        assert extends
        if 99 in order():
            raise ValueError("not that one")
        self.keys += order().tolist()


def test_a_dataset_is_told_what_its_worker_will_load() -> None:
    packed = io.BytesIO(SampleAssignment(dataset=TwoStageDataset(Told()), worker_init_fn=None).pack())

    def task(key: int) -> memoryview:
        return memoryview(pack_task(key, 0, None))

    def load() -> list[Any]:
        source = SampleSource(packed, 0, 1)
        draw = memoryview(pack_task(6, 0, text_payload(SAMPLE, "of a first part").payload))
        source.announce([task(5), task(7), draw])
        source.announce([draw])
        outcomes: list[Any] = [[*source._dataset.cacheable.keys]]
        for key in (99, 3):  # once it has failed it is told no more, and loads
            source.announce([task(key)])
            outcomes.append(source.load(task(key)))
        return [*outcomes, source._dataset.cacheable.keys]

    assert in_fork(load) == [[5, 7], (SAMPLE, 99), (SAMPLE, 3), [5, 7]]

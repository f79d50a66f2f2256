"""What a job may ask for, and what it is told where it may not or where nobody answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset

from tests.shared_datasets import Numbers
from torch_dpflow import ALSDCache
from torch_dpflow.cluster.client.flow_registration import content_of, describe, register, split_stages, unwrapped
from torch_dpflow.cluster.client.options import FlowDefinition, JobOptions
from torch_dpflow.cluster.control.flow_registry import FlowRegistry
from torch_dpflow.cluster.messages.coordinator import FlowSpec
from torch_dpflow.cluster.security.connection_file import find_cluster
from torch_dpflow.cluster.shard.sample_source import SampleAssignment
from torch_dpflow.errors import DeadlineError, OptionError, OptionTypeError, UsageError
from torch_dpflow.workers.script_settings import ScriptSettings


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"strategy": []}, OptionTypeError, r"strategy=\[\] is of type list"),
        ({"policy": ""}, OptionError, r"policy='' is not one of \['alsd'"),
        ({"policy": {}}, OptionTypeError, r"policy=\{\} is of type dict"),
        ({"ready": 9}, OptionError, "ready=9, requested=8: .*give requested=10 or more, or a smaller ready"),
        ({"repeatable": 1}, OptionTypeError, "repeatable=1: give True, False or None"),
        ({"repeatable": 0}, OptionTypeError, "repeatable=0: give True, False or None"),
        ({"task_timeout_s": 0}, OptionError, "task_timeout_s=0 is out of range; give seconds above 0"),
        ({"task_timeout_s": "9"}, OptionTypeError, "task_timeout_s='9' is of type str; give seconds"),
        ({"shards": 10**9}, OptionError, "shards=1000000000 is out of range; give an int from 1 to 256, or None$"),
        ({"shards": "auto"}, OptionTypeError, "shards='auto' is of type str; give an int from 1 to 256, or None$"),
        ({"idle_s": 1}, OptionError, "idle_s=1: give at least 3 seconds"),
        ({"memory_bytes": 10**30}, OptionError, "memory_bytes=10+ is out of range"),
        ({"memory_bytes": 2 << 20, "shards": 3}, OptionError, "memory_bytes=2097152 is out of range"),
    ],
    ids=str,
)
def test_what_is_not_allowed_is_refused_when_options_are_made(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        JobOptions(**given)


def seed_all(worker: int) -> None:
    """One of two `worker_init_fn`."""


def seed_none(worker: int) -> None:
    """The other."""


def spec_with(worker_init_fn: Callable[[int], Any] | None, options: JobOptions) -> FlowSpec:
    flow = FlowDefinition(name="images", dataset=Numbers(10), version=3, workers=1, worker_init_fn=worker_init_fn)
    source = split_stages(flow.dataset, options)
    packed = SampleAssignment(dataset=source.dataset, worker_init_fn=worker_init_fn).pack()
    content = content_of(source.dataset, worker_init_fn, options, ScriptSettings())
    return describe(flow, source, packed, content, size=10, options=options)


def test_another_function_for_workers_is_named_and_so_is_the_next_version() -> None:
    registry = FlowRegistry()
    registry.register(spec_with(seed_all, JobOptions()), 0.0)
    with pytest.raises(UsageError) as raised:
        registry.register(spec_with(seed_none, JobOptions()), 1.0)
    message = str(raised.value)
    module = __name__
    assert f"worker_init_fn: {module}.seed_none here, {module}.seed_all in the flow" in message
    assert "JobOptions(ignore=['worker_init_fn'])" in message
    assert 'flow="images:v4"' in message


def test_a_fingerprint_of_the_users_stands_for_all_that_is_loaded() -> None:
    options = JobOptions(fingerprint="of mine")
    assert not spec_with(seed_all, options).difference(spec_with(None, options))


@pytest.mark.parametrize(("address", "hints"), [("tcp://127.0.0.1:1", True), ("ipc:///nowhere", False)])
def test_where_no_cluster_answers_the_flow_is_named_and_keys_are_thought_of(address: str, hints: bool) -> None:
    spec = spec_with(None, JobOptions())
    with pytest.raises(DeadlineError, match="flow 'images': no cluster answers at") as raised:
        register(find_cluster(address), spec, b"", reconnect_timeout_s=0.1)
    assert ("clients with other keys" in str(raised.value)) == hints


class Squares:
    """As a dataset whose samples tell their number."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> int:
        return index * index


@given(st.lists(st.sampled_from(["cache", "part"]), max_size=4), st.randoms(use_true_random=False))
def test_subsets_around_a_cache_and_in_it_are_one_part(layers: list[str], random: Any) -> None:
    whole = dataset = Squares()
    for layer in layers:
        if layer == "part":
            dataset = Subset(dataset, random.sample(range(len(dataset)), len(dataset) - 1))
        elif not isinstance(dataset, ALSDCache):
            dataset = ALSDCache(dataset, "1MiB")
    inside, cache, places = unwrapped(dataset)
    caches = [layer for layer in layers if layer == "cache"]
    assert (cache is not None) == bool(caches)
    if len(caches) < 2:
        assert inside is whole
    assert [dataset[n] for n in range(len(dataset))] == [
        inside[n if places is None else int(places[n])] for n in range(len(dataset))
    ]


class LargerCache(ALSDCache):
    """A cache that adds to its samples what a shard's cache would not."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) + 1000

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        return [self[index] for index in indices]


class NamedCache(ALSDCache):
    name = "squares"


@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize("kind", [LargerCache, NamedCache])
def test_a_subclass_of_the_cache_is_left_out_only_if_it_changes_no_samples(kind: Any, is_part: bool) -> None:
    dataset = kind(Squares(), "1MiB")
    part = Subset(dataset, [5, 3]) if is_part else dataset
    source = split_stages(part, JobOptions())
    places = range(len(part)) if source.places is None else source.places
    assert [source.dataset[int(place)] for place in places] == [part[n] for n in range(len(part))]
    assert (source.cache is dataset) == (kind is NamedCache)

"""DPFlowDataLoader over a shared flow: one changed argument, the loader's promises kept."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler

from tests.loader_cases import Failing, Messaged, Stream
from tests.new_process import held_by_child
from tests.shared_cluster import TestCluster
from tests.shared_datasets import Numbers
from torch_dpflow import DPFlowDataLoader, JobOptions, LoaderOptions
from torch_dpflow.errors import NotPicklableError, OptionError, OptionTypeError, StateError, UsageError
from torch_dpflow.loader import flow_iterator

Make = Callable[..., DPFlowDataLoader[Any]]
QUICK = JobOptions(idle_s=3.0)


@pytest.fixture
def make(cluster: TestCluster, flow: str) -> Any:
    """A loader over this test's flow."""

    def make(dataset: Any, **arguments: Any) -> DPFlowDataLoader[Any]:
        given = {"num_workers": 2, **arguments}
        return DPFlowDataLoader(dataset, flow=flow, address=cluster.address, job=QUICK, **given)

    return make


def keys(batches: Any) -> list[int]:
    return [int(key) for _, labels in batches for key in labels]


def test_a_shuffled_epoch_is_every_sample_once(make: Make) -> None:
    loader = make(Numbers(101), batch_size=8, shuffle=True)
    orders = [keys(loader) for _ in range(3)]
    assert all(sorted(order) == list(range(101)) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    stats = loader.stats()
    assert (stats.epochs, stats.batches, stats.samples) == (3, 39, 303)
    assert len(loader) == 13


@pytest.mark.parametrize("given", [{"shuffle": False}, {"batch_sampler": [[3, 1], [2]]}, {"drop_last": True}], ids=str)
def test_any_other_order_is_torchs(make: Make, given: dict[str, Any]) -> None:
    sizes = {} if "batch_sampler" in given else {"batch_size": 4}
    theirs = DataLoader(Numbers(30), **sizes, **given)
    ours = make(Numbers(30), **sizes, **given)
    for _ in range(2):
        for mine, expected in zip(ours, theirs, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(mine, expected, strict=True))


def test_pinning_leaves_the_training_thread_its_number_of_threads(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training thread pins the batches of a flow, and computes with all of its threads."""
    pinned: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(flow_iterator, "pin_memory", lambda batch, device: pinned.append(batch) or batch)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert sorted(keys(make(Numbers(12), batch_size=4, pin_memory=True))) == list(range(12))
        assert (len(pinned), torch.get_num_threads()) == (3, 3)
    finally:
        torch.set_num_threads(threads)


class Drawing(Sampler[int]):
    """Draws each key from a generator of its own, and counts them."""

    def __init__(self) -> None:
        self.generator, self.drawn = torch.Generator().manual_seed(5), 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(24):
            self.drawn += 1
            yield int(torch.randint(30, (), generator=self.generator))


@pytest.mark.parametrize(("num_workers", "prefetch"), [(0, None), (1, 2), (2, 3)])
def test_a_sampler_is_asked_when_torch_asks_it(make: Make, num_workers: int, prefetch: int | None) -> None:
    """An order that may change depends on how far ahead it is drawn, also in the next epoch after a break."""

    def read(make: Any) -> tuple[list[int], list[list[int]]]:
        sampler = Drawing()
        loader = make(Numbers(30), batch_size=2, sampler=sampler, num_workers=num_workers, prefetch_factor=prefetch)
        drawn, seen = [], []
        for leaves_at in (3, None):
            iterator = islice(loader, leaves_at)
            for batch in iterator:
                seen.append(keys([batch]))
                drawn.append(sampler.drawn)
        return drawn, seen

    assert read(make) == read(DataLoader)


@pytest.mark.parametrize("size", [6, 12, 14, 30])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_generator_draws_the_end_of_an_epoch_when_torch_does(make: Make, size: int, num_workers: int) -> None:
    """A RandomSampler draws once more there: the epoch after a break depends on it, also of a resumed epoch."""

    def started(make: Any) -> Any:
        sampler = RandomSampler(range(size), generator=torch.Generator().manual_seed(4))
        return make(Numbers(size), batch_size=4, sampler=sampler, num_workers=num_workers)

    theirs, ours = started(DataLoader), started(make)
    batches = iter(theirs)
    expected = [keys([next(batches)]), keys([next(batches)]), keys(theirs)]
    begun = iter(ours)
    read = [keys([next(begun)])]
    resumed = started(make)
    resumed.load_state_dict(ours.state_dict())
    rest = iter(resumed)
    read.append(keys([next(rest)]))
    assert [*read, keys(resumed)] == expected
    assert [keys([next(begun)]), keys(ours)] == expected[1:]


class OnePass:
    """Batches of keys that can be iterated once each, of many types."""

    def __iter__(self) -> Any:
        yield map(int, "312")
        yield reversed([4, 5])
        yield (key for key in range(6, 9))
        yield torch.tensor([9, 10])
        yield np.array([11, 12], np.int16)
        yield [np.int64(13), torch.tensor(14), 15]


def test_batches_of_keys_are_read_once(make: Make) -> None:
    loader = make(Numbers(30), batch_sampler=OnePass())
    for _ in range(2):
        read = [labels.tolist() for _, labels in loader]
        assert read == [[3, 1, 2], [5, 4], [6, 7, 8], [9, 10], [11, 12], [13, 14, 15]]


def test_a_key_that_is_no_integer_is_refused(make: Make) -> None:
    message = r"the key .* of type .* have numbers, 0 to 29; make the sampler return"
    bools = (True, np.bool_(True), torch.tensor(True))
    for key in (2.5, np.float64(2.0), "cat", b"1", (1, 2), slice(3), None, torch.tensor(2.0), *bools):
        unbatched: Any = {"sampler": [key], "batch_size": None}
        for given in ({"batch_sampler": [[1, key]]}, unbatched):
            with pytest.raises(OptionTypeError, match=message):
                list(make(Numbers(30), **given))


class Settings(Numbers):
    """Sample `i` is what settings of the worker's process are."""

    def __getitem__(self, index: int) -> Any:
        import PIL.Image
        import PIL.ImageFile

        flags = PIL.ImageFile.LOAD_TRUNCATED_IMAGES, PIL.Image.MAX_IMAGE_PIXELS
        torchs = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
        place = Path("relative.txt").read_text(), sys.argv
        return torch.ones(()), [*flags, *torchs, np.geterr()["over"], os.environ.get("DPFLOW_TEST_SETTING"), *place]


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Settings of this process that are not the defaults."""
    import PIL.Image
    import PIL.ImageFile

    monkeypatch.setattr(PIL.ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 5_000)
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "3"])
    monkeypatch.chdir(tmp_path)
    Path("relative.txt").write_text("found")
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    with np.errstate(over="raise"):
        yield
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("preloaded_workers")
@pytest.mark.parametrize("where", ["flow", "platform"])
def test_settings_of_the_script_hold_in_the_workers(make: Make, settings: None, where: str) -> None:
    def init(worker: int) -> None:
        os.environ["DPFLOW_TEST_SETTING"] = "set there"

    given: dict[str, Any] = {"batch_size": None, "worker_init_fn": init}
    # Not on both sides: for this setting torch imports its compiler in each process, which takes seconds.
    is_deterministic = where == "flow"
    if is_deterministic:
        torch.use_deterministic_algorithms(True)
        loader = make(Settings(4), **given)
    else:
        loader = DPFlowDataLoader(Settings(4), platform="processes", num_workers=1, **given)
    (ones, found), *_ = loader
    if is_deterministic:
        torch.use_deterministic_algorithms(False)
    assert ones.dtype is torch.float64
    assert found == [True, 5_000, is_deterministic, "high", "raise", "set there", "found", ["train.py"]]


def test_jobs_with_other_settings_do_not_share(make: Make, settings: None) -> None:
    iterator = iter(make(Settings(4), batch_size=None))
    torch.set_default_dtype(torch.float32)
    with pytest.raises(
        UsageError, match=r"the script's settings is .*registered is torch's default dtype torch.float64"
    ):
        iter(make(Settings(4), batch_size=None))
    next(iterator)


def test_a_rank_reads_its_part(make: Make) -> None:
    sampler: Any = DistributedSampler(range(30), num_replicas=2, rank=1, seed=3)
    loader = make(Numbers(30), batch_size=4, sampler=sampler)
    assert keys(loader) == list(sampler)


def test_samples_without_batches(make: Make) -> None:
    loader = make(Numbers(5), batch_size=None)
    assert [int(label) for _, label in loader] == [0, 1, 2, 3, 4]


def test_two_jobs_load_each_sample_about_once(make: Make, tmp_path: Path) -> None:
    log = tmp_path / "log"
    one, other = (make(Numbers(120, log=log), batch_size=8, shuffle=True) for _ in range(2))
    seen: tuple[list[int], list[int]] = ([], [])
    for first, second in zip(one, other, strict=True):
        seen[0].extend(first[1].tolist())
        seen[1].extend(second[1].tolist())
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(120))
    assert len(log.read_text().split()) < 240


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_is_resumed_by_another_loader(make: Make, shuffle: bool) -> None:
    begun = make(Numbers(60), batch_size=4, shuffle=shuffle)
    seen = keys(islice(begun, 6))
    state = begun.state_dict()
    again = make(Numbers(60), batch_size=4, shuffle=shuffle)
    again.load_state_dict(state)
    assert sorted(seen + keys(again)) == list(range(60))
    assert sorted(keys(again)) == list(range(60))


def test_an_epoch_of_the_samplers_order_is_continued_in_it(make: Make) -> None:
    """As that of a loader without a flow, or of ranks that had peers which read the same."""
    plain = DPFlowDataLoader(Numbers(20), batch_size=4, shuffle=True)
    batches = iter(plain)
    next(batches)
    loader = make(Numbers(20), batch_size=4, shuffle=True)
    loader.load_state_dict(plain.state_dict())
    assert keys(loader) == keys(batches)
    assert loader.state_dict()["fresh"]
    assert sorted(keys(loader)) == list(range(20))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_of_a_flow_is_refused_without_one(make: Make, workers: int) -> None:
    shared = make(Numbers(20), batch_size=4, shuffle=True)
    next(iter(shared))
    plain = DPFlowDataLoader(Numbers(20), batch_size=4, shuffle=True, num_workers=workers)
    with pytest.raises(StateError, match=r"an epoch of a shared flow, .* give it the flow="):
        plain.load_state_dict(shared.state_dict())
    assert sorted(keys(plain)) == list(range(20))


def test_a_state_of_the_routers_order_is_refused_where_the_sampler_decides(make: Make) -> None:
    sampler: Any = DistributedSampler(range(20), num_replicas=1, rank=0)
    routed = make(Numbers(20), batch_size=4, sampler=sampler)
    next(iter(routed))
    sampler.shuffle = False
    kept = make(Numbers(20), batch_size=4, sampler=sampler)
    kept.load_state_dict(routed.state_dict())
    with pytest.raises(StateError, match="order is that of its DistributedSampler; resume with"):
        iter(kept)
    assert keys(kept) == list(range(20))


def test_a_dataset_that_cannot_travel_is_told(make: Make) -> None:
    dataset = Numbers(4)
    dataset.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(NotPicklableError, match=r"dataset\.lock of type _thread.lock"):
        iter(make(dataset))


@pytest.mark.parametrize(
    ("error", "arrives"), [(LookupError("no image"), LookupError), (Messaged("no image"), RuntimeError)]
)
def test_an_error_names_its_type_and_the_loader_goes_on(make: Make, error: Exception, arrives: type[Exception]) -> None:
    loader = make(Failing(12, {5: error}), batch_size=4)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(arrives, match=rf"{type(error).__name__}: no image"):
        next(iterator)
    next(iterator)


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        ({"flow": "no spaces"}, OptionError, "no spaces"),
        ({"flow": "a:v"}, OptionError, "a:v"),
        ({"flow": f"a:v{10**9}"}, OptionError, "version has 10 digits, at most 9 are allowed"),
        ({"address": "auto"}, OptionError, "without a flow"),
        ({"flow": "a", "job": {"ready": 1}}, OptionTypeError, "JobOptions"),
        (
            {"flow": "a", "options": JobOptions()},
            OptionTypeError,
            "JobOptions are given as job=",
        ),
        ({"flow": "a", "job": LoaderOptions()}, OptionTypeError, "it is given as options="),
    ],
    ids=str,
)
def test_what_is_not_allowed_is_refused_at_once(arguments: dict[str, Any], error: Any, hint: str) -> None:
    with pytest.raises(error, match=hint):
        DPFlowDataLoader(Numbers(4), **arguments)


def test_iterable_datasets_are_not_shared() -> None:
    with pytest.raises(OptionError, match="map-style"):
        DPFlowDataLoader(Stream(4), flow="a")


def values(batch: list[torch.Tensor]) -> list[int]:
    return [*{int(one) for part in batch for one in part.flatten().tolist()}]


def test_a_forked_child_keeps_the_batch_that_it_holds(make: Make) -> None:
    batches = iter(make(Numbers(100, width=50_000), batch_size=1))
    held = [next(batches) for _ in range(2)]
    with held_by_child("os.fork", lambda: [values(one) for one in held]) as looked:
        held.clear()
        assert [values(batch) for batch in batches] == [[number] for number in range(2, 100)]
        assert looked() == [[0], [1]]


def test_an_array_of_a_batch_can_be_read_after_the_batch_was_shared(make: Make) -> None:
    kept: list[tuple[Any, int]] = []
    for number, batch in enumerate(make(Numbers(30, width=50_000), batch_size=1)):
        for part in batch:
            kept.append((part.numpy(), number))
            part.share_memory_()
    assert len(kept) == 60
    assert all({*array.flatten().tolist()} == {number} for array, number in kept)

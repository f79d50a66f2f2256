"""Under accelerate, which wraps a loader in a class of its own."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.later import Later
from tests.loader_cases import Augmented, Indices, Stream, assert_same
from tests.new_process import run_interpreter
from tests.worker_cases import kill, worker_pids
from torch_dpflow import JobOptions
from torch_dpflow.options import LoaderOptions

accelerate: Any = Later("accelerate")
pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")


#: accelerate is imported after the loader has been made, and looked at from all sides before it is used.
LATE = """
import inspect
from tests.loader_cases import Indices
from torch_dpflow import DPFlowDataLoader, LoaderOptions

loader = DPFlowDataLoader(Indices(6), batch_size=2, options=LoaderOptions(restart_limit=5))
import accelerate.data_loader as theirs
import torch.utils.data
assert type(theirs.DataLoader(Indices(4))) is torch.utils.data.DataLoader
before = dict(vars(theirs)), dict(vars(theirs.DataLoaderAdapter))
inspect.getmembers(loader)
assert (dict(vars(theirs)), dict(vars(theirs.DataLoaderAdapter))) == before
prepared = theirs.prepare_data_loader(loader)
assert isinstance(prepared, DPFlowDataLoader)
assert prepared.options is loader.options
skipping = theirs.skip_first_batches(loader, 1)
assert type(skipping) is DPFlowDataLoader
assert [batch.tolist() for batch in skipping] == [[2, 3], [4, 5]]
"""


@pytest.fixture
def stateful() -> bool:
    """Whether accelerate is to use torchdata's loader."""
    return False


@pytest.fixture
def accelerator(stateful: bool) -> Iterator[Any]:
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DataLoaderConfiguration

    config = DataLoaderConfiguration(use_stateful_dataloader=stateful)
    yield accelerate.Accelerator(cpu=True, dataloader_config=config)
    for shared in (AcceleratorState, GradientState, PartialState):
        shared._reset_state()


def test_a_prepared_loader_gives_what_torchs_gives(OurLoader: Any, accelerator: Any) -> None:
    def run(loader_class: Any) -> list[Any]:
        torch.manual_seed(0)
        prepared = accelerator.prepare(loader_class(Indices(11), batch_size=3, shuffle=True, num_workers=2))
        return [list(prepared), list(prepared)]

    assert_same(run(OurLoader), run(DataLoader))


@pytest.mark.parametrize("dataset", [Indices(40), Stream(40)], ids=["map", "iterable"])
def test_a_prepared_loader_has_our_workers(OurLoader: Any, accelerator: Any, dataset: Any) -> None:
    """They survive what torch's do not."""
    options = LoaderOptions(restart_limit=5)
    prepared = accelerator.prepare(OurLoader(dataset, batch_size=2, num_workers=2, options=options))
    assert isinstance(prepared, OurLoader)
    assert prepared.options is options
    assert len(prepared) == 20
    seen = []
    for batch in prepared:
        seen += batch.tolist()
        if len(seen) == 20:
            for pid in worker_pids():
                kill(pid)
    assert sorted(seen) == list(range(40))


def test_preparing_twice_and_skipping_keep_the_class(OurLoader: Any, accelerator: Any) -> None:
    loader = OurLoader(Indices(10), batch_size=2, num_workers=1)
    prepared = accelerator.prepare(accelerator.prepare(loader))
    skipping = accelerator.skip_first_batches(prepared, 2)
    assert isinstance(skipping, OurLoader)
    assert [batch.tolist() for batch in skipping] == [[4, 5], [6, 7], [8, 9]]


def test_torchs_own_loaders_stay_torchs(OurLoader: Any, accelerator: Any) -> None:
    ours, theirs = accelerator.prepare(OurLoader(Indices(4), num_workers=1), DataLoader(Indices(4), num_workers=1))
    assert isinstance(ours, OurLoader)
    assert not isinstance(theirs, OurLoader)
    assert_same(list(ours), list(theirs))


def test_a_prepared_loader_resumes(OurLoader: Any, accelerator: Any) -> None:
    """accelerate reads one batch ahead and still snapshots what the loop has got."""

    def prepared(num_workers: int) -> Any:
        own = torch.Generator().manual_seed(3)
        return accelerator.prepare(
            OurLoader(Augmented(20), batch_size=2, shuffle=True, num_workers=num_workers, generator=own)
        )

    begun = prepared(2)
    iterator = iter(begun)
    for _ in range(4):
        next(iterator)
    state = begun.state_dict()
    rest = list(iterator)
    again = prepared(1)
    again.load_state_dict(state)
    assert_same(list(again), rest)


def test_accelerate_imported_late_and_a_look_at_every_attribute() -> None:
    ended = run_interpreter(LATE, timeout_s=250)
    assert ended.returncode == 0, ended.stderr


def test_a_prepared_loader_reads_its_flow(OurLoader: Any, accelerator: Any) -> None:
    job = JobOptions(name="mine")
    prepared = accelerator.prepare(OurLoader(Indices(4), flow="a/b:v2", address="somewhere", job=job))
    assert (prepared.flow, prepared.address, prepared.job) == ("a/b:v2", "somewhere", job)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("stateful", [True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_is_ours_and_resumes_from_a_checkpoint(
    OurLoader: Any, accelerator: Any, num_workers: int, tmp_path: Path
) -> None:
    pytest.importorskip("torchdata", reason="torchdata is not installed")
    options = LoaderOptions(restart_limit=5)

    def prepared() -> Any:
        own = torch.Generator().manual_seed(3)
        loader = OurLoader(Indices(20), 2, shuffle=True, num_workers=num_workers, generator=own, options=options)
        return accelerator.prepare(loader)

    begun = prepared()
    assert isinstance(begun, OurLoader)
    assert (begun.use_stateful_dataloader, begun.options) == (True, options)
    iterator = iter(begun)
    for _ in range(4):
        next(iterator)
    accelerator.save_state(str(tmp_path))
    rest = list(iterator)
    accelerator.free_memory()
    again = prepared()
    accelerator.load_state(str(tmp_path))
    assert_same(list(again), rest)


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_every_position_of_one_of_two_processes_resumes(
    OurLoader: Any, accelerator: Any, dispatch: bool, split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main process alone reads, ahead, for all; or each has a shard of the batches, and a generator within it."""
    state = accelerate.PartialState()
    monkeypatch.setattr(state, "num_processes", 2)

    def prepared() -> Any:
        return accelerate.data_loader.prepare_data_loader(
            OurLoader(Indices(22), batch_size=4, shuffle=True),
            num_processes=2,
            process_index=0,
            dispatch_batches=dispatch,
            split_batches=split,
            device=torch.device("cpu"),
            put_on_device=True,
        )

    begun = prepared()
    iterator, states, batches = iter(begun), [], []
    for batch in iterator:
        states.append(begun.state_dict())
        batches.append(batch.tolist())
    assert len(batches) == (6 if split else 3)
    for position, saved in enumerate(states[:-1], 1):  # the last one is that of the next epoch
        torch.manual_seed(99 + position)
        again = prepared()
        again.load_state_dict(saved)
        assert [batch.tolist() for batch in again] == batches[position:]

"""RemoteDataLoadFlowReader: equal samples to those of the local reader, shared and kept by a cluster."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.flows.flow_cases import Numbers, draw, label_of
from tests.flows.task_flows import (
    classification,
    detection,
    pad,
    publish_source,
    speech,
    write_detection,
    write_images,
    write_speech,
)
from tests.new_process import run_interpreter
from tests.shared_cluster import TestCluster
from torch_dpflow import JobOptions
from torch_dpflow.datasets import DatasetStore
from torch_dpflow.errors import OptionError, OptionTypeError, StageError, UsageError
from torch_dpflow.flows import DataLoadFlow, LocalDataLoadFlowReader, RemoteDataLoadFlowReader, random_split

QUICK = JobOptions(idle_s=3.0)
_names = itertools.count()


class Logged(Numbers):
    """Samples `(number as bytes, {"label": number % 3})`; every load is noted in a file."""

    def __init__(self, count: int, log: Path, broken: tuple[int, ...] = ()) -> None:
        super().__init__(count, broken)
        self._log = log

    def __getitem__(self, index: int) -> tuple[bytes, dict[str, int]]:
        with open(self._log, "a") as log:
            log.write(f"{index}\n")
        return super().__getitem__(index)


def halve(number: int) -> float:
    return 1 / (number - 4)


@pytest.fixture(scope="module")
def cluster(common_cluster: TestCluster) -> TestCluster:
    return common_cluster


@pytest.fixture
def remote(cluster: TestCluster) -> Callable[..., RemoteDataLoadFlowReader]:
    def remote(store: DatasetStore | None = None, **options: Any) -> RemoteDataLoadFlowReader:
        given = {"address": cluster.address, "workers": 1, "job": QUICK, **options}
        return RemoteDataLoadFlowReader(store, **given)

    return remote


def flow_of(samples: Any, **options: Any) -> DataLoadFlow:
    """Bytes to numbers, annotations to labels; under a name that no other test has."""
    flow = DataLoadFlow(f"test/numbers{next(_names)}", 1, **options)
    flow.dataset("core/numbers", "v1", "train", samples=samples)
    flow.map_data("decode", int, cache="always")
    return flow.map_target("label", label_of, cache="always")


Remote = Callable[..., RemoteDataLoadFlowReader]


# -- the three kinds of tasks -------------------------------------------------------------------------------


def _classify(store: DatasetStore, folder: Path) -> DataLoadFlow:
    publish_source(store, "core/cifar100", "train", "imagefolder", write_images(folder / "images", 6))
    return classification()


def _detect(store: DatasetStore, folder: Path) -> DataLoadFlow:
    document = write_detection(folder, [(40 + number, 30) for number in range(6)])
    publish_source(store, "core/mscoco", "train2017", "coco", document, images=f"{folder}/train2017")
    return detection()


def _transcribe(store: DatasetStore, folder: Path) -> DataLoadFlow:
    publish_source(store, "core/libri-speech", "train-clean-100", "speech", write_speech(folder / "speech", 6))
    return speech()


def as_plain(sample: Any) -> Any:
    """Tensors as lists, whatever they lie in, so that samples can be compared and sorted."""
    if isinstance(sample, torch.Tensor):
        return (str(sample.dtype), sample.tolist())
    if isinstance(sample, dict):
        return [(key, as_plain(value)) for key, value in sample.items()]
    return [as_plain(part) for part in sample] if isinstance(sample, tuple | list) else sample


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As many threads for torch's operators as workers have: how they divide a sum decides its last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("task", [_classify, _detect, _transcribe], ids=lambda task: task.__name__)
def test_samples_of_each_kind_of_task_equal_those_of_the_local_reader(
    remote: Remote, tmp_path: Path, task: Callable[..., DataLoadFlow]
) -> None:
    store = DatasetStore.create(str(tmp_path / "datasets"))
    flow = task(store, tmp_path)
    flow.name += str(next(_names))
    ours = flow.prepare_read(remote(store, seed=7)).to_mapped()
    theirs = flow.prepare_read(LocalDataLoadFlowReader(store, seed=7)).to_mapped()
    assert len(ours) == len(theirs) == 6
    order = [3, 0, 5, 5, 1, 2, 4]
    drawn = []
    for epoch in range(2):
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)
        expected = as_plain(theirs.__getitems__(order))
        assert as_plain(ours.__getitems__(order)) == expected
        assert as_plain(ours[-1]) == as_plain(theirs[5])
        drawn.append(expected)
    assert drawn[0] != drawn[1]


def test_ragged_samples_are_shuffled_and_padded_by_the_job(remote: Remote, tmp_path: Path) -> None:
    store = DatasetStore.create(str(tmp_path / "datasets"))
    flow = _transcribe(store, tmp_path)
    flow.name += str(next(_names))
    read = flow.prepare_read(remote(store))
    for _ in range(2):
        ((frames, lengths, letters),) = read.to_shuffled(batch_size=6, collate_fn=pad)
        assert frames.shape == (6, int(lengths.max()), 33)
        assert sorted(zip(lengths.tolist(), map(len, letters))) == [(10 * n + 1, 2 * n) for n in range(1, 7)]


# -- what is kept, and what is drawn ------------------------------------------------------------------------


def test_a_deterministic_flow_is_loaded_once_for_all_reads_and_epochs(remote: Remote, tmp_path: Path) -> None:
    flow = flow_of(Logged(12, tmp_path / "log"))
    expected = [(number, number % 3) for number in range(12)]
    loader = flow.prepare_read(remote()).to_shuffled(batch_size=5)
    orders = []
    for _ in range(2):
        batches = list(loader)
        assert [len(labels) for _, labels in batches] == [5, 5, 2]
        orders.append([(int(one), int(two)) for batch in batches for one, two in zip(*batch)])
        assert sorted(orders[-1]) == expected
    assert orders[0] != orders[1]
    mapped = flow.prepare_read(remote()).to_mapped()
    assert mapped.__getitems__(list(range(12))) == expected
    assert Counter((tmp_path / "log").read_text().split()) == Counter(map(str, range(12)))


def test_stages_before_the_first_random_one_are_kept_for_reads_by_index(remote: Remote, tmp_path: Path) -> None:
    flow = flow_of(Logged(6, tmp_path / "log")).map_data("draw", draw)
    reads = [flow.prepare_read(remote()).to_mapped() for _ in range(2)]
    first, second = ([read[index] for index in range(6)] for read in reads)
    assert [sample[0][0] for sample in first] == [sample[0][0] for sample in second] == list(range(6))
    assert all(one[0][1:] != other[0][1:] for one, other in zip(first, second))
    assert len((tmp_path / "log").read_text().split()) == 6


def test_a_job_draws_anew_in_each_epoch_and_the_same_in_another_run(remote: Remote) -> None:
    def epochs(flow: DataLoadFlow) -> list[list[Any]]:
        loader = flow.prepare_read(remote(seed=3)).to_shuffled(batch_size=4, collate_fn=list)
        return [[sample for batch in loader for sample in batch] for _ in range(2)]

    flow = flow_of(Numbers(8)).map_data("draw", draw)
    again = copy.copy(flow)
    again.name += "-again"
    first = epochs(flow)
    assert [sorted(data[0] for data, _ in epoch) for epoch in first] == [list(range(8))] * 2
    assert not {data for data, _ in first[0]} & {data for data, _ in first[1]}
    assert epochs(again) == first


# -- parts of a flow ----------------------------------------------------------------------------------------


def test_parts_of_a_flow_are_read_by_torchs_orders(remote: Remote) -> None:
    flow = flow_of(Numbers(10))
    train, val = random_split(flow.prepare_read(remote()), [0.8, 0.2], seed=1)
    loader = train.to_shuffled(batch_size=3)
    orders = [[number for data, _ in loader for number in data.tolist()] for _ in range(2)]
    assert len(loader) == 3
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(train.indices())
    still = val.to_shuffled(batch_size=2, shuffle=False)
    assert [data.tolist() for data, _ in still] == [list(val.indices())]
    last, first = (train.indices()[place] for place in (7, 0))
    picked = train.to_shuffled(batch_size=2, sampler=[7, 0], prefetch=3)
    assert [data.tolist() for data, _ in picked] == [[last, first]]
    batches = train.to_shuffled(batch_size=1, batch_sampler=[[0], [7, 0]])
    assert [data.tolist() for data, _ in batches] == [[first], [last, first]]


def test_a_mapped_dataset_joins_in_every_process_that_reads_it(remote: Remote) -> None:
    mapped = flow_of(Numbers(6)).prepare_read(remote()).local_map(lambda sample: sample[0]).to_mapped()
    assert mapped[1] == 1
    assert [batch.tolist() for batch in DataLoader(mapped, batch_size=3, num_workers=1)] == [
        [0, 1, 2],
        [3, 4, 5],
    ]
    assert pickle.loads(pickle.dumps(mapped))[4] == 4
    assert mapped.__getitems__([]) == []


#: Imports once, which takes most of its time; both processes describe the flow, each for itself.
PROGRAM = """
import os, sys
import torch
from torchvision.transforms import v2
from torch_dpflow import JobOptions
from torch_dpflow.flows import DataLoadFlow, RemoteDataLoadFlowReader

other = os.fork()
flow = DataLoadFlow("test/processes", 1).dataset("core/x", samples=[(n, n % 3) for n in range(6)])
flow.map_data("image", lambda number: torch.full((3, 2, 2), float(number)), cache="always")
flow.map_data("normalize", v2.Normalize([0.5] * 3, [0.25] * 3), cache="always")
flow.map_data("shift", lambda image, by=torch.ones(1): image + by, cache="always")
job = JobOptions(idle_s=3.0)
mapped = flow.prepare_read(RemoteDataLoadFlowReader(address=sys.argv[1], workers=1, job=job)).to_mapped()
told = [(int(image[0, 0, 0]), label) for image, label in mapped.__getitems__(list(range(6)))]
os.write(1, f"{told}\\n".encode())  # whole, beside the other's
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


def test_processes_that_describe_a_flow_alike_read_it_together(cluster: TestCluster) -> None:
    done = run_interpreter(PROGRAM, cluster.address, timeout_s=250)
    assert done.returncode == 0, done.stderr
    expected = str([(4 * number - 1, number % 3) for number in range(6)])
    assert done.stdout.splitlines() == [expected] * 2


# -- local functions, and what cannot be loaded -------------------------------------------------------------


def test_errors_are_raised_unless_the_flow_says_otherwise(remote: Remote) -> None:
    read = flow_of(Numbers(8)).map_data("halve", halve).prepare_read(remote())
    with pytest.raises(StageError, match="sample 4: stage 'halve'"):
        read.to_mapped()[4]
    with pytest.raises(StageError, match="sample 4: stage 'halve'"):
        list(read.to_shuffled(batch_size=4))
    local = flow_of(Numbers(4)).prepare_read(remote()).local_map(lambda sample: 1 / sample[0], "divide")
    with pytest.raises(StageError, match="stage 'divide'"):
        list(local.to_shuffled(batch_size=4))


def test_skipped_samples_are_left_out_and_counted(remote: Remote, caplog: pytest.LogCaptureFixture) -> None:
    flow = flow_of(Numbers(12, broken=(2, 3, 9)), on_error="skip").map_data("halve", halve)
    read = flow.prepare_read(remote()).local_map(lambda sample: round(4 + 1 / sample[0])).local_map(int)
    loaded = [0, 1, 5, 6, 7, 8, 10, 11]
    with caplog.at_level(logging.WARNING, "torch_dpflow.flows"):
        batches = list(read.to_shuffled(batch_size=4, shuffle=False, collate_fn=list))
    assert batches == [[0, 1], [5, 6, 7], [8, 10, 11]]
    assert read.skipped() == {"read": 3, "halve": 1}
    assert f"{flow.name}:1, sample 9 is left out: FileNotFoundError: object 9" in caplog.text
    again = read.subset(range(12))
    assert again.to_mapped().__getitems__(list(range(12))) == loaded
    assert again.skipped() == {"read": 3, "halve": 1}
    with pytest.raises(FileNotFoundError, match="object 3"):
        read.to_mapped().__getitems__([2, 3])


def test_one_version_of_a_flow_is_one_description(remote: Remote) -> None:
    flow = flow_of(Numbers(4))
    assert flow.prepare_read(remote()).to_mapped()[0] == (0, 0)
    other = flow.clone().map_data("negate", abs, cache="always")
    with pytest.raises(UsageError, match=r"dataset\._stages: 3 entries here, 2 entries in the flow"):
        other.prepare_read(remote()).to_mapped()[0]


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"workers": 0}, OptionError, "workers=0"),
        ({"workers": "x"}, OptionTypeError, "workers='x'"),
        ({"workers": 1.5}, OptionTypeError, "workers=1.5"),
        ({"seed": "x"}, OptionTypeError, "seed='x'"),
        ({"job": {"ready": 2}}, OptionTypeError, "JobOptions"),
    ],
)
def test_wrong_options_are_told(options: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        RemoteDataLoadFlowReader(**options)


def test_what_cannot_be_read_is_told_before_anything_is_started() -> None:
    flow = DataLoadFlow("a/b", 1).dataset("core/x")
    with pytest.raises(UsageError, match="this reader has none"):
        flow.prepare_read(RemoteDataLoadFlowReader(address="/nowhere"))
    read = flow_of(Numbers(4)).prepare_read(RemoteDataLoadFlowReader(address="/nowhere"))
    with pytest.raises(OptionError, match="batch_size=None"):
        read.to_shuffled(batch_size=None)

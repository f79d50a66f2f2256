"""What cannot be read ends in a clear error or is left out and counted, with the local and the remote reader alike."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.datasets.samples_source import Numbered, despite_time_outs, publish
from tests.new_process import interpreter
from tests.shared_cluster import TestCluster
from tests.support.oss_server import Fault, OSSServer
from torch_dpflow import JobOptions
from torch_dpflow.datasets import DatasetStore, Draft
from torch_dpflow.datasets.importers import Item
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.datasets.storage import ReadOptions
from torch_dpflow.datasets.storage.base import checksum_of
from torch_dpflow.errors import (
    AccessDeniedError,
    ChecksumError,
    DPFlowError,
    NewerFormatError,
    ObjectMissingError,
    StageError,
    StorageError,
    StorageTimeoutError,
    StorageUnavailableError,
    TruncatedObjectError,
)
from torch_dpflow.flows import (
    DataLoadFlow,
    DataLoadFlowRead,
    ImagePilDecode,
    LocalDataLoadFlowReader,
    RemoteDataLoadFlowReader,
)

#: For what hangs. On a busy machine other reads can exceed this, too.
IMPATIENT = ReadOptions(timeout_s=0.3, deadline_s=0.5, attempts=2, backoff_s=0.01)
#: For a batch of which some samples hang: the others have ten times what they take.
LIMITED = ReadOptions(timeout_s=3.0, deadline_s=3.0, attempts=1)
PATIENT = ReadOptions(timeout_s=60.0, deadline_s=60.0, attempts=3, backoff_s=0.01)
HANGING = (Fault.HANG, Fault.TRICKLE)
QUICK = JobOptions(idle_s=10.0)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What is wrong with one sample, and how it is told."""

    what: str
    error: type[DPFlowError]
    #: What the server does instead of answering.
    fault: Fault | None = None

    @property
    def stage(self) -> str:
        """Under which name the sample is counted when it is left out."""
        return "image_decode" if self.error is StageError else "read"


#: By number of the sample; the others are as they should be.
FAILURES = {
    1: Failure(what="missing", error=ObjectMissingError),
    2: Failure(what="cut-short", error=TruncatedObjectError),
    3: Failure(what="truncated-jpeg", error=StageError),
    4: Failure(what="wrong-checksum", error=ChecksumError),
    5: Failure(what="forbidden", error=AccessDeniedError, fault=Fault.FORBIDDEN),
    6: Failure(what="hangs", error=StorageTimeoutError, fault=Fault.HANG),
    7: Failure(what="trickles", error=StorageTimeoutError, fault=Fault.TRICKLE),
    8: Failure(what="resets", error=StorageUnavailableError, fault=Fault.RESET),
    9: Failure(what="resets-in-body", error=StorageUnavailableError, fault=Fault.RESET_IN_BODY),
}
COUNT = 12
WHOLE = [number for number in range(COUNT) if number not in FAILURES]

#: Serves a folder; the named objects meet a fault. In a process of its own, for workers keep connections open.
SERVER = """
import signal, sys
from pathlib import Path
from tests.support.oss_server import Fault, OSSServer
from tests.support.oss_server.__main__ import load

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
with OSSServer() as server:
    server.buckets.create("data")
    load(server, "data", Path(sys.argv[1]))
    for given in sys.argv[2:]:
        key, _, fault = given.partition("=")
        server.faults.add(Fault(fault), key=key)
    print(server.endpoint, flush=True)
    signal.sigwait({signal.SIGTERM})
"""


def _jpeg(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "JPEG")
    return data.getvalue()


def _flipped(data: bytes) -> bytes:
    return data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]


def _imported(number: int) -> bytes:
    """The bytes that the dataset knows of. Sample 3 was no whole JPEG from the beginning."""
    return _jpeg(number)[:700] if number == 3 else _jpeg(number)


def _write_objects(folder: Path) -> None:
    """What became of the objects since they were imported."""
    changed: dict[int, Callable[[bytes], bytes]] = {2: lambda data: data[:-100], 4: _flipped}
    folder.mkdir(parents=True)
    for number in range(COUNT):
        if number != 1:
            change = changed.get(number, bytes)
            (folder / f"{number}.jpg").write_bytes(change(_imported(number)))


def _publish_jpegs(store: DatasetStore) -> None:
    items = [
        Item(
            path=f"{number}.jpg",
            length=len(_imported(number)),
            checksum=checksum_of(_imported(number), "crc32"),
            meta={"number": number},
        )
        for number in range(COUNT)
    ]
    draft = Draft(store, "core/jpegs", "v1")
    draft.add("train", IterableImporter(items, root="oss://data/images"))
    draft.publish()


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the dataset is, and who can load it."""

    store: DatasetStore
    endpoint: str
    cluster: TestCluster

    def reader(self, kind: str, options: ReadOptions) -> Any:
        given: dict[str, Any] = {
            "storage_options": {"endpoint": self.endpoint, "key": "test-key-id", "secret": "test-secret"},
            "read_options": options,
            "check": True,
        }
        if kind == "local":
            return LocalDataLoadFlowReader(self.store, **given)
        return RemoteDataLoadFlowReader(self.store, address=self.cluster.address, workers=2, job=QUICK, **given)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("place")
    _write_objects(folder / "bucket/images")
    store = DatasetStore.create(str(folder / "datasets"))
    _publish_jpegs(store)
    faults = [f"images/{n}.jpg={failure.fault.value}" for n, failure in FAILURES.items() if failure.fault]
    cluster = TestCluster.start(tmp_path_factory.mktemp("c"))
    with interpreter(SERVER, str(folder / "bucket"), *faults) as server:
        assert server.stdout is not None
        yield Place(store=store, endpoint=server.stdout.readline().strip(), cluster=cluster)
        cluster.stop()
        server.terminate()
        server.communicate()


@pytest.fixture(params=["local", "remote"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _read(place: Place, kind: str, options: ReadOptions = PATIENT, **policy: Any) -> DataLoadFlowRead:
    """options: impatient ones only where a server hangs; on a busy machine others would meet a timeout instead."""
    flow = DataLoadFlow(f"test/failures-{policy.get('on_error', 'raise')}-{options.timeout_s:.0f}", 1, **policy)
    flow.dataset("core/jpegs", "v1", "train")
    flow.map_data("image_decode", ImagePilDecode(), cache="always").map_data("pixels", np.array, cache="always")
    flow.map_target("number", lambda target: target["number"], cache="always")
    read: DataLoadFlowRead = flow.prepare_read(place.reader(kind, options))
    return read


@pytest.mark.parametrize("number", FAILURES, ids=lambda number: FAILURES[number].what)
def test_a_failure_is_raised_and_names_the_object(place: Place, kind: str, number: int) -> None:
    failure = FAILURES[number]
    mapped = _read(place, kind, IMPATIENT if failure.fault in HANGING else PATIENT).to_mapped()
    named = f"sample {number}: stage" if failure.error is StageError else f"oss://data/images/{number}.jpg"
    with pytest.raises(failure.error, match=re.escape(named)):
        mapped[number]
    assert despite_time_outs(lambda: mapped[WHOLE[0]][1]) == WHOLE[0]


def test_a_loader_raises_the_first_failure_that_it_comes_to(place: Place, kind: str) -> None:
    loader = _read(place, kind).to_shuffled(3, shuffle=False, num_workers=1)
    with pytest.raises(ObjectMissingError, match=re.escape("oss://data/images/1.jpg")):
        list(loader)


def test_failures_are_left_out_and_counted_when_asked(place: Place, kind: str) -> None:
    counts = {"read": 8, "image_decode": 1}
    read = _read(place, kind, LIMITED, on_error="skip")
    assert [number for _, number in read.to_mapped().__getitems__(list(range(COUNT)))] == WHOLE
    assert read.skipped() == counts
    read = _read(place, kind, LIMITED, on_error="skip")
    loader = read.to_shuffled(COUNT, num_workers=1)
    assert [sorted(numbers.tolist()) for _, numbers in loader] == [WHOLE]
    assert read.skipped() == counts


# -- what is wrong with the store itself ----------------------------------------------------------------------


def _reader(kind: str, store: DatasetStore) -> Any:
    """Nothing is started: what a store does not give is told before."""
    return LocalDataLoadFlowReader(store) if kind == "local" else RemoteDataLoadFlowReader(store, address="/nowhere")


def _numbers() -> DataLoadFlow:
    return DataLoadFlow("test/numbers", 1).dataset("core/numbers", "v1", "train")


def test_a_version_of_a_newer_format_is_told(kind: str, tmp_path: Path) -> None:
    store = DatasetStore.create(str(tmp_path))
    publish(store, Numbered(3))
    version = tmp_path / "core/numbers/versions/v1.json"
    version.write_bytes(version.read_bytes().replace(b'"format":1', b'"format":2'))
    with pytest.raises(NewerFormatError, match=r"versions/v1\.json has format 2; this release reads up to 1"):
        _numbers().prepare_read(_reader(kind, store))


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault.FORBIDDEN, AccessDeniedError),
        (Fault.HANG, StorageTimeoutError),
        (Fault.TRICKLE, StorageTimeoutError),
        (Fault.RESET, StorageUnavailableError),
    ],
)
def test_a_store_that_does_not_answer_is_told(kind: str, fault: Fault, error: type[StorageError]) -> None:
    with OSSServer() as server:
        server.buckets.create("data")
        options = server.storage_options()
        publish(DatasetStore.create("oss://data/datasets", **options), Numbered(3))
        given = IMPATIENT if fault in HANGING else PATIENT
        store = DatasetStore("oss://data/datasets", read_options=given, **options)
        server.faults.add(fault)
        with pytest.raises(error, match=re.escape("oss://data/datasets/core/numbers/versions/v1.json")):
            _numbers().prepare_read(_reader(kind, store))
        with pytest.raises(error, match=re.escape("oss://data/datasets/store.json")):
            DatasetStore("oss://data/datasets", read_options=given, **options)
        store.files.filesystem._session.session.close()

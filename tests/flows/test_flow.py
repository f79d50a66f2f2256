"""DataLoadFlow: describing, printing, drawing, saving."""

from __future__ import annotations

import pickle
import platform
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.flows.flow_cases import Numbers, label_of, numbers_flow
from tests.new_process import run_interpreter
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.datasets.storage import ObjectReader
from torch_dpflow.datasets.storage.base import sha256_of
from torch_dpflow.errors import (
    DamagedStoreError,
    NewerFormatError,
    OptionError,
    OptionTypeError,
    StageError,
    UsageError,
)
from torch_dpflow.flows import (
    DataLoadFlow,
    DataTransform,
    LocalDataLoadFlowReader,
    TargetTransform,
    describe_flow,
    load_flow,
    save_flow,
    to_mermaid,
)


@pytest.fixture
def flow() -> DataLoadFlow:
    """The image classification of the thesis's figure 5-5."""
    flow = DataLoadFlow("example/cls", version=1).dataset("core/mini-imagenet", "v1", "train")
    flow.map_target("transform_label", label_of, cache="always").map_data("image_decode", bytes, cache="always")
    for name in ("random_resized_crop", "random_hflip", "to_tensor", "normalize"):
        flow.map_data(name, bytes)
    return flow


def test_a_flow_prints_itself(flow: DataLoadFlow) -> None:
    assert str(flow) == (
        "Dataset(core/mini-imagenet:v1:train) -> Map(transform_label) -> Map(image_decode) "
        "-> Map(random_resized_crop) -> Map(random_hflip) -> Map(to_tensor) -> Map(normalize)"
    )
    assert flow.format(width=55) == (
        "Dataset(core/mini-imagenet:v1:train)\n"
        "    -> Map(transform_label) -> Map(image_decode)\n"
        "    -> Map(random_resized_crop) -> Map(random_hflip)\n"
        "    -> Map(to_tensor) -> Map(normalize)"
    )
    assert "example/cls" in repr(flow)
    bare = DataLoadFlow("a/b", 1).map("one", bytes)
    assert (str(bare), bare.format(5)) == ("no dataset -> Map(one)", "no dataset\n    -> Map(one)")
    assert repr(bare) == "DataLoadFlow('a/b', version=1: no dataset -> Map(one))"


def test_names_of_stages_may_hold_anything_printable() -> None:
    flow = DataLoadFlow("a/b", 1).dataset("core/x").map('crop "2 x 2" é #1\\', bytes)
    assert flow.format(20) == 'Dataset(core/x)\n    -> Map(crop "2 x 2" é #1\\)'
    assert 'n1["crop #quot;2 x 2#quot; é #35;1\\"]' in to_mermaid(flow)


def test_a_flow_is_drawn(flow: DataLoadFlow) -> None:
    flow = DataLoadFlow("example/cls", 2).dataset("core/x", "v1", "train")
    flow.map_data("decode", bytes, cache="always").map_data("crop", bytes)
    assert to_mermaid(flow) == (
        "flowchart LR\n"
        '  n0[("core/x:v1:train")]\n'
        '  n0 --> n1["decode"]:::kept\n'
        '  n1 --> n2["crop"]\n'
        "  classDef kept fill:#d9ead3\n"
    )


@pytest.mark.parametrize(
    ("caches", "kept"),
    [([], 0), (["always"], 1), (["never", "always"], 0), (["always", "never", "always"], 1)],
)
def test_what_may_be_kept_ends_at_the_first_random_stage(caches: list[Any], kept: int) -> None:
    flow = DataLoadFlow("a/b", 1).dataset("core/x")
    for number, cache in enumerate(caches):
        flow.map(str(number), bytes, cache=cache)
    assert flow.cacheable == kept


def test_a_clone_goes_its_own_way(flow: DataLoadFlow) -> None:
    before = str(flow)
    clone = flow.clone()
    assert (str(clone), clone.name, clone.version) == (before, flow.name, 1)
    clone.map_data("more", bytes).dataset("core/other")
    assert str(flow) == before
    assert "more" in str(clone)


def test_stages_take_and_give_parts_of_a_sample() -> None:
    flow = DataLoadFlow("a/b", 1).dataset("core/x", samples=[(1, 2)])
    flow.map_data("data", lambda data: data + 10)
    flow.map_target("target", lambda target: target + 20)
    flow.map("swap", lambda sample: sample[::-1])
    flow.map("again", lambda data: data * 2, transform=DataTransform())
    flow.map("target again", str, transform=TargetTransform())
    assert flow.prepare_read(LocalDataLoadFlowReader()).to_mapped()[0] == (44, "11")


@pytest.mark.parametrize(
    "given",
    [
        ("core/one:v1:train",),
        ("core/one:v1", None, "train"),
        ("core/one:v1", "v1", "train"),
        ("core/one", "v1", "train"),
        ("core/one:v1:train", "v1", "train"),
    ],
)
def test_a_dataset_is_named_in_one_string_or_in_parts(given: Any) -> None:
    assert str(DataLoadFlow("a/b", 1).dataset(*given)) == "Dataset(core/one:v1:train)"


def test_a_transform_may_be_anything_that_fits() -> None:
    class Annotated:
        def process_arg(self, arg: Any) -> Any:
            return arg["value"]

        def process_ret(self, arg: Any, ret: Any) -> Any:
            return {**arg, "square": ret}

    flow = DataLoadFlow("a/b", 1).dataset("core/x", samples=[{"value": 3}])
    flow.map("square", lambda value: value**2, transform=Annotated())
    read = flow.prepare_read(LocalDataLoadFlowReader())
    assert read.to_mapped()[0] == {"value": 3, "square": 9}


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_samples_that_look_up_all_names_are_read_one_by_one(on_error: Any) -> None:
    class Looks:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            return index * 10

        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    flow = DataLoadFlow("a/b", 1, on_error=on_error).dataset("core/x", samples=Looks()).map("text", str)
    read = flow.prepare_read(LocalDataLoadFlowReader()).to_mapped()
    assert read.__getitems__([2, 0]) == ["20", "0"]


def _flow() -> DataLoadFlow:
    return DataLoadFlow("a/b", 1).map("one", bytes)


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (lambda: DataLoadFlow("one-part", 1), OptionError, "namespace/name"),
        (lambda: DataLoadFlow("a/b:v1", 1), OptionError, "more than two parts"),
        (lambda: DataLoadFlow("a/b", 0), OptionError, "version=0"),
        (lambda: DataLoadFlow("a/b", "v1"), OptionTypeError, "version='v1' is of type str"),
        (lambda: DataLoadFlow("a/b", 1, on_error="ignore"), OptionError, "on_error='ignore' is not one of"),
        (lambda: _flow().map("one", bytes), OptionError, "has a stage 'one' already"),
        (lambda: _flow().map("", bytes), OptionError, "names no stage"),
        (lambda: _flow().map("a\nb", bytes), OptionError, "names no stage"),
        (lambda: _flow().map("two", 3), OptionTypeError, "3 cannot be called"),
        (
            lambda: _flow().map("two", bytes, cache="can-cache"),
            OptionError,
            "cache='can-cache' is not one of",
        ),
        (lambda: _flow().map("two", bytes, transform=bytes), OptionTypeError, "no process_arg"),
        (lambda: _flow().dataset("core/x", samples=iter([])), OptionTypeError, "cannot be indexed"),
        (lambda: _flow().dataset("core/x", None, "train"), OptionError, "needs a version"),
        (lambda: _flow().dataset("core/x:v1", "v2"), OptionError, "contradicts version='v2'"),
        (lambda: _flow().dataset("core/x:v1:val", "v1", "train"), OptionError, "contradicts variant='train'"),
        (
            lambda: _flow().dataset("core/x", 1, "train"),
            OptionTypeError,
            "version=1 of 'core/x' is of type int",
        ),
        (lambda: to_mermaid(_flow()), UsageError, "has no dataset; call .dataset"),
        (
            lambda: _flow().map("two", bytes, transform=DataTransform),
            OptionTypeError,
            "DataTransform is a class",
        ),
        (lambda: _flow().format(4), OptionError, "width=4 is out of range"),
        (
            lambda: _flow().prepare_read("somewhere"),
            OptionTypeError,
            "reader='somewhere' cannot build a flow",
        ),
        (lambda: to_mermaid(5), OptionTypeError, "flow=5 is of type int; give a DataLoadFlow"),
        (lambda: to_mermaid(None), OptionTypeError, "flow=None"),
        (lambda: LocalDataLoadFlowReader(5), OptionTypeError, "store=5"),
        (lambda: LocalDataLoadFlowReader(read_options=5), OptionTypeError, "read_options=5"),
        (lambda: LocalDataLoadFlowReader(storage_options=5), OptionTypeError, "storage_options=5"),
        (lambda: LocalDataLoadFlowReader(check="no"), OptionTypeError, "check='no'"),  # type: ignore[arg-type]
        (lambda: LocalDataLoadFlowReader(cache="x"), OptionError, "^cache='x' is no size"),
        (lambda: LocalDataLoadFlowReader(cache=1.5), OptionTypeError, "^cache=1.5 is of type float"),
        (lambda: LocalDataLoadFlowReader(seed="x"), OptionTypeError, "seed='x' is of type str"),
        (lambda: LocalDataLoadFlowReader(seed=1.5), OptionTypeError, "seed=1.5 is of type float"),
        (
            lambda: LocalDataLoadFlowReader(seed=2**80),
            OptionError,
            "seed=1208925819614629174706176 is out of",
        ),
        (lambda: LocalDataLoadFlowReader().read(_flow()), UsageError, "has no dataset"),
        (
            lambda: LocalDataLoadFlowReader().read(_flow().dataset("core/x")),
            UsageError,
            "this reader has none",
        ),
    ],
)
def test_mistakes_are_told_at_once(make: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        make()


def test_a_failing_stage_is_named_with_its_sample() -> None:
    flow = numbers_flow(Numbers()).map_data("halve", lambda number: 1 / (number - 3))
    mapped = flow.prepare_read(LocalDataLoadFlowReader()).to_mapped()
    with pytest.raises(StageError, match="example/numbers:1, sample 3: stage 'halve' failed: ZeroDivision") as caught:
        mapped[3]
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.stage) == (str(caught.value), "halve")


# -- saving -------------------------------------------------------------------------------------------------


def test_a_flow_is_saved_and_loaded(tmp_path: Path) -> None:
    offset = 5
    flow = numbers_flow(Numbers(4), on_error="skip").map_data("add", lambda number: number + offset)
    save_flow(flow, tmp_path / "numbers.flow")
    record = describe_flow(str(tmp_path / "numbers.flow"))
    assert (record.name, record.version, record.shown) == (flow.name, flow.version, str(flow))
    loaded = load_flow(tmp_path / "numbers.flow")
    assert (str(loaded), loaded.on_error, loaded.cacheable) == (str(flow), "skip", 2)
    mapped = loaded.prepare_read(LocalDataLoadFlowReader()).to_mapped()
    assert [mapped[index] for index in range(4)] == [(5, 0), (6, 1), (7, 2), (8, 0)]


def test_a_flow_of_a_script_is_loaded_by_another_process(tmp_path: Path) -> None:
    url = f"{tmp_path}/squares.flow"
    save = """
import sys
from torch_dpflow.flows import DataLoadFlow, save_flow
class Squares:
    def __len__(self): return 3
    def __getitem__(self, index): return index * index, None
flow = DataLoadFlow("a/b", 3).dataset("core/squares", samples=Squares())
save_flow(flow.map_data("negate", lambda value: -value), sys.argv[1])
"""
    assert run_interpreter(save, url).stderr == ""
    mapped = load_flow(url).prepare_read(LocalDataLoadFlowReader()).to_mapped()
    assert [mapped[index][0] for index in range(3)] == [0, -1, -4]


def test_damage_to_a_saved_flow_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.flow"
    save_flow(numbers_flow(Numbers()), str(path))
    whole = path.read_bytes()
    for damaged in (
        b"",
        whole[:10],
        whole[:-1],
        whole + b".",
        whole.replace(b"data-load-flow", b"data-load-flaw"),
        whole.replace(b'"format":2', b'"format":1'),
    ):
        path.write_bytes(damaged)
        with pytest.raises(DamagedStoreError, match=r"x\.flow"):
            load_flow(str(path))
    path.write_bytes(whole.replace(b'"format":2', b'"format":3'))
    with pytest.raises(NewerFormatError, match="format 3"):
        load_flow(str(path))
    path.write_bytes(b'{"format":' + b"[" * 200_000)
    with pytest.raises(DamagedStoreError, match=r"x\.flow is no data-load-flow file"):
        load_flow(str(path))
    path.write_bytes(whole.replace(b'"format":2', b'"more":' + b"[" * 101 + b"]" * 101 + b',"format":2'))
    with pytest.raises(
        DamagedStoreError, match=r"x\.flow is no data-load-flow file: it is nested deeper than 100 levels"
    ):
        load_flow(str(path))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"name":"example/numbers"', b'"name":"example/others"'),
        (b"Map(decode)", b"Map(delete)"),
        (b'"format":2,', b'"format":2,"more":1,'),
        (b'"format":2,', b'"format": 2,'),
    ],
)
def test_the_first_line_of_a_saved_flow_is_checked_too(tmp_path: Path, old: bytes, new: bytes) -> None:
    path = tmp_path / "x.flow"
    save_flow(numbers_flow(Numbers()), str(path))
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    for read in (load_flow, describe_flow):
        with pytest.raises(DamagedStoreError, match=r"x\.flow does not match its SHA-256"):
            read(str(path))


def _write(path: Path, code: bytes, *, python: str = ".".join(platform.python_version_tuple()[:2])) -> None:
    """A file of whatever code, whole by its SHA-256."""
    record = {"kind": "data-load-flow", "format": 2, "name": "a/b", "version": 1, "shown": "a flow"}
    record |= {"python": python, "sha256": ""}
    record["sha256"] = sha256_of(msgspec.json.encode(record) + b"\n" + code)
    path.write_bytes(msgspec.json.encode(record) + b"\n" + code)


def test_what_cannot_be_loaded_is_told_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "x.flow"
    for code, error, told in (
        (b"junk", DamagedStoreError, r"x\.flow holds no flow"),
        (
            b"cnowhere_at_all\nthing\n.",
            UsageError,
            r"cannot be loaded here: .*nowhere_at_all.*install the packages",
        ),
        (
            b"ctorch_dpflow.dataservice\nPooledDataset\n.",
            UsageError,
            r"x\.flow cannot .* save it again with this",
        ),
        (pickle.dumps(5), OptionTypeError, r"x\.flow holds a int"),
    ):
        _write(path, code)
        with pytest.raises(error, match=told):
            load_flow(str(path))
    _write(path, b"", python="2.7")
    with pytest.raises(UsageError, match=r"saved by Python 2\.7"):
        load_flow(str(path))
    with pytest.raises(OptionTypeError, match="flow=5"):
        save_flow(5, str(path))  # type: ignore[arg-type]


def reader_with(options: dict[str, Any]) -> DatasetReader:
    """A reader of a store with options of its own for the data; of the store itself there is nothing."""
    reader = DatasetReader.__new__(DatasetReader)
    vars(reader).update(stored=None, _storage_options=options)
    return reader


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (ObjectReader({"key": "k", "secret": "hidden", "endpoint": "http://127.0.0.1:9"}), "secret"),
        (Files("memory://flows", {"client_kwargs": {"session_token": "hidden"}}), "session_token"),
        (reader_with({"secret": "hidden"}), "secret"),
    ],
)
def test_keys_of_a_storage_are_not_saved_with_a_flow(tmp_path: Path, holder: Any, name: str) -> None:
    flow = numbers_flow(Numbers()).map_data("fetch", partial(getattr, holder))
    with pytest.raises(UsageError, match=rf"cannot be saved: storage_options \['{name}'\].* environment") as caught:
        save_flow(flow, str(tmp_path / "x.flow"))
    assert "hidden" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert b"hidden" in pickle.dumps(holder)  # workers get what they are to load with


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    flow = numbers_flow(Numbers())
    flow.map("lock", __import__("threading").Lock().acquire_lock)
    with pytest.raises(UsageError, match=r"cannot be saved: .*must pickle"):
        save_flow(flow, str(tmp_path / "x.flow"))
    assert list(tmp_path.iterdir()) == []

"""What workers load travels without keys of storages, and not at all where it is too large or cannot travel."""

from __future__ import annotations

import io
import pickle
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset, default_collate

from tests.new_process import Interpreter, in_fork, run_interpreter
from torch_dpflow._core.stage_clock import StageClock
from torch_dpflow._core.torch_private import DatasetKind
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.datasets.storage import ObjectReader, credentials
from torch_dpflow.errors import AccessDeniedError, NotPicklableError, OptionError, StorageError
from torch_dpflow.ipc.serialization.codec import decode, encode
from torch_dpflow.remote.shipping.content_pack import pack, pack_load_spec, unpack, unpack_load_spec
from torch_dpflow.workers.batch_pieces import task_of
from torch_dpflow.workers.batches import BatchSource, EpochSpec, LoadSpec


def spec_of(dataset: Any, *, collate_fn: Any = default_collate, worker_init_fn: Any = None) -> LoadSpec:
    return LoadSpec(
        dataset=dataset,
        dataset_kind=DatasetKind.Map,
        auto_collation=True,
        collate_fn=collate_fn,
        drop_last=False,
        batch_size=2,
        worker_init_fn=worker_init_fn,
        num_workers=1,
        base_seed=0,
        own_stream=False,
        read_threads=1,
        shared_memory=0,
    )


class Held:
    """A dataset with whatever attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


LARGE = [f"path/{number}" for number in range(2000)]


@pytest.mark.parametrize(
    ("dataset", "place"),
    [
        (Held(samples=LARGE, size=3), r"dataset\.samples of type builtins\.list pickles to 0 MB"),
        (
            Subset(Held(tables={"train": LARGE, "test": []}), [0]),
            r"dataset\.dataset\.tables\['train'\] of type",
        ),
        (Held(images=torch.zeros(1 << 20)), r"dataset\.images of type torch\.Tensor pickles to 4 MB"),
        (
            Held(images=np.zeros(1 << 20), lock=threading.Lock()),
            r"dataset\.images of type numpy\.ndarray .* 8 MB",
        ),
        (Held(samples=LARGE * 40, lock=threading.Lock()), r"dataset\.samples"),
        (list(range(100_000)), r"dataset of type builtins\.list"),
    ],
    ids=["list", "in a table", "tensor", "array", "beside a lock", "itself"],
)
def test_what_is_too_large_is_named(dataset: Any, place: str) -> None:
    with pytest.raises(OptionError, match=rf"^{place}.*keep it in a file or in a DatasetStore") as caught:
        pack_load_spec(spec_of(dataset), limit=10_000)
    pickle.loads(pickle.dumps(caught.value))


def test_large_arrays_travel() -> None:
    """Whose memory the pickler writes as a buffer, which has no length."""
    images = np.arange(40_000).reshape(200, 200)
    arrived = unpack_load_spec(pack_load_spec(spec_of(Held(images=images, turned=images.T)), limit=1 << 20)).dataset
    assert (arrived.images == images).all()
    assert (arrived.turned == images.T).all()


def test_a_large_variable_of_the_script_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    script = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)
    exec("TABLE = list(range(10_000))\ndef look_up(batch):\n    return TABLE[batch[0]]", vars(script))
    with pytest.raises(OptionError, match=r"^the script's variable TABLE of type builtins\.list"):
        pack_load_spec(spec_of([1], collate_fn=vars(script)["look_up"]), limit=10_000)


def test_what_cannot_travel_is_named_with_its_place() -> None:
    with pytest.raises(
        NotPicklableError, match=r"^dataset\.guards\['reads'\] of type _thread.lock .* The workers of a p"
    ):
        pack_load_spec(spec_of(Held(guards={"reads": threading.Lock()})))


SECRET = "se-cr-et"
NAMES = [
    *(
        "key",
        "secret",
        "token",
        "password",
        "passphrase",
        "account_key",
        "sas_token",
        "client_secret",
        "credential",
    ),
    *(
        "connection_string",
        "aws_secret_access_key",
        "aws_session_token",
        "SSECustomerKey",
        "Authorization",
        "pkey",
    ),
    *("Cookie", "X-Api-Key", "api_key", "apikey", "private_key", "accessKey", "creds", "x-amz-signature"),
]
PLAIN = {
    "endpoint": "http://127.0.0.1:9",
    "region": "xy",
    "anon": False,
    "requester_pays": True,
    "token": "anon",
}
SECRETS = st.sampled_from(NAMES).flatmap(
    lambda name: st.sampled_from(
        [
            {name: SECRET},
            {"client_kwargs": {name: SECRET, "region_name": "xy"}},
            {"client_kwargs": {"headers": {name: SECRET}}},
            {"headers": [(name, SECRET), ("Accept", "x")]},
            {"s3": [{"inner": {name: [SECRET]}}]},
            {"proxy": f"http://user:{SECRET}@proxy:80", name: SECRET},
            {name: {"nested": SECRET}},
        ]
    )
)


@given(options=st.lists(SECRETS, max_size=4), plain=st.sets(st.sampled_from(list(PLAIN))))
def test_no_secret_is_in_what_travels(options: list[dict[str, Any]], plain: set[str]) -> None:
    given_: dict[str, Any] = {name: PLAIN[name] for name in plain}
    for one in options:
        given_ |= one
    reader = ObjectReader(given_)
    packed = pack_load_spec(spec_of([reader, Held(inner=reader)]))
    assert SECRET.encode() not in packed
    kept = unpack_load_spec(packed).dataset[0]._storage_options
    credentials._left_out.clear()  # this process is no worker
    assert all(kept[name] == PLAIN[name] for name in plain if given_[name] == PLAIN[name])
    assert pickle.loads(pickle.dumps(reader))._storage_options == given_  # elsewhere it is as it was


def test_files_and_readers_of_stores_travel_without_secrets() -> None:
    files = Files("memory://content-pack", {"password": SECRET, "mode": "x"})
    reader: Any = DatasetReader.__new__(DatasetReader)
    vars(reader).update(stored=None, _storage_options={"secret": SECRET, "region": "xy"})
    packed = pack_load_spec(spec_of(Held(files=files, state=reader.__getstate__())))
    assert b"region" in packed
    assert SECRET.encode() in packed  # the state was taken elsewhere
    assert SECRET.encode() not in pack_load_spec(spec_of(Held(files=files, reader=reader)))


def test_a_worker_without_keys_is_told_that_they_were_not_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    options = {"key": "id", "secret": SECRET, "endpoint": "http://127.0.0.1:9"}
    packed = pack_load_spec(spec_of([ObjectReader(options)]))

    def errors() -> list[str]:
        reader = unpack_load_spec(packed).dataset[0]
        found = []
        for url in ("s3://bucket/object", "oss://bucket/object"):
            with pytest.raises(AccessDeniedError) as caught:
                reader.read(url)
            found.append(str(caught.value))
        return found

    for text in in_fork(errors):
        assert "no credentials were found" in text
        assert "storage_options ['key', 'secret'] of the training process were not sent to this worker" in text
        assert "give it separate keys" in text
        assert SECRET not in text
    with pytest.raises(StorageError) as caught:
        ObjectReader({"endpoint": "http://127.0.0.1:9"}).read("s3://bucket/object")
    assert "not sent" not in str(caught.value)


INIT = """
    def __init__(self, value):
        self.value = value
"""
SLOTS_AND_PROPERTY = """
    @property
    def value(self):
        return self.__value
    @value.setter
    def value(self, value):
        self.__value = value
"""


@pytest.mark.parametrize(
    "box",
    [
        pytest.param("class Box:" + INIT, id="attributes"),
        pytest.param("class Box:\n    __slots__ = ('value', '__weakref__')" + INIT, id="slots"),
        pytest.param("class Box:\n    __slots__ = 'value'" + INIT, id="a slot by its name"),
        pytest.param("class Box:\n    __slots__ = {'value': 'with its text'}" + INIT, id="slots with texts"),
        pytest.param("class Box:\n    __slots__ = ['__value']" + INIT + SLOTS_AND_PROPERTY, id="a private slot"),
        pytest.param("class Base:\n    __slots__ = ['value']\nclass Box(Base):\n    __slots__ = ()" + INIT, id="base"),
        pytest.param("class Base:\n    __slots__ = ['value']\nclass Box(Base):" + INIT, id="slots of the base only"),
        pytest.param("@dataclasses.dataclass(slots=True)\nclass Box:\n    value: object", id="dataclass"),
        pytest.param(
            "@dataclasses.dataclass(slots=True, frozen=True)\nclass Box:\n    value: object = 5", id="frozen dataclass"
        ),
    ],
)
def test_batches_of_the_scripts_own_classes_come_back_as_the_scripts(monkeypatch: pytest.MonkeyPatch, box: str) -> None:
    script = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)
    exec(f"import dataclasses, torch\n{box}\n{SCRIPT}", vars(script))
    packed = pack_load_spec(spec_of(vars(script)["Data"](), collate_fn=vars(script)["collate"]))

    def load() -> list[Any]:
        sys.modules["__main__"] = types.ModuleType("__main__")  # as a worker's is, without any of it
        source = BatchSource(unpack_load_spec(packed), 0, StageClock())
        source.begin(EpochSpec(epoch=0, base_seed=0, shared_seed=None, stream=None))
        loaded = [
            encode(source.load(task_of(0, position), index).value) for position, index in enumerate([[0, 1], [2, 3]])
        ]
        return [(table, [bytes(frame) for frame in frames]) for table, frames in loaded]

    (batch, failure) = (decode(table, [bytearray(frame) for frame in frames]) for table, frames in in_fork(load))
    assert [type(one) for one in batch.boxes] == [vars(script)["Box"]] * 2
    assert [int(one.value) for one in batch.boxes] == [0, 1]
    assert type(batch) is vars(script)["Batch"]
    with pytest.raises(vars(script)["Wrong"], match="3 is odd and large"):
        failure.reraise()


SCRIPT = """
@dataclasses.dataclass
class Batch:
    boxes: list
class Wrong(Exception):
    pass
class Data:
    def __getitem__(self, index):
        if index > 2:
            raise Wrong(f"{index} is odd and large")
        return Box(torch.tensor(index))
def collate(samples):
    return Batch(samples)
"""


SCRIPT_OF_ORDINARY_CLASSES = """
import functools, pickle, sys
from torch_dpflow.remote.shipping.content_pack import pack

def twice(function):
    @functools.wraps(function)
    def call(*arguments):
        return 2 * function(*arguments)
    return call

class Base:
    kind = "base"
    @property
    def scale(self):
        return 7

class Numbers(Base):
    def __init__(self):
        self.gain = 1
    @property
    def scale(self):
        return 2 + super().scale
    @property
    def gain(self):
        return self._gain
    @gain.setter
    def gain(self, gain):
        self._gain = gain * 10
    @gain.deleter
    def gain(self):
        del self._gain
    @staticmethod
    def plus(x):
        return x + 1
    @classmethod
    def make(cls, x):
        return [cls.__name__, x]
    @functools.cached_property
    def table(self):
        return [self.scale] * 2
    def power(self, x, to):
        return x ** to
    cube = functools.partialmethod(power, to=3)
    @twice
    def doubled(self, x):
        return x + self.gain
    @functools.lru_cache
    def kept(self, x):
        return x - 1
    def value(self, x):
        return x
    def other(self, x):
        return -x
    class Inner:
        @staticmethod
        def minus(x):
            return x - 5
        @property
        def name(self):
            return "inner"
        class Most:
            half = property(lambda self: 0.5)
    class Swapped:
        value = "first"

plain, First = Numbers.value, Numbers.Swapped
def tripled(self, i):
    return 3 * plain(self, i)
Numbers.value = tripled
first = Numbers.other
Numbers.other = lambda self, x: [first(self, x)]
class Second(First):
    value = "second"
Numbers.Swapped = Second

@twice
def top(x):
    return x + 0.5

GAIN = 5
def by_text():
    return (sum(globals().get("GAIN", 1) for _ in [0]), globals().get("GAIN", 1), top.__globals__.get("GAIN", 1),
        sys._getframe().f_globals.get("GAIN", 1))

def values(n=None):
    n = n or Numbers()
    found = [n.scale, n.gain, n.plus(4), Numbers.plus(4), n.make(3), n.table, n.cube(2), n.doubled(5), n.kept(9),
        n.value(5), n.other(5), n.Inner.minus(1), n.Inner().name, n.Inner.Most().half,
        n.Swapped.value, First.value, n.kind, top(1), by_text()]
    n.gain = 4
    found.append(n.gain)
    del n.gain
    found.append(sorted(vars(n)))
    static = [Numbers.__dict__[name].__class__.__name__ for name in ("scale", "gain", "plus", "make", "table", "cube")]
    return found, static, Numbers.Inner.__qualname__, pickle.loads(pickle.dumps(Numbers.Inner())).name

if __name__ == "__main__":
    sys.stdout.write(pack((values, Numbers(), Numbers.Inner.minus)).hex() + " " + pickle.dumps(values()).hex())
"""
WORKER = """
import io, pickle, sys
from torch_dpflow.remote.shipping.content_pack import unpack
for again in range(2):  # a worker gets the next version too
    values, dataset, minus = unpack(io.BytesIO(bytes.fromhex(sys.argv[1])))
    assert minus(1) == -4
    assert values(dataset) == values()
print(pickle.dumps(values()).hex())
"""


def test_ordinary_classes_of_a_script_are_the_same_in_a_worker(tmp_path: Path) -> None:
    """Descriptors, nested classes, decorated methods, and methods that replace others."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT_OF_ORDINARY_CLASSES)
    with Interpreter([sys.executable, str(script)]) as job:
        out, errors = job.communicate()
    assert job.returncode == 0, errors
    packed, here = out.split()
    worker = run_interpreter(WORKER, packed)
    assert worker.returncode == 0, worker.stderr
    assert pickle.loads(bytes.fromhex(worker.stdout)) == pickle.loads(bytes.fromhex(here))


def test_a_static_method_alone_does_not_need_its_class() -> None:
    script = "class K:\n    @staticmethod\n    def f(x):\n        return x + 1\n    class J:\n        s = 3\n"
    module = types.ModuleType("__main__")
    exec(script, vars(module))
    assert in_fork(_unpacked_without_classes, module) == (2, 3, 3)


def _unpacked_without_classes(script: types.ModuleType) -> tuple[int, int, int]:
    worker, sys.modules["__main__"] = types.ModuleType("__main__"), script
    packed = pack((script.K.f, script.K.J()))
    del script.K
    sys.modules["__main__"] = worker
    function, inner = unpack(io.BytesIO(packed))
    return function(1), inner.s, pickle.loads(pickle.dumps(inner)).s

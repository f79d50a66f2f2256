"""What unpickling imports is known beforehand, and nothing of it runs."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import importlib.util
import io
import pathlib
import pickle
import sys
import types
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.errors import MessageError
from torch_dpflow.remote.shipping.content_pack import pack
from torch_dpflow.remote.shipping.modules import installed_modules_in, modules_in

LEAVES = [
    collections.OrderedDict(a=1),
    collections.deque([1, 2]),
    datetime.datetime(2026, 1, 1),
    decimal.Decimal("1.5"),
    fractions.Fraction(1, 3),
    pathlib.PurePosixPath("a/b"),
    uuid.UUID(int=7),
    np.arange(3),
    np.float32(1.5),
    torch.arange(3),
    torch.float16,
    datetime.timedelta,
    len,
    io.StringIO,
    bytearray(b"x"),
    slice(1, 2),
]
VALUES = st.recursive(
    st.sampled_from(LEAVES) | st.none() | st.integers() | st.text() | st.binary() | st.floats(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner) | st.frozensets(st.text())
    ),
    max_leaves=8,
)


class Recording(pickle.Unpickler):
    """Notes what it is asked for."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.found: set[str] = set()

    def find_class(self, module: str, name: str, /) -> Any:
        self.found.add(module)
        return super().find_class(module, name)


@given(value=VALUES, protocol=st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_modules_of_any_pickle(value: Any, protocol: int) -> None:
    pickled = pickle.dumps(value, protocol)
    recording = Recording(io.BytesIO(pickled))
    recording.load()
    found = modules_in(pickled)
    if protocol >= 3:
        assert found == recording.found
    else:  # which name modules as Python 2 did
        assert len(found) == len(recording.found)
        assert all(importlib.util.find_spec(name) for name in found)


SCRIPT = """
import collections, dataclasses, enum, functools, json, typing, torch
class Mood(enum.Enum):
    GOOD = 1
class Pair(typing.NamedTuple):
    left: int
@dataclasses.dataclass(frozen=True)
class Point:
    x: int
class Slots:
    __slots__ = ("a",)
class Rows(list):
    pass
class Table(dict):
    pass
class Bag(set):
    pass
class Wrong(Exception):
    pass
class Generic(typing.Generic[typing.TypeVar("T")]):
    def __getitem__(self, index):
        return super().__class__, json
slots = Slots()
slots.a = 1
def outer(inside):
    def inner():
        return inside
    return inner
made = [
    Mood.GOOD, Pair(1), Point(2), slots, Rows([1, Point(3)]), Table({Point(4): Mood.GOOD}), Bag({Point(5)}), Wrong("x"),
    Generic(), outer([Point(6)]), functools.partial(outer, Point(7)), collections.defaultdict(Point, {1: Rows()}),
    torch.nn.Linear(1, 1), torch.Generator(), json, Point, property(outer), classmethod(outer), Rows.append,
    torch.nn.Parameter(torch.ones(1)), {Mood.GOOD, Point(8)}, collections.namedtuple("Late", "a")(1), typing.Any,
]
"""


def test_modules_of_whatever_a_script_makes() -> None:
    module = types.ModuleType("__main__")
    exec(SCRIPT, vars(module))
    for value in [*module.made, module.made]:
        pickled = pack(value)
        recording = Recording(io.BytesIO(pickled))
        recording.load()
        assert modules_in(pickled) >= recording.found - {"__main__"}


@given(data=st.binary(max_size=50))
def test_of_what_may_be_no_pickle_nothing_else_is_raised(data: bytes) -> None:
    for pickled in (data, b"\x80\x05" + data):
        with suppress(MessageError):
            modules_in(pickled)
    with pytest.raises(MessageError, match=r"^no pickle: "):
        modules_in(b"\xff" + data)


def test_nothing_of_it_runs() -> None:
    def touch(path: str) -> None:
        raise AssertionError(path)

    class Traps:
        def __reduce__(self) -> Any:
            return eval, ("1/0",)

    pickled = cloudpickle.dumps({"a": [touch, Traps()]})
    with pytest.raises(ZeroDivisionError):
        pickle.loads(pickled)
    assert "builtins" in modules_in(pickled)


def test_modules_of_code_that_travels() -> None:
    source = "import json.decoder\ndef read(path):\n    import late.module\n    return json.decoder.x(path)\n"
    module = types.ModuleType("__main__")
    exec(source, vars(module))
    modules = modules_in(pack([module.read, module.read]))
    assert "json.decoder" in modules
    assert not {"__main__", "late"} & modules


def test_objects_of_a_class_that_travels_as_code() -> None:
    """As a script's dataset does: what makes the object is itself made by a call."""
    module = types.ModuleType("__main__")
    source = "import torch\nclass Data(torch.utils.data.Dataset):\n    def __init__(self): self.rows = [1]\n"
    exec(source, vars(module))
    pickled = pack([module.Data(), {module.Data: module.Data()}])
    assert {"torch.utils.data.dataset", "cloudpickle.cloudpickle"} <= modules_in(pickled)


def test_installed_modules_that_a_pickle_needs_also_by_own_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_needs.py").write_text(
        "import json\nimport psutil as p\nfrom msgspec.msgpack import Decoder\nimport own_other\n\nclass Data: ...\n"
    )
    (tmp_path / "own_other.py").write_text("from hypothesis import strategies\n\ndef late():\n    import zmq\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("own_needs", "own_other"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    data = importlib.import_module("own_needs").Data()
    data.path, data.array = Path("x"), np.arange(3)
    found = installed_modules_in(pickle.dumps(data))
    assert found[:2] == ["psutil", "msgspec.msgpack"]
    assert "hypothesis.strategies" in found
    assert {"json", "zmq", "own_needs", "own_other", "pathlib"}.isdisjoint(found)
    assert any(name.startswith("numpy") for name in found)
    assert installed_modules_in(pickle.dumps([1, "a"])) == []

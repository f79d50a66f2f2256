"""Payloads: every kind of object that a batch is made of, there and back."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import itertools
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from torch._utils import ExceptionWrapper

from torch_dpflow.ipc.memory.arena import Arena
from torch_dpflow.ipc.memory.arena_reader import ArenaReader
from torch_dpflow.ipc.messages.headers import PayloadTable
from torch_dpflow.ipc.serialization.codec import LARGE_BYTES, decode, encode

Carry = Callable[[Any], Any]

DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and "q" not in str(value) and value is not torch.bits1x8
    },
    key=str,
)


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    boxes: list[Any]


class Attributed(torch.Tensor):
    """A tensor subclass with attributes, as torchvision's tv_tensors are."""


class Backed:
    """Pickles itself with an out-of-band buffer of its own."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Backed, (pickle.PickleBuffer(self.content),)


def carry_inline(obj: Any) -> Any:
    """Over a wire: the table as msgpack, the frames as bytes of their own."""
    table, frames = encode(obj)
    assert len(frames) == table.frames
    table = msgspec.msgpack.decode(msgspec.msgpack.encode(table), type=PayloadTable)
    return decode(table, [bytes(frame) for frame in frames])


def carry_shared(obj: Any) -> Any:
    arena = Arena(budget_bytes=1 << 28)
    reader = ArenaReader(os.getpid())
    table, frames = encode(obj, arena=arena)
    table = msgspec.msgpack.decode(msgspec.msgpack.encode(table), type=PayloadTable)
    return decode(table, [bytearray(frame) for frame in frames], reader=reader)


def carry_received(obj: Any) -> Any:
    """As frames come out of a socket or of a block: their memory becomes the object's where it can."""
    table, frames = encode(obj)
    return decode(table, [memoryview(bytearray(frame)) for frame in frames])


@pytest.fixture(params=[carry_inline, carry_received, carry_shared], ids=["inline", "received", "shared"])
def carry(request: pytest.FixtureRequest) -> Iterator[Carry]:
    # Beta layouts of torch say so once in a process, wherever they are first met.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield request.param


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert type(ours) is type(theirs)
    assert (ours.dtype, ours.layout, ours.shape) == (theirs.dtype, theirs.layout, theirs.shape)
    assert (ours.requires_grad, ours.is_conj(), ours.is_neg()) == (
        theirs.requires_grad,
        theirs.is_conj(),
        theirs.is_neg(),
    )
    assert bits(ours) == bits(theirs)


def bits(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous()
    return raw(dense.clone())


def raw(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()


def test_dense_tensors_of_every_dtype(carry: Carry) -> None:
    for dtype, shape in itertools.product(DTYPES, [(), (0,), (3, 0, 2), (7, 5), (64, 1024)]):
        count = int(np.prod(shape))
        memory = torch.randint(0, 2, (count * dtype.itemsize,), dtype=torch.uint8)
        tensor = torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), 0, shape)

        carried = carry(tensor)

        assert type(carried) is torch.Tensor, (dtype, shape)
        assert (carried.dtype, carried.shape, carried.stride()) == (dtype, tensor.shape, tensor.stride())
        assert raw(carried) == raw(tensor), (dtype, shape)


LAYOUTS = {
    "transposed": lambda: torch.arange(24.0).view(4, 6).t(),
    "offset": lambda: torch.arange(24.0)[5:9],
    "stepped": lambda: torch.arange(24.0)[::3],
    "channels last": lambda: torch.arange(96.0).view(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.ones(1, 3).expand(5, 3),
    "expanded over nothing": lambda: torch.ones(3, 1).expand(3, 0),
    "diagonal": lambda: torch.arange(25.0).view(5, 5).diagonal(),
    "small part of a big storage": lambda: torch.arange(100_000.0).view(100, 1000)[7:9, ::2],
    "conjugate": lambda: torch.randn(6, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(6, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_strided_layouts(carry: Carry, make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    carried = carry(tensor)
    assert_same(carried, tensor)
    assert carried.stride() == tensor.stride()


def test_a_view_travels_without_the_rest_of_a_big_storage() -> None:
    table, _ = encode(torch.zeros(1_000_000)[500:600])
    assert table.nbytes < 2000


def test_tensors_that_require_grad(carry: Carry) -> None:
    leaf = torch.randn(4, requires_grad=True)
    parameter = torch.nn.Parameter(torch.randn(40, 400))
    frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)
    for carried, tensor in zip(carry([leaf, parameter, frozen]), [leaf, parameter, frozen], strict=True):
        assert_same(carried, tensor)
        assert carried.is_leaf


@pytest.mark.parametrize(
    "convert",
    [
        lambda dense: dense.to_sparse(),
        lambda dense: dense.to_sparse_csr(),
        lambda dense: dense.to_sparse_csc(),
        lambda dense: dense.to_sparse_bsr((2, 2)),
        lambda dense: dense.to_sparse_bsc((2, 2)),
    ],
    ids=["coo", "csr", "csc", "bsr", "bsc"],
)
def test_sparse_tensors(carry: Carry, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    dense = torch.eye(200)
    sparse = convert(dense)
    carried = carry(sparse)
    assert carried.layout == sparse.layout
    assert carried.dtype == sparse.dtype
    assert torch.equal(carried.to_dense(), dense)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors(carry: Carry, layout: torch.layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch makes it for the jagged layout
    parts = [torch.randn(3, 2), torch.randn(5, 2)]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    carried = carry(nested)
    assert carried.is_nested
    for ours, theirs in zip(carried.unbind(), parts, strict=True):
        assert torch.equal(ours, theirs)


def test_quantised_tensors(carry: Carry) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.quantize_per_tensor(torch.randn(500, 30), 0.1, 3, torch.qint8)
    carried = carry(quantised)
    assert carried.dtype == torch.qint8
    assert (carried.q_scale(), carried.q_zero_point()) == (quantised.q_scale(), quantised.q_zero_point())
    assert torch.equal(carried.int_repr(), quantised.int_repr())


def test_meta_tensors_have_no_memory_to_carry(carry: Carry) -> None:
    carried = carry(torch.empty(1 << 40, device="meta"))
    assert (carried.device.type, carried.shape) == ("meta", (1 << 40,))


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_default_device_plays_no_part(carry: Carry, device: str) -> None:
    tensor = torch.randn(200, 200)
    with torch.device(device):
        assert torch.equal(carry([tensor, tensor[3]])[0], tensor)


def test_attributes_and_subclasses_stay(carry: Carry) -> None:
    plain = torch.arange(3)
    plain.label = "seven"  # type: ignore[attr-defined]
    boxes = torch.ones(2, 4).as_subclass(Attributed)
    boxes.canvas = (640, 480)  # type: ignore[attr-defined]

    carried_plain, carried_boxes = carry([plain, boxes])

    assert carried_plain.label == "seven"
    assert type(carried_boxes) is Attributed
    assert carried_boxes.canvas == (640, 480)
    assert torch.equal(carried_boxes.as_subclass(torch.Tensor), torch.ones(2, 4))


@pytest.mark.parametrize("size", [16, LARGE_BYTES], ids=["small", "big"])
def test_aliases_stay_aliases(carry: Carry, size: int) -> None:
    base = torch.zeros(size)
    again, whole, tail, view = carry([base, base, base[size // 4 :], base.view(2, -1)])
    again[size // 2] = 5
    assert again is whole
    assert tail[size // 4] == 5
    assert view[1, 0] == 5
    assert tail.untyped_storage().data_ptr() == again.untyped_storage().data_ptr()


def test_a_tensor_and_its_array_stay_one_memory(carry: Carry) -> None:
    tensor = torch.zeros(LARGE_BYTES)
    carried, array = carry((tensor, tensor.numpy()))
    carried[3] = 9
    assert array[3] == 9


def test_separate_tensors_stay_separate(carry: Carry) -> None:
    first, second, empty, void = carry([torch.zeros(4), torch.zeros(4), torch.zeros(0), torch.zeros(0)])
    first += 1
    assert second.tolist() == [0, 0, 0, 0]
    assert empty is not void


ARRAYS = {
    "0-d": np.array(3.5),
    "empty": np.zeros((0, 3), np.int16),
    "C": np.arange(12.0).reshape(3, 4),
    "Fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "big": np.arange(100_000),
    "big Fortran": np.asfortranarray(np.arange(90_000).reshape(300, 300)),
    "stepped": np.arange(24)[::5],
    "reversed": np.arange(20_000)[::-1],
    "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
    "bool": np.array([True, False]),
    "half": np.arange(3, dtype=np.float16),
    "complex": np.arange(3) * 1j,
    "long double": np.arange(3, dtype=np.longdouble),
    "big-endian": np.arange(5, dtype=">i4"),
    "bytes": np.array([b"a", b"bcd"]),
    "text": np.array(["ä", "longer"]),
    "no text": np.zeros(2, dtype=[("a", "U0")])["a"],
    "no fields": np.zeros(2, dtype=[]),
    "datetime": np.array(["2024-02-29", "NaT"], dtype="datetime64[ms]"),
    "timedelta": np.array([1, 2], dtype="timedelta64[25s]"),
    "structured": np.array([(1, 2.5, "x")], dtype=[("a", "i1"), ("b", ">f8"), ("c", "U3")]),
    "aligned": np.zeros(3, dtype=np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "object": np.array([None, "a", [1, 2]], dtype=object),
    "structured with objects": np.array([(1, "x")], dtype=[("a", "i1"), ("b", object)]),
    "metadata": np.zeros(2, np.dtype("f4", metadata={"unit": "m"})),
    "record": np.array([(1, 2)], dtype=[("a", "i1"), ("b", "i2")]).view(np.recarray),
    "masked": np.ma.masked_array([1, 2, 3], mask=[0, 1, 0]),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_arrays(carry: Carry, array: np.ndarray[Any, Any]) -> None:
    carried = carry(array)
    assert type(carried) is type(array)
    assert carried.dtype == array.dtype
    assert carried.dtype.isalignedstruct == array.dtype.isalignedstruct
    assert carried.flags.fnc == array.flags.fnc
    assert carried.dtype.metadata == array.dtype.metadata
    np.testing.assert_array_equal(carried, array)
    assert carried.flags.writeable


def test_read_only_memory_arrives_writable(carry: Carry) -> None:
    frozen = np.arange(50_000)
    frozen.setflags(write=False)
    from_bytes = np.frombuffer(b"abcd", np.uint8)
    tensor = torch.arange(5)
    carried_frozen, carried_bytes, carried_tensor = carry([frozen, from_bytes, tensor])
    carried_frozen[0] = carried_bytes[0] = 7
    carried_tensor.fill_(3)
    assert carried_frozen[0] == 7
    assert from_bytes[0] == ord("a")
    assert carried_tensor.tolist() == [3] * 5


def test_shared_memory_is_aligned_for_vectors() -> None:
    sizes = (1, 3, 65, 10_000, 40_000, LARGE_BYTES + 1)
    carried = carry_shared([torch.zeros(size, dtype=torch.uint8) for size in sizes])
    assert [tensor.data_ptr() % 64 for tensor in carried] == [0] * len(sizes)


def shifted(frame: Any, shift: int) -> memoryview:
    """The frame's content, `shift` bytes behind a multiple of 64."""
    room = torch.zeros(128 + len(frame), dtype=torch.uint8).numpy()
    start = -room.ctypes.data % 64 + shift
    room[start : start + len(frame)] = np.frombuffer(frame, np.uint8)
    return memoryview(room)[start : start + len(frame)]


@pytest.mark.parametrize("shift", [0, 1, 4, 8, 16])
@pytest.mark.parametrize("writable", [True, False])
def test_a_frame_may_lie_anywhere(shift: int, writable: bool) -> None:
    tensor = torch.randn(LARGE_BYTES)
    table, frames = encode((tensor, torch.arange(3)))
    moved = [shifted(frame, shift) for frame in frames]
    carried, count = decode(table, moved if writable else [frame.toreadonly() for frame in moved])
    assert torch.equal(carried, tensor)
    assert carried.data_ptr() % 8 == 0
    assert count.tolist() == [0, 1, 2]
    in_place = writable and shift % 8 == 0
    assert np.shares_memory(carried.numpy(), np.asarray(moved[1])) == in_place


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble], ids=str)
@pytest.mark.parametrize("count", [3, LARGE_BYTES])
def test_long_doubles_are_aligned_to_themselves(dtype: Any, count: int) -> None:
    array = np.arange(count).astype(dtype)
    table, frames = encode([array, array[:0].real, np.arange(count)])
    carried = decode(table, [shifted(frame, 8) for frame in frames])
    assert all(piece.flags.aligned for piece in carried)
    assert carried[0].tolist() == array.tolist()


OBJECTS = {
    "scalars": [1, 2.5, 1 << 100, True, None, "text", b"bytes", 3j, decimal.Decimal("1.5")],
    "numpy scalars": [np.float32(1.5), np.int8(-3), np.str_("s"), np.datetime64("2024-01-01")],
    "big bytes": [b"x" * 500_000, bytearray(b"y" * 500_000)],
    "containers": {"a": (1, [2, {3}]), 4: frozenset({5}), "d": collections.OrderedDict(x=1)},
    "defaultdict": collections.defaultdict(list, a=[1]),
    "date": datetime.datetime(2024, 2, 29, tzinfo=datetime.timezone.utc),
    "torch values": [torch.bfloat16, torch.Size([2, 3]), torch.device("cpu"), torch.sparse_coo],
    "numpy values": [np.dtype("f4"), np.float32],
    "slices": [slice(1, None), range(5), Ellipsis],
    "path": Path("a/b"),
}


@pytest.mark.parametrize("obj", OBJECTS.values(), ids=OBJECTS)
def test_plain_objects(carry: Carry, obj: Any) -> None:
    carried = carry(obj)
    assert carried == obj
    assert type(carried) is type(obj)


def test_structures_keep_their_types(carry: Carry) -> None:
    point = carry(Point(torch.ones(2), {"y": np.zeros(3)}))
    sample = carry(Sample(torch.ones(200, 200), [torch.tensor(1), 2]))
    assert type(point) is Point
    assert torch.equal(point.x, torch.ones(2))
    assert type(sample) is Sample
    assert torch.equal(sample.image, torch.ones(200, 200))


def test_an_object_that_contains_itself(carry: Carry) -> None:
    loop: list[Any] = [torch.arange(2)]
    loop.append(loop)
    carried = carry(loop)
    assert carried[1] is carried


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "RGBA", "I;16"])
def test_images(carry: Carry, mode: str) -> None:
    image = Image.new(mode, (201, 303))
    image.putpixel((3, 4), 1 if mode != "RGB" else (1, 2, 3))
    carried = carry(image)
    assert (carried.mode, carried.size, carried.tobytes()) == (mode, (201, 303), image.tobytes())


def test_a_failure_keeps_its_traceback(carry: Carry) -> None:
    try:
        raise KeyError("lost")
    except KeyError:
        failure = ExceptionWrapper(where="in a worker")
    carried = carry(failure)
    with pytest.raises(KeyError, match="raise KeyError"):
        carried.reraise()


@pytest.mark.parametrize("content", [b"read-only", bytearray(b"writable"), bytearray(100_000)], ids=len)
def test_objects_with_buffers_of_their_own(carry: Carry, content: Any) -> None:
    carried = carry(Backed(content))
    assert isinstance(carried.content, memoryview)
    assert carried.content == content


def test_storages(carry: Carry) -> None:
    storage = torch.arange(4).untyped_storage()
    carried = carry(storage)
    assert carried.tolist() == storage.tolist()


def test_reductions_registered_for_multiprocessing_stay_out() -> None:
    shared = torch.arange(10).share_memory_()
    _, frames = encode(shared)
    assert b"rebuild_storage_fd" not in bytes(frames[0])
    assert b"torch.multiprocessing" not in bytes(frames[0])

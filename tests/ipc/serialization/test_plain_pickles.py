"""Where pickle writes otherwise than the library knows, payloads are packed the plain way, with the same results."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.new_process import run_interpreter
from torch_dpflow.cluster.client.collate import collate_payloads, collate_samples
from torch_dpflow.ipc.messages.headers import PayloadTable
from torch_dpflow.ipc.serialization.codec import decode, encode
from torch_dpflow.ipc.serialization.fast_path import encode_sample

BIG = 1 << 16
#: What is done before the library is imported, and what it says to that, once.
BREAKS = {
    "opcodes": ("NEXT_BUFFER = pickle.NONE", "big bytes objects are sent inside"),
    "samples": ("TUPLE = pickle.LIST", "samples are encoded by pickle"),
}
PROGRAM = """
import logging, pickle, sys
pickle.{broken}
# Of the process that this is forked from.
for name in [name for name in sys.modules if name.startswith("torch_dpflow")]:
    del sys.modules[name]
logging.basicConfig(level="WARNING", format="%(name)s: %(message)s", stream=sys.stdout)
from pathlib import Path
from tests.ipc.serialization.test_plain_pickles import payloads, opened_like_the_originals
there, here = Path(sys.argv[1]), Path(sys.argv[2])
opened_like_the_originals(there)
payloads(here)
opened_like_the_originals(here)
"""


def corpus() -> list[Any]:
    """What takes either way, and what takes none."""
    one = bytes(range(256)) * (BIG // 256)
    base = torch.arange(64.0)
    image = torch.arange(3 * 160 * 160).to(torch.uint8).reshape(3, 160, 160)
    return [
        None,
        ["text", b"bytes", 5, 2**70, {"a": 1.5}],
        [one, "x", one, bytes(bytearray(one)), b"\x95" + bytes(8) + one, bytearray(one), "y" * BIG],
        (one, np.frombuffer(one, np.uint8), torch.arange(BIG)),
        [base, base[8:16], base.view(8, 8).t()],
        image,
        (image, 4, -1.5, None, True),
        (image.permute(1, 2, 0), 2**70),
        (torch.ones(3), 1),
        (torch.ones(3), "a text"),
        torch.nn.Parameter(torch.ones(2)),
        torch.eye(4).to_sparse(),
        [np.arange(5), np.asfortranarray(np.eye(3)), np.arange(3).astype(np.longdouble)],
    ]


def payloads(folder: Path) -> None:
    """Writes each object of the corpus as it travels, packed as a batch and as a sample."""
    for number, obj in enumerate(corpus()):
        for name, (table, frames) in {"batch": encode(obj), "sample": encode_sample(obj)}.items():
            content = msgspec.msgpack.encode((table, [bytes(frame) for frame in frames]))
            (folder / f"{number}.{name}").write_bytes(content)


def opened_like_the_originals(folder: Path) -> None:
    """Opens what another process, or this, has written."""
    for number, obj in enumerate(corpus()):
        for name in ("batch", "sample"):
            table, frames = msgspec.msgpack.decode(
                (folder / f"{number}.{name}").read_bytes(), type=tuple[PayloadTable, list[bytes]]
            )
            assert told(decode(table, frames)) == told(obj), (number, name)
    samples = [(torch.full((3, 120, 120), value), value) for value in range(3)]
    travelled = [(table, list(map(_writable, frames))) for table, frames in map(encode_sample, samples)]
    batch = collate_payloads(travelled) or collate_samples([decode(*one) for one in travelled])
    assert told(batch) == told(collate_samples(samples))


def _writable(frame: Any) -> memoryview:
    return memoryview(bytearray(frame))


def told(obj: Any) -> Any:
    """An object as what can be compared."""
    if isinstance(obj, torch.Tensor):
        dense = obj.to_dense() if obj.is_sparse else obj
        return type(obj), obj.dtype, obj.layout, dense.tolist()
    if isinstance(obj, np.ndarray):
        return obj.dtype, obj.flags.fnc, obj.tolist()
    if isinstance(obj, list | tuple):
        return type(obj), [told(item) for item in obj]
    return type(obj), obj


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus as this process packs it: with big bytes objects apart, and the common samples by the short cut."""
    folder = tmp_path_factory.mktemp("payloads")
    payloads(folder)
    assert len((folder / "2.batch").read_bytes()) > 4 * BIG
    opened_like_the_originals(folder)
    return folder


@pytest.mark.parametrize("break_", BREAKS)
def test_the_plain_way_gives_the_same_and_says_so_once(break_: str, here: Path, tmp_path: Path) -> None:
    broken, said = BREAKS[break_]
    done = run_interpreter(PROGRAM.format(broken=broken), str(here), str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(said) == 1
    opened_like_the_originals(tmp_path)


def test_where_pickles_are_known_the_quick_ways_are_taken() -> None:
    table, _ = encode([bytes(BIG)])
    assert [place.size for place in table.buffers] == [BIG]
    _, frames = encode_sample((torch.ones(3), 1))
    assert pickle.FRAME not in bytes(frames[0])[:3]

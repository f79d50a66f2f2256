"""Arrays in the pool: every row as numpy has it, from memory or from storage, and what cannot be held is refused."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, get_worker_info

from tests.new_process import held_by_child
from tests.pool.pool_servers import inner_server, server
from tests.shared_cluster import PATIENCE_S, wait
from torch_dpflow import DPFlowDataLoader
from torch_dpflow.cluster.security.connection_file import generate_keys, write_connection_file
from torch_dpflow.errors import (
    ChecksumError,
    MissingExtraError,
    ObjectMissingError,
    OptionError,
    OptionTypeError,
    TruncatedObjectError,
)
from torch_dpflow.pool import ArraySource, DataClient, PooledArray, open_array
from torch_dpflow.pool.array_files import array_identity, array_layout
from torch_dpflow.pool.planning.layout import ArrayLayout
from torch_dpflow.pool.transport.address import find_address

ROWS = np.arange(5000 * 30, dtype=np.float32).reshape(5000, 5, 6)


def saved(path: Path, content: Any = ROWS, **how: Any) -> Path:
    np.save(path, content, **how)
    return path


def as_numpy(rows: object) -> np.ndarray[Any, Any]:
    return rows.numpy() if isinstance(rows, torch.Tensor) else np.asarray(rows)


def test_rows_come_from_memory_also_without_the_file(tmp_path: Path, client: DataClient) -> None:
    source = open_array(saved(tmp_path / "rows.npy"))
    info = client.preload(source)
    assert (info.records, info.placed, info.loaded, info.failed) == (5000, 5000, 5000, 0)
    (tmp_path / "rows.npy").unlink()
    chosen = np.random.default_rng(1).integers(-5000, 5000, 1000)
    found = client.read_batch(source, chosen.tolist())
    assert isinstance(found, torch.Tensor)
    assert np.array_equal(found.numpy(), ROWS[chosen])
    assert torch.equal(torch.as_tensor(client.read(source, -1)), torch.from_numpy(ROWS[-1]))
    assert client.read_batch(source, []).shape == (0, 5, 6)
    assert (client.dataset(source).hits, client.dataset(source).misses) == (1001, 0)
    client.unload(source)


def test_arrays_of_two_endpoints_are_one_only_by_their_etag() -> None:
    """Their URLs, sizes and times of change may be equal."""

    def identities(state: str) -> set[bytes]:
        given: list[dict[str, Any]] = [
            {},
            {"endpoint": "http://one"},
            {"endpoint": "http://other", "key": "x"},
            {"endpoint": "http://other", "key": "y"},
            {"client_kwargs": {"endpoint_url": "http://third"}},
        ]
        sources = [
            ArraySource(ref="x", url="s3://data/x.npy", options=options, dtype="<f4", shape=[4], stamp=f"144 {state}")
            for options in given
        ]
        return {*map(array_identity, sources)}

    assert len(identities("Thu, 01 Jan 2026 00:00:00 GMT")) == 4
    assert len(identities('"0123"')) == 1


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    records=st.integers(1, 40),
    shape=st.lists(st.integers(1, 300), max_size=2).filter(lambda shape: np.prod(shape) < 60_000),
    dtype=st.sampled_from(["u1", "<f4", ">f8", "?", "<c16", "S7", "<U3", "<M8[s]"]),
    seed=st.integers(0, 99),
)
def test_rows_of_any_form_are_those_of_numpy(
    tmp_path: Path, client: DataClient, records: int, shape: list[int], dtype: str, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    numbers = chance.integers(0, 2, (records, *shape))
    content = numbers.astype(dtype)
    source = open_array(saved(tmp_path / "any.npy", content))
    with closing(PooledArray(source, tmp_path / "p", silence_s=PATIENCE_S)) as rows:
        client.preload(source)
        chosen = chance.integers(0, records, 17)
        found = as_numpy(rows.read_batch(chosen))
        assert found.dtype == content.dtype
        assert np.array_equal(found, content[chosen])
        assert (rows.hits, rows.misses) == (17, 0)
    client.close()
    client.unload(source)


@given(
    records=st.integers(1, 400),
    shape=st.lists(st.integers(1, 9), max_size=2),
    stripe_bytes=st.integers(400, 3000),
    block_bytes=st.integers(1, 900),
)
def test_blocks_of_rows_lie_in_stripes_of_whole_rows(
    records: int, shape: list[int], stripe_bytes: int, block_bytes: int
) -> None:
    rows = ArrayLayout(b"n" * 16, records, "float32", shape, stripe_bytes, block_bytes)
    blocks = rows.blocks()
    assert int(blocks.lengths.sum()) == records * rows.record_bytes
    assert blocks.stripes == rows.stripes
    for stripe in range(rows.stripes):
        own, offsets = blocks.records_of(stripe), blocks.offsets(stripe).tolist()
        assert int(blocks.lengths[own].sum()) <= stripe_bytes
        assert [row // rows.per_block for row in rows.records_of(stripe)[:: rows.per_block]] == [*own]
        for row in rows.records_of(stripe):
            block = row // rows.per_block
            assert (row % rows.per_block + 1) * rows.record_bytes <= blocks.lengths[block]
            if rows.per_block > 1 and rows.per_block * rows.record_bytes % 64 == 0:  # no space between blocks
                offset = offsets[block - own.start] + row % rows.per_block * rows.record_bytes
                assert offset == (row - rows.records_of(stripe).start) * rows.record_bytes


def test_loaders_and_processes_get_the_same_rows(tmp_path: Path, client: DataClient) -> None:
    source = open_array(saved(tmp_path / "rows.npy"))
    with closing(PooledArray(source, tmp_path / "p", silence_s=PATIENCE_S)) as rows:
        for _ in range(2):
            loader = DPFlowDataLoader(rows, batch_size=512, shuffle=True, num_workers=2)
            found = torch.cat([*loader])
            assert torch.equal(found[found[:, 0, 0].argsort()], torch.from_numpy(ROWS))
        wait(lambda: [one.loaded for one in client.cached_datasets()] == [5000], what="the implicit set")
        with closing(pickle.loads(pickle.dumps(rows))) as other:
            assert torch.equal(other.read_batch([7]), torch.from_numpy(ROWS[7:8]))


class KeepsRows(Dataset[Any]):
    def __init__(self, array: Dataset[Any]) -> None:
        self.array, self.kept = array, dict[int, Any]()

    def __getitems__(self, indices: list[int]) -> list[Any]:
        new = [one for one in indices if one not in self.kept]
        self.kept.update(zip(new, self.array.__getitems__(new) if new else []))  # type: ignore[attr-defined]
        return [self.kept[one] for one in indices]


def keep_rows(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.dataset = KeepsRows(info.dataset.dataset)


def test_rows_that_a_worker_has_come_to_keep_stay_as_they_were(tmp_path: Path) -> None:
    rows = np.arange(32 * 4096, dtype=np.float32).reshape(32, 4096)
    np.save(tmp_path / "rows.npy", rows)
    array = PooledArray(open_array(tmp_path / "rows.npy"), tmp_path / "nobody")
    loader = DPFlowDataLoader(
        Subset(array, range(32)),
        batch_size=16,
        num_workers=1,
        persistent_workers=True,
        worker_init_fn=keep_rows,
    )
    for _ in range(2):
        for batch, expected in zip(loader, np.split(rows, 2)):
            assert np.array_equal(batch, expected)
            batch.zero_()


def test_batches_that_are_held_while_it_forks_or_shared_stay_as_they_were(tmp_path: Path) -> None:
    rows = np.arange(64 * 4096, dtype=np.float32).reshape(64, 4096)
    np.save(tmp_path / "rows.npy", rows)
    array = PooledArray(open_array(tmp_path / "rows.npy"), tmp_path / "nobody")
    batches = iter(DPFlowDataLoader(array, batch_size=4, num_workers=1))
    held = [next(batches)]
    alone = array.read_batch([0, 1])
    view = np.asarray(alone)
    alone.share_memory_()
    with held_by_child("os.fork", lambda: np.array_equal(held[0], rows[:4])) as looked:
        held.clear()
        assert [batch[0, 0].item() for batch in batches] == [*rows[4::4, 0]]
        assert looked()
    assert np.array_equal(view, rows[:2])


def test_a_directory_that_others_may_enter_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    np.save(tmp_path / "rows.npy", np.arange(8))
    source, place = open_array(tmp_path / "rows.npy"), tmp_path / "p"

    def read() -> list[str]:
        caplog.clear()
        for _ in range(2):
            array = PooledArray(source, place)
            assert array.read_batch([3]).tolist() == [3]
            assert len([*DPFlowDataLoader(array, batch_size=4, num_workers=1)]) == 2
            array.close()
        return [record.message for record in caplog.records if record.levelno >= logging.WARNING]

    assert read() == [], "no server is no mistake"
    place.mkdir()
    place.chmod(0o750)
    (warning,) = read()
    assert warning.startswith("the pool is not used, and samples are read from storage: ")
    assert f"{place} must be a directory of this user that no other user may enter (mode 0700)" in warning
    assert read() == []


def test_a_directory_that_others_may_enter_later_is_warned_of_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    np.save(tmp_path / "rows.npy", np.arange(8))
    place = tmp_path / "p"
    place.mkdir(mode=0o700)
    array = PooledArray(open_array(tmp_path / "rows.npy"), place)
    place.chmod(0o755)
    for row in range(3):
        assert array.read_batch([row]).tolist() == [row]
    array.close()
    (record,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert "is read from storage for now: " in record.message
    assert "(mode 0700)" in record.message


def test_a_killed_server_costs_no_row(tmp_path: Path) -> None:
    source = open_array(saved(tmp_path / "rows.npy"))
    address = tmp_path / "p"
    with closing(PooledArray(source, address, silence_s=PATIENCE_S)) as rows:
        assert np.array_equal(as_numpy(rows.read_batch(range(9))), ROWS[:9])  # there is no server yet
        rows.close()
        with server(address) as process:
            DataClient(address, silence_s=PATIENCE_S).preload(source)
            assert np.array_equal(as_numpy(rows.read_batch(range(9))), ROWS[:9])
            assert rows.hits == 9
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            assert np.array_equal(as_numpy(rows.read_batch(range(5000))), ROWS)


def test_a_file_that_is_replaced_is_never_mixed(tmp_path: Path, client: DataClient) -> None:
    path = saved(tmp_path / "rows.npy")
    source = open_array(path)
    client.preload(source)
    saved(path, ROWS + 1)
    os.utime(path, ns=(1, 1))
    assert np.array_equal(as_numpy(client.read_batch(source, range(5000))), ROWS)  # what is held is the old one
    anew = open_array(path)
    assert array_identity(anew) != array_identity(source)
    client.preload(anew)
    assert np.array_equal(as_numpy(client.read_batch(anew, range(5000))), ROWS + 1)
    client.unload(source)
    with pytest.raises(ChecksumError, match="was written again after the dataset was opened"):
        client.read(source, 3)
    info = client.preload(source, on_error="skip")
    assert (info.loaded, info.failed) == (0, 5000)
    path.unlink()
    with pytest.raises(ObjectMissingError):
        open_array(path)


def test_arrays_of_any_storage(client: DataClient) -> None:
    with fsspec.open("memory://arrays/rows.npy", "wb") as file:
        np.save(file, ROWS)
    source = open_array("memory://arrays/rows.npy")
    try:
        client.preload(source)
        assert np.array_equal(as_numpy(client.read_batch(source, range(5000))), ROWS)
    finally:
        fsspec.filesystem("memory").rm("/arrays/rows.npy")


def test_datasets_of_hdf5_files(tmp_path: Path, client: DataClient) -> None:
    h5py = pytest.importorskip("h5py", reason="the extra hdf5 is not installed")
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file.create_dataset("train/x", data=ROWS, chunks=(64, 5, 6), compression="gzip")
        file["train/y"] = np.arange(10)
    source = open_array(tmp_path / "rows.h5", path="train/x")
    info = client.preload(source)
    assert (info.loaded, info.failed) == (5000, 0)
    chosen = np.random.default_rng(1).integers(0, 5000, 100)
    assert np.array_equal(as_numpy(client.read_batch(source, chosen.tolist())), ROWS[chosen])
    client.unload(source)
    assert np.array_equal(as_numpy(client.read_batch(source, chosen.tolist())), ROWS[chosen])
    for path in ("", "train", "nothing"):
        with pytest.raises(OptionError, match=r"give path=, one of \['train/x', 'train/y'\]"):
            open_array(tmp_path / "rows.h5", path=path)


def test_an_hdf5_file_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    (tmp_path / "rows.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    with pytest.raises(MissingExtraError, match=r"pip install 'torch_dpflow\[hdf5\]'"):
        open_array(tmp_path / "rows.h5", path="x")


@pytest.mark.parametrize(
    ("content", "kind", "says"),
    [
        (np.float32(1), OptionError, "single number .0-d., and has no records; give it a first dimension"),
        (np.zeros((0, 3)), OptionError, "records=0"),
        (np.zeros((3, 0)), OptionError, "records have no bytes; give at least one"),
        (np.asfortranarray(np.ones((3, 4))), OptionError, "Fortran order.*numpy.ascontiguousarray"),
        (np.array([{}, 1], dtype=object), OptionTypeError, "Python objects or has fields; give"),
        (np.zeros(3, dtype=[("a", "f4")]), OptionTypeError, "Python objects or has fields; give"),
        (
            np.zeros(3, dtype=[("\u65e5", "f4")]),
            OptionError,
            r"version 3.0 of the .npy format.* such as one for each field",
        ),
        (np.zeros(3, dtype=[(f"{n:040}", "f4") for n in range(500)]), OptionError, "header that is damaged, or longer"),
        (
            np.zeros((1, (64 << 20) + 1), "u1"),
            OptionError,
            "at most 67,108,864 are allowed; have more and smaller",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Stored array in format 3.0")
def test_arrays_that_cannot_be_held(tmp_path: Path, content: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        open_array(saved(tmp_path / "rows.npy", content))


def test_files_that_are_no_arrays(tmp_path: Path) -> None:
    (tmp_path / "text.npy").write_bytes(b"no array at all")
    with pytest.raises(OptionError, match=r"neither a \.npy file .* nor an HDF5 file"):
        open_array(tmp_path / "text.npy")
    path = saved(tmp_path / "rows.npy")
    (tmp_path / "cut.npy").write_bytes(path.read_bytes()[:40])
    with pytest.raises(OptionError, match=r"cut\.npy has a \.npy header that is damaged"):
        open_array(tmp_path / "cut.npy")
    with pytest.raises(OptionError, match="leave out path='x'"):
        open_array(path, path="x")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TruncatedObjectError, match="600,127 bytes of 600,128"):
        open_array(path)


def test_what_a_client_claims_is_checked(client: DataClient) -> None:
    claimed = ArraySource(ref="x", url="/none", dtype="<f4", shape=[1 << 40, 1 << 7], stamp="", start=0)
    with pytest.raises(OptionError, match="are too many; split the array"):
        array_layout(claimed)
    for changes in ({"dtype": "O"}, {"dtype": "no type"}, {"shape": []}):
        wrong = ArraySource(**{"ref": "x", "url": "/none", "dtype": "<f4", "shape": [3], "stamp": "", **changes})
        with pytest.raises((OptionError, OptionTypeError)):
            array_layout(wrong)
    assert client.cached_datasets() == []


def test_rows_come_over_a_network_too(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    write_connection_file(keys, generate_keys("", certificates=True))
    source = open_array(saved(tmp_path / "rows.npy"))
    listen = find_address("tcp://127.0.0.1:0", keys)
    with inner_server(tmp_path / "p", 64 << 20, listen=listen) as serving:
        (tmp_path / "p").rename(tmp_path / "q")  # as in another container, so that its memory cannot be mapped
        with closing(DataClient(str(serving.address), connection=keys, silence_s=PATIENCE_S)) as client:
            client.preload(source)
            (tmp_path / "rows.npy").unlink()
            chosen = np.random.default_rng(1).integers(-5000, 5000, 300)
            assert np.array_equal(as_numpy(client.read_batch(source, chosen.tolist())), ROWS[chosen])
            assert (client.dataset(source).hits, client.dataset(source).misses) == (300, 0)

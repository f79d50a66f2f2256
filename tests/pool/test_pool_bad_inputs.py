"""What users and peers may give by mistake: refused early and whole, and nothing else is disturbed."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from tests.datasets.samples_source import Numbered, numbers, publish
from torch_dpflow import PooledDataset
from torch_dpflow.cli.main import root
from torch_dpflow.datasets import DatasetStore, Draft, StoredDataset
from torch_dpflow.datasets.importers import Item, make_importer
from torch_dpflow.errors import (
    DatasetError,
    MessageError,
    OptionError,
    OptionTypeError,
    PoolFullError,
    StorageError,
    UsageError,
)
from torch_dpflow.flows import DataLoadFlow, LocalDataLoadFlowReader
from torch_dpflow.pool import DataClient, PooledArray, open_array
from torch_dpflow.pool.messages import (
    DatasetSource,
    GetRecordStates,
    OpenDataset,
    PreloadDataset,
    PushStripe,
)
from torch_dpflow.pool.sources import identity_of
from torch_dpflow.pool.transport.control_connection import (
    REQUESTS,
    Channel,
    PoolConnection,
)

COUNT = 40


def test_numbers_of_samples_and_rows(stored: StoredDataset, client: DataClient, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(COUNT))
    rows = open_array(tmp_path / "rows.npy")
    client.preload(stored)
    client.preload(rows)
    expected: list[tuple[PooledDataset | PooledArray, Callable[[int], Any]]] = [
        (client.dataset(stored), lambda number: numbers(COUNT)[number]),
        (client.dataset(rows), lambda number: torch.tensor(number % COUNT)),
    ]
    for dataset, one in expected:
        for number in (0, -1, -COUNT, True, np.int64(3), torch.tensor(3)):
            assert dataset[number] == one(int(number))  # type: ignore[index]
        assert [*dataset.__getitems__([3, 3, 5])] == [one(3), one(3), one(5)]
        assert [*dataset.__getitems__([])] == []
        for number in (COUNT, -COUNT - 1, 1 << 70, -(1 << 70)):
            with pytest.raises(IndexError, match=f"{number} is out of range; .* has {COUNT}"):
                dataset.__getitems__([0, number])
        for number in (1.0, "1", None):
            with pytest.raises(TypeError):
                dataset[number]  # type: ignore[index]
    many = np.random.default_rng(1).integers(-COUNT, COUNT, 1_000_000)
    assert np.array_equal(np.asarray(client.read_batch(rows, many)), many % COUNT)
    for wrong in (np.array([[1, 2]]), np.array(1), np.array([1.0]), np.array([True]), torch.tensor([True, False])):
        with pytest.raises(OptionTypeError, match="one dimension of whole numbers"):
            client.read_batch(rows, wrong)  # type: ignore[call-overload]
    with pytest.raises(OptionTypeError, match="has a bool"):  # a mask, which would be rows 1 and 0
        client.read_batch(rows, [True, False])


def test_what_is_no_dataset(stored: StoredDataset, client: DataClient) -> None:
    for wrong in (None, "core/numbers:v1:train", 3):
        for act in (client.preload, client.unload, client.dataset, client.samples):
            with pytest.raises(OptionTypeError, match=r"give what DatasetStore\.open, open_array or"):
                act(wrong)  # type: ignore[operator]
    for options in ({"fit": "half"}, {"on_error": "ignore"}):
        with pytest.raises(OptionError, match='give "all" or "part", and "raise" or "skip"'):
            client.preload(stored, **options)  # type: ignore[arg-type]
    assert client.cached_datasets() == []


def test_versions_and_names_that_there_are_not(store: DatasetStore, client: DataClient, tmp_path: Path) -> None:
    stored = publish(store, Numbered(COUNT))
    draft = Draft(store, "core/begun", "v1")
    (tmp_path / "files" / "a").mkdir(parents=True)
    (tmp_path / "files" / "a" / "0.JPEG").write_bytes(b"x")
    draft.add("train", make_importer("imagefolder", str(tmp_path / "files"), {}))
    for target, says in [
        ("core/numbers:v9", "core/numbers has versions"),
        ("core/numbers:v1:other", "it has ['train']"),
        ("core/begun:v1", "its import has begun and not ended"),
        ("core/none:v1", "there is no dataset core/none"),
        ("core/numbers:v1:train:x", "at most namespace/name:version:variant"),
        ("../numbers:v1", "there is no such file"),
        ("core/numbers:..", "is no name of a dataset"),
    ]:
        options = ["--store", store.url, "--address", str(tmp_path / "p")]
        result = CliRunner().invoke(root, ["pool", "preload", target, *options])
        assert result.exit_code == 1
        assert says in result.output
    for target in ("../numbers:v1", "core/..:v1", ""):
        with pytest.raises(OptionError, match="is no name of a dataset"):
            DataLoadFlow("example/numbers", version=1).dataset(f"pool://{target}")
        with pytest.raises(OptionError, match="is no name of a dataset"):
            client.push(target, [1, 2])
    for target in ("core/numbers:v1\n", "core/a\nb:v1", "core/numbers:v1\x1b[2J"):
        for act in (partial(client.push, target, [1, 2]), partial(store.open, target)):
            with pytest.raises(OptionError, match=r"^'.*' is no name of a dataset") as refused:
                act()
            assert str(refused.value).isprintable()
    for url, path in ((tmp_path / "a\nb.npy", ""), (tmp_path / "a.h5", "x\x1b[2J")):
        with pytest.raises(OptionError, match="has a line break or another control character") as refused:
            open_array(url, path=path)
        assert str(refused.value).isprintable()
    assert client.cached_datasets() == []
    for name in ("store.json", "core/numbers/versions/v1.json"):
        file = tmp_path / "datasets" / name
        file.write_text(json.dumps({**json.loads(file.read_text()), "format": 2}))
        with pytest.raises(DatasetError, match="format 2"):
            client.preload(stored)  # which the server opens
    assert client.cached_datasets() == []


def test_flows_read_what_no_pool_has(
    store: DatasetStore, stored: StoredDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPFLOW_POOL", str(tmp_path / "none"))
    flow = DataLoadFlow("example/numbers", version=1).dataset("pool://core/numbers:v1:train")
    mapped = flow.prepare_read(LocalDataLoadFlowReader(store)).to_mapped()
    assert mapped.__getitems__([1, 2]) == numbers(COUNT)[1:3]
    mapped._samples._samples.close()


def test_files_that_are_empty_huge_or_of_unknown_length(
    store: DatasetStore, client: DataClient, tmp_path: Path
) -> None:
    for number, content in enumerate((b"first", b"", b"third")):
        (tmp_path / f"{number}").write_bytes(content)
    with open(tmp_path / "3", "wb") as file:
        file.truncate(5 << 30)  # which takes no space
    paths = [f"file://{tmp_path}/{number}" for number in range(4)]
    known = [Item(path=path, length=Path(path[7:]).stat().st_size) for path in paths]
    stored = publish(store, known, name="core/known")
    with pytest.raises(PoolFullError, match="5,368,709,"):
        client.preload(stored)
    info = client.preload(stored, fit="part")
    assert (info.records, info.failed) == (4, 0)
    assert info.placed < 4
    assert [one for one, _ in client.read_batch(stored, [0, 1, 2])] == [b"first", b"", b"third"]
    unknown = publish(store, [Item(path=path) for path in paths[:3]], name="core/unknown")
    with pytest.raises(StorageError, match="lengths are not known"):
        client.preload(unknown)
    info = client.preload(unknown, on_error="skip")
    assert (info.loaded, info.failed) == (0, 3)
    assert [one for one, _ in client.read_batch(unknown, [0, 1, 2])] == [b"first", b"", b"third"]


def test_a_cluster_refuses_what_its_server_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(root, ["up", "--pool-memory", "100TiB"])
    assert result.exit_code == 1
    assert "--pool-memory" in result.output
    monkeypatch.setenv("DPFLOW_POOL", "tcp://127.0.0.1:7070")
    result = CliRunner().invoke(root, ["up", "--pool-memory", "1MiB"])
    assert result.exit_code == 1
    assert "a server needs a directory of this host" in result.output


def test_requests_for_what_is_not_there(stored: StoredDataset, client: DataClient, tmp_path: Path) -> None:
    client.preload(stored)
    identity = identity_of(stored)
    with PoolConnection(tmp_path / "p") as connection:
        for first in (1, 1 << 62, -5):
            _, fds = connection.request(OpenDataset(identity, first))
            assert fds == [] or first < 0
            for fd in fds:
                os.close(fd)
        for records in ([1 << 62], [COUNT], [-1], [0] * 4097):
            with pytest.raises(UsageError, match="that exist are allowed"):
                connection.request(GetRecordStates(identity, records))
        for stripe in (0, -1, 1 << 40):
            with pytest.raises(UsageError):
                connection.request(PushStripe(identity, stripe))
    assert client.read_batch(stored, range(COUNT)) == numbers(COUNT)


def test_a_message_is_nested_as_deep_with_every_python() -> None:
    source = DatasetSource(store="/s", ref="a/b:v1:c", options={"a": "b"})
    message = msgspec.msgpack.encode(PreloadDataset(source=source, identity=bytes(16), is_explicit=True, whole=True))
    assert message.count(b"\xa1a\xa1b") == 1
    ours, theirs = socket.socketpair()
    with ours, theirs:
        receiver = Channel(ours)
        for levels in (90, 101, 500, 5_000):
            packet = message.replace(b"\xa1a\xa1b", b"\xa1a" + b"\x81\xa1a" * levels + b"\x00")
            theirs.sendall(struct.pack("<I", len(packet)) + packet)
            if levels == 90:
                request, _ = receiver.receive(REQUESTS)
                assert isinstance(request, PreloadDataset)
            else:
                with pytest.raises(MessageError, match="nested deeper than 100 levels"):
                    receiver.receive(REQUESTS)

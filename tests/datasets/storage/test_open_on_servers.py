"""`open_dataset` on S3 and on a web server: listings instead of requests for each object, and objects that change."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.datasets.formats.tars import members_of, samples_of, write_tar
from tests.datasets.formats.test_lit_rows import ROWS, write_rows
from tests.datasets.formats.test_packed import with_offsets, words
from tests.datasets.formats.test_tfrecord import example, record
from tests.datasets.storage.ftp_server import FTPServer
from tests.datasets.storage.servers import BUCKET, S3_KEYS, s3_client
from tests.datasets.storage.web_server import WebServer, serve_ranges
from tests.later import Later
from tests.support.oss_server import OSSServer, StoredObject
from torch_dpflow.datasets import open_dataset
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.importers.sources import find_sources
from torch_dpflow.datasets.index import Index
from torch_dpflow.datasets.reader import OpenedDataset
from torch_dpflow.datasets.storage import ReadOptions
from torch_dpflow.datasets.storage.file_systems import fsspec_options
from torch_dpflow.datasets.tables import TableDataset
from torch_dpflow.errors import ChecksumError, ObjectMissingError, OptionError, SourceError

models, responses = Later("moto.s3.models"), Later("moto.s3.responses")
_names = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def servers_first(s3_endpoint: str) -> None:
    """What lives as long as the session is not left behind by the test that first asks for it."""


@pytest.fixture
def options(s3_endpoint: str) -> Iterator[dict[str, Any]]:
    given = {**S3_KEYS, "endpoint_url": s3_endpoint}
    yield given
    files = fsspec.filesystem("s3", **fsspec_options("s3", given))
    if files._s3 is not None:
        files.close_session(files.loop, files._s3)


@pytest.fixture
def oss_options(oss: OSSServer) -> Iterator[dict[str, Any]]:
    given = oss.storage_options()
    yield given
    files = fsspec.filesystem("oss", **given)
    files._session.session.close()
    type(files).clear_instance_cache()


@pytest.fixture
def put(s3_endpoint: str) -> Iterator[Callable[[str, bytes], None]]:
    """Write an object."""
    client = s3_client(s3_endpoint)
    yield lambda key, data: client.put_object(Bucket=BUCKET, Key=key, Body=data)
    client.close()


def shard(tmp_path: Path, first: int, seed: int = 0) -> bytes:
    return write_tar(tmp_path / "shard.tar", members_of(samples_of(first, 10, seed))).read_bytes()


def test_shards_on_s3(tmp_path: Path, options: dict[str, Any], put: Callable[[str, bytes], None]) -> None:
    folder = f"shards-{next(_names)}"
    for number in range(3):
        put(f"{folder}/train-{number:03d}.tar", shard(tmp_path, number * 10))
    samples = samples_of(0, 10) + samples_of(10, 10) + samples_of(20, 10)
    for name in ("train-{000..002}.tar", "train-*.tar", ""):
        dataset = open_dataset(
            f"s3://{BUCKET}/{folder}/{name}".rstrip("/"), storage_options=options, index_dir=tmp_path / "index"
        )
        assert dataset.__getitems__([0, 29, 11]) == [samples[0], samples[29], samples[11]]
        dataset.close()


@pytest.mark.parametrize("name", ["", "/", "/a-*.tar", "/a-0.tar", "/a-{0..2}.tar", "/a-{00..39}.tar", "/folder"])
def test_a_missing_bucket_is_named(
    name: str, options: dict[str, Any], oss_options: dict[str, Any], tmp_path: Path
) -> None:
    for scheme, given in (("s3", options), ("oss", oss_options)):
        with pytest.raises((SourceError, ObjectMissingError), match=f"{scheme}://nowhere.* 404 NoSuchBucket") as raised:
            open_dataset(f"{scheme}://nowhere{name}", storage_options=given, index_dir=tmp_path / "index")
        assert "endpoint and the region" in str(raised.value)
    with pytest.raises(ObjectMissingError, match=r"s3://nowhere: .* 404 NoSuchBucket"):
        TableDataset(f"s3://nowhere{name.rpartition('/')[0]}/*.parquet", storage_options=options)


def test_a_bucket_without_matching_objects(
    options: dict[str, Any], oss: OSSServer, oss_options: dict[str, Any], tmp_path: Path
) -> None:
    for url, given in ((f"s3://{BUCKET}", options), (f"oss://{BUCKET}", oss_options)):
        with pytest.raises(SourceError, match=rf"nothing matches {url}/no/a-\*.tar: {url}/no is missing or empty"):
            open_dataset(f"{url}/no/a-*.tar", storage_options=given, index_dir=tmp_path / "index")
        with pytest.raises(SourceError, match=rf"there is no {url}/no; the storage answered 404 NoSuchKey"):
            open_dataset(f"{url}/no", storage_options=given, index_dir=tmp_path / "index")
    oss.buckets.create("empty")
    with pytest.raises(OptionError, match=r"oss://empty \(no files\) has no format"):
        open_dataset("oss://empty", storage_options=oss_options, index_dir=tmp_path / "index")


def test_an_object_that_grew_is_to_be_opened_again(
    tmp_path: Path, options: dict[str, Any], put: Callable[[str, bytes], None]
) -> None:
    name = f"grown-{next(_names)}.tfrecord"
    records = record(example({"n": [1]}))
    put(name, records)
    url = f"s3://{BUCKET}/{name}"
    dataset = open_dataset(url, storage_options=options, index_dir=tmp_path / "index")
    put(name, records * 2)
    with pytest.raises(ChecksumError, match=rf"{url} .*it was replaced or cut short: .*open it again if it is read in"):
        dataset[0]
    dataset.close()
    assert len(open_dataset(url, storage_options=options, index_dir=tmp_path / "index")) == 2


def test_building_the_index_fills_the_disk_cache(
    tmp_path: Path, options: dict[str, Any], put: Callable[[str, bytes], None], s3_endpoint: str
) -> None:
    """The pass reads whole shards, so that the first epoch need not read them again."""
    folder = f"filled-{next(_names)}"
    for number in range(2):
        put(f"{folder}/a-{number}.tar", shard(tmp_path, number * 10))
    reading = ReadOptions(cache_dir=tmp_path / "cache")
    how: dict[str, Any] = {"storage_options": options, "index_dir": tmp_path / "index", "read_options": reading}
    open_dataset(f"s3://{BUCKET}/{folder}", **how).close()
    client = s3_client(s3_endpoint)
    for number in range(2):
        client.delete_object(Bucket=BUCKET, Key=f"{folder}/a-{number}.tar")
    client.close()
    (name,) = (path.name for path in tmp_path.glob("index/joined/*"))
    index = Index.open(Files(tmp_path / "index"), name)
    reads_nothing = OpenedDataset(index, storage_options=options, read_options=reading)
    assert reads_nothing.__getitems__(range(20)) == samples_of(0, 10) + samples_of(10, 10)
    reads_nothing.close()


def test_a_sample_in_the_disk_cache_passes_few_functions(
    tmp_path: Path, options: dict[str, Any], put: Callable[[str, bytes], None]
) -> None:
    key = f"walk-{next(_names)}/0.tar"
    put(key, shard(tmp_path, 0))
    reading = ReadOptions(cache_dir=tmp_path / "cache", concurrency=1)  # all in this thread
    how: dict[str, Any] = {"storage_options": options, "index_dir": tmp_path / "index", "read_options": reading}
    dataset: Any = open_dataset(f"s3://{BUCKET}/{key}", **how)
    expected, passed = dataset[3], list[str]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("torch_dpflow."):
            passed.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        found = dataset[3]
    finally:
        sys.setprofile(None)
    dataset.close()
    assert found == expected
    assert passed.count("cache_key") == 2  # of both members
    assert len(passed) <= 38


def test_an_object_replaced_by_one_of_the_same_size(
    tmp_path: Path, options: dict[str, Any], put: Callable[[str, bytes], None]
) -> None:
    key = f"replaced-{next(_names)}.tar"
    before, after = shard(tmp_path, 0), bytearray(shard(tmp_path, 0))
    mask = samples_of(0, 10)[4]["mask.png"]
    assert isinstance(mask, bytes)
    at = after.index(mask)
    after[at : at + 300] = bytes(300)
    url = f"s3://{BUCKET}/{key}"
    put(key, before)
    opened = open_dataset(url, storage_options=options, index_dir=tmp_path / "index")
    put(key, bytes(after))
    with pytest.raises(ChecksumError, match=key):
        opened[4]
    anew = open_dataset(url, storage_options=options, index_dir=tmp_path / "index")
    assert anew[4]["mask.png"] == bytes(300)
    opened.close()
    anew.close()


def test_an_index_is_of_one_endpoint(tmp_path: Path) -> None:
    """Names, sizes and times of change are equal, so the index of one would have wrong labels for the other."""
    modified = datetime(2026, 1, 1, tzinfo=timezone.utc)
    with OSSServer() as one, OSSServer() as other:
        for server, names in ((one, ["cat", "dog"]), (other, ["dog", "cat"])):
            members = [(f"{name}.bin", name.encode() * 10) for name in names]
            data = write_tar(tmp_path / "0.tar", members).read_bytes()
            server.buckets.create("mirror")
            server.buckets.put("mirror", "x/0.tar", StoredObject(data=data, content_type="binary", modified=modified))
            options = server.storage_options()
            with closing(
                open_dataset("oss://mirror/x", index_dir=tmp_path / "index", storage_options=options)
            ) as dataset:
                assert [dataset[0], dataset[1]] == [{"__key__": name, "bin": name.encode() * 10} for name in names]
            files = fsspec.filesystem("oss", **options)
            files._session.session.close()
            type(files).clear_instance_cache()
    assert len([*(tmp_path / "index" / "joined").iterdir()]) == 2


def test_a_missing_object_is_named(tmp_path: Path, options: dict[str, Any], put: Callable[[str, bytes], None]) -> None:
    folder = f"missing-{next(_names)}"
    put(f"{folder}/a-0.tar", shard(tmp_path, 0))
    for last in (1, 99):  # by a request for each, and by a listing
        with pytest.raises(SourceError, match=rf"there is no s3://{BUCKET}/{folder}/a-1\.tar"):
            find_sources(f"s3://{BUCKET}/{folder}/a-{{0..{last}}}.tar", options)


@pytest.mark.slow
def test_ten_thousand_objects_are_listed(
    options: dict[str, Any], put: Callable[[str, bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = f"many-{next(_names)}"
    put(f"{folder}/notes", b"")
    store = next(iter(models.s3_backends.values()))["aws"]  # a request for each would take minutes
    for number in range(10_000):
        store.put_object(BUCKET, f"{folder}/a-{number:05d}.tar", b"")
    listed: list[str] = []
    answer = responses.S3Response.list_objects_v2

    def counted(self: Any) -> Any:
        listed.append("")
        return answer(self)

    monkeypatch.setattr(responses.S3Response, "list_objects_v2", counted)
    monkeypatch.setattr(responses.S3Response, "head_object", None)
    found = find_sources(f"s3://{BUCKET}/{folder}/a-{{00000..09999}}.tar", options)
    assert len(found.files) == 10_000
    assert all(file.state is not None for file in found.files)
    assert 1 <= len(listed) <= 20


def test_shards_on_a_web_server(tmp_path: Path) -> None:
    contents = {f"/a-{number}.tar": shard(tmp_path, number * 10) for number in range(2)}
    with WebServer(lambda request: serve_ranges(contents[request.path])(request)) as web:
        dataset = open_dataset(f"{web.url}/a-{{0..1}}.tar", index_dir=tmp_path / "index")
        assert dataset.__getitems__([19, 0]) == [samples_of(10, 10)[9], samples_of(0, 10)[0]]
        dataset.close()


def _of_letter(letter: bytes, kind: str, tmp_path: Path) -> tuple[bytes, dict[str, Any]]:
    """Return an object, of one size for all letters, and its sample."""
    if kind == "tfrecord":
        return record(example({"cls": [letter], "bin": [letter * 600]})), {"cls": [letter], "bin": [letter * 600]}
    members = [("0.bin", letter * 600), ("0.cls", letter)]
    content = write_tar(tmp_path / "made", members).read_bytes()
    return content, {"__key__": "0", "bin": letter * 600, "cls": letter}


@pytest.mark.parametrize("checksum", [None, "crc32"])
@pytest.mark.parametrize("kind", ["webdataset", "tfrecord"])
def test_an_object_without_a_state_is_indexed_at_each_opening(tmp_path: Path, kind: str, checksum: Any) -> None:
    """The others of the list are not; equal content has one index, and each index stays for its readers."""
    made = {letter: _of_letter(letter, kind, tmp_path) for letter in (b"A", b"B", b"S")}
    answers = {"/stated": serve_ranges(made[b"S"][0], ETag='"1"')}
    how: dict[str, Any] = {"index_dir": tmp_path / "index", "checksum": checksum, "format": kind}
    with WebServer(lambda request: answers[request.path](request)) as web:
        opened: dict[bytes, Any] = {}
        for letter in (b"A", b"A", b"B", b"A", b"B"):
            answers["/none"] = serve_ranges(made[letter][0])
            before = len(web.requests)
            if letter in opened:  # an old index that is found again is not swept
                os.utime(tmp_path / "index" / "joined" / opened[letter].stored.name, (0, 0))
            dataset = open_dataset([f"{web.url}/none", f"{web.url}/stated"], **how)
            looks = [request for request in web.requests[before:] if request["path"] == "/stated"]
            assert len(looks) <= 3 if not opened else len(looks) == 1
            first = opened.setdefault(letter, dataset)
            assert first.stored.ref == dataset.stored.ref
            for one in (dataset, first, pickle.loads(pickle.dumps(first))):
                assert one.__getitems__([0, 1]) == [made[letter][1], made[b"S"][1]]
                one.close()
    assert len([*tmp_path.rglob("joined/*")]) == 2
    assert len([*tmp_path.rglob("parts/*/*")]) == 3


@pytest.mark.parametrize("compression", [None, "gz"])
def test_shards_of_mds_without_a_state_are_indexed_at_each_opening(tmp_path: Path, compression: str | None) -> None:
    column = {"column_names": ["x"], "column_encodings": ["bytes"], "column_sizes": [None]}
    with FTPServer("me", "secret") as ftp:
        for letter in (b"A", b"B", b"A"):
            values = [b"ab", b"c"] if letter == b"A" else [b"a", b"bc"]
            raw = with_offsets([words(len(value)) + value for value in values])
            data = {"basename": "shard.00000.mds", "bytes": len(raw)}
            packed = {"basename": "shard.00000.mds.gz", "bytes": len(gzip.compress(raw, mtime=0))}
            entry = {"format": "mds", "version": 2, "compression": compression, "samples": 2, "raw_data": data}
            ftp.files["/mds/index.json"] = json.dumps(
                {"version": 2, "shards": [{**entry, **column, "zip_data": compression and packed}]}
            ).encode()
            name = "shard.00000.mds.gz" if compression else "shard.00000.mds"
            ftp.files[f"/mds/{name}"] = gzip.compress(raw, mtime=0) if compression else raw
            with closing(open_dataset(f"ftp://me:secret@{ftp.host}/mds", index_dir=tmp_path / "index")) as dataset:
                assert dataset.__getitems__([0, 1]) == [{"x": value} for value in values]
    assert len([*tmp_path.rglob("joined/*")]) == len([*tmp_path.rglob("parts/*/*")]) == 2
    assert len([*tmp_path.rglob("packs/*/*")]) == (2 if compression else 0)


def test_images_without_a_state_are_indexed_at_each_opening(tmp_path: Path) -> None:
    with FTPServer("me", "secret") as ftp:
        for letter in (b"A", b"B"):
            ftp.files["/images/cat/0.png"] = letter * 100
            url = f"ftp://me:secret@{ftp.host}/images"
            with closing(open_dataset(url, index_dir=tmp_path / "index", checksum="crc32")) as dataset:
                assert letter * 100 in dataset[0].values()


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.parametrize("query", ["", "?sig=a.b/c.d"])
def test_tables_on_a_web_server(tmp_path: Path, ending: str, query: str) -> None:
    """Which has no listing."""
    contents = {}
    for number in range(2):
        table, path = pa.table({"n": [10 * number, 10 * number + 1]}), tmp_path / f"{number}.{ending}"
        if ending == "parquet":
            pq.write_table(table, path)
        else:
            with pa.ipc.new_file(str(path), table.schema) as writer:
                writer.write_table(table)
        contents[f"/data/{path.name}{query}"] = path.read_bytes()
    with WebServer(lambda request: serve_ranges(contents[request.path])(request)) as web:
        urls = [f"{web.url}{path}" for path in contents]
        for source in (urls, f"{web.url}/data/{{0..1}}.{ending}{query}"):
            dataset: Any = open_dataset(source, format="table")
            assert dataset.__getitems__(range(4)) == [{"n": n} for n in (0, 1, 10, 11)]
            dataset.close()
        one: Any = TableDataset(urls[1])
        assert one[1] == {"n": 11}
        one.close()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("sv=1&se=2026-01-01&sig=SECRET/1&v=3", "sv=1&se=2027-01-01&sig=SECRET/2&v=3"),
        ("X-Amz-Date=1&v=3&X-Amz-Signature=SECRET1", "X-Amz-Date=2&v=3&X-Amz-Signature=SECRET2"),
        ("v=3&Expires=1&Signature=SECRET1&Key-Pair-Id=a", "v=3&Expires=2&Signature=SECRET2&Key-Pair-Id=a"),
    ],
)
@pytest.mark.parametrize("checksum", [None, "crc32"])
def test_signatures_are_not_stored_and_may_be_renewed(tmp_path: Path, first: str, second: str, checksum: Any) -> None:
    contents = {}
    for number in range(2):
        members = [(f"{number}{one}.bin", b"%d%d" % (number, one) * 1000) for one in range(10)]
        contents[f"/a/{number}.tar"] = write_tar(tmp_path / "shard.tar", members).read_bytes()
    allowed = [first]

    def answer(request: Any) -> None:
        path, _, query = request.path.partition("?")
        if query not in allowed:
            request.send_error(403)
            return
        serve_ranges(contents[path], ETag='"1"')(request)

    with WebServer(answer) as web:
        how: dict[str, Any] = {"index_dir": tmp_path / "index", "checksum": checksum, "format": "webdataset"}
        how["read_options"] = ReadOptions(cache_dir=tmp_path / "cache")
        expected = [{"__key__": key, "bin": key.encode() * 1000} for key in ("19", "00")]
        for query in (first, second):
            allowed[:] = [query]
            before = len(web.requests)
            dataset = open_dataset([f"{web.url}{path}?{query}" for path in contents], **how)
            if query == second:  # a look at each object
                assert len(web.requests) - before <= 4
            for one in (dataset, pickle.loads(pickle.dumps(dataset))):
                assert one.__getitems__([19, 0]) == expected
                one.close()
            if query == second and checksum is not None:  # all samples are in the disk cache
                assert len(web.requests) - before <= 4
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert not any(b"SECRET" in path.read_bytes() for path in files)
        assert all(b"v=3" in path.read_bytes() for path in (tmp_path / "index").glob("parts/*/*"))


def test_a_signed_object_is_looked_up_as_it_was_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Links with other parameters than a signature's are other objects; none is requested without its query."""
    queries = ("sr=16000&signature=abc", "sr=44100&signature=abc", "sv=1&sig=1&v=3")
    contents = {
        f"/get?{query}": write_tar(tmp_path / "s.tar", [("0.cls", query[:5].encode())]).read_bytes()
        for query in queries
    }

    def answer(request: Any) -> None:
        if request.path in contents:
            serve_ranges(contents[request.path], last_modified="Sun, 13 Sep 2020 12:26:40 GMT")(request)
        else:
            request.send_error(404)

    with WebServer(answer) as web:
        for query in queries:
            dataset = open_dataset(f"{web.url}/get?{query}", index_dir=tmp_path / "index", format="webdataset")
            assert dataset[0]["cls"] == query[:5].encode()
        assert {request["path"] for request in web.requests} <= contents.keys()
    assert "missing" not in caplog.text


@pytest.mark.parametrize("kind", ["webdataset", "tfrecord"])
@pytest.mark.parametrize("damage", [b"no archive" * 60, b""])
def test_errors_of_formats_print_no_signature(
    tmp_path: Path, kind: str, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with WebServer(serve_ranges(damage)) as web, pytest.raises(SourceError) as caught:
        open_dataset(f"{web.url}/a/0.tar?v=3&sig=SECRET", index_dir=tmp_path / "index", format=kind)
    assert "SECRET" not in f"{caught.value}{caplog.text}"
    assert "/a/0.tar?v=3" in str(caught.value)


def test_rows_of_litdata_on_s3(tmp_path: Path, options: dict[str, Any], put: Callable[[str, bytes], None]) -> None:
    folder = f"rows-{next(_names)}"
    write_rows(tmp_path / "data", compression="zstd")
    for path in (tmp_path / "data").iterdir():
        put(f"{folder}/{path.name}", path.read_bytes())
    dataset = open_dataset(f"s3://{BUCKET}/{folder}", storage_options=options)
    assert isinstance(dataset, TableDataset)
    with closing(dataset):
        assert dataset.__getitems__([1012, 600, 5]) == [ROWS[number] for number in (1012, 600, 5)]
        put(f"{folder}/chunk-0-0.bin", (tmp_path / "data" / "chunk-0-1.bin").read_bytes())
        with pytest.raises(ChecksumError, match=r"chunk-0-0\.bin"):
            dataset[300]
    with pytest.raises(SourceError, match=r"chunk-0-0\.bin .* the index says"):
        open_dataset(f"s3://{BUCKET}/{folder}", storage_options=options)

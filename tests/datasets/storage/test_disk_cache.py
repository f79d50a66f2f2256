"""The disk cache: fewer reads, never another byte, and no error that a run without it would not have."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from email.utils import formatdate
from pathlib import Path
from typing import Any

import fsspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.datasets.samples_source import Numbered, numbers, publish
from tests.datasets.storage.servers import BUCKET
from tests.datasets.storage.web_server import WebServer, serve_ranges
from tests.shared_cluster import wait
from tests.support.oss_server import OSSServer, StoredObject
from torch_dpflow.cli.main import root
from torch_dpflow.datasets import DatasetStore
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.datasets.storage import ByteRange, ObjectReader, ReadOptions, disk_cache
from torch_dpflow.datasets.storage.base import checksum_of
from torch_dpflow.datasets.storage.disk_cache import IDLE_S, DiskCache
from torch_dpflow.errors import ChecksumError, OptionError, OptionTypeError, StorageUnavailableError

COUNT = 40
BLOCK = 4096
#: The objects of the store, once they are published: copied to each test's server.
_OBJECTS: dict[str, StoredObject] = {}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def stored(s3_endpoint: str, oss: OSSServer) -> Iterator[Any]:
    """After the S3 server, which has fsspec's thread started once for all."""
    url, options = f"oss://{BUCKET}/datasets", oss.storage_options()
    if not _OBJECTS:
        publish(DatasetStore.create(url, **options), Numbered(COUNT))
        _OBJECTS.update(oss.buckets.page(BUCKET, prefix="", delimiter="", after="", limit=1000).objects)
    for key, one in _OBJECTS.items():
        oss.buckets.put(BUCKET, key, one)
    yield DatasetStore(url, **options).open("core/numbers:v1:train")
    files = fsspec.filesystem("oss", **oss.storage_options())
    files._session.session.close()
    type(files).clear_instance_cache()


def _entries(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and path.parent.parent.parent == directory]


def _read(stored: Any, **options: Any) -> list[Any]:
    with_cache = DatasetReader(stored, read_options=ReadOptions(**options))
    found = with_cache.__getitems__(range(COUNT))
    with_cache.close()
    return found


def test_a_second_run_reads_nothing_from_the_storage(stored: Any, oss: OSSServer, directory: Path) -> None:
    assert _read(stored, cache_dir=directory) == numbers(COUNT)
    oss.close()  # this host has the metadata too
    assert _read(stored, cache_dir=directory, deadline_s=1.0) == numbers(COUNT)


def test_the_environment_names_the_directory(
    stored: Any, oss: OSSServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPFLOW_CACHE_DIR", str(directory))
    assert _read(stored) == numbers(COUNT)
    oss.close()
    assert _read(stored, deadline_s=1.0) == numbers(COUNT)
    monkeypatch.setenv("DPFLOW_CACHE_DIR", "s3://bucket/cache")
    with pytest.raises(OptionError, match="DPFLOW_CACHE_DIR='s3://bucket/cache': give the path of a directory"):
        _read(stored)


def test_single_reads_use_it_too(stored: Any, oss: OSSServer, directory: Path) -> None:
    reader = DatasetReader(stored, read_options=ReadOptions(cache_dir=directory, deadline_s=1.0))
    assert [reader[number] for number in range(COUNT)] == numbers(COUNT)
    oss.close()
    assert [reader[number] for number in range(COUNT)] == numbers(COUNT)


def _damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    changed = {
        "flipped": bytes([data[0] ^ 1]) + data[1:],
        "cut": data[:-1],
        "empty": b"",
        "only zeros": bytes(len(data)),
        "longer": data + b"x",
        "footer": data[:-1] + bytes([data[-1] ^ 1]),
    }[how]
    path.write_bytes(changed)


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "only zeros", "longer", "footer"])
def test_a_damaged_entry_is_read_from_the_storage_again(stored: Any, directory: Path, how: str) -> None:
    _read(stored, cache_dir=directory)
    entries = _entries(directory)
    assert len(entries) == COUNT
    sound = {path: path.read_bytes() for path in entries}
    for path in entries:
        _damage(path, how)
    assert _read(stored, cache_dir=directory) == numbers(COUNT)
    assert {path: path.read_bytes() for path in _entries(directory)} == sound


def test_an_entry_of_another_key_is_not_given_out(directory: Path) -> None:
    cache = DiskCache(str(directory))
    cache.put("one", b"first")
    cache.put("other", b"second")
    one, other = sorted(_entries(directory), key=lambda path: path.stat().st_size)
    other.write_bytes(one.read_bytes())
    assert cache.get("one") == b"first"
    assert cache.get("other") is None


def test_an_entry_that_is_no_file_is_as_if_it_were_not_there(directory: Path) -> None:
    cache = DiskCache(str(directory))
    cache.put("one", b"first")
    (entry,) = _entries(directory)
    entry.unlink()
    entry.mkdir()
    assert cache.get("one") is None
    cache.put("one", b"first")
    assert cache.get("one") is None
    entry.rmdir()
    entry.symlink_to("/etc/hostname")
    assert cache.get("one") is None


def test_bytes_without_an_identity_are_not_kept(oss: OSSServer, directory: Path) -> None:
    oss.buckets.put(BUCKET, "x", StoredObject(data=b"first", content_type="binary"))
    with ObjectReader(oss.storage_options(), options=ReadOptions(cache_dir=directory)) as reader:
        assert reader.read(f"oss://{BUCKET}/x") == b"first"
        oss.buckets.put(BUCKET, "x", StoredObject(data=b"other", content_type="binary"))
        assert reader.read(f"oss://{BUCKET}/x") == b"other"
    assert not _entries(directory)


def test_bytes_that_do_not_match_their_checksum_are_not_kept(stored: Any, oss: OSSServer, directory: Path) -> None:
    """The error goes away with its cause."""
    page = oss.buckets.page(BUCKET, prefix="", delimiter="", after="", limit=1000)
    objects = [key for key, _ in page.objects if "/data/" in key]
    sound = {key: oss.buckets.get(BUCKET, key).data for key in objects}
    for key, data in sound.items():
        oss.buckets.put(BUCKET, key, StoredObject(data=bytes(len(data)), content_type="binary"))
    with pytest.raises(ChecksumError):
        _read(stored, cache_dir=directory)
    for key, data in sound.items():
        oss.buckets.put(BUCKET, key, StoredObject(data=data, content_type="binary"))
    assert _read(stored, cache_dir=directory) == numbers(COUNT)


def test_two_endpoints_with_equal_names_do_not_mix(directory: Path) -> None:
    with OSSServer() as one, OSSServer() as other:
        for server, content in ((one, b"of one"), (other, b"of other")):
            server.buckets.create(BUCKET)
            server.buckets.put(BUCKET, "x", StoredObject(data=content, content_type="binary"))
            with ObjectReader(server.storage_options(), options=ReadOptions(cache_dir=directory)) as reader:
                span = ByteRange(f"oss://{BUCKET}/x", checksum=checksum_of(content, "crc32"))
                for _ in range(2):
                    assert reader.read_many([span]) == [content]


def test_two_endpoints_of_a_vendors_client_with_equal_states_do_not_mix(directory: Path, s3_endpoint: str) -> None:
    modified = datetime(2026, 1, 1, tzinfo=timezone.utc)
    with OSSServer() as one, OSSServer() as other:
        for server, content in ((one, b"of one"), (other, b"of two")):
            server.buckets.create(BUCKET)
            server.buckets.put(BUCKET, "x", StoredObject(data=content, content_type="binary", modified=modified))
            options = {**server.storage_options(), "skip_instance_cache": True}
            with ObjectReader(options, options=ReadOptions(cache_dir=directory)) as reader:
                span = ByteRange(f"oss://{BUCKET}/x", state=formatdate(modified.timestamp(), usegmt=True))
                try:
                    assert [reader.read_many([span]) for _ in range(2)] == [[content]] * 2
                finally:
                    reader._opened.get().place(span.url).storage._files._session.session.close()  # type: ignore[attr-defined]
    assert len(_entries(directory)) == 2


def test_two_endpoints_of_one_host_with_equal_states_do_not_mix(directory: Path) -> None:
    for content in (b"of one", b"of two"):
        with WebServer(serve_ranges(content, ETag='"1"')) as web:
            options = {"anon": True, "endpoint": web.url}
            with ObjectReader(options, options=ReadOptions(cache_dir=directory)) as reader:
                for span in (ByteRange("s3://data/x", 0, 6, state='"1"'), ByteRange("s3://data/x", state='"1"')):
                    assert [reader.read_many([span]), reader.read_many([span, span])] == [[content], [content] * 2]


def test_local_files_are_not_copied(tmp_path: Path, directory: Path) -> None:
    (tmp_path / "x").write_bytes(b"content")
    span = ByteRange(f"file://{tmp_path}/x", checksum=checksum_of(b"content", "crc32"))
    with ObjectReader(options=ReadOptions(cache_dir=directory)) as reader:
        assert reader.read_many([span]) == [b"content"]
    assert not _entries(directory)


@given(sizes=st.lists(st.integers(0, 3 * BLOCK), max_size=30), limit=st.integers(1, 12 * BLOCK))
@settings(max_examples=30)
def test_the_limit_holds_and_what_is_kept_stays(
    sizes: list[int], limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("cache")
    directory.chmod(0o700)
    kept: dict[str, bytes] = {}
    for number, size in enumerate(sizes):
        cache = DiskCache(str(directory), limit)  # as another process
        cache.put(str(number), bytes([number]) * size)
        if cache.get(str(number)) is not None:
            kept[str(number)] = bytes([number]) * size
        usage = cache.usage()
        assert usage.bytes <= limit
        assert usage.entries == len(kept)
    assert all(cache.get(key) == data for key, data in kept.items())


def test_entries_that_are_not_read_make_room(directory: Path) -> None:
    cache = DiskCache(str(directory), limit=2 * BLOCK)
    cache.put("old", b"old")
    cache.put("used", b"used")
    long_ago = time.time() - IDLE_S - 10
    for path in _entries(directory):
        os.utime(path, (long_ago, long_ago))
    assert cache.get("used") == b"used"
    # One directory is searched at a time.
    for number in range(300):
        cache = DiskCache(str(directory), limit=2 * BLOCK)
        cache._searched = {n: time.time() for n in range(256) if n != number % 256}
        cache.put("new", b"new")
    assert cache.get("new") == b"new"
    assert cache.get("used") == b"used"
    assert cache.get("old") is None


def test_what_a_killed_writer_reserved_is_returned(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = os.fork()
    if not child:
        monkeypatch.setattr(disk_cache, "_write", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        DiskCache(str(directory), limit=4 * BLOCK).put("lost", bytes(3 * BLOCK - 100))
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    cache = DiskCache(str(directory), limit=4 * BLOCK)
    cache.put("first", b"1")
    for _ in range(256):  # a full cache searches one directory at each attempt
        cache._paused_until = 0.0
        cache.put("second", b"2")
    assert (cache.get("first"), cache.get("second")) == (b"1", b"2")
    cache._paused_until = 0.0
    cache.put("too large", bytes(3 * BLOCK - 100))
    assert cache.get("too large") is None


def test_entries_of_a_version_that_counted_otherwise_are_counted(directory: Path) -> None:
    DiskCache(str(directory)).put("old", bytes(5000))
    (counts,) = directory.glob("*/counts")
    counts.unlink()
    cache = DiskCache(str(directory), limit=2 * BLOCK)
    cache.put("new", b"new")
    assert (cache.get("old"), cache.get("new")) == (bytes(5000), None)


def test_a_full_disk_stops_writing_and_nothing_else(
    stored: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted = directory
    mounted.mkdir(mode=0o700)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(mounted)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("mounting a small file system takes root")
    try:
        options = ReadOptions(cache_dir=mounted, cache_bytes="1GiB")
        reader = DatasetReader(stored, read_options=options)
        assert reader.__getitems__(range(COUNT)) == numbers(COUNT)
        assert 0 < len(_entries(mounted)) < COUNT
        assert reader.__getitems__(range(COUNT)) == numbers(COUNT)
        subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
        assert _read(stored, cache_dir=mounted) == numbers(COUNT)
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)


def test_without_a_limit_a_tenth_of_the_disk_stays_free(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs

    def nearly_full(path: str) -> Any:
        found = list(real(path))
        found[4] = found[2] // 11  # f_bavail of f_blocks
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", nearly_full)
    cache = DiskCache(str(directory))
    cache.put("one", b"first")
    assert cache.get("one") is None


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_directory_that_others_may_write_to_is_not_used(
    stored: Any, directory: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    directory.mkdir()
    directory.chmod(mode)
    assert _read(stored, cache_dir=directory) == numbers(COUNT)
    assert "other users may write to the directory" in caplog.text
    assert not _entries(directory)


def test_a_directory_that_cannot_be_made_is_warned_of(
    stored: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert _read(stored, cache_dir=tmp_path / "file" / "cache") == numbers(COUNT)
    assert "Samples are read from storage instead" in caplog.text


def _content(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest() * (1 + number % 400)


def _use(directory: str, seed: int) -> None:
    cache = DiskCache(directory, limit=200 * BLOCK)
    draw = random.Random(seed)
    for _ in range(400):
        number = draw.randrange(300)
        data = cache.get(str(number))
        if data is None:
            cache.put(str(number), _content(number))
        elif data != _content(number):
            sys.exit(f"wrong bytes of {number}")


@pytest.mark.parametrize("count", [8, 32])
def test_processes_that_share_it_and_are_killed_get_no_wrong_byte(directory: Path, count: int) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_use, args=(str(directory), seed)) for seed in range(count)]
    for process in processes:
        process.start()
    cache = DiskCache(str(directory), limit=200 * BLOCK)
    wait(lambda: cache.usage().entries >= 50, what="entries of several processes")
    for process in processes[::2]:
        process.kill()
    for process in processes:
        process.join()
    assert {process.exitcode for process in processes} <= {0, -signal.SIGKILL}
    assert all(process.exitcode == 0 for process in processes[1::2])
    for process in processes:
        process.close()
    assert cache.usage().bytes <= 200 * BLOCK
    for number in range(300):
        assert cache.get(str(number)) in (None, _content(number))


_HOLD = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def held(directory: Path) -> Iterator[Callable[[], None]]:
    """The lock of the count is held by a process that does nothing."""
    started: list[subprocess.Popen[bytes]] = []

    def hold() -> None:
        (count,) = directory.glob("*/counts")
        program = [sys.executable, "-c", _HOLD, str(count)]
        process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        started.append(process)

    yield hold
    for process in started:
        process.communicate()


def test_a_process_that_is_frozen_as_it_counts_stops_nobody(directory: Path, held: Callable[[], None]) -> None:
    cache = DiskCache(str(directory), limit=10 * BLOCK)
    cache.put("one", b"first")
    held()
    cache.put("two", b"second")
    assert cache.get("one") == b"first"
    assert cache.get("two") is None


def test_it_is_shown_and_cleared(stored: Any, directory: Path) -> None:
    _read(stored, cache_dir=directory)
    runner = CliRunner()
    shown = runner.invoke(root, ["cache", "show", "--directory", str(directory), "--json"])
    assert shown.exit_code == 0, shown.output
    facts = json.loads(shown.stdout)
    assert facts["entries"] == len(_entries(directory)) == COUNT
    assert facts["bytes"] >= BLOCK * COUNT
    plain = runner.invoke(root, ["cache", "show"], env={"DPFLOW_CACHE_DIR": str(directory)})
    assert f"samples   {facts['entries']}" in plain.stdout
    keep = directory / "other"
    keep.write_text("of the user")
    cleared = runner.invoke(root, ["cache", "clear", "--directory", str(directory), "--json"])
    assert json.loads(cleared.stdout)["removed"] == facts["entries"]
    assert not _entries(directory)
    assert keep.read_text() == "of the user"
    again = runner.invoke(root, ["cache", "show", "--directory", str(directory), "--json"])
    assert json.loads(again.stdout)["entries"] == 0
    assert _read(stored, cache_dir=directory) == numbers(COUNT)
    assert len(_entries(directory)) == facts["entries"]


def test_showing_a_directory_that_is_no_cache_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "images/cat").mkdir(parents=True)
    for command in ("show", "clear"):
        shown = CliRunner().invoke(root, ["cache", command, "--directory", str(tmp_path / "images")])
        assert shown.exit_code == 0
        assert os.listdir(tmp_path / "images") == ["cat"]
        missing = CliRunner().invoke(root, ["cache", command, "--directory", str(tmp_path / "none")])
        assert (missing.exit_code != 0, os.listdir(tmp_path)) == (True, ["images"])


def test_clearing_at_the_moment_of_a_write_loses_only_that_entry(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = DiskCache(str(directory))
    link = os.link

    def cleared_before(source: str, target: str) -> None:
        monkeypatch.setattr(os, "link", link)
        cache.clear()
        link(source, target)

    monkeypatch.setattr(os, "link", cleared_before)
    cache.put("one", b"first")
    assert cache.get("one") is None
    cache.put("two", b"second")
    assert cache.get("two") == b"second"
    assert not caplog.records


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"cache_dir": 3}, OptionTypeError, "cache_dir=3"),
        ({"cache_dir": ""}, OptionError, "cache_dir=''"),
        ({"cache_dir": "s3://bucket/cache"}, OptionError, "local disk"),
        ({"cache_dir": "a\0b"}, OptionError, "null byte"),
        ({"cache_dir": b"/tmp/x"}, OptionTypeError, "cache_dir="),
        ({"cache_bytes": 0}, OptionError, "cache_bytes=0"),
        ({"cache_bytes": "many"}, OptionError, "is no size"),
        ({"cache_bytes": 1.5}, OptionTypeError, "cache_bytes=1.5"),
    ],
)
def test_options_that_are_not_understood_are_refused(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ReadOptions(**options)


def test_an_error_of_the_storage_stays_one(stored: Any, oss: OSSServer, directory: Path) -> None:
    reader = DatasetReader(stored, read_options=ReadOptions(cache_dir=directory, deadline_s=0.5, attempts=1))
    reader.__getitems__(range(4))
    oss.close()
    with pytest.raises(StorageUnavailableError):
        reader.__getitems__(range(COUNT))

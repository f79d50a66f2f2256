"""Objects that are replaced while a dataset is open: an error by name, and never a mixture of old and new."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from email.utils import formatdate
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.datasets.formats.tars import write_tar
from tests.datasets.storage.web_server import WebServer, reply, serve_ranges
from torch_dpflow.datasets import open_dataset
from torch_dpflow.datasets.storage import ByteRange, ObjectReader, ReadOptions
from torch_dpflow.datasets.storage.base import (
    conditions,
    is_settled,
    is_state_of_entry,
    is_state_of_fields,
    is_state_of_file,
    state_of_entry,
    state_of_fields,
    state_of_file,
)
from torch_dpflow.errors import ChecksumError, TruncatedObjectError

OLD, NEW = formatdate(1_700_000_000, usegmt=True), formatdate(1_700_000_001, usegmt=True)
#: Headers of the object before and after, of servers that check no condition of a request.
SERVERS = {
    "strong": ({"ETag": '"1"', "Last-Modified": OLD}, {"ETag": '"2"', "Last-Modified": OLD}),
    "weak": ({"ETag": 'W/"1"'}, {"ETag": 'W/"2"'}),
    "date": ({"Last-Modified": OLD}, {"Last-Modified": NEW}),
    "weak and date": ({"ETag": 'W/"1"', "Last-Modified": OLD}, {"ETag": 'W/"1"', "Last-Modified": NEW}),
    "no longer any": ({"ETag": '"1"'}, {}),
    "obsolete dates": (
        {"Last-Modified": "Tuesday, 14-Nov-23 22:13:20 GMT"},
        {"Last-Modified": "Tue Nov 14 22:13:21 2023"},
    ),
    "the tag of all objects": ({"ETag": '""', "Last-Modified": OLD}, {"ETag": '""', "Last-Modified": NEW}),
}


def tar(path: Path, label: int) -> bytes:
    """Return a tar of two samples, all of one size; in the index are labels, and images are read in place."""
    members = [
        (f"{number}.{ending}", content)
        for number in range(2)
        for ending, content in (("cls", str(label).encode()), ("jpg", bytes([label]) * 600), ("bin", bytes(600)))
    ]
    return write_tar(path, members).read_bytes()


def of_headers(headers: dict[str, str]) -> str | None:
    return state_of_fields({name.lower(): value for name, value in headers.items()})


class _Web:
    def __init__(self, headers: tuple[dict[str, str], dict[str, str]]) -> None:
        self.server = WebServer(lambda handler: self.answer(handler))
        self.answers = headers

    def put(self, data: bytes, state: int) -> str:
        self.answer = serve_ranges(data, **self.answers[state])
        return f"{self.server.url}/a.tar"


@pytest.fixture(params=["replace", "in place", "in place, old time", "memory", *SERVERS])
def put(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[bytes, int], str]]:
    """Writes the first (0) or the second (1) state of one object, and returns its URL."""
    path = tmp_path / "data/a.tar"
    path.parent.mkdir()

    def local(data: bytes, state: int) -> str:
        if request.param == "replace":
            (tmp_path / "new").write_bytes(data)
            os.replace(tmp_path / "new", path)
        else:
            path.write_bytes(data)
        if request.param != "in place":
            os.utime(path, ns=(1, 1))
        return f"file://{path}"

    def memory(data: bytes, state: int) -> str:
        fsspec.filesystem("memory").pipe_file("/replaced/a.tar", data)
        return "memory://replaced/a.tar"

    if request.param in SERVERS:
        web = _Web(SERVERS[request.param])
        with web.server:
            yield web.put
    else:
        yield memory if request.param == "memory" else local
        if request.param == "memory":
            fsspec.filesystem("memory").rm("/replaced", recursive=True)


def test_no_image_of_the_new_file_gets_a_label_of_the_old_one(
    put: Callable[[bytes, int], str], tmp_path: Path, patient: ReadOptions
) -> None:
    how: dict[str, Any] = {"index_dir": tmp_path / "index", "read_options": patient}
    url = put(tar(tmp_path / "made.tar", 3), 0)
    with closing(open_dataset(url, **how)) as opened:
        assert [(sample["cls"], sample["jpg"][0]) for sample in opened.__getitems__([0, 1])] == [(b"3", 3)] * 2
        put(tar(tmp_path / "made.tar", 5), 1)
        for _ in range(2):
            with pytest.raises(ChecksumError, match=r"a\.tar.*written again"):
                opened[0]
    with closing(open_dataset(url, **how)) as again:
        assert [(sample["cls"], sample["jpg"][0]) for sample in again.__getitems__([0, 1])] == [(b"5", 5)] * 2


def test_a_file_that_is_written_in_place_during_a_read_gives_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.tar"
    tar(path, 3)
    new, read = tar(tmp_path / "made.tar", 5), os.pread

    def read_half(descriptor: int, length: int, position: int) -> bytes:
        half = read(descriptor, -(-length // 2), position)
        with open(path, "r+b") as file:
            file.write(new)
        return half

    with closing(open_dataset(path, index_dir=tmp_path / "index")) as opened:
        monkeypatch.setattr("os.pread", read_half)
        with pytest.raises(ChecksumError, match=r"a\.tar.*written again"):
            opened[0]


@pytest.mark.parametrize("headers", [{}, {"ETag": '"1"'}, {"Last-Modified": OLD}])
@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_response_of_another_size_is_of_another_object(
    headers: dict[str, str], has_ranges: bool, tmp_path: Path, patient: ReadOptions
) -> None:
    web = _Web((headers, headers))
    whole = tar(tmp_path / "made.tar", 3)
    with web.server:
        url = web.put(whole, 0)
        with closing(open_dataset(url, index_dir=tmp_path / "index", read_options=patient)) as opened:
            web.server.requests.clear()
            assert opened[0] == {"__key__": "0", "cls": b"3", "jpg": bytes([3]) * 600, "bin": bytes(600)}
            assert len(web.server.requests) == 1
            for other in (tar(tmp_path / "made.tar", 5) + bytes(512), tar(tmp_path / "made.tar", 5)[:-512]):
                web.answer = serve_ranges(other, **headers)
                if not has_ranges:
                    web.answer = lambda handler, body=other: reply(handler, 200, body, **headers)  # type: ignore[misc]
                with pytest.raises(
                    (ChecksumError, TruncatedObjectError), match=f"has {len(other)} bytes, .* {len(whole)};"
                ):
                    opened[0]


@pytest.mark.parametrize("kind", ["strong", "weak and date", "date"])
def test_the_disk_cache_keeps_what_was_checked_alone(kind: str, tmp_path: Path, patient: ReadOptions) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    old, new = b"old" * 100, b"new" * 100
    web = _Web(SERVERS[kind])
    limits = ReadOptions(**{**vars(patient), "cache_dir": tmp_path / "cache"})
    with web.server, ObjectReader(options=limits) as reader:
        span = ByteRange(web.put(old, 0), 0, 200, state=of_headers(web.answers[0]))
        web.put(new, 1)
        with pytest.raises(ChecksumError):
            reader.read_many([span])
        web.put(old, 0)
        assert reader.read_many([span]) == [old[:200]]  # from the server, as the cache has nothing
        web.answer = lambda handler: reply(handler, 503)
        assert reader.read_many([span]) == [old[:200]]  # from the cache


def test_an_object_without_a_state_is_read_after_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    web = _Web(({}, {}))
    with web.server:
        url = web.put(tar(tmp_path / "made.tar", 1), 0)
        for number in range(2):
            with closing(open_dataset(url, index_dir=tmp_path / str(number))) as opened:
                assert opened[1]["cls"] == b"1"
        assert [record.message.split(" reports")[0] for record in caplog.records] == [web.server.url]


def test_a_weak_etag_is_no_condition_and_names_no_entry_of_the_cache() -> None:
    assert conditions('"a"') == {"if-match": '"a"'}
    assert conditions('W/"a"') == {}
    assert conditions(f'W/"a" {OLD}') == {"if-unmodified-since": OLD}
    assert conditions("1 2 3") == conditions("mtime=1.0") == {}
    assert [is_settled(state) for state in ('"a"', OLD, 'W/"a"', f'W/"a" {OLD}', "mtime=1.0", "1 2 3")] == [
        True, True, False, True, False, False,
    ]  # fmt: skip
    assert not is_settled(formatdate(usegmt=True))


_tags = st.one_of(
    st.none(), st.builds('{}"{}"'.format, st.sampled_from(["", "W/"]), st.text("abc", min_size=1, max_size=3))
)
_dates = st.one_of(st.none(), st.integers(0, 2**31).map(lambda seconds: formatdate(seconds, usegmt=True)))
_fields = st.builds(
    lambda tag, date: {name: value for name, value in (("etag", tag), ("last-modified", date)) if value is not None},
    _tags,
    _dates,
)


@given(one=_fields, other=_fields)
def test_a_state_is_that_of_the_same_answer_and_of_no_other(one: dict[str, str], other: dict[str, str]) -> None:
    state = state_of_fields(one)
    assert (state is None) == (not one)
    if state is not None:
        assert is_state_of_fields(state, one)
        is_strong = one.get("etag", "W/")[:2] != "W/"
        expected = other.get("etag") == one["etag"] if is_strong else all(other.get(name) == one[name] for name in one)
        assert is_state_of_fields(state, other) == expected


def test_a_listing_with_other_fields_than_the_look() -> None:
    """ossfs lists no ETag, but reports one of each object."""
    listed = state_of_entry({"LastModified": 1_700_000_000})
    assert listed == OLD
    assert is_state_of_entry(listed, {"LastModified": 1_700_000_000, "ETag": '"a"'})
    assert not is_state_of_entry(listed, {"LastModified": 1_700_000_001, "ETag": '"a"'})
    assert state_of_entry({"name": "x", "size": 1}) is None
    assert state_of_entry({"ETag": "abc"}) == '"abc"'  # some servers leave the quotes out


def test_a_mount_that_numbers_files_anew_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"x")
    found = os.stat(tmp_path / "x")
    assert state_of_file(found).split()[2] == str(found.st_ino)
    monkeypatch.setattr("torch_dpflow.datasets.storage.base._has_lasting_inodes", lambda device: False)
    assert state_of_file(found).split()[2] == "0"
    assert is_state_of_file(state_of_file(found), found)

"""The contract suite of storages: subclass `StorageContract`, give it a storage, and let pytest collect it.

::

    class TestMyStorage(StorageContract):
        @pytest.fixture
        def storage(self): ...

        @pytest.fixture
        def put(self): ...      # put(name, data) -> url
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from torch_dpflow.datasets.storage.base import ByteRange, Storage
from torch_dpflow.errors import AccessDeniedError, ChecksumError, ObjectMissingError, TruncatedObjectError

Put = Callable[[str, bytes], str]

#: Names that are escaped somewhere, or easily taken for something else.
AWKWARD_NAMES = (
    "plain.bin",
    "deep/down/here.bin",
    "with space.bin",
    "plus+and&equals=.bin",
    "percent%20.bin",
    "tilde~(1)'!*.bin",
    "日本-ü.bin",
    "question?mark#hash.bin",
)
_DATA = bytes(range(256)) * 40


class StorageContract:
    """The contract of `torch_dpflow.datasets.storage.base.Storage`, as tests."""

    def test_gives_the_bytes_of_an_object_whatever_its_name(self, storage: Storage, put: Put) -> None:
        for name in AWKWARD_NAMES:
            data = _DATA + name.encode()
            assert storage.fetch(ByteRange(put(name, data)), _soon()) == data, name

    def test_gives_exactly_the_range(self, storage: Storage, put: Put) -> None:
        url = put("ranged.bin", _DATA)
        for start, stop in ((0, 1), (0, 10), (5, 9), (9000, None), (10239, 10240)):
            assert storage.fetch(ByteRange(url, start, stop), _soon()) == _DATA[start:stop], (start, stop)

    def test_gives_an_empty_object(self, storage: Storage, put: Put) -> None:
        assert storage.fetch(ByteRange(put("empty.bin", b"")), _soon()) == b""

    def test_gives_an_object_of_megabytes(self, storage: Storage, put: Put) -> None:
        data = _DATA * 500
        assert storage.fetch(ByteRange(put("large.bin", data)), _soon()) == data

    def test_names_the_object_that_is_shorter_than_the_range(self, storage: Storage, put: Put) -> None:
        url = put("short.bin", _DATA)
        for start, stop in ((10239, 10241), (10, 20000), (20000, 20010)):
            refuses(storage.fetch, ByteRange(url, start, stop), TruncatedObjectError, r"short\.bin")

    def test_names_the_object_that_is_missing(self, storage: Storage, put: Put) -> None:
        url = put("there.bin", _DATA).replace("there", "missing")
        with pytest.raises(ObjectMissingError, match=r"missing\.bin"):
            storage.fetch(ByteRange(url), _soon())

    def test_looks_at_size_and_state_without_reading(self, storage: Storage, put: Put) -> None:
        for name in ("looked.bin", "empty.bin", "percent%20.bin"):
            data = b"" if name == "empty.bin" else _DATA
            span = ByteRange(put(name, data))
            found = storage.look(span, _soon())
            assert found.size == len(data)
            # The state and the size hold for reads of all kinds.
            whole = ByteRange(span.url, size=found.size, state=found.state)
            assert storage.look(whole, _soon()) == found
            assert storage.fetch(whole, _soon()) == data
        with pytest.raises(ObjectMissingError, match=r"missing\.bin"):
            storage.look(ByteRange(put("looked.bin", _DATA).replace("looked", "missing")), _soon())

    def test_refuses_an_object_that_was_replaced_by_one_of_its_size(self, storage: Storage, put: Put) -> None:
        url = put("replaced.bin", _DATA)
        found = storage.look(ByteRange(url), _soon())
        if found.state is None:
            pytest.skip("this storage reports no state of its objects")
        spans = [ByteRange(url, *span, state=found.state) for span in ((0, None), (5, None), (5, 9), (0, 1))]
        for span in spans:
            assert storage.fetch(span, _soon()) == _DATA[span.start : span.stop], span
        end = _soon()
        put("replaced.bin", _DATA[::-1])
        while storage.look(ByteRange(url), end) == found:  # a state in whole seconds
            put("replaced.bin", _DATA[::-1])
        for span in spans:
            for read in (storage.fetch, storage.look):
                refuses(read, span, ChecksumError, r"replaced\.bin.*written again")
            now = ByteRange(url, span.start, span.stop)
            assert storage.fetch(now, _soon()) == _DATA[::-1][span.start : span.stop], span

    def test_serves_many_threads(self, storage: Storage, put: Put) -> None:
        urls = [put(f"many/{number}.bin", bytes([number]) * 5000) for number in range(16)]

        def first_byte(turn: int) -> int:
            return storage.fetch(ByteRange(urls[turn % 16]), _soon())[0]

        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(first_byte, range(64))) == [turn % 16 for turn in range(64)]

    def test_can_be_used_after_close(self, storage: Storage, put: Put) -> None:
        url = put("again.bin", _DATA)
        storage.fetch(ByteRange(url), _soon())
        storage.close()
        assert storage.fetch(ByteRange(url), _soon()) == _DATA

    def test_names_a_node_for_each_url(self, storage: Storage, put: Put) -> None:
        one, other = put("a.bin", b"a"), put("b.bin", b"b")
        assert storage.node(one) == storage.node(other)


class PrivateStorageContract(StorageContract):
    """For storages that look at credentials. Its own fixture: `strange`, the same storage with wrong ones."""

    def test_names_the_object_that_may_not_be_read(self, strange: Storage, put: Put) -> None:
        url = put("private.bin", _DATA)
        with pytest.raises(AccessDeniedError, match=r"private\.bin"):
            strange.fetch(ByteRange(url), _soon())


def refuses(read: Callable[[ByteRange, float], object], span: ByteRange, error: type[Exception], says: str) -> None:
    """Check that a read fails with this error; name the range if it does not."""
    raised: Exception | None = None
    try:
        read(span, _soon())
    except error as one:
        raised = one
    assert re.search(says, str(raised)), (span, raised)


def _soon() -> float:
    return time.monotonic() + 30.0

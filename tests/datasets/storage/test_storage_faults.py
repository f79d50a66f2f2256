"""What a storage does wrong ends in a clear error or in the right bytes, and never in a hang."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.datasets.storage.servers import BUCKET
from tests.support.oss_server import Fault, OSSServer, StoredObject
from torch_dpflow.datasets.storage import ByteRange, ObjectReader, ReadOptions, object_reader
from torch_dpflow.datasets.storage.local import LocalStorage
from torch_dpflow.errors import (
    AccessDeniedError,
    ObjectMissingError,
    StorageError,
    StorageTimeoutError,
    StorageUnavailableError,
)

URL = f"oss://{BUCKET}/some/object.jpg"
DATA = bytes(range(256)) * 400
KINDS: dict[Fault, type[StorageError]] = {
    Fault.RESET: StorageUnavailableError,
    Fault.RESET_IN_BODY: StorageUnavailableError,
    Fault.HANG: StorageTimeoutError,
    Fault.TRICKLE: StorageTimeoutError,
    Fault.TRUNCATE: StorageUnavailableError,
    Fault.GARBAGE: StorageUnavailableError,
    Fault.FORBIDDEN: AccessDeniedError,
    Fault.OVERLOADED: StorageUnavailableError,
    Fault.BROKEN: StorageUnavailableError,
}
#: Those that are told by the time that they take; the others are told at once, however slow the machine is.
SILENT = (Fault.HANG, Fault.TRICKLE)
PATIENT = ReadOptions(timeout_s=60.0, deadline_s=60.0, attempts=3, backoff_s=0.01)
#: Options under which a hanging read ends soon, and others have ten times what they take.
LIMITED = ReadOptions(timeout_s=3.0, deadline_s=3.0, attempts=1)
PASSING = [fault for fault in KINDS if fault not in (Fault.FORBIDDEN, Fault.TRICKLE)]


@pytest.fixture
def server(oss: OSSServer) -> OSSServer:
    oss.buckets.put(BUCKET, "some/object.jpg", StoredObject(data=DATA, content_type="image/jpeg"))
    return oss


@pytest.fixture(params=["direct", "ossfs"])
def reader(request: pytest.FixtureRequest, server: OSSServer, impatient: ReadOptions) -> Iterator[ObjectReader]:
    """Through our own client, and through the vendor's."""
    options: dict[str, Any] = server.storage_options()
    if request.param == "ossfs":
        options |= {"skip_instance_cache": True}
    waits = request.node.callspec.params.get("fault") in SILENT
    with ObjectReader(options, options=impatient if waits else PATIENT) as reader:
        yield reader
        if request.param == "ossfs":
            reader._opened.get().place(URL).storage._files._session.session.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("fault", KINDS)
def test_a_fault_that_stays_ends_in_an_error_that_names_the_object(
    server: OSSServer, reader: ObjectReader, fault: Fault
) -> None:
    server.faults.add(fault)
    with pytest.raises(KINDS[fault], match=re.escape(URL)):
        reader.read(URL)


@pytest.mark.parametrize("fault", PASSING)
def test_a_fault_that_passes_is_not_seen(server: OSSServer, fault: Fault) -> None:
    server.faults.add(fault, times=2)
    timeout_s = 0.5 if fault in SILENT else 60.0
    options = ReadOptions(timeout_s=timeout_s, deadline_s=90.0, attempts=9, backoff_s=0.01)
    with ObjectReader(server.storage_options(), options=options) as reader:
        assert reader.read(URL) == DATA


@pytest.mark.parametrize("fault", [Fault.FORBIDDEN, None])
def test_what_cannot_pass_is_tried_once(server: OSSServer, reader: ObjectReader, fault: Fault | None) -> None:
    if fault is not None:
        server.faults.add(fault)
    with pytest.raises((AccessDeniedError, ObjectMissingError)):
        reader.read(URL if fault is not None else URL + ".not")
    assert len(server.requests) == 1


def test_the_message_tells_of_the_attempts(server: OSSServer, reader: ObjectReader) -> None:
    server.faults.add(Fault.OVERLOADED)
    with pytest.raises(StorageUnavailableError, match=r"attempt 3 of 3, \d"):
        reader.read(URL)
    assert len(server.requests) == 3


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.TRICKLE])
def test_a_read_ends_at_its_deadline(server: OSSServer, fault: Fault) -> None:
    server.faults.add(fault)
    options = ReadOptions(timeout_s=100.0, deadline_s=0.5)
    begun = time.monotonic()
    with (
        ObjectReader(server.storage_options(), options=options) as reader,
        pytest.raises(StorageTimeoutError),
    ):
        reader.read(URL)
    assert time.monotonic() - begun < 90.0  # the deadline, not the timeout


def test_a_connection_that_the_server_closed_meanwhile_costs_no_attempt(server: OSSServer) -> None:
    once = ReadOptions(attempts=1)
    with ObjectReader(server.storage_options(), options=once) as reader:
        assert reader.read(URL) == DATA
        server._http.cut_connections()
        assert reader.read(URL) == DATA
    assert server.connections == 2


def test_connections_are_used_again_even_after_an_error(server: OSSServer) -> None:
    with ObjectReader(server.storage_options()) as reader:
        for _ in range(10):
            reader.read(URL)
            reader.read(URL, 5, 9)
            with pytest.raises(ObjectMissingError):
                reader.read(URL + ".not")
    assert server.connections == 1


def test_a_server_that_is_not_there(patient: ReadOptions) -> None:
    options = {"endpoint": "http://127.0.0.1:9", "key": "k", "secret": "s"}
    with (
        ObjectReader(options, options=patient) as reader,
        pytest.raises(StorageUnavailableError, match=URL),
    ):
        reader.read(URL)


@pytest.mark.parametrize("url", [URL, "s3://bucket/x"])
def test_a_server_that_is_not_there_through_the_vendors_client(s3_endpoint: str, url: str) -> None:
    once = ReadOptions(attempts=1)
    options = {"endpoint": "http://127.0.0.1:9", "key": "k", "secret": "s", "skip_instance_cache": True}
    if url.startswith("s3"):
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1}}
    with (
        ObjectReader(options, options=once) as reader,
        pytest.raises(StorageUnavailableError, match=rf"{url}: .*; the connection failed \(attempt 1 of 1"),
    ):
        reader.read(url)


def test_a_host_that_has_no_address(patient: ReadOptions) -> None:
    options = {"endpoint": "http://nowhere.invalid", "key": "k", "secret": "s"}
    with (
        ObjectReader(options, options=patient) as reader,
        pytest.raises(StorageUnavailableError, match=URL),
    ):
        reader.read(URL)


def test_an_object_above_the_limit_is_refused_before_it_is_read(server: OSSServer) -> None:
    with ObjectReader(server.storage_options(), options=ReadOptions(longest=1000)) as reader:
        with pytest.raises(StorageError, match="102400 bytes are above the limit of 1000"):
            reader.read(URL)
        assert reader.read(URL, 0, 1000) == DATA[:1000]


def test_one_bad_object_costs_the_others_of_a_batch_nothing(server: OSSServer) -> None:
    for number in range(6):
        server.buckets.put(BUCKET, f"{number}", StoredObject(data=bytes([number]), content_type="x"))
    server.faults.add(Fault.HANG, key="2")
    server.faults.add(Fault.RESET, key="4")
    with ObjectReader(server.storage_options(), options=LIMITED) as reader:
        results = reader.read_each([ByteRange(f"oss://{BUCKET}/{number}") for number in range(7)])
    kinds = [type(result) for result in results]
    assert kinds == [
        bytes,
        bytes,
        StorageTimeoutError,
        bytes,
        StorageUnavailableError,
        bytes,
        ObjectMissingError,
    ]
    assert results[5] == b"\5"


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.RESET, Fault.FORBIDDEN])
def test_ranges_that_were_merged_fail_together_where_each_would_fail(server: OSSServer, fault: Fault) -> None:
    server.faults.add(fault)
    limit_s = 0.5 if fault in SILENT else 60.0
    once = ReadOptions(timeout_s=limit_s, deadline_s=limit_s, attempts=1)
    with ObjectReader(server.storage_options(), options=once) as reader:
        results = reader.read_each([ByteRange(URL, start, start + 100) for start in range(0, 1200, 100)])
    assert {type(result) for result in results} == {KINDS[fault]}
    assert [request.headers["range"] for request in server.requests] == ["bytes=0-1199"]


def test_what_waits_behind_reads_that_hang_is_not_asked_for(server: OSSServer) -> None:
    server.faults.add(Fault.HANG)
    two_at_once = ReadOptions(deadline_s=1.0, concurrency=2)
    with ObjectReader(server.storage_options(), options=two_at_once) as reader:
        results = reader.read_each([ByteRange(f"oss://{BUCKET}/{number}") for number in range(12)])
    assert {type(result) for result in results} == {StorageTimeoutError}
    assert str(results[-1]).startswith(f"oss://{BUCKET}/11: the storage returned nothing of this batch")
    assert len(server.requests) == 2


def test_patience_begins_anew_with_every_read_that_brings_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    now, taken, deadlines = [100.0], iter([9.0, 9.0, 9.0, 10.0]), list[float]()

    class Slow(LocalStorage):
        is_remote = True

        def fetch(self, span: ByteRange, deadline: float) -> bytes:
            deadlines.append(deadline)
            now[0] += (taken_s := next(taken))
            if taken_s == 10.0:
                raise StorageTimeoutError(f"{span}: too late")
            return b"x"

    monkeypatch.setattr(object_reader, "monotonic", lambda: now[0])
    monkeypatch.setattr(object_reader, "open_storage", lambda *_: Slow(1))
    with ObjectReader(options=ReadOptions(deadline_s=10.0, concurrency=1)) as reader:
        *found, late, later = reader.read_each([ByteRange(f"s3://{BUCKET}/{number}", 0, 1) for number in range(5)])
    assert (found, deadlines) == ([b"x"] * 3, [110.0, 119.0, 128.0, 137.0])
    assert str(late).startswith(f"s3://{BUCKET}/3 (bytes 0 to 1): too late")
    assert "returned nothing of this batch" in str(later)

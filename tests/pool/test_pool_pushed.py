"""Arrays that clients push into the pool, and further versions of them that share their memory."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.pool.pool_servers import inner_server, server
from tests.shared_cluster import PATIENCE_S
from torch_dpflow import DPFlowDataLoader
from torch_dpflow.errors import (
    DPFlowError,
    OptionError,
    OptionTypeError,
    PeerLostError,
    PoolFullError,
    UsageError,
)
from torch_dpflow.pool import ArraySource, DataClient, PooledArray
from torch_dpflow.pool.array_files import array_identity
from torch_dpflow.pool.messages import PushStripe
from torch_dpflow.pool.planning import layout as layouts
from torch_dpflow.pool.pushing import push, pushed_source
from torch_dpflow.pool.transport.control_connection import PoolConnection

NAME = "lab/rows:v1"
ROWS = np.arange(5000 * 30, dtype=np.float32).reshape(5000, 5, 6)


@pytest.fixture
def small_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stripes of 1,000 bytes and blocks of 250, in this process."""
    usual = layouts.ArrayLayout.__init__
    monkeypatch.setattr(
        layouts.ArrayLayout,
        "__init__",
        lambda self, identity, records, dtype, shape: usual(self, identity, records, dtype, shape, 1000, 250),
    )


def test_what_is_pushed_again_is_read_by_whom_it_was_unloaded_from(client: DataClient) -> None:
    for _ in range(2):
        source = client.push(NAME, ROWS)
        assert np.array_equal(client.read_batch(source, range(len(ROWS))), ROWS)
        client.unload(source)


def test_a_server_whose_assertions_are_off_holds_what_was_pushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    with (
        server(tmp_path / "p", "64MiB"),
        closing(DataClient(tmp_path / "p", silence_s=PATIENCE_S)) as client,
    ):
        assert np.array_equal(client.read_batch(client.push(NAME, ROWS), range(len(ROWS))), ROWS)


def test_what_is_pushed_is_read_by_others_by_its_name(tmp_path: Path, client: DataClient) -> None:
    source = client.push(NAME, ROWS)
    assert [(one.ref, one.records, one.loaded, one.is_explicit) for one in client.cached_datasets()] == [
        (NAME, 5000, 5000, True)
    ]
    with closing(DataClient(tmp_path / "p", silence_s=PATIENCE_S)) as other:
        assert other.array(NAME) == source
        assert np.array_equal(other.read_batch(other.array(NAME), [3, -1, 3]), ROWS[[3, -1, 3]])
        rows = PooledArray(source, tmp_path / "p", silence_s=PATIENCE_S)
        with closing(rows):
            found = torch.cat([*DPFlowDataLoader(rows, batch_size=512, num_workers=2)])
            assert torch.equal(found, torch.from_numpy(ROWS))
        client.push(NAME, ROWS)  # the same again
        with pytest.raises(UsageError, match="in the pool with another content; push or append under another"):
            client.push(NAME, ROWS + 1)
        other.unload(source)
        with pytest.raises(UsageError, match="no array 'lab/rows:v1' was pushed"):
            other.array(NAME)
        with pytest.raises(PeerLostError, match="1 of these rows of lab/rows:v1 are in no server's memory"):
            other.read(source, 7)
    client.push(NAME, ROWS + 1)


def test_a_killed_server_takes_what_was_pushed_and_gets_it_again(tmp_path: Path) -> None:
    client = DataClient(tmp_path / "p", silence_s=PATIENCE_S)
    with closing(client):
        with server(tmp_path / "p") as process:
            source = client.push(NAME, ROWS)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            for _ in range(2):
                with pytest.raises(PeerLostError, match=r"start one: dpflow pool serve .* Then push the array again"):
                    client.read(source, 7)
        with server(tmp_path / "p"):
            with pytest.raises(PeerLostError, match=r"its server was lost, or it was unloaded; push it again$"):
                client.read(source, 7)
            assert client.push(NAME, ROWS) == source
            assert np.array_equal(np.asarray(client.read_batch(source, range(5000))), ROWS)


def test_a_server_that_is_killed_while_an_array_is_pushed(tmp_path: Path) -> None:
    megabyte = 1 << 20
    source = ArraySource(ref=NAME, dtype="|u1", shape=[3 * 64, megabyte], stamp="three stripes")
    with server(tmp_path / "p", "256MiB") as process:

        def rows_of(first: int, stop: int) -> np.ndarray[Any, Any]:
            if first:
                os.kill(process.pid, signal.SIGKILL)
            return np.ones((stop - first, megabyte), np.uint8)

        with pytest.raises(PeerLostError, match="does not answer"):
            push(tmp_path / "p", source, rows_of)
        process.wait()
    with pytest.raises(PeerLostError, match="dpflow pool serve"):
        push(tmp_path / "p", source, rows_of)


def test_a_push_that_was_interrupted_goes_on(tmp_path: Path, client: DataClient, small_stripes: None) -> None:
    source = pushed_source(NAME, ROWS[:100])
    push(tmp_path / "p", source, lambda first, stop: ROWS[first:stop], stripes=[0, 2])
    half = client.cached_datasets()[0]
    assert (half.records, half.placed, half.loaded) == (100, 100, 16)
    assert np.array_equal(np.asarray(client.read_batch(source, range(8))), ROWS[:8])
    with pytest.raises(UsageError, match="is not completely in memory; complete its push first"):
        client.append(NAME, ROWS[:1])
    with (
        closing(DataClient(tmp_path / "p", silence_s=0.1)) as hasty,
        pytest.raises(PeerLostError, match="or its push has not finished"),
    ):
        hasty.read(source, 9)
    client.push(NAME, ROWS[:100])
    assert np.array_equal(np.asarray(client.read_batch(source, range(100))), ROWS[:100])


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.lists(st.integers(1, 25), min_size=2, max_size=3),
    width=st.integers(1, 60),
    dtype=st.sampled_from(["u1", "<f4", ">i8"]),
    gone=st.lists(st.integers(0, 3), max_size=4, unique=True),
)
def test_versions_share_memory_and_stay_as_they_are(
    client: DataClient, small_stripes: None, counts: list[int], width: int, dtype: str, gone: list[int]
) -> None:
    rows = np.random.default_rng(1).integers(0, 99, (sum(counts), width)).astype(dtype)
    ends = np.cumsum(counts).tolist()
    versions = [client.push(NAME, rows[: ends[0]])]
    for number, (first, stop) in enumerate(pairwise(ends), 2):
        versions.append(client.append(versions[-1].ref, rows[first:stop], version=f"v{number}"))
    full = client.cached_datasets()
    for version, end in zip(versions, ends):
        assert np.array_equal(np.asarray(client.read_batch(version, range(end))), rows[:end])
    layout = layouts.ArrayLayout(b"", ends[-1], dtype, (width,))  # type: ignore[call-arg]
    once = sum(one.reserved_bytes for one in full)
    tails = sum((end % layout.per_stripe) * layout.record_bytes for end in ends[:-1])
    assert once <= rows.nbytes + tails + 200 * (len(versions) + ends[-1])  # indices, and lines that are not full
    client.close()
    for number in gone:
        if number < len(versions):
            client.unload(versions[number])
    left = [number for number in range(len(versions)) if number not in gone]
    assert [one.ref for one in client.cached_datasets()] == [versions[number].ref for number in left]
    for number in left:
        end = ends[number]
        assert np.array_equal(np.asarray(client.read_batch(versions[number], range(end))), rows[:end])
    client.close()
    for number in left:
        client.unload(versions[number])
    with PoolConnection(client._address) as connection:
        assert connection.contents().free == connection.contents().capacity


def test_what_cannot_be_appended_changes_nothing(client: DataClient) -> None:
    client.push(NAME, ROWS)
    for rows, kind, says in (
        (ROWS[:0], OptionError, "no rows to append"),
        (ROWS[0], OptionTypeError, "give them the same form"),
        (ROWS.astype("f8"), OptionTypeError, "rows of <f8 and shape .5, 6. cannot go behind lab/rows:v1"),
        (np.float32(1), OptionTypeError, "give them the same form"),
    ):
        with pytest.raises(kind, match=says):
            client.append(NAME, rows)
    with pytest.raises(OptionError, match="the version that is appended to"):
        client.append(NAME, ROWS, version="v1")
    with pytest.raises(UsageError, match="no array 'lab/none:v1'"):
        client.append("lab/none:v1", ROWS)
    assert [one.ref for one in client.cached_datasets()] == [NAME]


def test_of_two_that_append_at_once_one_is_refused(tmp_path: Path, client: DataClient) -> None:
    client.push(NAME, ROWS)
    outcomes: list[object] = []
    start = threading.Barrier(2)

    def append(more: float) -> None:
        with closing(DataClient(tmp_path / "p", silence_s=PATIENCE_S)) as own:
            start.wait()
            try:
                outcomes.append(own.append(NAME, ROWS[:3] + more, version="v2"))
            except DPFlowError as error:
                outcomes.append(error)

    threads = [threading.Thread(target=append, args=(more,)) for more in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(type(one).__name__ for one in outcomes) == ["ArraySource", "UsageError"]
    assert len(client.read_batch(client.array("lab/rows:v2"), range(5003))) == 5003


def test_what_does_not_fit_or_is_none_is_refused(tmp_path: Path) -> None:
    with inner_server(tmp_path / "p", 1 << 10), closing(DataClient(tmp_path / "p")) as client:
        with pytest.raises(PoolFullError, match="the dataset takes"):
            client.push(NAME, ROWS)
        for name in ("rows", "lab/rows", "lab/rows:v1:x"):
            with pytest.raises((OptionError, UsageError)):
                client.push(name, ROWS[:1])
        with pytest.raises(OptionTypeError, match="Python objects"):
            client.push(NAME, np.array([{}], dtype=object))
        with pytest.raises(OptionError, match="single number"):
            client.push(NAME, 3.0)
        for wrong, reason in (
            (np.ma.masked_array([1.0, 2.0], mask=[False, True]), "the array is masked, and memory has no masks"),
            (torch.ones(2, dtype=torch.bfloat16), "a Tensor is no array of numbers or bytes: .*BFloat16"),
            ([[1], [1, 2]], "a list is no array of numbers or bytes"),
        ):
            with pytest.raises(OptionTypeError, match=reason):
                client.push(NAME, wrong)  # type: ignore[arg-type]
        assert client.cached_datasets() == []
        learned = client.push("lab/learned:v1", torch.ones(3, 2, requires_grad=True))
        assert np.array_equal(np.asarray(client.read_batch(learned, range(3))), np.ones((3, 2)))
        turned = client.push(NAME, np.asfortranarray(ROWS[:3].reshape(3, 30)))
        assert np.array_equal(np.asarray(client.read_batch(turned, range(3))), ROWS[:3].reshape(3, 30))


def test_a_server_takes_sealed_memory_of_the_right_size_alone(tmp_path: Path, client: DataClient) -> None:
    source = pushed_source(NAME, ROWS[:3])
    identity = array_identity(source)
    push(tmp_path / "p", source, lambda first, stop: ROWS[first:stop], stripes=[])
    sealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.write(sealed, bytes(7))
    unsealed = os.memfd_create("y", os.MFD_ALLOW_SEALING)
    os.write(unsealed, bytes(3 * 120))
    with PoolConnection(tmp_path / "p") as connection, open(tmp_path / "file", "w+b") as file:
        os.truncate(file.fileno(), 3 * 120)
        for fd in (sealed, unsealed, file.fileno()):
            with pytest.raises(UsageError, match="is not 360 bytes of sealed memory"):
                connection.request(PushStripe(identity, 0), [fd])
        for stripe, fds in ((1, [sealed]), (-1, [sealed]), (0, [])):
            with pytest.raises(UsageError, match="it has no place here"):
                connection.request(PushStripe(identity, stripe), fds)
        claims = ArraySource(ref="lab/rows:v2", dtype="<f4", shape=[9, 5, 6], stamp="s", base=b"?" * 16, shared=1)
        with pytest.raises(UsageError, match="is not in the pool"):
            push(tmp_path / "p", claims, lambda first, stop: ROWS[first:stop])
        claims = ArraySource(ref="lab/rows:v3", dtype="<f4", shape=[9, 5, 6], stamp="s", base=identity, shared=1)
        with pytest.raises(UsageError, match="is no further version of lab/rows:v1"):
            push(tmp_path / "p", claims, lambda first, stop: ROWS[first:stop])
    for fd in (sealed, unsealed):
        os.close(fd)
    assert client.push(NAME, ROWS[:3]) == source
    assert np.array_equal(np.asarray(client.read_batch(source, range(3))), ROWS[:3])

"""The memory that samples are read ahead into: a place is kept while somebody may copy from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.datasets.samples_source import Numbered, content, publish
from tests.shared_cluster import PATIENCE_S, wait
from torch_dpflow.datasets import DatasetStore
from torch_dpflow.datasets.sample_reader import SampleReader
from torch_dpflow.errors import UsageError
from torch_dpflow.pool.messages import (
    IN_STORAGE_ONLY,
    MAX_PLAN_RECORDS,
    AheadPlaces,
    AnnounceAccessPlan,
)
from torch_dpflow.pool.server import ahead
from torch_dpflow.pool.server.ahead import AheadReading
from torch_dpflow.pool.sources import sample_layout

COUNT = 40


@pytest.fixture
def reading(tmp_path: Path) -> Iterator[AheadReading]:
    stored = publish(DatasetStore.create(str(tmp_path / "datasets")), Numbered(COUNT))
    records, known = sample_layout(stored)
    with (
        closing(SampleReader(stored)) as reader,
        closing(AheadReading(known, records.lengths, reader, 1 << 16, 7)) as made,
    ):
        yield made


def order(keys: list[int], name: str = "epoch", **of: Any) -> AnnounceAccessPlan:
    return AnnounceAccessPlan(
        identity=b"",
        plan=name,
        records=np.array(keys, dtype="<i4").tobytes(),
        **{"first": 0, "total": len(keys), "spread": 8, **of},
    )


def texts(reading: AheadReading, places: AheadPlaces) -> list[bytes]:
    return [reading._memory[at : at + length] for at, length in zip(places.offsets, places.lengths)]


def want(reading: AheadReading, connection: str, keys: list[int], name: str = "epoch") -> AheadPlaces:
    return reading.want(connection, name, keys, PATIENCE_S)


def test_a_place_stays_until_it_is_taken_or_its_connection_ends(reading: AheadReading) -> None:
    reading.announce("owner", order([*range(COUNT)]))
    one = want(reading, "one", [0, 1])
    assert texts(reading, one) == [content(0), content(1)]
    assert one.memory == 7
    reading.leave("owner")  # nobody reads in this order any more
    wait(lambda: reading._machine.used == 0)
    assert texts(reading, one) == [content(0), content(1)]
    reading.confirm("one", [0])
    assert reading._space.used
    assert texts(reading, one)[1] == content(1)
    reading.leave("one")
    wait(lambda: not reading._space.used, what="the end of its memory")
    with pytest.raises(UsageError, match="was not read ahead for this connection"):
        reading.confirm("one", [1])


def test_what_two_connections_copy_is_free_after_both(reading: AheadReading) -> None:
    reading.announce("owner", order([3, 4]))
    first, second = want(reading, "one", [3]), want(reading, "two", [3])
    assert texts(reading, first) == texts(reading, second) == [content(3)]
    reading.confirm("one", [3])
    assert want(reading, "one", [3]).lengths == [IN_STORAGE_ONLY]  # it was read; who wants it again has storage
    assert texts(reading, second) == [content(3)]
    reading.confirm("two", [3])


def test_a_record_that_comes_twice_in_an_order_is_read_twice(reading: AheadReading) -> None:
    reading.announce("owner", order([5, 6, 5]))
    for _ in range(2):
        assert texts(reading, want(reading, "one", [5])) == [content(5)]
        reading.confirm("one", [5])
    assert want(reading, "one", [5]).lengths == [IN_STORAGE_ONLY]


def test_what_no_order_has_is_left_to_the_reader(reading: AheadReading) -> None:
    assert want(reading, "one", [1]).lengths == [IN_STORAGE_ONLY]
    reading.announce("owner", order([1, 2]))
    assert want(reading, "one", [9]).lengths == [IN_STORAGE_ONLY]
    assert want(reading, "one", [1], "another").lengths == [IN_STORAGE_ONLY]
    reading.announce("owner", order([7, 8]))
    assert want(reading, "one", [1]).lengths == [IN_STORAGE_ONLY]
    assert texts(reading, want(reading, "one", [8])) == [content(8)]


def test_an_order_comes_in_parts_that_fit(reading: AheadReading) -> None:
    reading.announce("owner", order([1, 2], total=3))
    assert want(reading, "one", [1]).lengths == [IN_STORAGE_ONLY]
    for wrong in (order([3], first=1, total=3), order([3, 4], first=2, total=3), order([COUNT])):
        with pytest.raises(UsageError, match="access plan"):
            reading.announce("owner", wrong)
    reading.announce("owner", order([1, 2], total=3))
    reading.announce("owner", order([3], first=2, total=3))
    assert texts(reading, want(reading, "one", [3])) == [content(3)]


def test_an_order_may_be_extended_by_who_has_announced_it(
    reading: AheadReading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "MAX_UPCOMING", 6)
    reading.announce("owner", order([1, 2], extends=True))
    reading.announce("owner", order([3, 1], extends=True))
    assert texts(reading, want(reading, "one", [1, 3])) == [content(1), content(3)]
    reading.confirm("one", [1, 3])
    assert texts(reading, want(reading, "one", [1])) == [content(1)]  # the second time
    reading.confirm("one", [1])
    reading.announce("owner", order([4, 5, 6, 7, 8], extends=True))
    assert want(reading, "one", [2]).lengths == [IN_STORAGE_ONLY]  # too many have come since
    assert texts(reading, want(reading, "one", [8])) == [content(8)]
    reading.announce("another", order([9], extends=True))
    assert want(reading, "one", [4]).lengths == [IN_STORAGE_ONLY]  # it is the order of another connection now
    reading.leave("owner")
    assert texts(reading, want(reading, "one", [9])) == [content(9)]


def test_orders_are_no_more_than_allowed(reading: AheadReading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "MAX_PLANS", 3)
    reading.announce("owner", order([9], "waits", total=2))
    for number in range(2):
        reading.announce("owner", order([number], f"{number}"))
    with pytest.raises(UsageError, match="at most 3"):
        reading.announce("owner", order([1], "one more"))
    reading.announce("owner", order([2], "0"))  # in the place of another
    reading.leave("owner")
    assert reading.is_idle
    with pytest.raises(UsageError, match="part 0 of an access plan of"):
        reading.announce("owner", order([1], total=MAX_PLAN_RECORDS + 1))
    assert reading.is_idle


def test_a_sample_that_cannot_be_read_is_left_to_the_reader(reading: AheadReading) -> None:
    for pack in Path(reading._reader.stored.url.removeprefix("file://")).rglob("*"):
        if pack.is_file() and "data" in str(pack):
            pack.unlink()
    reading.announce("owner", order([1, 2]))
    assert set(want(reading, "one", [1, 2]).lengths) == {IN_STORAGE_ONLY}

"""An import that dies before or after any single write: nothing half-written is ever read, and it can be finished."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.datasets.samples_source import Numbered, contents, numbers, publish
from torch_dpflow.datasets import DatasetStore, Draft
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.errors import DatasetNotFoundError, OptionError, PublishedError, SourceError


class Crash(BaseException):
    """The process is gone: nothing of it runs any more."""


class CrashPoint:
    """Lets `writes` changes of a store happen, and then none."""

    def __init__(self, patch: pytest.MonkeyPatch, writes: int, *, after: bool) -> None:
        self._left = writes
        self._after = after
        for name in ("write", "create", "remove"):
            patch.setattr(Files, name, self._counted(getattr(Files, name)))

    def _counted(self, change: Callable[..., None]) -> Callable[..., None]:
        def counted(files: Files, *arguments: Any) -> None:
            self._left -= 1
            if self._left < 0 and not self._after:
                raise Crash
            change(files, *arguments)
            if self._left < 0:
                raise Crash

        return counted


def _import(store: DatasetStore) -> None:
    publish(store, Numbered(10))


def _append(store: DatasetStore) -> None:
    publish(store, Numbered(5, first=10), version="v2", parent="v1", shard_size=None)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("work", "version", "count"), [(_import, "v1", 10), (_append, "v2", 15)])
def test_a_crash_at_any_write(
    store: DatasetStore, after: bool, work: Callable[[DatasetStore], None], version: str, count: int
) -> None:
    crashed = []
    for writes in itertools.count():
        if store.ids():
            store.files.remove("core")
        if work is _append:
            _import(store)
        with pytest.MonkeyPatch.context() as patch:
            CrashPoint(patch, writes, after=after)
            try:
                work(store)
                break
            except Crash:
                crashed.append(store.versions("core/numbers").count(version))
        if crashed[-1]:
            assert contents(store.open(f"core/numbers:{version}")) == numbers(count)
            with pytest.raises(PublishedError):
                work(store)
        else:
            with pytest.raises(DatasetNotFoundError):
                store.open(f"core/numbers:{version}")
            work(store)
        assert contents(store.open(f"core/numbers:{version}")) == numbers(count)
        if work is _append:
            assert contents(store.open("core/numbers:v1")) == numbers(10)
    assert crashed == sorted(crashed)  # once published, always published
    assert crashed.count(0) > 6


def test_who_comes_late_changes_nothing(store: DatasetStore) -> None:
    late = Draft(store, "core/numbers", "v1")
    _import(store)
    other = IterableImporter(Numbered(10, first=5), name="other")
    with pytest.raises(PublishedError):
        late.add("train", other, shard_size=4)
    assert contents(store.open("core/numbers:v1")) == numbers(10)


def test_what_an_earlier_import_of_other_samples_left_is_named(store: DatasetStore) -> None:
    Draft(store, "core/numbers", "v1").add("train", IterableImporter(Numbered(10)), shard_size=4)
    store.files.remove("core/numbers/drafts")
    draft = Draft(store, "core/numbers", "v1")
    other = IterableImporter(Numbered(10, first=5))
    with pytest.raises(SourceError, match=r"an earlier one of other samples.*--restart"):
        draft.add("train", other, shard_size=4)
    draft.discard()
    draft.add("train", other, shard_size=4)
    draft.publish()
    assert contents(store.open("core/numbers:v1")) == numbers(10, first=5)


def test_two_who_import_the_same_at_once_end_in_one_version(store: DatasetStore) -> None:
    together = threading.Barrier(2)
    published: list[bool] = []

    def run() -> None:
        together.wait()
        try:
            draft = Draft(store, "core/numbers", "v1")
            draft.add("train", IterableImporter(Numbered(40), name="numbered"), shard_size=4)
            draft.publish()
            published.append(True)
        except (PublishedError, OptionError):
            published.append(False)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(published) == [False, True]
    assert contents(store.open("core/numbers:v1")) == numbers(40)

"""Drafts: importing, going on after a kill, appending."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.datasets.samples_source import Numbered, content, contents, lazily, numbers, publish
from tests.new_process import interpreter
from torch_dpflow.datasets import DatasetStore, Draft, verify
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.errors import (
    DamagedStoreError,
    DatasetNotFoundError,
    OptionError,
    OptionTypeError,
    SourceError,
)


class Stop(Exception):
    """An importer's source breaks down."""


def breaking(count: int) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The first samples, and then an error."""
    yield from lazily(count)
    raise Stop


def _add(store: DatasetStore, source: Any, **how: Any) -> Draft:
    draft = Draft(store, "core/numbers", "v1")
    draft.add("train", IterableImporter(source, name="numbered"), shard_size=4, **how)
    return draft


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 9])
def test_what_is_imported_is_read_again(store: DatasetStore, count: int) -> None:
    stored = publish(store, Numbered(count))
    assert contents(stored) == numbers(count)
    assert len(stored.variant.shards) == -(-count // 4)


def test_an_import_that_broke_goes_on_where_it_stopped(store: DatasetStore) -> None:
    whole = publish(store, Numbered(11), name="core/whole").variant
    for stop in range(12):
        draft = Draft(store, "core/numbers", f"v{stop}")
        with pytest.raises(Stop):
            draft.add("train", IterableImporter(breaking(stop), name="numbered"), shard_size=4)
        source, seen = Numbered(11), []
        draft.add("train", IterableImporter(source, name="numbered"), shard_size=4, progress=seen.append)
        kept = stop // 4 * 4
        # Only the last sample that is there already is drawn again, to see that it is the same.
        assert source.asked == list(range(max(0, kept - 1), 11))
        assert seen[0] == kept
        stored = draft.publish().variants["train"]
        assert (stored.samples, len(stored.shards)) == (whole.samples, len(whole.shards))
        assert contents(store.open(f"core/numbers:v{stop}")) == numbers(11)


_IMPORT_FOR_EVER = """
import sys, itertools
from tests.datasets.samples_source import content
from torch_dpflow.datasets import DatasetStore, Draft
from torch_dpflow.datasets.importers.iterable import IterableImporter
endless = ((content(n), {"number": n}) for n in itertools.count())
draft = Draft(DatasetStore.create(sys.argv[1]), "core/numbers", "v1")
draft.add("train", IterableImporter(endless, name="numbered"), shard_size=4)
"""


def test_a_killed_import_goes_on_where_it_stopped(tmp_path: Path, eventually: Callable[..., None]) -> None:
    folder = tmp_path / "datasets/core/numbers"
    with interpreter(_IMPORT_FOR_EVER, str(tmp_path / "datasets")) as process:
        eventually(lambda: (folder / "drafts/v1/train/ms-20.json").exists(), what="a shard")
        process.send_signal(signal.SIGKILL)
        process.communicate()
    store = DatasetStore(str(tmp_path / "datasets"))
    assert store.versions("core/numbers") == []
    written = len(list((folder / "drafts/v1/train").glob("ms-*.json")))
    (folder / "meta/v1/train/.ms-0.json.0a.unfinished").write_bytes(b"left by a killed writer")

    count = 4 * written + 10
    source = Numbered(count)
    _add(store, source).publish()
    assert source.asked[0] == 4 * written - 1
    assert contents(store.open("core/numbers:v1")) == numbers(count)
    leftovers = [path.name for path in folder.rglob("*") if path.is_file() and path.name.startswith(".")]
    assert leftovers == []
    assert not (folder / "drafts/v1").exists()


def test_publishing_goes_on_after_all_was_written(store: DatasetStore) -> None:
    _add(store, Numbered(9))
    source = Numbered(9)
    seen: list[int] = []
    _add(store, source, progress=seen.append).publish()
    assert (source.asked, seen) == ([], [9])
    assert contents(store.open("core/numbers:v1")) == numbers(9)


def test_a_source_that_has_changed_is_named(store: DatasetStore) -> None:
    with pytest.raises(Stop):
        _add(store, breaking(9))
    with pytest.raises(SourceError, match=r"changed since.*sample 7 was.*'|sample 7 was .*number.*:7"):
        _add(store, Numbered(20, first=1))
    with pytest.raises(SourceError, match="has changed since its import was interrupted"):
        _add(store, Numbered(3))
    _add(store, Numbered(20)).publish()
    assert contents(store.open("core/numbers:v1")) == numbers(20)


def test_a_source_that_has_grown_is_named(store: DatasetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the last shard was noted and before the whole was: that shard is not full."""
    with monkeypatch.context() as patch:
        patch.setattr("torch_dpflow.datasets.writer.ImportProgress.finish", lambda *_: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            _add(store, Numbered(6))
    with pytest.raises(SourceError, match="it had 6 samples and has more now"):
        _add(store, Numbered(7))
    _add(store, Numbered(6)).publish()
    assert contents(store.open("core/numbers:v1")) == numbers(6)


def test_another_import_in_the_way_is_named(store: DatasetStore) -> None:
    with pytest.raises(Stop):
        _add(store, breaking(9))
    draft = Draft(store, "core/numbers", "v1")
    other = IterableImporter(Numbered(20), name="other")
    with pytest.raises(OptionError, match=r"in the way: it has .*shard_size=4 instead of 1000, source="):
        draft.add("train", other)
    with pytest.raises(OptionError, match="has not ended"):
        draft.publish()
    draft.discard()
    assert store.ids() == [] or store.drafts("core/numbers") == []
    draft.add("train", other, shard_size=5)
    assert draft.publish().variants["train"].samples == 20


def test_a_note_that_was_cut_short_is_told_with_the_way_out(store: DatasetStore) -> None:
    with pytest.raises(Stop):
        _add(store, breaking(5))
    store.files.write("core/numbers/drafts/v1/train/ms-0.json", b"{")
    with pytest.raises(DamagedStoreError, match=r"drafts/v1/train/ms-0\.json is no .*--restart"):
        _add(store, Numbered(9))


def test_discarding_leaves_data_that_was_there(local_store: DatasetStore) -> None:
    folder = Path(local_store.url.removeprefix("file://")) / "core/numbers/data/v1/train"
    folder.mkdir(parents=True)
    (folder / "mine.jpg").write_bytes(b"mine")
    _add(local_store, Numbered(3)).discard()
    assert [path.name for path in folder.iterdir()] == ["mine.jpg"]


def test_an_import_of_which_nothing_came_is_not_in_the_way(store: DatasetStore) -> None:
    with pytest.raises(SourceError, match=r"there is nothing to import from .*name='empty'"):
        Draft(store, "core/numbers", "v1").add("train", IterableImporter([], name="empty"))
    _add(store, Numbered(3)).publish()
    assert contents(store.open("core/numbers:v1")) == numbers(3)


def test_a_failed_import_leaves_nothing_but_what_can_be_continued(store: DatasetStore) -> None:
    for source in ([], breaking(3)):
        with pytest.raises((SourceError, Stop)):
            _add(store, source)
        assert store.ids() == []
    draft = _add(store, Numbered(3))
    with pytest.raises(Stop):
        draft.add("val", IterableImporter(breaking(3), name="numbered"), shard_size=4)
    assert list(draft.publish().variants) == ["train"]
    with pytest.raises(Stop):
        Draft(store, "core/other", "v1").add("train", IterableImporter(breaking(5), name="n"), shard_size=4)
    assert store.drafts("core/other") == ["v1"]


def test_nothing_is_not_published(store: DatasetStore) -> None:
    with pytest.raises(OptionError, match="nothing to publish as core/numbers:v1"):
        Draft(store, "core/numbers", "v1").publish()


@pytest.mark.parametrize("shard_size", [0, -1, "5", 2.5, True])
def test_a_shard_holds_at_least_a_sample(store: DatasetStore, shard_size: Any) -> None:
    with pytest.raises((OptionError, OptionTypeError), match=f"shard_size={shard_size!r}"):
        Draft(store, "core/x", "v1").add("train", IterableImporter(Numbered(1)), shard_size=shard_size)
    assert store.drafts("core/x") == []


def test_variants_are_published_together(store: DatasetStore) -> None:
    draft = Draft(store, "core/numbers", "v1", description="numbers from 0")
    draft.add("train", IterableImporter(Numbered(5)), shard_size=2)
    draft.add("val", IterableImporter(Numbered(3)), shard_size=3)
    assert draft.publish().description == "numbers from 0"
    assert [len(store.open(f"core/numbers:v1:{name}")) for name in ("train", "val")] == [5, 3]
    with pytest.raises(DatasetNotFoundError, match=r"no variant is named.*\['train', 'val'\]"):
        store.open("core/numbers:v1")


def test_a_variant_of_another_run_is_not_published_along(store: DatasetStore) -> None:
    Draft(store, "core/numbers", "v1").add("trian", IterableImporter(Numbered(3)))
    draft = Draft(store, "core/numbers", "v1")
    draft.add("train", IterableImporter(Numbered(5)))
    with pytest.raises(OptionError, match=r"core/numbers:v1 has imports of other variants.*\['trian'\].*--restart"):
        draft.publish()
    assert store.versions("core/numbers") == []
    draft.add("trian", IterableImporter(Numbered(3)))
    assert sorted(draft.publish().variants) == ["train", "trian"]


def test_what_a_source_misses_itself_is_told_as_its_own(store: DatasetStore) -> None:
    def source() -> Iterator[tuple[bytes, dict[str, Any]]]:
        yield from lazily(4)
        yield Path("/no/such.bin").read_bytes(), {}

    with pytest.raises(
        SourceError, match=r"name='numbered'.*cannot be read further: FileNotFoundError.*such\.bin"
    ) as told:
        _add(store, source())
    assert "--restart" not in str(told.value)


def test_what_a_draft_cannot_work_with_is_refused(store: DatasetStore) -> None:
    draft = Draft(store, "core/x", "v1")
    with pytest.raises(OptionError, match=r"checksum='md5': give one of \('crc32', 'sha256'\)"):
        draft.add("train", IterableImporter(Numbered(1)), checksum="md5")  # type: ignore[arg-type]
    with pytest.raises(OptionTypeError, match=r"has no \['root'.*IterableImporter"):
        draft.add("train", [(b"", {})])  # type: ignore[arg-type]
    with pytest.raises(OptionTypeError, match="give a DatasetStore"):
        Draft(store.url, "core/x", "v1")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="'core/x:v1', 'v1' is no name of a dataset; give id, version"):
        Draft(store, "core/x:v1", "v1")
    for wrong in (5, None):
        with pytest.raises(OptionTypeError, match="a dataset is named by a string"):
            store.open(wrong)  # type: ignore[arg-type]
        with pytest.raises(OptionTypeError, match=r"give what DatasetStore\.open"):
            verify(wrong)  # type: ignore[arg-type]
        with pytest.raises(OptionTypeError, match="are strings"):
            Draft(store, wrong, "v1")  # type: ignore[arg-type]
        with pytest.raises(OptionTypeError, match=f"are strings|version={wrong}"):
            Draft(store, "core/x", wrong)  # type: ignore[arg-type]
        with pytest.raises(OptionTypeError, match=f"variant={wrong}"):
            draft.add(wrong, IterableImporter(Numbered(1)))  # type: ignore[arg-type]
        with pytest.raises(OptionTypeError, match=f"progress={wrong} is of type"):
            draft.add("train", IterableImporter(Numbered(1)), progress=wrong)  # type: ignore[arg-type]
        with pytest.raises(OptionTypeError, match=f"iterable={wrong}"):
            IterableImporter(wrong)  # type: ignore[arg-type]


# -- appending -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("more", [1, 3, 4, 9])
def test_appended_samples_come_behind(store: DatasetStore, before: int, more: int) -> None:
    first = publish(store, Numbered(before))
    second = publish(store, Numbered(more, first=before), version="v2", parent="v1", shard_size=None)
    assert contents(second) == numbers(before + more)
    assert contents(first) == numbers(before)
    assert second.dataset.parent == "v1"
    kept = before // 4
    assert second.variant.shards[:kept] == first.variant.shards[:kept]
    assert {entry.version for entry in second.variant.shards[kept:]} == {"v2"}


@pytest.mark.parametrize("stop", range(10))
def test_an_append_that_broke_goes_on_where_it_stopped(local_store: DatasetStore, stop: int) -> None:
    publish(local_store, Numbered(6))

    def rest(count: int) -> Iterator[tuple[bytes, dict[str, Any]]]:
        for number in range(6, 6 + count):
            yield content(number), {"number": number}
        raise Stop

    draft = Draft(local_store, "core/numbers", "v2", parent="v1")
    with pytest.raises(Stop):
        draft.add("train", IterableImporter(rest(stop), name="more"))
    draft.add("train", IterableImporter(Numbered(10, first=6), name="more"))
    draft.publish()
    assert contents(local_store.open("core/numbers:v2")) == numbers(16)


def test_variants_that_nothing_is_added_to_stay(store: DatasetStore) -> None:
    draft = Draft(store, "core/numbers", "v1")
    for name in ("train", "val"):
        draft.add(name, IterableImporter(Numbered(3)))
    draft.publish()
    draft = Draft(store, "core/numbers", "v2", parent="v1")
    draft.add("test", IterableImporter(Numbered(2)))
    draft.add("val", IterableImporter(Numbered(2, first=3)))
    draft.publish()
    assert {name: v.samples for name, v in store.load("core/numbers").variants.items()} == {
        "train": 3,
        "val": 5,
        "test": 2,
    }


def test_a_parent_must_be_published(store: DatasetStore) -> None:
    with pytest.raises(DatasetNotFoundError):
        Draft(store, "core/numbers", "v2", parent="v1")


def test_discarding_leaves_no_directory(local_store: DatasetStore) -> None:
    _add(local_store, Numbered(3)).discard()
    assert [path.name for path in Path(local_store.url.removeprefix("file://")).iterdir()] == ["store.json"]

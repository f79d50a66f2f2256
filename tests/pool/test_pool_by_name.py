"""Samples of the pool by the names of their files, and what verifying it says."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.datasets.samples_source import Numbered, numbers, publish
from tests.pool.pool_servers import inner_server
from tests.shared_cluster import wait
from torch_dpflow.cli.main import root
from torch_dpflow.cli.tables import read_rates
from torch_dpflow.datasets import DatasetStore, Draft, StoredDataset
from torch_dpflow.datasets.importers import make_importer
from torch_dpflow.errors import ObjectMissingError, OptionError
from torch_dpflow.pool import DataClient
from torch_dpflow.pool.messages import CachedDatasetList

CLASSES, FILES = 3, 5


@pytest.fixture
def photos(tmp_path: Path, store: DatasetStore) -> StoredDataset:
    """Files of several lengths in folders of their classes."""
    for label in range(CLASSES):
        folder = tmp_path / "photos" / f"n{label}"
        folder.mkdir(parents=True)
        for number in range(FILES):
            (folder / f"{number}.JPEG").write_bytes(f"photo {label}, {number}".encode() * (1 + number))
    draft = Draft(store, "core/photos", "v1")
    draft.add("train", make_importer("imagefolder", str(tmp_path / "photos"), {}), shard_size=4)
    draft.publish()
    return store.open("core/photos:v1:train")


def verified(stored: StoredDataset, address: Path) -> Result:
    store = stored.url.removesuffix(f"/{stored.dataset.id}")
    words = ["verify", str(stored.ref), "--store", store, "--address", str(address)]
    return CliRunner().invoke(root, ["pool", *words])


def test_files_are_read_by_their_paths(photos: StoredDataset, client: DataClient) -> None:
    client.preload(photos)
    for label in range(CLASSES):
        for number in range(FILES):
            found, _ = client.read(photos, f"n{label}/{number}.JPEG")
            assert found == f"photo {label}, {number}".encode() * (1 + number)
    both = client.read_batch(photos, ["n2/4.JPEG", 0])
    assert both == [client.read(photos, CLASSES * FILES - 1), client.read(photos, "n0/0.JPEG")]
    assert client.dataset(photos).misses == 0
    with pytest.raises(ObjectMissingError, match=r"has the path 'n2/5\.JPEG'.*as 'n0/0\.JPEG'"):
        client.read(photos, "n2/5.JPEG")


def test_records_that_lie_at_one_path_are_read_by_number(store: DatasetStore, client: DataClient) -> None:
    stored = publish(store, Numbered(8))
    path = stored.sample(5).path
    with pytest.raises(OptionError, match=rf"4 records of .* have the path '{path}'.*the first is 4"):
        client.read(stored, path)


def test_verifying_tells_each_sample_that_differs(photos: StoredDataset, client: DataClient, tmp_path: Path) -> None:
    absent = verified(photos, tmp_path / "p")
    assert absent.exit_code == 1
    assert "is not in the pool" in absent.output
    client.preload(photos)
    assert "15 samples are in memory as in storage, 0 in storage alone" in verified(photos, tmp_path / "p").output
    folder = tmp_path / "photos" / "n1"
    (folder / "0.JPEG").write_bytes(b"photo 1, X")
    (folder / "1.JPEG").write_bytes(b"short")
    (folder / "2.JPEG").unlink()
    result = verified(photos, tmp_path / "p")
    assert result.exit_code == 1
    assert "sample 5: byte 9 of 10 is 48 in memory, and 88 in storage" in result.output
    assert "sample 6: is in memory, and cannot be compared: TruncatedObjectError" in result.output
    assert "sample 7: is in memory, and cannot be compared: ObjectMissingError" in result.output
    assert "12 samples are in memory as in storage" in result.output
    assert "3 of 15 samples differ" in result.output


def test_verifying_a_part_counts_the_rest(tmp_path: Path, store: DatasetStore) -> None:
    stored = publish(store, Numbered(400), shard_size=10)
    with inner_server(tmp_path / "q", 8 << 10), closing(DataClient(tmp_path / "q")) as client:
        held = client.preload(stored, fit="part").placed
        result = verified(stored, tmp_path / "q")
        assert f"{held:,} samples are in memory as in storage, {400 - held:,} in storage alone" in result.output
        assert result.exit_code == 0
        assert client.read_batch(stored, range(400)) == numbers(400)


def test_top_shows_how_fast_a_set_is_read(photos: StoredDataset, client: DataClient, tmp_path: Path) -> None:
    info = client.preload(photos)
    client.read_batch(photos, range(len(photos)))
    before = CachedDatasetList([info], 1, 2)
    client.close()  # which tells the server what was read
    wait(lambda: client.cached_datasets()[0].hits == len(photos), what="what a reader has told")
    now = CachedDatasetList(client.cached_datasets(), 1, 2)
    assert read_rates(before, now, 0.5) == {info.identity: (2 * len(photos), 0.0)}
    assert read_rates(CachedDatasetList([], 1, 2), now, 0.5) == {}
    words = ["top", "--count", "2", "--interval-s", "0.1", "--address", str(tmp_path / "p")]
    result = CliRunner().invoke(root, ["pool", *words])
    assert result.exit_code == 0
    for word in ("core/photos:v1:train", "from storage/s", "hit rate", "bytes are free"):
        assert word in result.output

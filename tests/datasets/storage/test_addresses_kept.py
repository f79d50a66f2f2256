"""An address is read as it was given: what is measured and what is read is one object."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.datasets.formats.tars import write_tar
from tests.datasets.storage.servers import BUCKET, S3_KEYS, s3_client
from tests.datasets.storage.web_server import WebServer, reply, serve_ranges
from torch_dpflow.datasets import DatasetStore, Draft, open_dataset
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.importers import sources
from torch_dpflow.datasets.importers.tfrecord import TFRecordImporter
from torch_dpflow.datasets.importers.webdataset import WebDatasetImporter
from torch_dpflow.errors import OptionError, SourceError

#: Addresses, and what servers of paths take them for.
AWKWARD = (
    ("x//y.tar", "x/y.tar"),
    ("x/./y.tar", "x/y.tar"),
    ("x/z/../y.tar", "x/y.tar"),
    ("x///a//y.tar", "x/a/y.tar"),
    ("x/y.tar/", "x/y.tar"),
    ("/y.tar", "y.tar"),
)
#: Python's server of tests joins slashes at the beginning.
ON_THE_WEB = (
    *AWKWARD[:-1],
    ("x/y.tar?path=a//b", "x/y.tar?path=a/b"),
    ("x/y.tar?path=/a/../b", "x/y.tar?path=/b"),
    ("x/y.tar?", "x/y.tar"),
)


@pytest.fixture(scope="session", autouse=True)
def servers_first(s3_endpoint: str) -> None:
    """What lives as long as the session is not left behind by the test that first asks for it."""


def tar(folder: Path, text: str) -> bytes:
    return write_tar(folder / "made.tar", [(f"{text}.cls", b"1"), (f"{text}.jpg", text.encode() * 100)]).read_bytes()


@pytest.mark.parametrize(("given", "other"), ON_THE_WEB)
def test_on_a_web_server(given: str, other: str, tmp_path: Path) -> None:
    contents = {f"/{given}": tar(tmp_path, "right"), f"/{other}": tar(tmp_path, "otherone")}

    def answer(handler: Any) -> None:
        (serve_ranges(contents[handler.path]) if handler.path in contents else lambda h: reply(h, 404))(handler)

    with WebServer(answer) as web:
        how: dict[str, Any] = {"format": "webdataset", "index_dir": tmp_path / "index"}
        with closing(open_dataset([f"{web.url}/{given}"], **how)) as opened:
            assert opened[0]["jpg"] == b"right" * 100
        store = DatasetStore.create(str(tmp_path / "store"))
        draft = Draft(store, "core/x", "v1")
        draft.add("train", WebDatasetImporter([f"{web.url}/{given}", f"{web.url}/{other}"]))
        draft.publish()
        with closing(open_dataset("core/x:v1:train", store=store)) as stored:
            assert [sample["jpg"] for sample in stored.__getitems__([0, 1])] == [b"right" * 100, b"otherone" * 100]
        assert {request["path"] for request in web.requests} == {f"/{given}", f"/{other}"}
        del contents[f"/{given}"]
        with pytest.raises(SourceError, match=r"there is no "):
            TFRecordImporter([f"{web.url}/{given}"])


@pytest.mark.parametrize("count", [1, 5])  # by a request for each, and by a listing
@pytest.mark.parametrize(("given", "other"), AWKWARD)
def test_on_s3(
    given: str, other: str, count: int, s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_WORTH_A_LISTING", 5)
    options = {**S3_KEYS, "endpoint_url": s3_endpoint}
    folder = f"kept-{count}-{AWKWARD.index((given, other))}"
    given, other = f"{folder}/{given}", f"{folder}/{other}"
    more = [f"{folder}/{number}.tar" for number in range(count)]
    with closing(s3_client(s3_endpoint)) as client:
        client.put_object(Bucket=BUCKET, Key=other, Body=tar(tmp_path, "otherone"))
        for key in more:
            client.put_object(Bucket=BUCKET, Key=key, Body=tar(tmp_path, "more"))
        with pytest.raises(SourceError) as missing:
            open_dataset([f"s3://{BUCKET}/{key}" for key in (*more, given)], storage_options=options)
        assert f"there is no s3://{BUCKET}/{given}; " in str(missing.value)
        client.put_object(Bucket=BUCKET, Key=given, Body=tar(tmp_path, "right"))
    how: dict[str, Any] = {"format": "webdataset", "index_dir": tmp_path / "index", "storage_options": options}
    with closing(open_dataset([f"s3://{BUCKET}/{key}" for key in (*more, given, other)], **how)) as opened:
        assert [sample["jpg"] for sample in opened.__getitems__([count - 1, count, count + 1])] == [
            b"more" * 100,
            b"right" * 100,
            b"otherone" * 100,
        ]


@pytest.mark.parametrize("give", [str, lambda path: f"file://{path}"])
def test_on_a_disk_a_link_is_followed_before_its_parent(give: Callable[[Path], str], tmp_path: Path) -> None:
    (tmp_path / "real/below").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real/below")
    (tmp_path / "real/y.tar").write_bytes(tar(tmp_path, "right"))
    (tmp_path / "y.tar").write_bytes(tar(tmp_path, "otherone"))
    given = give(Path(f"{tmp_path}/link")) + "/../y.tar"
    with closing(open_dataset(given, index_dir=tmp_path / "index")) as opened:
        assert opened[0]["jpg"] == b"right" * 100
    assert os.path.samefile(tmp_path / "link/../y.tar", tmp_path / "real/y.tar")


@pytest.mark.parametrize("url", ["s3://data/x//", "http://127.0.0.1:1/x//", "memory://x//", "zip://x//::file:///x.zip"])
def test_a_directory_with_an_empty_name_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match="ends with several slashes"):
        Files(url)

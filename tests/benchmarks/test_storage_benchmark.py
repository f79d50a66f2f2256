"""The storage benchmark's servers serve its bucket, and its clients read the same."""

from __future__ import annotations

import argparse
import http.client
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.storage import _chosen, served, sides_of
from benchmarks.storage_corpus import object_name
from benchmarks.storage_sides import CLIENTS, Place, PlainReads
from torch_dpflow.datasets.storage import ObjectReader

CONTENT = b"encoded JPEG" * 1000


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A bucket with one object."""
    path = tmp_path / object_name(0)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    return tmp_path


def check_clients(place: Place) -> None:
    """Read the object with the vendor's client and with ours."""
    assert PlainReads(lambda: CLIENTS[place.kind](place))[0] == CONTENT
    reader = ObjectReader(place.storage_options())
    assert reader.read(f"{place.bucket_url}/{object_name(0)}") == CONTENT


def test_the_vendors_client_and_ours_read_the_same_from_the_server(bucket: Path) -> None:
    with served("oss", bucket, 0.0) as endpoint:
        place = Place(kind="oss", endpoint=endpoint)
        check_clients(place)


def test_the_s3_server_keeps_connections_open(bucket: Path) -> None:
    with served("s3", bucket, 0.0) as endpoint:
        place = Place(kind="s3", endpoint=endpoint)
        check_clients(place)
        with closing(http.client.HTTPConnection(endpoint.removeprefix("http://"))) as connection:
            for method, name, status, length in (
                ("GET", object_name(0), 200, len(CONTENT)),
                ("HEAD", object_name(0), 200, len(CONTENT)),
                ("GET", object_name(1), 404, None),
                ("GET", object_name(0), 200, len(CONTENT)),
            ):
                connection.request(method, f"/data/{name}")
                answer = connection.getresponse()
                assert (answer.status, answer.will_close) == (status, False)
                assert length in (
                    None,
                    answer.length if method == "GET" else int(answer.headers["Content-Length"]),
                )
                answer.read()


def test_the_disk_needs_no_server(bucket: Path) -> None:
    with served("disk", bucket, 30.0) as endpoint:
        assert endpoint == ""


@pytest.mark.parametrize("kind", ["disk", "oss", "s3"])
def test_every_storage_has_a_plain_side_first_and_both_loaders_over_udr(kind: str) -> None:
    first, *others = sides_of(kind)
    assert first.startswith("torch + ")
    assert others[:2] == ["torch + UDR", "dpflow + UDR"]


def test_workloads_are_chosen_by_name() -> None:
    assert _chosen("s3,disk") == ["s3", "disk"]
    with pytest.raises(argparse.ArgumentTypeError, match="tape"):
        _chosen("disk,tape")

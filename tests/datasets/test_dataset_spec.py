"""The files of a store: what is written is read again, and what is damaged is named."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import msgspec
import pytest

from torch_dpflow.datasets.spec import (
    Dataset,
    DatasetShardMeta,
    SampleMeta,
    ShardEntry,
    StoreRecord,
    Variant,
    data_url,
    decode_dataset,
    decode_file,
    encode_file,
    sealed,
    sha256_of,
)
from torch_dpflow.datasets.writer import json_schemas
from torch_dpflow.errors import DamagedStoreError, DatasetNotFoundError, NewerFormatError

NAME = "store/core/x/versions/v1.json"


def _shard(count: int = 2) -> DatasetShardMeta:
    samples = [SampleMeta(path=f"a/{n}.jpg", length=n, meta=msgspec.Raw(b'{"label":%d}' % n)) for n in range(count)]
    return DatasetShardMeta(format=1, dataset="core/x", version="v1", variant="train", shard=0, samples=samples)


def _dataset(shard: bytes = b"", **changes: Any) -> Dataset:
    entry = ShardEntry(version="v1", bytes=len(shard), sha256=sha256_of(shard))
    fields = {"data": "data", "samples": 2, "shard_size": 3, "shards": [entry], **changes}
    train = Variant(**fields)
    return sealed(
        Dataset(format=1, id="core/x", version="v1", created="2024-01-01T00:00:00", variants={"train": train})
    )


def test_what_is_written_is_read_again() -> None:
    dataset = _dataset(info={"classes": ["a", "b"], "mean": [0.1, 1e-7, 3]})
    assert decode_dataset(encode_file(dataset), NAME) == dataset
    shard = _shard()
    assert decode_file(encode_file(shard), DatasetShardMeta, NAME) == shard


def test_every_flipped_bit_is_noticed() -> None:
    data = encode_file(_dataset(info={"classes": ["a"]}))
    for position, bit in itertools.product(range(len(data)), range(8)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << bit
        with pytest.raises((DamagedStoreError, NewerFormatError), match=r"versions/v1\.json"):
            decode_dataset(bytes(damaged), NAME)


def test_every_cut_is_noticed() -> None:
    data = encode_file(_dataset())
    for length in range(len(data)):
        with pytest.raises(DamagedStoreError, match=r"versions/v1\.json"):
            decode_dataset(data[:length], NAME)


def test_a_newer_format_is_named_before_anything_else_is_looked_at() -> None:
    data = b'{"kind":"dataset","format":2,"entirely":"different"}'
    with pytest.raises(NewerFormatError, match="format 2; this release reads up to 1: update"):
        decode_dataset(data, NAME)


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{}", b'{"kind":"dataset"}', b"\xff", b'{"format":1}'])
def test_what_is_no_file_of_the_store_is_named(data: bytes) -> None:
    with pytest.raises(DamagedStoreError, match=r"versions/v1\.json is no dataset file"):
        decode_dataset(data, NAME)


def test_a_file_of_another_kind_is_named() -> None:
    record = encode_file(StoreRecord(format=1, created="now"))
    with pytest.raises(DamagedStoreError, match="dataset-store"):
        decode_dataset(record, NAME)


def test_unknown_fields_are_damage_not_something_to_skip() -> None:
    data = json.loads(encode_file(_shard()))
    data["samples"][0]["flipped"] = True
    with pytest.raises(DamagedStoreError, match="flipped"):
        decode_file(json.dumps(data).encode(), DatasetShardMeta, NAME)


def test_counts_that_contradict_each_other_are_named() -> None:
    with pytest.raises(DamagedStoreError, match="names 1 shards of 3 samples for the 4 samples of 'train'"):
        decode_dataset(encode_file(_dataset(samples=4)), NAME)


def test_a_shard_must_be_what_its_version_says() -> None:
    data = encode_file(_shard())
    assert _dataset(data).decode_shard("train", 0, data) == _shard()
    with pytest.raises(DamagedStoreError, match=r"core/x/meta/v1/train/ms-0\.json has 0 bytes"):
        _dataset(data).decode_shard("train", 0, b"")
    with pytest.raises(DamagedStoreError, match="SHA-256"):
        _dataset(data).decode_shard("train", 0, data[:-1] + b" ")
    other = encode_file(msgspec.structs.replace(_shard(), shard=1))
    with pytest.raises(DamagedStoreError, match=r"shard=1.*instead of.*shard=0"):
        _dataset(other).decode_shard("train", 0, other)
    longer = encode_file(_shard(3))
    with pytest.raises(DamagedStoreError, match=r"samples=3.*instead of.*samples=2"):
        _dataset(longer).decode_shard("train", 0, longer)


def test_variants_by_name() -> None:
    dataset = _dataset()
    assert dataset.variant() is dataset.variant("train")
    with pytest.raises(DatasetNotFoundError, match=r"no variant 'val' of core/x:v1; it has \['train'\]"):
        dataset.variant("val")


@pytest.mark.parametrize(
    ("root", "path", "url"),
    [
        ("data", "a/b.jpg", "s3://b/core/x/data/a/b.jpg"),
        ("file:///mnt/x", "a b#1.jpg", "file:///mnt/x/a b#1.jpg"),
        ("data", "oss://other/key", "oss://other/key"),
        ("data", "a..b", "s3://b/core/x/data/a..b"),
    ],
)
def test_where_data_lies(root: str, path: str, url: str) -> None:
    assert data_url("s3://b/core/x", root, path) == url


@pytest.mark.parametrize(("root", "path"), [("data", "../y"), ("..", "y"), ("data", "/etc/passwd"), ("/x", "y")])
def test_no_path_leads_out_of_its_root(root: str, path: str) -> None:
    with pytest.raises(DamagedStoreError, match="leads out of"):
        data_url("s3://b/core/x", root, path)


def test_annotations_are_anew_each_time() -> None:
    sample = _shard().samples[1]
    sample.fields()["label"] = "overwritten"
    assert sample.fields() == {"label": 1}


def test_annotations_that_are_no_object_are_damage() -> None:
    sample = SampleMeta(path="a", meta=msgspec.Raw(b"[1]"))
    with pytest.raises(DamagedStoreError, match="annotations of a"):
        sample.fields()


def test_an_offset_needs_a_length() -> None:
    data = encode_file(_shard()).replace(b'"length":1', b'"offset":1')
    with pytest.raises(DamagedStoreError, match="needs a length"):
        decode_file(data, DatasetShardMeta, NAME)


@pytest.mark.parametrize("record", [StoreRecord(format=1, created="now"), _dataset(), _shard()])
def test_the_published_schemas_describe_the_files(record: Any) -> None:
    data = json.loads(encode_file(record))
    schema = json_schemas()[data["kind"]]
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(data, schema)
    for change in ({"format": 4}, {"kind": "x"}, {"surplus": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**data, **change}, schema)

"""Samples that clients decode and push: each rank its part, one set for each transform."""

from __future__ import annotations

import numpy as np
import pytest

from tests.datasets.samples_source import content
from torch_dpflow.datasets import StoredDataset
from torch_dpflow.errors import OptionError, PeerLostError
from torch_dpflow.pool import DataClient
from torch_dpflow.pool.planning import layout as layouts

COUNT = 40


class Decode:
    """The first bytes as a picture of 2 x 3, and how often it was asked."""

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift
        self.calls: list[bytes] = []

    def __call__(self, content: bytes) -> np.ndarray:
        self.calls.append(content)
        return np.frombuffer(content.ljust(6)[:6], np.uint8).reshape(2, 3) + np.uint8(self.shift)

    def __getstate__(self) -> int:
        return self.shift


def expected(shift: int) -> np.ndarray:
    return np.stack([Decode(shift)(content(number)) for number in range(COUNT)])


def test_pixels_are_decoded_once_and_read_by_everybody(stored: StoredDataset, client: DataClient) -> None:
    decode = Decode()
    info = client.preload(stored, transform=decode)
    assert (info.records, info.loaded) == (COUNT, COUNT)
    assert info.pushed is not None
    assert np.array_equal(np.asarray(client.read_batch(info.pushed, range(COUNT))), expected(0))
    assert len(decode.calls) == COUNT + 1  # the first one tells the shape
    client.preload(stored, transform=decode)
    assert len(decode.calls) == COUNT + 2
    other = client.preload(stored, transform=Decode(1)).pushed
    assert other is not None
    assert other != info.pushed
    assert np.array_equal(np.asarray(client.read_batch(other, range(COUNT))), expected(1))


def test_each_rank_decodes_its_part(stored: StoredDataset, client: DataClient, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = layouts.ArrayLayout.__init__
    monkeypatch.setattr(
        layouts.ArrayLayout,
        "__init__",
        lambda self, identity, records, dtype, shape: usual(self, identity, records, dtype, shape, 18, 18),
    )
    first, second = Decode(), Decode()
    half = client.preload(stored, transform=first, rank=0, world=2)
    assert half.loaded < COUNT
    whole = client.preload(stored, transform=second, rank=1, world=2)
    assert whole.loaded == COUNT
    assert len(first.calls) + len(second.calls) == COUNT + 2
    assert whole.pushed == half.pushed
    assert whole.pushed is not None
    assert np.array_equal(np.asarray(client.read_batch(whole.pushed, range(COUNT))), expected(0))
    client.unload(whole.pushed)
    with pytest.raises(PeerLostError, match="push it"):
        client.read(whole.pushed, 3)


def test_what_cannot_be_decoded_to_one_shape_is_refused(stored: StoredDataset, client: DataClient) -> None:
    with pytest.raises(OptionError, match="for the first; have it crop, resize or pad to one shape"):
        client.preload(stored, transform=lambda content: np.frombuffer(content, np.uint8))
    [begun] = client.cached_datasets()
    assert begun.loaded < COUNT
    assert begun.pushed is not None
    client.unload(begun.pushed)
    client.preload(stored)  # samples of any length, decoded by who reads them
    assert [one for one, _ in client.read_batch(stored, range(COUNT))] == [content(one) for one in range(COUNT)]
    for transform in (None, Decode()):
        for rank, world in ((2, 2), (-1, 2), (0, 0)):
            with pytest.raises(OptionError, match=r"rank=2 of world=2|rank=-1 is out|world=0 is out"):
                client.preload(stored, transform=transform, rank=rank, world=world)
    for rank in range(2):
        with pytest.raises(OptionError, match=rf"rank={rank}, world=2 without transform="):
            client.preload(stored, rank=rank, world=2)
    with pytest.raises(OptionError, match="transform= is for datasets of a store"):
        client.preload(stored, transform=Decode(), fit="part")

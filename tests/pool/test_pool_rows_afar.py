"""Rows of arrays in the memory of other hosts: each is received where it stays, and no more than the rows comes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import StackDataset, Subset

from tests.pool.pool_servers import inner_server
from tests.pool.test_pool_over_tcp import Relay
from tests.shared_cluster import PATIENCE_S
from torch_dpflow import DPFlowDataLoader
from torch_dpflow.cluster.security.connection_file import generate_keys, write_connection_file
from torch_dpflow.pool import DataClient, PooledArray
from torch_dpflow.pool.transport.address import PoolAddress, find_address

KEYS = generate_keys("", certificates=True)
#: Rows of 20 bytes, of 12 kB of which many are in a block, and of 240 kB, which are blocks.
SHAPES = [(5,), (30, 100), (200, 300)]


def rows_of(shape: tuple[int, ...], count: int = 120) -> np.ndarray:
    return np.arange(count * np.prod(shape), dtype=np.float32).reshape(count, *shape)


@pytest.fixture(params=[True, False], ids=["plain", "TLS"])
def afar(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[PoolAddress]:
    """A server whose memory cannot be mapped, as it is in another container."""
    write_connection_file(tmp_path / "keys", KEYS)
    listen = find_address("tcp://127.0.0.1:0", tmp_path / "keys", trust_network=request.param)
    with inner_server(tmp_path / "p", 64 << 20, listen=listen) as serving:
        (tmp_path / "p").rename(tmp_path / "q")
        yield find_address(str(serving.address), tmp_path / "keys", trust_network=request.param)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_other_hosts_come_alone_and_in_order(afar: PoolAddress, tmp_path: Path, shape: tuple[int, ...]) -> None:
    rows, chance = rows_of(shape), np.random.default_rng(3)
    source = DataClient(tmp_path / "q", silence_s=PATIENCE_S).push("tests/rows:1", rows)
    with (
        closing(Relay(afar, 1 << 60, "")) as relay,
        closing(PooledArray(source, relay.address, silence_s=PATIENCE_S)) as array,
    ):
        array.read_batch([0])
        for chosen in (
            chance.integers(0, 120, 40),
            np.arange(120),
            np.arange(30, 90),
            np.array([7, 7, 8, 8, 9, 119, 0, 1, 2]),
            np.arange(120)[::-3],
        ):
            told = relay.passed
            found = array.read_batch(chosen)
            assert np.array_equal(np.asarray(found), rows[chosen])
            assert relay.passed - told < 1.1 * found.nbytes + 200 * len(chosen) + 10_000
        assert array.misses == 0


def test_batches_of_a_loader_are_rows_of_other_hosts(afar: PoolAddress, tmp_path: Path) -> None:
    """They stay as they are while later ones come, and can be written to."""
    images, labels = rows_of((3, 64, 64)), np.arange(120, dtype=np.int64)
    client = DataClient(tmp_path / "q", silence_s=PATIENCE_S)
    arrays = {
        name: PooledArray(client.push(f"tests/{name}:1", content), afar, silence_s=PATIENCE_S)
        for name, content in (("image", images), ("label", labels))
    }
    order = np.random.default_rng(4).permutation(120)
    loader = DPFlowDataLoader(Subset(StackDataset(**arrays), order.tolist()), batch_size=16, num_workers=2)
    batches = []
    for number, batch in enumerate(loader):
        batches.append(batch)
        if number % 2:
            batch["image"].neg_()
    for number, (batch, chosen) in enumerate(zip(batches, np.split(order, range(16, 120, 16)))):
        assert torch.equal(batch["image"], torch.from_numpy(images[chosen] * (-1 if number % 2 else 1)))
        assert torch.equal(batch["label"], torch.from_numpy(labels[chosen]))
    assert len(batches) == 8

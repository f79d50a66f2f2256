"""BlockShuffleSampler: a random order of the rows of tables, which are decoded in blocks."""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from torch_dpflow._core.checks import check_int
from torch_dpflow.errors import OptionTypeError
from torch_dpflow.samplers.indices import CompactArray, compact
from torch_dpflow.samplers.sampler import DynaGCSSampler


@runtime_checkable
class HasBlocks(Protocol):
    """Interface of a dataset whose rows are stored in blocks, such as `TableDataset`."""

    #: Number of rows of each block, in the order of the row numbers.
    blocks: NDArray[np.int64]

    def __len__(self) -> int: ...


class BlockShuffleSampler(DynaGCSSampler):
    """Sampler of a random order of rows that lets each rank decode each of its blocks about once per epoch.

    Blocks are drawn in random order and divided among the ranks. A rank reads `window` blocks at a time, their rows
    shuffled together, so a reader needs memory for `window` blocks. A larger window comes closer to a full shuffle.

    Ranks, `set_epoch` and states are as with `DynaGCSSampler`. If an epoch is resumed with a different number of ranks,
    each rank reads rows of more blocks at a time until the epoch ends.

    Args:
        dataset: a dataset with `blocks`, such as `TableDataset`.
        window: number of blocks that are shuffled together.
        num_replicas: number of ranks; by default torch.distributed's, if it is initialised, else 1.
        rank: this rank; by default torch.distributed's, if it is initialised, else 0.
        ranks: a 1-D DeviceMesh or a process group that defines both.
        seed: determines the order, together with the epoch.
        drop_last: leave out the tail that does not divide evenly among the ranks, instead of repeating rows.

    Raises:
        OptionError: a value is out of range.
        OptionTypeError: an argument is of the wrong type.
    """

    def __init__(
        self,
        dataset: HasBlocks,
        *,
        window: int = 8,
        num_replicas: int | None = None,
        rank: int | None = None,
        ranks: Any = None,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if not isinstance(dataset, HasBlocks):
            raise OptionTypeError(
                f"dataset is a {type(dataset).__name__} without `blocks`; give a TableDataset, or use DynaGCSSampler "
                "for rows that can be read alone"
            )
        self._blocks = np.asarray(dataset.blocks, np.int64)
        self._window = check_int("window", window, minimum=1)
        super().__init__(
            range(int(self._blocks.sum())),
            num_replicas=num_replicas,
            rank=rank,
            ranks=ranks,
            seed=seed,
            drop_last=drop_last,
        )

    def _order(self, epoch: int, began_with: int) -> CompactArray:
        return block_order(self._blocks.tobytes(), self._window, began_with, self.seed + epoch)

    def _identity(self) -> dict[str, Any]:
        return super()._identity() | {"blocks": zlib.crc32(self._blocks.tobytes()), "window": self._window}


@lru_cache(maxsize=2)
def block_order(blocks: bytes, window: int, ranks: int, seed: int) -> CompactArray:
    """Return an order of all rows. Rank r reads the places r, r + `ranks` and so on: mostly rows of its own blocks.

    Args:
        blocks: number of rows in each block, as the bytes of an int64 array.
        window: number of blocks that are shuffled together.
        ranks: number of ranks.
        seed: seed of the epoch.
    """
    sizes = np.frombuffer(blocks, np.int64)
    total = int(sizes.sum())
    firsts = np.cumsum(sizes) - sizes
    generator = torch.Generator()
    generator.manual_seed(seed)
    drawn = torch.randperm(len(sizes), generator=generator).numpy()
    order: CompactArray = np.empty(total, compact(total))
    surplus, unfilled = [np.empty(0, np.int64)], []
    # Windows are written where they belong, as an array of all rows in 64 bits would take more memory than the order.
    for rank in range(ranks):
        own, blocks_of_rank = order[rank::ranks], drawn[rank::ranks]
        for start in range(0, len(blocks_of_rank), window):
            chosen = blocks_of_rank[start : start + window]
            together = np.concatenate([np.arange(firsts[block], firsts[block] + sizes[block]) for block in chosen])
            rows = together[torch.randperm(len(together), generator=generator).numpy()]
            fitting = min(len(rows), len(own))
            own[:fitting], own = rows[:fitting], own[fitting:]
            if fitting < len(rows):
                surplus.append(rows[fitting:])
        unfilled.append(own)
    # Blocks differ in size: the last rows of ranks with more rows go to ranks with fewer.
    left = np.concatenate(surplus)
    for places in unfilled:
        places[:], left = left[: len(places)], left[len(places) :]
    order.flags.writeable = False
    return order

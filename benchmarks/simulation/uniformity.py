"""Is every epoch of every job a uniform permutation of its set? Counts over many epochs, and their tests.

The statistics are those of thesis 5.2.3 (chi-square of each position, Benjamini-Hochberg), and the same for
each item, which catches samples that come early or late; besides, the share of each class of samples (those
that the same jobs read) in each tenth of the epoch; and how often each sample comes right behind each other one,
which catches orders that are uniform place by place and yet put the same samples side by side.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: significance level of the Benjamini-Hochberg procedure
LEVEL = 0.05


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the tests say about one job's epochs."""

    epochs: int
    #: Benjamini-Hochberg adjusted p values, one for each position
    position_p: NDArray[np.float64]
    #: the same, one for each item
    item_p: NDArray[np.float64]
    #: mean over the positions of chi-square over its degrees of freedom: 1 for a perfect sampler
    position_ratio: float
    item_ratio: float
    #: chi-square of pairs of neighbours, in standard deviations from what it is for a perfect sampler
    pair_z: float
    #: shape (classes, 10): share of a class in a tenth of the epoch over its share in the set
    class_shares: NDArray[np.float64]

    @property
    def failing_positions(self) -> float:
        return float((self.position_p < LEVEL).mean())

    @property
    def failing_items(self) -> float:
        return float((self.item_p < LEVEL).mean())

    @property
    def share_range(self) -> tuple[float, float]:
        return float(self.class_shares.min()), float(self.class_shares.max())


class Counts:
    """How often each item of one job's set came at each position.

    Two tables of int32, (positions, items) and (items, items behind them): 8 MB for 1,000 samples.
    """

    def __init__(self, indices: NDArray[np.int64], classes: NDArray[np.int64] | None = None) -> None:
        """`classes` has one class number for each of `indices`; all samples are of one class without it."""
        self._place = np.full(int(indices.max()) + 1, -1, dtype=np.int64)
        self._place[indices] = np.arange(len(indices))
        self._classes = np.zeros(len(indices), dtype=np.int64) if classes is None else classes
        self._positions = np.arange(len(indices))
        self._table = np.zeros((len(indices), len(indices)), dtype=np.int32)
        self._pairs = np.zeros_like(self._table)
        self.epochs = 0

    def add(self, order: NDArray[np.int64]) -> None:
        """Count one whole epoch. Raises ValueError unless `order` is a permutation of the set."""
        items = self._place[order]
        if len(items) != len(self._positions) or len(np.unique(items)) != len(items) or items.min() < 0:
            raise ValueError(f"an epoch of {len(order)} samples is no permutation of the job's set")
        self._table[self._positions, items] += 1
        self._pairs[items[:-1], items[1:]] += 1
        self.epochs += 1

    def verdict(self) -> Verdict:
        """Test what was counted."""
        position_p, position_ratio = _chi_square(self._table, self.epochs)
        item_p, item_ratio = _chi_square(self._table.T, self.epochs)
        return Verdict(
            epochs=self.epochs,
            position_p=position_p,
            item_p=item_p,
            position_ratio=position_ratio,
            item_ratio=item_ratio,
            pair_z=self._pair_z(),
            class_shares=self._class_shares(),
        )

    def _pair_z(self) -> float:
        length = len(self._positions)
        expected = self.epochs / length  # of length * (length - 1) pairs, length - 1 come in each epoch
        behind_others = ~np.eye(length, dtype=np.bool_)
        statistic = np.square(self._pairs[behind_others] - expected).sum() / expected
        freedom = length * (length - 1) - 1
        return float((statistic - freedom) / np.sqrt(2 * freedom))

    def _class_shares(self) -> NDArray[np.float64]:
        tenths = np.add.reduceat(self._table, _tenths(len(self._positions)), axis=0)
        _, member = np.unique(self._classes, return_inverse=True)
        by_class = np.array([tenths[:, member == c].sum(axis=1) for c in range(member.max() + 1)])
        expected = np.outer(np.bincount(member) / len(member), tenths.sum(axis=1))
        return np.asarray(by_class / expected)


def _chi_square(table: NDArray[np.int32], epochs: int) -> tuple[NDArray[np.float64], float]:
    """Adjusted p value of each row, and the mean of chi-square over its degrees of freedom."""
    from scipy import stats  # takes a second, and only verdicts need it

    items = table.shape[1]
    expected = epochs / items
    statistic = np.square(table - expected).sum(axis=1) / expected
    p = stats.chi2.sf(statistic, items - 1)
    return stats.false_discovery_control(p), float(statistic.mean() / (items - 1))


def _tenths(positions: int) -> NDArray[np.int64]:
    return np.unique(np.arange(10) * positions // 10)

"""How alike a job's successive epochs are: the price of sharing."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


def epoch_correlation(orders: Sequence[NDArray[np.int64]]) -> float:
    """Mean rank correlation of the samples' positions in each epoch with those in the next.

    0 for independent epochs, 1 where every epoch repeats the last; nan with fewer than two epochs.
    """
    ranks = [np.argsort(order) for order in orders]
    pairs = [np.corrcoef(before, after)[0, 1] for before, after in pairwise(ranks)]
    return float(np.mean(pairs)) if pairs else float("nan")

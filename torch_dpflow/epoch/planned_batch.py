"""One batch of an epoch's plan, from the sampler to the training loop.

Control-C may interrupt the training loop's thread between any two of its steps. So a batch stays the next one until it
was taken, which is one assignment, `batch.outcome = TAKEN`, after which nothing is called before it is returned: Python
handles signals at calls and backward jumps only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_dpflow.epoch.state import StreamState

#: The outcome of a batch that was taken.
TAKEN: Any = object()


@dataclass(slots=True, eq=False)
class PlannedBatch:
    """A batch, and what its delivery changes."""

    position: int
    #: The batch's indices.
    index: Any
    #: Its worker, where batches are bound to workers.
    worker: int | None = None
    #: Its result or error; None until it arrives.
    outcome: Any = None
    samples: int = 0
    #: Where its worker's own stream is after it; None: nothing new.
    stream: StreamState | None = None
    #: Positions that are given up with it.
    dropped: Sequence[int] = ()
    #: The workers that owe batches after it, in order, and whose turn it is then; None where there is no order.
    owing: tuple[list[int], int] | None = None

"""A small driver of policies: jobs read announced orders, batch by batch, at a steady pace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from torch_dpflow.caches.policy import Policy
from torch_dpflow.lookahead import Lookahead

Order = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Request:
    """One job reads a batch."""

    instant: int
    job: int
    epoch: int
    keys: Order


def requests(
    orders: Sequence[Sequence[Order]], *, starts: Sequence[int] | None = None, batch: int = 1
) -> list[Request]:
    """What jobs ask for, in order: `orders[job][epoch]`; job j joins `starts[j]` batches after the first."""
    timed = []
    for job, epochs in enumerate(orders):
        instant = starts[job] if starts else 0
        for epoch, order in enumerate(epochs):
            for first in range(0, len(order), batch):
                timed.append(Request(instant, job, epoch, order[first : first + batch]))
                instant += 1
    return sorted(timed, key=lambda request: (request.instant, request.job))


def stream(asked: Sequence[Request]) -> Order:
    """The keys of all requests, as OPT wants them."""
    return np.concatenate([request.keys for request in asked])


def hit_rate(
    policy: Policy, asked: Sequence[Request], orders: Sequence[Sequence[Order]], *, announce: str = "order"
) -> float:
    """Percent of accesses that load nothing. What is asked for twice at one instant is loaded once.

    `announce`: what is told when an epoch begins: its "order", the next one's too ("both"), or "nothing".
    """
    hits = 0
    for _, simultaneous in groupby(asked, key=lambda request: request.instant):
        loading: dict[int, None] = {}
        for request in simultaneous:
            epochs = orders[request.job]
            if announce != "nothing" and request.keys[0] == epochs[request.epoch][0]:
                following = epochs[request.epoch + 1] if request.epoch + 1 < len(epochs) else None
                told = Lookahead.of_order(
                    epochs[request.epoch],
                    epoch=request.epoch,
                    following=following if announce == "both" else None,
                )
                policy.hint(request.job, told)
            held = policy.access_many(request.keys, request.job).tolist()
            for key, hit in zip(request.keys.tolist(), held):
                hits += hit or key in loading
                if not hit:
                    loading[key] = None
        if loading:
            policy.admit_many(np.array(list(loading)))
    return 100 * hits / sum(len(request.keys) for request in asked)

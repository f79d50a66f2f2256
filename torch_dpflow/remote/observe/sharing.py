"""Whether the jobs of a flow share their loading, and why they do not. Pure."""

from __future__ import annotations

from typing import NamedTuple

#: Nothing is said before so many samples have been given out, and where fewer than this share of them were loaded.
LEAST_SERVED, LITTLE = 100, 0.9


class Sharing(NamedTuple):
    """What the shards of a flow have done since they were started."""

    #: Samples that jobs have been given, and those that workers have loaded.
    served: int
    decodes: int
    #: Why little is shared; empty where much is, or nothing can be said yet.
    why: str


def sharing_of(served: int, decodes: int, *, size: int, keeps: bool) -> Sharing:
    """How a flow of `size` samples is shared; `keeps` says whether samples may be kept for who reads later."""
    if served < LEAST_SERVED or decodes < LITTLE * served:
        return Sharing(served, decodes, "")
    if not keeps:
        why = (
            "a sample goes to the jobs that ask for it at about the same time, is dropped once they have it, and is "
            "loaded anew for whoever comes later, as it may be drawn by chance. Start the jobs together, or say what "
            "may be kept: wrap the dataset in ALSDCache(dataset, SIZE, transform=what is random), or give "
            "JobOptions(repeatable=True) where nothing is"
        )
    elif served <= 1.1 * size:
        why = "each sample has been read about once so far; what was loaded is kept for later epochs and other jobs"
    else:
        why = (
            "its caches do not hold samples until they are read again: give them more room "
            "(JobOptions(memory_bytes=...), `dpflow up --memory`), or start the jobs together"
        )
    return Sharing(served, decodes, why)

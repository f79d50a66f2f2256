"""Whether the jobs of a flow share its loading, and if not, why. Pure."""

from __future__ import annotations

from typing import NamedTuple

#: Little is shared once so many samples have been served and at least this share of them was loaded for it.
LEAST_SERVED, LITTLE = 100, 0.9


class Sharing(NamedTuple):
    """Counts of a flow's shards since they started."""

    #: Samples that jobs have received, and that workers have loaded.
    served: int
    decodes: int
    #: Why little is shared, and what to change; empty if much is, or if that is not known yet.
    why: str
    #: What to change alone; empty: nothing.
    change: str = ""


def sharing_of(served: int, decodes: int, *, size: int, keeps: bool) -> Sharing:
    """How a flow of `size` samples is shared. keeps: whether samples may be cached for later readers."""
    if served < LEAST_SERVED or decodes < LITTLE * served:
        return Sharing(served, decodes, "")
    if not keeps:
        why = (
            "a sample goes to the jobs that request it at about the same time, is dropped once they have it, and is "
            "loaded again for later readers, as it may be random. Start the jobs together, or say what may be cached: "
        )
        change = (
            "wrap the dataset in ALSDCache(dataset, SIZE, transform=what is random), or give "
            "JobOptions(repeatable=True) if nothing is"
        )
    elif served <= 1.1 * size:
        why, change = (
            "each sample has been read about once so far; samples are cached for later epochs and other jobs",
            "",
        )
    else:
        why = "its caches are too small to hold samples until they are read again: "
        change = (
            "give them more memory (JobOptions(memory_bytes=...), `dpflow up --memory`), "
            "or start the jobs together"
        )
    return Sharing(served, decodes, why + change, change)

"""Position of a job, or of one of its ranks, in its epoch, and the state that saves it for any number of ranks.

A state contains up to three sets of samples, with one bit for each sample of the flow:

- `done`: samples that were delivered to this rank.
- `together`: samples that all ranks together have read when each has read the same number as this rank, as reported by
  the router.
- `earlier`: samples that had been read when the unread samples were divided among the present ranks.

If the number of ranks is the same, each rank resumes from `done` of its own state, or from `together` if only the state
of another rank is given. With a different number of ranks, or from the
states of all ranks if these differ in position, the read samples become `earlier`, and the unread samples are divided
again. The read samples are `done` of all ranks' states or, if all ranks had the same position, `together` of any one.

In flows of more than `MAX_MARKED` samples, a job without ranks that reads all samples saves a digest instead of `done`,
as long as its order follows from seed and epoch alone. With the strategy "shared-log", this ends when the job reads a
sample because another job has loaded it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_dpflow._core.permutation import epoch_order
from torch_dpflow.cluster.client.options import JobDescription
from torch_dpflow.cluster.messages.router import EpochPlace
from torch_dpflow.errors import StateError
from torch_dpflow.samplers.passes import RankShares

Marks = npt.NDArray[np.uint8]
#: In flows up to this number of samples, a state always contains `done` (up to 43 KiB as text), never its digest.
MAX_MARKED = 1 << 18


class EpochCursor:
    """Position of a job, or of a rank of a job, in its epoch.

    The position is the epoch's start until `resume` or `add` is called.
    """

    def __init__(self, job: JobDescription, epoch: int) -> None:
        self._job = job
        self.epoch = epoch
        #: Number of samples that were delivered to this rank, not counting `earlier`.
        self.position = 0
        self.marks: Marks = np.zeros(-(-job.size // 8), np.uint8)
        #: Samples that had been read when the unread samples were divided among the present ranks; None: no samples.
        self.earlier: Marks | None = None
        #: (position, samples that all ranks together have read when each is at this position); None: not known.
        self.together: tuple[int, Marks] | None = None
        #: How many of the epoch's first samples are in the order that follows from seed and epoch alone.
        self.in_order = 0
        #: Whether the epoch was complete in the resumed state: samples that `drop_last` left out are not read now.
        self._is_over = False

    @property
    def knows_all_ranks(self) -> bool:
        """Whether this process knows which samples all ranks together have read at this position."""
        is_alone = self._job.rank is None or self._job.rank.replicas == 1
        return is_alone or not self.position or (self.together is not None and self.together[0] == self.position)

    @property
    def length(self) -> int:
        """Number of samples in this rank's part of the epoch, without the samples in `earlier`."""
        job = self._job
        samples = job.size if job.indices is None else len(job.indices)
        read = 0 if self.earlier is None else _count(self.earlier)
        if job.rank is None:
            return samples - read
        return RankShares(samples - read, job.rank.replicas, job.rank.drop_last).per_rank

    @property
    def left(self) -> int:
        """Number of samples that are still to be delivered, not counting a last batch that `drop_last` drops."""
        left = 0 if self._is_over else self.length - self.position
        return left - left % self._job.batch_size if self._job.drop_last else left

    def drawn(self) -> DrawnEpoch:
        """Return a report of this position for the router. Only delivered samples count as drawn."""
        return DrawnEpoch(self.epoch, self.marks.copy(), self.position, self.length, self.earlier, self.in_order)

    def add(self, keys: list[int], position: int) -> None:
        """Record the delivery of a batch. Idempotent. position: number of delivered samples, this batch included."""
        # For the few samples of a batch numpy would take twice as long.
        marks = self.marks.data
        for key in keys:
            marks[key >> 3] |= 128 >> (key & 7)
        self.position = position

    def state(self) -> dict[str, Any]:
        """Return the state as plain data: each set of samples as text, a character for six; or a digest for `done`."""
        rank = self._job.rank
        at, together = self.together or (-1, self.marks)
        return {
            "epoch": self.epoch,
            "size": self._job.size,
            "seed": self._job.seed,
            "rank": None if rank is None else [rank.rank, rank.replicas],
            "position": self.position,
            "over": self.left <= 0,
            **self._done(),
            "together": _encoded(together) if at == self.position else None,
            "earlier": None if self.earlier is None else _encoded(self.earlier),
        }

    def _done(self) -> dict[str, Any]:
        """Return the entries "done" and "digest" of a state: the marks of the samples that were read, or their digest.

        The digest is enough if the flow is large and the order follows from seed and epoch. "done" is then None.
        """
        job = self._job
        is_prefix = self.position <= self.in_order and job.rank is None and job.indices is None
        if not is_prefix or self.earlier is not None or job.size <= MAX_MARKED:
            return {"done": _encoded(self.marks)}
        return {"done": None, "digest": _digest(self.marks)}

    def resume(self, epoch: int, state: dict[str, Any]) -> None:
        """Set the position from `state`: the state of one rank, or the states of all ranks from `join_flow_states`.

        Raises StateError, and changes nothing, if `state` is damaged, does not fit this epoch, flow and job, or lacks
        the samples that all ranks had read although they are needed.
        """
        is_joined = "ranks" in state
        saved = _saved(state["ranks"] if is_joined else [state], epoch, self._job.size)
        rank, replicas = (0, 1) if self._job.rank is None else (self._job.rank.rank, self._job.rank.replicas)
        own = next((one for one in saved if (one.rank, one.replicas) == (rank, replicas)), None)
        one = saved[0] if own is None else own
        marks, position, earlier = np.zeros_like(self.marks), 0, one.earlier
        in_step = not is_joined or (len(saved) == replicas and len({part.position for part in saved}) == 1)
        if one.replicas != replicas or not in_step:
            earlier = self._read_by_all(saved, is_joined=is_joined)
        elif own is not None or one.over:
            marks, position = one.done, one.position
        else:
            marks, position = one.read_in_step(), one.position
        self._check(marks, earlier)
        self.epoch, self.marks = epoch, marks.copy()
        self.earlier = earlier if earlier.any() else None
        # `drop_last` may have been given since, which makes a part shorter by one sample.
        self.position = min(position, self.length)
        self.together = None if one.together is None or not position else (self.position, one.together)
        self._is_over = one.over and in_step and one.replicas == replicas
        self.in_order = self.position if one.in_order and not earlier.any() else 0

    def _read_by_all(self, saved: Sequence[_Saved], *, is_joined: bool) -> Marks:
        """Return the samples that all ranks had read in the run that saved these states."""
        one = saved[0]
        if all(part.over for part in saved) and (len(saved) == one.replicas or not is_joined):
            return self._members()  # an epoch that was read to its end is not continued, whatever `drop_last` left out
        if not is_joined:
            return one.read_in_step() | one.earlier
        read: Marks = np.bitwise_or.reduce([part.done | part.earlier for part in saved])
        return read

    def _members(self) -> Marks:
        members = np.ones(self._job.size, np.bool_)
        if self._job.indices is not None:
            members[:] = False
            members[self._job.indices] = True
        return np.packbits(members)

    def _check(self, *marks: Marks) -> None:
        foreign = np.bitwise_or.reduce(marks) & ~self._members()
        if foreign.any():
            raise StateError(
                f"the state has sample {int(np.unpackbits(foreign).argmax())}, which the job does not read; resume "
                "with the samples that the state was taken with, or begin the epoch again"
            )


@dataclass(slots=True)
class DrawnEpoch:
    """Report of a job to its router: which samples of an epoch were drawn. `RouterLink` updates it at each draw."""

    number: int
    drawn: Marks
    #: How many samples of this rank's part were drawn.
    position: int
    #: As in `EpochCursor`.
    length: int
    earlier: Marks | None
    in_order: int

    @property
    def place(self) -> EpochPlace:
        """Position in the epoch, as a part of the message `StartEpoch`."""
        return EpochPlace(self.number, self.position, self.earlier is not None)

    def frames(self) -> list[bytes]:
        drawn = self.drawn.tobytes() if self.position else b""
        return [drawn] if self.earlier is None else [drawn, self.earlier.tobytes()]


@dataclass(frozen=True)
class _Saved:
    """Checked state of one rank."""

    rank: int
    replicas: int
    position: int
    over: bool
    done: Marks
    together: Marks | None
    earlier: Marks
    #: Whether `done` follows from seed and epoch.
    in_order: bool

    @classmethod
    def of(cls, state: dict[str, Any], epoch: Any, size: int) -> _Saved:
        """Check a state. Raises StateError if it is damaged, or of another epoch or flow."""
        try:
            if (state["epoch"], state["size"]) != (epoch, size):
                raise StateError(
                    f"the state is of epoch {state['epoch']!r} of {state['size']!r} samples, to be begun is epoch "
                    f"{epoch} of {size}; give the epoch's own state, or none"
                )
            rank, replicas = (0, 1) if state["rank"] is None else map(int, state["rank"])
            done, together, earlier = (_decoded(state.get(name), size) for name in ("done", "together", "earlier"))
            position, over = int(state["position"]), bool(state.get("over", False))
            in_order = done is None and "digest" in state and 0 <= position <= size
            if in_order:
                done = _first_of_order(size, int(state["seed"]) + int(state["epoch"]), position, state["digest"])
        except StateError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"the job's state is damaged: {error!r}") from error
        # A part's last sample may fill up an uneven end, and may be one that the rank has.
        read = -1 if done is None else _count(done)
        if done is None or not (0 <= position <= min(size, read + 1) and 0 <= rank < replicas):
            raise StateError(
                f"the job's state is damaged: rank {rank} of {replicas} at position {position} with {read} samples of "
                f"{size}; pass what state_dict() returned"
            )
        earlier = np.zeros_like(done) if earlier is None else earlier
        return cls(rank, replicas, position, over, done, together, earlier, in_order)

    def read_in_step(self) -> Marks:
        """Return the samples that all ranks have read, except `earlier`, when each has read as many as this rank.

        Raises StateError if the state does not contain them.
        """
        if self.replicas == 1:
            return self.done
        if not self.position:
            return np.zeros_like(self.done)
        if self.together is None:
            raise StateError(
                f"the state has the samples of rank {self.rank} of {self.replicas} only, as the flow's router did not "
                f"know those of the others when the state was saved; give load_state_dict() the states of all "
                f"{self.replicas} ranks as a list, resume with {self.replicas} ranks from the state of each, or begin "
                "the epoch again"
            )
        return self.together & ~self.earlier


def check_resumable(state: dict[str, Any], replicas: int) -> None:
    """Raise StateError if `state` is damaged, or if it alone is not enough to resume with `replicas` ranks."""
    is_joined = "ranks" in state
    parts = state["ranks"] if is_joined else [state]
    first = parts[0] if isinstance(parts, list) and parts and isinstance(parts[0], dict) else {}
    size = first.get("size", 1)
    if type(size) is not int or size < 1:
        raise StateError(f"the job's state is damaged: it is of {size!r} samples; pass what state_dict() returned")
    one = _saved(parts, state.get("epoch"), size)[0]
    if not (is_joined or one.replicas == replicas or one.over):
        one.read_in_step()


def _saved(parts: Any, epoch: Any, size: int) -> list[_Saved]:
    """Return the checked states of the ranks of one run. Raises StateError if they do not belong together."""
    if not isinstance(parts, list) or not parts:
        raise StateError(f"the job's state is damaged: its ranks are {parts!r:.80}; give the states of all ranks")
    saved = [_Saved.of(part, epoch, size) for part in parts]
    ranks = {one.rank for one in saved}
    if len(ranks) < len(saved) or any(one.replicas != saved[0].replicas for one in saved):
        raise StateError(
            f"the states are of [rank, ranks] {[[one.rank, one.replicas] for one in saved]}; give one state of every "
            "rank that there was"
        )
    if any(not np.array_equal(one.earlier, saved[0].earlier) for one in saved):
        raise StateError(
            "the states continue different earlier runs of the epoch; give states that the ranks of one run saved "
            "together"
        )
    return saved


@lru_cache(maxsize=1)
def _first_of_order(size: int, seed: int, position: int, digest: str) -> Marks:
    """Return the marks of the first `position` samples of the order. Raises StateError if their digest differs."""
    read = np.zeros(size, np.bool_)
    read[epoch_order(size, seed)[:position]] = True
    marks = np.packbits(read)
    if _digest(marks) != digest:
        raise StateError(
            f"the job's state is damaged, or of another version: its digest is not that of "
            f"the first {position} samples of its order; pass what state_dict() returned, or begin the epoch again"
        )
    return marks


def _digest(marks: Marks) -> str:
    return hashlib.blake2b(marks.tobytes(), digest_size=16).hexdigest()


def _count(marks: Marks) -> int:
    return int(np.unpackbits(marks).sum())


def _encoded(marks: Marks) -> str:
    return base64.b64encode(marks.tobytes()).decode("ascii")


def _decoded(text: str | None, size: int) -> Marks | None:
    """Decode the marks of `size` samples; None for None. Raises StateError or ValueError for anything else."""
    if text is None:
        return None
    marks = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    needed = -(-size // 8)
    if len(marks) != needed:
        raise StateError(f"the job's state is damaged: {len(marks)} bytes of marks; {needed} bytes are right")
    if size % 8 and marks[-1] & ((1 << (8 - size % 8)) - 1):
        raise StateError(f"the job's state is damaged: it marks a sample beyond the {size} of the flow")
    return marks

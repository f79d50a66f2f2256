"""The contract of a sampling group, which orders the samples of several jobs so that the jobs can share reads.

A group is pure: no clock, thread or socket. Time is an argument, and random numbers come from seeds, so the same
calls give the same draws. It is not thread-safe: one thread at a time may call it.
"""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from torch_dpflow._core.checks import check_int, check_number, check_type
from torch_dpflow._core.permutation import MIN_LENGTH, Permutation, epoch_order
from torch_dpflow.errors import OptionError, UsageError
from torch_dpflow.lookahead import Lookahead
from torch_dpflow.samplers.indices import (
    MAX_SEED,
    BoolArray,
    CompactArray,
    IndexArray,
    Indices,
    Order,
    check_indices,
    compact,
)

#: Weight of the latest interval in a job's measured speed; one batch alone says little.
_SPEED_WEIGHT = 0.2


@dataclass(kw_only=True)
class Member:
    """Record of one job of a group: the arguments of its `join`, and its position."""

    name: str
    #: The job's set: the samples that it reads, in the order given; None: every sample of the group.
    indices: CompactArray | None
    #: Number of samples in the set.
    length: int
    seed: int
    batch_size: int
    independence: float
    #: Whether `name` identifies the job; False if its set does.
    named: bool = True
    #: Samples per second, given or measured; None if not known yet.
    speed: float | None = None
    #: Number of the job's epoch; None before the first.
    epoch: int | None = None
    #: Samples of this epoch that were drawn; `length` when it is over.
    position: int = 0
    #: How many of the epoch's first samples were drawn in the order of `order`; None: all so far.
    ordered: int | None = 0
    #: The time of the latest draw, by the caller's clock, and how many samples were drawn at that time.
    drew_at: float | None = None
    drew: int = 0

    def measure(self, n: int, now: float) -> None:
        """Record that the job draws `n` samples at the time `now`, seconds, and update its speed by earlier draws."""
        if self.drew_at is None or now > self.drew_at:
            if self.drew_at is not None:
                latest = self.drew / (now - self.drew_at)
                known = latest if self.speed is None else self.speed
                self.speed = known + _SPEED_WEIGHT * (latest - known)
            self.drew_at, self.drew = now, 0
        self.drew += n

    def samples(self) -> CompactArray:
        """Return the job's set of samples as an int32 or int64 array, in the order given."""
        return np.arange(self.length) if self.indices is None else self.indices

    def order(self, epoch: int) -> Order:
        """Return the permutation of the job's set that torch's RandomSampler draws with the seed `seed + epoch`.

        For 214 million samples or more the order is a different one, because torch's could not be drawn as it is read.
        """
        return self._taken(epoch_order(self.length, self.seed + epoch))

    def own_order(self, epoch: int, *what: int) -> Order:
        """Return a permutation of the job's set, drawn with the seed of `own_rng(epoch, *what)`."""
        if self.length < MIN_LENGTH:
            return self._taken(self.own_rng(epoch, *what).permutation(self.length).astype(compact(self.length)))
        return self._taken(Permutation(self.length, np.random.MT19937(self._key(epoch, *what))))

    def own_rng(self, *what: int) -> np.random.Generator:
        """Return a new generator, seeded with the job's seed, its identity (see `named`), and the numbers `what`."""
        return np.random.default_rng(self._key(*what))

    def _key(self, *what: int) -> int:
        key = hashlib.blake2b(repr((self.seed, self._identity(), *what)).encode(), digest_size=16).digest()
        return int.from_bytes(key, "little")

    def reads_as(self, other: "Member") -> bool:
        """Return whether both jobs have the same set, given in the same order."""
        if self.indices is None or other.indices is None:
            return self.indices is other.indices
        return np.array_equal(self.indices, other.indices)

    def _identity(self) -> str:
        if self.named:
            return self.name
        return "" if self.indices is None else hashlib.blake2b(self.indices.tobytes()).hexdigest()

    def _taken(self, places: Order) -> Order:
        return places if self.indices is None else self.indices[places[:]]


#: Maximum number of samples; the numbers of more would fit into no memory.
MAX_SIZE = 2**40
_NOTHING: IndexArray = np.empty(0, np.int64)


@dataclass(frozen=True)
class Draw:
    """Result of `SamplingGroup.draw` for one job.

    A strategy with a directory (a record of what the caches hold) decides what is loaded and evicted, as if the samples
    of all earlier draws were loaded already. A caller that draws ahead of delivery must keep drawn samples until they
    are delivered, even if a later draw evicts them.
    """

    #: Sample numbers in the order in which the job reads them; shape (n,).
    indices: IndexArray
    #: True for samples that must be loaded, False for resident ones; shape (n,). None if the strategy has no directory,
    #: so that the cache policy decides.
    led: BoolArray | None = None
    #: Samples that the directory evicts once this draw is loaded; shape (m,).
    evicted: IndexArray = field(default_factory=lambda: _NOTHING)


class SamplingGroup(ABC):
    """Sampling group: decides which of the samples 0 to `size` - 1 each of several jobs reads next.

    A job calls ``join``, then for every epoch ``start_epoch`` and ``draw`` until nothing is left, then
    ``leave``. Every epoch that is drawn to its end is a permutation of the job's set, whatever other jobs do at the
    same time. A call that raises leaves the group as it was. A pickle or deep copy continues like its original.

    Args:
        size: number of samples that the jobs choose from; at least 1.
        capacity: number of samples that the caches together can hold, at least 1; None: a tenth of `size`. Only
            strategies with a directory (`keeps_directory`) use it.
        seed: seed of the group's own random numbers.
    """

    #: The strategy's name in `STRATEGIES`.
    strategy: ClassVar[str]
    #: Maximum number of samples of a flow: with more, the strategy is too slow for the router's heartbeats.
    max_flow: ClassVar[int] = MAX_SIZE

    def __init__(self, size: int, *, capacity: int | None = None, seed: int = 0) -> None:
        self.size = check_int("size", size, minimum=1, maximum=MAX_SIZE)
        self.capacity = max(1, self.size // 10) if capacity is None else check_int("capacity", capacity, minimum=1)
        self.seed = check_int("seed", seed, minimum=0, maximum=MAX_SEED)
        self._members: dict[str, Member] = {}

    @property
    def jobs(self) -> tuple[str, ...]:
        """Names of the jobs in the group, in the order in which they joined."""
        return tuple(self._members)

    def join(
        self,
        job: str,
        indices: Indices | None = None,
        *,
        seed: int = 0,
        batch_size: int = 1,
        speed: float | None = None,
        independence: float = 0.0,
        named: bool = True,
    ) -> None:
        """Register a job. Before it can draw, `start_epoch` must be called.

        Args:
            indices: the job's set, the samples that it reads; None: every sample.
            seed: the job's seed, by which some strategies draw the job's order.
            batch_size: samples that the job consumes at once.
            speed: samples per second, where known; strategies that do not use it ignore it.
            independence: for "shared-log", share of samples, 0 to 1, that are picked whatever others have loaded.
            named: whether the name identifies the job; False for a random name, so that the set identifies the job.

        Raises:
            UsageError: the job is a member already.
            OptionError: `indices` or a number is not allowed, or the group has the strategy's maximum number of jobs.
            OptionTypeError: an argument is of the wrong type.
        """
        check_type("job", job, str, "the job's name as text")
        if job in self._members:
            raise UsageError(f"job {job!r} is a member already; leave() first, or choose another name")
        checked = None if indices is None else check_indices(indices, self.size)
        member = Member(
            name=job,
            indices=None if checked is None else checked.astype(compact(self.size)),
            length=self.size if checked is None else len(checked),
            seed=check_int("seed", seed, minimum=0, maximum=MAX_SEED),
            batch_size=check_int("batch_size", batch_size, minimum=1),
            independence=check_number("independence", independence, minimum=0, maximum=1),
            speed=None if speed is None else check_number("speed", speed, exclusive=True),
            named=named,
        )
        self._members[job] = member
        self._joined(member)

    def leave(self, job: str) -> None:
        """Remove a job that has ended or died, at any time; the other jobs continue their epochs.

        Raises:
            UsageError: the job is not a member.
        """
        member = self._member(job)
        self._left(member)
        del self._members[job]

    def start_epoch(self, job: str, epoch: int, *, done: Indices | None = None) -> None:
        """Begin an epoch of the job; the unread rest of its earlier epoch is dropped.

        Args:
            epoch: number of the epoch, at least 0; some strategies draw the job's order by it.
            done: samples that the job has read in this epoch already (a resume); they are not drawn again.

        Raises:
            UsageError: the job is not a member.
            OptionError: `epoch` is out of range; a sample of `done` is not in the job's set, or is there twice.
            OptionTypeError: an argument is of the wrong type.
        """
        member = self._member(job)
        epoch = check_int("epoch", epoch, minimum=0, maximum=MAX_SEED - member.seed)
        read = _NOTHING if done is None else self._check_done(member, done)
        member.epoch, member.position, member.ordered = epoch, len(read), 0
        member.drew_at, member.drew = None, 0
        self._started(member, epoch, read)

    def draw(self, job: str, n: int, now: float | None = None) -> Draw:
        """Draw the job's next `n` samples; fewer, finally none, at the end of its epoch.

        Args:
            now: seconds on any steady clock, from which the job's speed is measured.

        Raises:
            UsageError: the job is not a member, or its first epoch was not started.
            OptionError: `n` is below 1.
        """
        member = self._member(job)
        n = check_int("n", n, minimum=1)
        if member.epoch is None:
            raise UsageError(f"job {job!r} has no epoch to draw from; call start_epoch({job!r}, 0) first")
        n = min(n, member.length - member.position)
        if not n:
            return Draw(_NOTHING, None if self.keeps_directory is False else np.empty(0, np.bool_))
        if now is not None:
            member.measure(n, now)
        drawn = self._draw(member, n)
        member.position += n
        return drawn

    def next(self, job: str, n: int, now: float | None = None) -> IndexArray:
        """Draw like `draw`, and return only the indices (int64)."""
        return self.draw(job, n, now).indices

    def in_order(self, job: str) -> int:
        """Return how many of the epoch's first samples are known to be drawn in the order of `Member.order`.

        These samples follow from seed and epoch, so a state need not list them. 0 if the job does not read all samples.
        Raises UsageError: the job is not a member.
        """
        member = self._member(job)
        if member.indices is not None:
            return 0
        return member.position if member.ordered is None else member.ordered

    def remaining(self, job: str) -> int:
        """Return the number of samples left in the job's epoch; 0 before its first.

        Raises:
            UsageError: the job is not a member.
        """
        member = self._member(job)
        return 0 if member.epoch is None else member.length - member.position

    def lookahead(self, job: str, *, horizon: int | None = None) -> Lookahead:
        """Return the known part of the job's future reads, for cache policies. Draws nothing.

        Args:
            horizon: maximum number of certain samples, and of likely ones, to return; `members` and `following` are
                then left out. None: return everything.

        Raises:
            UsageError: the job is not a member, or its first epoch was not started.
        """
        member = self._member(job)
        if member.epoch is None:
            raise UsageError(f"job {job!r} has no epoch to look ahead in; call start_epoch({job!r}, 0) first")
        if horizon is None:
            return self._lookahead(member, member.epoch)
        return self._near_lookahead(member, member.epoch, horizon)

    def resize(self, capacity: int) -> IndexArray:
        """Set how many samples the caches can hold together; return the samples (int64) that this evicts.

        Raises:
            OptionError: `capacity` is below 1.
        """
        self.capacity = check_int("capacity", capacity, minimum=1)
        return self._resized()

    #: Whether the strategy has a directory: its draws say which samples must be loaded and which are evicted.
    keeps_directory: ClassVar[bool] = False

    @abstractmethod
    def _joined(self, member: Member) -> None:
        """Handle a member that was just registered."""

    @abstractmethod
    def _left(self, member: Member) -> None:
        """Handle a member that is about to be removed."""

    @abstractmethod
    def _started(self, member: Member, epoch: int, done: IndexArray) -> None:
        """Begin an epoch of a member, of which it has read `done`; drop an unfinished one."""

    @abstractmethod
    def _draw(self, member: Member, n: int) -> Draw:
        """Draw exactly `n` of the samples that are left, n >= 1; the caller advances `member.position`."""

    @abstractmethod
    def _lookahead(self, member: Member, epoch: int) -> Lookahead:
        """Return everything that is known of the member's future reads; see `lookahead`."""

    def _near_lookahead(self, member: Member, epoch: int, horizon: int) -> Lookahead:
        """Return a lookahead of the next `horizon` samples only. Strategies for many samples do this in O(horizon)."""
        whole = self._lookahead(member, epoch)
        certain, likely = whole.certain[:horizon], whole.likely[:horizon]
        if len(certain) < len(whole.certain):
            likely = likely[:0]
        return replace(
            whole, certain=certain, likely=likely, weights=whole.weights[: len(likely)], members=None, following=None
        )

    def _resized(self) -> IndexArray:
        """Handle a changed `capacity`, see `resize`; strategies without a directory ignore it."""
        return _NOTHING

    def _member(self, job: str) -> Member:
        try:
            return self._members[job]
        except (KeyError, TypeError):
            known = ", ".join(map(repr, self._members)) or "none"
            raise UsageError(
                f"job {job!r} is no member of this group (members: {known}); it never joined, or it left: join() first"
            ) from None

    def _check_done(self, member: Member, done: Indices) -> IndexArray:
        read = check_indices(done, self.size, name="done", allow_empty=True)
        if member.indices is not None and not (known := np.isin(read, member.indices)).all():
            raise OptionError(f"done has {int(read[~known][0])}, which is not in the set of job {member.name!r}")
        return read

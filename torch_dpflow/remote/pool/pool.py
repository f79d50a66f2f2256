"""A shard's pool: prefetch buffer and cache over one set of objects (thesis 3.4.2, 3.4.3, figure 4-12).

A pure state machine: each call returns what to do, in order; there is no socket, thread or clock inside.

**References.** A job wants samples ahead of its need, each under a ticket, and releases a ticket when it has
the sample. An object stays while a ticket refers to it or the cache holds it; a sample that two jobs want is
loaded once.

**Freshness.** What a repeatable flow loads may be served for ever. A sample that is drawn by chance is served
at most once to each job: a job that wants the key again gets another draw. It is kept for the jobs that have
not had it, as the policy allows, and goes when every job has.

**Room.** A load begins when there is room for it: what is held, what is expected of loads under way, and it.
For a sample that is wanted ahead of need the cache gives up at most half of all room. For one that a job
waits for, everything makes room: first the cache, then what is wanted farthest ahead, which is loaded again
later. Where even that does not do, requests are answered with what they have, so that their jobs release it.
So no job waits for another that holds samples and does not read: the sample that a job waits for can always
be loaded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch_dpflow.caches.policy import Policy
from torch_dpflow.checks import check_int
from torch_dpflow.errors import OptionError, UsageError
from torch_dpflow.lookahead import Lookahead
from torch_dpflow.remote.pool.objects import (
    Arrival,
    Cancel,
    Load,
    LoadQueue,
    PoolInstruction,
    PoolJob,
    PoolObject,
    PoolStatistics,
    RequestId,
    RequestTable,
    Ticket,
)
from torch_dpflow.remote.pool.shelf import Shelf

#: The part of its room that a cache gives up for samples that are wanted ahead of need.
AHEAD_SHARE = 0.5


class Pool:
    """Decides what is loaded, kept and served. Not thread-safe: one thread owns it.

    Every call costs O(log n) for each sample that it names, amortised, but for `leave`, which for samples
    drawn by chance costs O(cached).

    Args:
        capacity_bytes: most bytes of samples that are held or on their way. One sample alone may be larger,
            and while samples come in larger than those before, so may be what is on its way.
        concurrency: most loads under way.
        repeatable: whether loading a sample twice gives the same, with the same draw where it is `by_draw`.
        by_draw: whether who asks for another draw of a sample is to be given another. Then nothing is kept beyond the
            jobs' wants.
        policy: makes the cache's policy for a budget of bytes; None keeps nothing beyond the jobs' wants.
        numbers: those of its loads, each given once; pools of one owner may share them.

    Raises:
        OptionError: a number is below 1, or there is a policy for samples by draw.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int,
        concurrency: int,
        repeatable: bool,
        by_draw: bool = False,
        policy: Callable[[int], Policy] | None = None,
        numbers: Iterator[int] | None = None,
    ) -> None:
        check_int("capacity_bytes", capacity_bytes, minimum=1)
        check_int("concurrency", concurrency, minimum=1)
        if by_draw and policy is not None:
            raise OptionError(
                "by_draw=True with a policy: one for each sample is kept; leave out one of the two"
            )
        self._jobs: dict[str, PoolJob] = {}
        kept = None if policy is None else policy(capacity_bytes)
        self._shelf = Shelf(capacity_bytes, kept, repeatable=repeatable, by_draw=by_draw)
        self._queue = LoadQueue()
        self._requests = RequestTable(self._queue)
        self._numbers = itertools.count(1) if numbers is None else numbers
        #: Told to be loaded, by number.
        self._loading: dict[int, PoolObject] = {}
        #: Most loads under way; may be changed at any time.
        self.concurrency = concurrency
        self._wants = self._shared = self._loads = 0
        #: Whether everything that could make room has, and a sample that is waited for has none.
        self._pressed = False

    # -- jobs ------------------------------------------------------------------------------------------------

    def join(self, job: str, *, counts: bool = True) -> None:
        """A job begins to read; one that is there already is left as it is.

        counts: whether its wants are reads to the cache's policy; where not, `note_read` tells what is read.
        """
        if job not in self._jobs:
            self._jobs[job] = PoolJob(job, counts)
            if counts:
                self._shelf.join(job)

    def leave(self, job: str) -> list[PoolInstruction]:
        """A job has ended or died: everything that it wants is released. An unknown one is ignored."""
        gone = self._jobs.pop(job, None)
        if gone is None:
            return []
        out: list[PoolInstruction] = [*self._requests.abandon(gone)]
        out += self._release(gone, list(gone.wants))
        self._shelf.leave(job, self._jobs)
        return self._admit(out)

    def foresee(self, job: str, lookahead: Lookahead) -> None:
        """Tell the cache what is known of a job's future. UsageError for a job that has not joined."""
        self._job(job)
        self._shelf.foresee(job, lookahead)

    def note_read(self, job: str, key: int) -> None:
        """Tell the cache that a job reads this sample, on whose behalf another job wants it."""
        self._job(job)
        self._shelf.read([key], job)

    # -- room ------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Most bytes that are held or on their way."""
        return self._shelf.capacity

    @property
    def used(self) -> int:
        """Bytes that are held or on their way."""
        return self._shelf.held + self._shelf.reserved

    # -- reading ---------------------------------------------------------------------------------------------

    def is_wanted(self, job: str, ticket: Ticket) -> bool:
        """Whether a job holds this ticket."""
        return ticket in self._job(job).wants

    def want(self, job: str, wants: Iterable[tuple[Ticket, int]], draw: int) -> list[PoolInstruction]:
        """`job` will fetch these: (ticket, key), nearest first. A ticket that it holds already is ignored.

        draw: for samples that have to be loaded, decides what is drawn by chance; another one for each job
            and epoch.

        Raises:
            UsageError: the job has not joined.
        """
        reader = self._job(job)
        new = {ticket: key for ticket, key in wants if ticket not in reader.wants}
        if reader.counts:
            self._shelf.read(list(new.values()), job)
        oldest = next(iter(new), 0) if reader.oldest is None else reader.oldest
        for ticket, key in new.items():
            # How many samples the job reads before this one, at least 1: 0 is for what it waits for.
            self._want(reader, ticket, key, draw, max(1, 1 + ticket - oldest))
        return self._admit([])

    def fetch(self, job: str, request: RequestId, tickets: Sequence[Ticket]) -> list[PoolInstruction]:
        """`job` waits for these, which it wants; answered by one `Serve` with all of them, or with some.

        Raises:
            UsageError: the job has not joined, a ticket is not wanted, or the request's number is in use.
        """
        return self._admit([*self._requests.open(request, self._job(job), tickets)])

    def release(self, job: str, tickets: Iterable[Ticket]) -> list[PoolInstruction]:
        """`job` has these, or does not want them any more. Unknown ones are ignored.

        Raises:
            UsageError: the job has not joined.
        """
        return self._admit(self._release(self._job(job), tickets))

    def tickets_outside(self, job: str, first: int, end: int) -> list[Ticket]:
        """The tickets of `job` for keys that are not from `first` to before `end`."""
        return [ticket for ticket, wanted in self._job(job).wants.items() if not first <= wanted.key < end]

    @property
    def room(self) -> int:
        """How many samples the cache can hold, by the size of the latest; 0 where that is not known yet."""
        return self._shelf.room

    def resize(self, capacity_bytes: int) -> list[PoolInstruction]:
        """There is room for so many bytes from now on; what is beyond goes as soon as nobody waits for it.

        Raises:
            OptionError: it is below 1.
        """
        check_int("capacity_bytes", capacity_bytes, minimum=1)
        self._shelf.resize(capacity_bytes)
        self._trim()
        return self._admit([])

    # -- loading ---------------------------------------------------------------------------------------------

    def loaded(self, arrivals: Iterable[Arrival]) -> list[PoolInstruction]:
        """These samples that were told to be loaded are here; one that was cancelled is ignored."""
        out: list[PoolInstruction] = []
        for load, value, size, keep in arrivals:
            arrived = self._loading.pop(load, None)
            if arrived is None:
                continue
            self._shelf.store(arrived, value, size)
            if arrived.requests:
                out += self._requests.arrived(arrived)
            if keep:
                self._shelf.offer(arrived, self._jobs)
        self._trim()
        return self._admit(out)

    def statistics(self) -> PoolStatistics:
        """What was counted until now."""
        return PoolStatistics(
            wants=self._wants,
            shared=self._shared,
            loads=self._loads,
            held_bytes=self._shelf.held,
            reserved_bytes=self._shelf.reserved,
            capacity_bytes=self._shelf.capacity,
            ready=self._shelf.ready,
            loading=len(self._loading),
            queued=len(self._queue),
            cached=self._shelf.cached,
            jobs=len(self._jobs),
        )

    # -- inside ----------------------------------------------------------------------------------------------

    def _job(self, job: str) -> PoolJob:
        try:
            return self._jobs[job]
        except KeyError:
            raise UsageError(f"job {job!r} has not joined this pool, or has left it; join first") from None

    def _want(self, reader: PoolJob, ticket: Ticket, key: int, draw: int, distance: int) -> None:
        self._wants += 1
        wanted = self._shelf.find(key, reader.name, draw)
        if wanted is not None:
            self._shared += 1
            if distance < wanted.distance:
                wanted.approach(distance)
                if wanted.is_waiting:
                    self._queue.add(wanted)
            self._shelf.attach(wanted, reader.name, ticket, self._jobs)
        else:
            wanted = self._shelf.add(key, draw, distance, reader.name, ticket)
            self._queue.push(wanted, distance, wanted.number)
        reader.wants[ticket] = wanted

    def _release(self, reader: PoolJob, tickets: Iterable[Ticket]) -> list[PoolInstruction]:
        out: list[PoolInstruction] = []
        cancelled: list[int] = []
        for ticket in tickets:
            wanted = reader.wants.get(ticket)
            if wanted is None:
                continue
            if wanted.requests:
                out += self._requests.shorten(reader, ticket)
            del reader.wants[ticket]
            if not self._shelf.detach(wanted, reader.name, ticket):
                continue
            if wanted.loading:
                del self._loading[wanted.loading]
                cancelled.append(wanted.loading)
            elif not wanted.ready:
                self._queue.discard(wanted)
            self._shelf.release(wanted)
        return [*out, Cancel(cancelled)] if cancelled else out

    # -- admission -------------------------------------------------------------------------------------------

    def _admit(self, out: list[PoolInstruction]) -> list[PoolInstruction]:
        """Begin loads while there is room, the nearest first; ends every call."""
        self._pressed = False
        queue, loading, shelf = self._queue, self._loading, self._shelf
        while queue and len(loading) < self.concurrency:
            first = queue.first()
            size = shelf.expected_size(first)
            if not (shelf.has_room(size) or self._make_room(first, size)):
                break
            queue.discard(first)
            self._loads += 1
            load = next(self._numbers)
            shelf.begin(first, load, size)
            loading[load] = first
            out.append(Load(load, first.key, first.draw))
        if self._pressed:
            out += self._requests.flush()
        return out

    def _make_room(self, wanted: PoolObject, size: int) -> bool:
        """Whether there is room for it, after what may go has gone."""
        if not wanted.requests:
            return self._shelf.make_room(size, share=AHEAD_SHARE)
        if self._shelf.make_room(size, share=1.0):
            return True
        while self._requeue_farthest():
            if self._shelf.has_room(size):
                return True
        # Whatever is left is on its way to a job, waited for, or being loaded. Nothing of it: then go ahead.
        self._pressed = True
        return not self._loading and not self._shelf.held

    def _trim(self) -> None:
        """More came than was expected: what is not needed now goes."""
        while self._shelf.is_over and (self._shelf.evict() or self._requeue_farthest()):
            pass

    def _requeue_farthest(self) -> bool:
        """Give up the sample that is wanted last, to be loaded again; whether there was any."""
        farthest = self._shelf.farthest_spare()
        if farthest is None:
            return False
        self._shelf.requeue(farthest)
        self._queue.add(farthest)
        return True

    def validate(self) -> None:
        """Check every invariant; O(n), for tests. Raises AssertionError."""
        for job in self._jobs.values():
            assert all(ticket in wanted.tickets[job.name] for ticket, wanted in job.wants.items())
        assert all(entry.loading == load for load, entry in self._loading.items())
        self._requests.validate()
        self._queue.validate()
        self._shelf.validate(self._jobs)

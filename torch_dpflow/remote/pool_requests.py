"""The fetches of a pool that wait for an answer."""

from __future__ import annotations

from collections.abc import Sequence

from torch_dpflow.errors import UsageError
from torch_dpflow.remote.pool_objects import PoolJob, PoolObject, PoolRequest, RequestId, Serve, Ticket
from torch_dpflow.remote.pool_queue import LoadQueue


class RequestTable:
    """Who waits for what. An object that somebody waits for goes to the head of `queue`."""

    def __init__(self, queue: LoadQueue) -> None:
        self._queue = queue
        self._open: dict[RequestId, PoolRequest] = {}

    def open(self, number: RequestId, job: PoolJob, tickets: Sequence[Ticket]) -> list[Serve]:
        """`job` waits for these. UsageError where it does not want one of them, or the number is in use."""
        if number in self._open:
            raise UsageError(f"request {number} is open; give each fetch a number of its own")
        unknown = next((ticket for ticket in tickets if ticket not in job.wants), None)
        if unknown is not None:
            raise UsageError(
                f"job {job.name!r} fetches ticket {unknown}, which it does not want; want it first"
            )
        request = self._open[number] = PoolRequest(number, job, list(dict.fromkeys(tickets)))
        job.requests.add(number)
        for ticket in request.tickets:
            wanted = job.wants[ticket]
            wanted.requests.add((number, ticket))
            wanted.distance = 0
            request.missing += not wanted.ready
            self._queue.moved(wanted)
        return [] if request.missing else [self._serve(request)]

    def arrived(self, wanted: PoolObject) -> list[Serve]:
        """It has come: answer the requests that lacked nothing else."""
        complete: list[Serve] = []
        for number, _ in list(wanted.requests):
            request = self._open[number]
            request.missing -= 1
            if not request.missing:
                complete.append(self._serve(request))
        return complete

    def shorten(self, job: PoolJob, ticket: Ticket) -> list[Serve]:
        """`job` gives this ticket up; a request that lacked nothing else is answered."""
        wanted = job.wants[ticket]
        complete: list[Serve] = []
        for number in [number for number, asked in wanted.requests if asked == ticket]:
            request = self._open[number]
            if request.job is job:
                request.tickets.remove(ticket)
                self._forgo(wanted, number, ticket)
                request.missing -= not wanted.ready
                if not request.missing:
                    complete.append(self._serve(request))
        return complete

    def flush(self) -> list[Serve]:
        """Answer every request that has something with what it has."""
        partly = [request for request in self._open.values() if request.missing < len(request.tickets)]
        return [self._serve(request) for request in partly]

    def abandon(self, job: PoolJob) -> list[Serve]:
        """`job` is gone: answer its requests with nothing."""
        empty = [Serve(number, []) for number in job.requests]
        for answer in empty:
            self._close(self._open[answer.request])
        return empty

    def _serve(self, request: PoolRequest) -> Serve:
        self._close(request)
        wants = request.job.wants
        ready = [(ticket, wants[ticket]) for ticket in request.tickets if wants[ticket].ready]
        for ticket, served in ready:
            served.served.add((request.job.name, ticket))
        return Serve(request.number, [(ticket, served.value) for ticket, served in ready])

    def _close(self, request: PoolRequest) -> None:
        del self._open[request.number]
        request.job.requests.discard(request.number)
        for ticket in request.tickets:
            self._forgo(request.job.wants[ticket], request.number, ticket)

    def _forgo(self, wanted: PoolObject, request: RequestId, ticket: Ticket) -> None:
        """A request has it among its own no more."""
        wanted.requests.discard((request, ticket))
        if not wanted.requests:
            # It is near still, but behind what a job waits for.
            wanted.distance = 1
            self._queue.moved(wanted)

    def validate(self) -> None:
        """Check every invariant; O(n), for tests. Raises AssertionError."""
        for number, request in self._open.items():
            wanted = [request.job.wants[ticket] for ticket in request.tickets]
            assert number in request.job.requests
            assert all((number, ticket) in entry.requests for ticket, entry in zip(request.tickets, wanted))
            assert request.missing == sum(not entry.ready for entry in wanted)
            assert request.missing > 0, "a complete request was not answered"

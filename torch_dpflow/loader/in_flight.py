"""The batches that are planned and not delivered, and which worker gets the next one. Pure bookkeeping."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any


@dataclass
class InFlightBatch:
    """One batch on its way."""

    position: int
    #: The batch's indices.
    index: Any
    #: Its worker, where batches are bound to workers.
    worker: int | None
    #: Its result or error; None until it arrives.
    outcome: Any = None


class InFlight:
    """The batches in flight, by position, with their outcomes.

    Args:
        in_order: deliver by position; else by arrival.
    """

    def __init__(self, *, in_order: bool) -> None:
        self._in_order = in_order
        self._flights: dict[int, InFlightBatch] = {}
        self._arrived: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def add(self, flight: InFlightBatch) -> None:
        """A batch was planned; positions rise."""
        self._flights[flight.position] = flight

    def arrive(self, position: int, outcome: Any) -> None:
        """The outcome of a batch has arrived; ignored if it is not in flight. Idempotent."""
        flight = self._flights.get(position)
        if flight is not None and flight.outcome is None:
            self._arrived.append(position)
            flight.outcome = outcome

    def take(self) -> InFlightBatch | None:
        """Remove and return the batch to deliver next; None while it has not arrived."""
        if self._in_order:
            flight = next(iter(self._flights.values()), None)
            return None if flight is None or flight.outcome is None else self._flights.pop(flight.position)
        while self._arrived:
            flight = self._flights.get(self._arrived.popleft())
            if flight is not None and flight.outcome is not None:
                return self._flights.pop(flight.position)
        return None

    def put_back(self, flight: InFlightBatch) -> None:
        """Undo `take` for a batch that could not be delivered."""
        self._flights = {flight.position: flight, **self._flights}
        self._arrived.appendleft(flight.position)

    def drop_waiting(self, worker: int) -> list[InFlightBatch]:
        """Remove the batches that this worker owes: they will not arrive."""
        dropped = [f for f in self._flights.values() if f.worker == worker and f.outcome is None]
        for flight in dropped:
            del self._flights[flight.position]
        return dropped

    def workers(self) -> list[int]:
        """The workers of the batches in flight, by position."""
        return [flight.worker for flight in self._flights.values() if flight.worker is not None]

    def first_waiting(self) -> InFlightBatch | None:
        """The oldest batch that has not arrived."""
        return next((flight for flight in self._flights.values() if flight.outcome is None), None)


class Rotation:
    """torch's assignment of batches to workers: in turn, skipping those whose stream has ended.

    Args:
        workers: how many.
        in_order: if False, also skip those that owe more than their share.
        most: batches in flight at most.
    """

    def __init__(self, workers: int, *, in_order: bool, most: int, first: int = 0) -> None:
        self._active = [True] * workers
        self._owed = [0] * workers
        self._in_order = in_order
        self._most = most
        #: The worker that is next in the rotation.
        self.next = first % workers

    def assign(self, worker: int | None = None) -> int | None:
        """The worker that gets the next batch, None where none may; or give it to this one."""
        if worker is None:
            worker = self._in_turn()
        if worker is not None:
            self._owed[worker] += 1
        return worker

    def delivered(self, worker: int) -> None:
        """A batch of this worker has gone to the training loop."""
        self._owed[worker] -= 1

    def end(self, worker: int) -> None:
        """This worker's stream has ended."""
        self._active[worker] = False

    def _in_turn(self) -> int | None:
        share = self._most // max(1, sum(self._active))
        for _ in self._active:
            worker = self.next
            self.next = (worker + 1) % len(self._active)
            if self._active[worker] and (self._in_order or self._owed[worker] < share):
                return worker
        return None

"""The batches that are planned and not delivered, and which worker gets the next one. Pure bookkeeping."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch_dpflow.epoch.planned_batch import PlannedBatch


class InFlight:
    """The batches in flight, by position, with their outcomes.

    Args:
        in_order: deliver by position; else by arrival.
    """

    def __init__(self, *, in_order: bool) -> None:
        self._in_order = in_order
        self._flights: dict[int, PlannedBatch] = {}
        self._arrived: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def add(self, flight: PlannedBatch) -> None:
        """A batch was planned; positions rise."""
        self._flights[flight.position] = flight

    def arrive(self, position: int, outcome: Any) -> None:
        """The outcome of a batch has arrived; ignored if it is not in flight. Idempotent."""
        flight = self._flights.get(position)
        if flight is not None and flight.outcome is None:
            if not self._in_order:
                self._arrived.append(position)
            flight.outcome = outcome

    def due(self) -> PlannedBatch | None:
        """The batch to deliver next, the same one until it is removed; None while it has not arrived."""
        if self._in_order:
            flight = next(iter(self._flights.values()), None)
            return flight if flight is not None and flight.outcome is not None else None
        while self._arrived:
            flight = self._flights.get(self._arrived[0])
            if flight is not None:
                return flight
            self._arrived.popleft()
        return None

    def remove(self, position: int) -> None:
        """The batch at this position is not waited for any more. Idempotent."""
        self._flights.pop(position, None)

    def waiting(self, worker: int) -> list[int]:
        """The positions of the batches that this worker owes."""
        return [f.position for f in self._flights.values() if f.worker == worker and f.outcome is None]

    def workers(self) -> list[int]:
        """The workers of the batches in flight, by position."""
        return [flight.worker for flight in self._flights.values() if flight.worker is not None]

    def first_waiting(self) -> PlannedBatch | None:
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
        self._in_order = in_order
        self._most = most
        #: The worker that is next in the rotation.
        self.next = first % workers

    def in_turn(self, flights: InFlight) -> int | None:
        """The worker that gets the next batch, None where none may. Once it has, set `next` to `after` it."""
        share = self._most // max(1, sum(self._active))
        for turn in range(len(self._active)):
            worker = (self.next + turn) % len(self._active)
            if self._active[worker] and (self._in_order or flights.workers().count(worker) < share):
                return worker
        return None

    def after(self, worker: int) -> int:
        """Whose turn it is after this worker's."""
        return (worker + 1) % len(self._active)

    def is_active(self, worker: int) -> bool:
        """Whether its stream goes on."""
        return self._active[worker]

    def end(self, worker: int) -> None:
        """This worker's stream has ended."""
        self._active[worker] = False


class FlightRoom:
    """How many batches may be in flight: as many as with torch."""

    def __init__(self, most: int) -> None:
        self._most = most

    def at_start(self, largest: int) -> int:
        """How many to plan at the start of an epoch. largest: bytes of the largest batch so far."""
        return self._most

    def next(self, largest: int, in_flight: int) -> int:
        """How many to plan in place of the one that is due, which is still in flight."""
        return 1


class BoundedRoom(FlightRoom):
    """As many as with torch, unless those of workers elsewhere would fill this process's memory.

    Args:
        most: torch's number.
        workers: how many there are; each may always have one.
        budget: bytes that all together may have.
    """

    def __init__(self, most: int, workers: int, budget: int) -> None:
        super().__init__(most)
        self._workers = workers
        self._budget = budget

    def at_start(self, largest: int) -> int:
        # Until a batch has come, nobody knows how large they are.
        fitting = self._budget // largest if largest else 0
        return max(self._workers, min(self._most, fitting))

    def next(self, largest: int, in_flight: int) -> int:
        return max(0, min(2, self.at_start(largest) - in_flight + 1))

"""Single flight: one thread loads a key, others that ask for it meanwhile wait for that load."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any


class Flight(Future[Any]):
    """A running load. Threads that wait for one that is cancelled start over."""

    def __init__(self) -> None:
        super().__init__()
        #: who loads
        self.thread = threading.get_ident()


class Flights(dict[int, Flight]):
    """The running loads, by key. Guarded by its owner's lock."""

    def board(self, key: int) -> tuple[Flight, bool]:
        """The running load of a key, or a new one; and whether it was running."""
        is_new = key not in self
        if is_new:
            self[key] = Flight()
        return self[key], not is_new

    def land(self, key: int, flight: Flight) -> bool:
        """A load is over; returns whether it was still wanted."""
        was_wanted = self.get(key) is flight
        if was_wanted:
            del self[key]
        return was_wanted


def fail(flights: Iterable[Flight], error: BaseException) -> None:
    """Fail the waiters of these loads, which are over, with `error`."""
    for flight in flights:
        if isinstance(error, Exception):
            flight.set_exception(error)
        else:
            flight.cancel()  # an interrupt concerns one thread: the others start over

"""Loads that one thread runs and others wait for."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any


class Flight(Future[Any]):
    """A load under way. Who waits for one that is cancelled starts over."""

    def __init__(self) -> None:
        super().__init__()
        #: who loads
        self.thread = threading.get_ident()


class Flights(dict[int, Flight]):
    """The loads under way, by key. Its owner's lock guards it."""

    def board(self, key: int) -> tuple[Flight, bool]:
        """The load of a key under way, or a new one; and whether it was under way."""
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
    """Tell those who wait that their loads, which have landed, ended with `error`."""
    for flight in flights:
        if isinstance(error, Exception):
            flight.set_exception(error)
        else:
            flight.cancel()  # an interrupt is meant for one thread: the others start over

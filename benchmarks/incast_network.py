"""Many servers, one switch port with a small buffer, one client: packets and TCP in simulated time.

Each server has a link of the line's rate to the switch; the port to the client drops what finds no room. Connections
do what TCP NewReno does: slow start from ten packets, additive increase, fast retransmission after three duplicate
acknowledgements, a retransmission timer of at least 200 ms that doubles. They have no selective acknowledgements and
no tail loss probes, which Linux has. Acknowledgements and requests are never lost.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

PACKET_BYTES, PAYLOAD_BYTES = 1500, 1448
#: Packets that a connection may send at first, Linux' default.
FIRST_WINDOW = 10.0
LEAST_TIMEOUT_S = 0.2
DUPLICATES = 3


@dataclass(frozen=True, kw_only=True)
class Line:
    """What lies between servers and client."""

    bits_per_s: float = 100e6
    #: Of the switch's port to the client.
    buffer_bytes: int = 64 << 10
    #: Without any queue.
    round_trip_s: float = 200e-6

    @property
    def packet_s(self) -> float:
        return PACKET_BYTES * 8 / self.bits_per_s

    @property
    def payload_per_s(self) -> float:
        """What a client can get at most, bytes."""
        return PAYLOAD_BYTES / self.packet_s


class Network:
    """The agenda, the port, and its connections."""

    def __init__(self, line: Line, servers: int) -> None:
        self.line = line
        self.now = 0.0
        self.drops = self.timeouts = 0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._port_free_at = 0.0
        self.connections = [Connection(self) for _ in range(servers)]

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + seconds, next(self._numbers), action))

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Let time pass until then."""
        while not is_done():
            self.now, _, action = heapq.heappop(self._agenda)
            action()

    def forward(self, deliver: Callable[[], None]) -> None:
        """A packet is at the switch: it is dropped, or it comes to the client."""
        line = self.line
        waiting = max(0.0, self._port_free_at - self.now) / line.packet_s * PACKET_BYTES
        if waiting + PACKET_BYTES > line.buffer_bytes:
            self.drops += 1
            return
        self._port_free_at = max(self._port_free_at, self.now) + line.packet_s
        self.after(self._port_free_at - self.now + line.round_trip_s / 4, deliver)


class Connection:
    """One server's connection to the client: records in, in order, one after the other."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._link_free_at = 0.0
        #: Packets that the server has to send in all, that it has sent next, that are acknowledged.
        self._end = self._next = self._acknowledged = 0
        self._window, self._threshold = FIRST_WINDOW, float("inf")
        self._duplicates = 0
        #: Where fast recovery ends; None: not in it.
        self._recovers_at: int | None = None
        self._deadline = float("inf")
        self._timer_runs = False
        self._timeout_s = LEAST_TIMEOUT_S
        #: The client's side: the next packet in order, and those that came before it.
        self._expected = 0
        self._early: set[int] = set()
        #: Where each record under way ends, and what is called when it is there.
        self._records: deque[tuple[int, Callable[[], None]]] = deque()

    def request(self, length: int, deliver: Callable[[], None]) -> None:
        """Ask the server for a record of so many bytes."""

        def answer() -> None:
            self._end += -(-length // PAYLOAD_BYTES)
            self._records.append((self._end, deliver))
            self._send()

        self._network.after(self._network.line.round_trip_s / 2, answer)

    # -- the server ------------------------------------------------------------------------------------------

    def _send(self) -> None:
        while self._next < self._end and self._next - self._acknowledged < int(self._window):
            self._transmit(self._next)
            self._next += 1

    def _transmit(self, packet: int) -> None:
        network = self._network
        self._link_free_at = max(self._link_free_at, network.now) + network.line.packet_s
        network.after(
            self._link_free_at - network.now + network.line.round_trip_s / 4,
            lambda: network.forward(lambda: self._receive(packet)),
        )
        if self._deadline == float("inf"):
            self._restart_timer()

    def _restart_timer(self) -> None:
        self._deadline = self._network.now + self._timeout_s
        if not self._timer_runs:
            self._timer_runs = True
            self._network.after(self._timeout_s, self._look_at_timer)

    def _look_at_timer(self) -> None:
        self._timer_runs = False
        if self._deadline == float("inf"):
            return
        left = self._deadline - self._network.now
        if left > 1e-9:
            self._timer_runs = True
            self._network.after(left, self._look_at_timer)
            return
        self._network.timeouts += 1
        self._threshold = max(2.0, (self._next - self._acknowledged) / 2)
        self._window, self._duplicates, self._recovers_at = 1.0, 0, None
        self._timeout_s *= 2
        self._next = self._acknowledged
        self._deadline = float("inf")
        self._send()

    def _acknowledge(self, upto: int) -> None:
        if upto > self._acknowledged:
            self._progress(upto)
        elif self._acknowledged < self._next:
            self._duplicates += 1
            if self._recovers_at is not None:
                self._window += 1
            elif self._duplicates == DUPLICATES:
                self._threshold = max(2.0, (self._next - self._acknowledged) / 2)
                self._window = self._threshold + DUPLICATES
                self._recovers_at = self._next
                self._transmit(self._acknowledged)
        self._send()

    def _progress(self, upto: int) -> None:
        came, self._acknowledged = upto - self._acknowledged, upto
        self._next = max(self._next, upto)
        self._duplicates, self._timeout_s = 0, LEAST_TIMEOUT_S
        if self._recovers_at is not None and upto < self._recovers_at:
            self._window = max(1.0, self._window - came + 1)
            self._transmit(upto)
        elif self._recovers_at is not None:
            self._window, self._recovers_at = self._threshold, None
        elif self._window < self._threshold:
            self._window += came
        else:
            self._window += came / self._window
        if self._acknowledged < self._next:
            self._restart_timer()
        else:
            self._deadline = float("inf")

    # -- the client ------------------------------------------------------------------------------------------

    def _receive(self, packet: int) -> None:
        if packet >= self._expected:
            self._early.add(packet)
        while self._expected in self._early:
            self._early.remove(self._expected)
            self._expected += 1
        upto = self._expected
        self._network.after(self._network.line.round_trip_s / 2, lambda: self._acknowledge(upto))
        while self._records and self._records[0][0] <= upto:
            self._records.popleft()[1]()

"""What `benchmarks.incast` measures our window beside: everything at once, and the DataServer paper's Algorithm 1.

`StagedWindow` is Algorithm 1 of the DataServer paper, which does not run as printed: `i` never advances; `req_out`
grows by itself less the start instead of by the stage; the last stage is cut where `req_finished` reaches the batch
and not where `end_idx` does; the limit is rounded down, so it may be 0 and wait for ever; and to wait only while
`limit` are out lets a stage more than the limit be out. Its latency has to be that of an idle network: one that is
measured under load grows with the queue that it causes, and the limit with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch_dpflow._core.checks import check_int, check_number
from torch_dpflow.pool.planning.request_window import BatchWindow


class Unbounded(BatchWindow):
    """Everything at once."""

    def __init__(self) -> None:
        super().__init__(1)

    def grant(self, lengths: Sequence[int], now: float, connections: int = 1) -> int:
        return len(lengths)


class StagedWindow(BatchWindow):
    """Algorithm 1, repaired: records of one size, by what is known of the line.

    Args:
        bytes_per_s: the reader's share of the line.
        latency_s: from asking for one record until it is there, with nothing else under way.
        record_bytes: the size of a record.
        stages: requests are made in so many parts of what may be out.

    Raises:
        OptionError: a number is not above 0.
    """

    def __init__(self, *, bytes_per_s: float, latency_s: float, record_bytes: int, stages: int = 4) -> None:
        super().__init__(stages)
        rate = check_number("bytes_per_s", bytes_per_s, exclusive=True)
        latency = check_number("latency_s", latency_s, exclusive=True)
        size = check_int("record_bytes", record_bytes, minimum=1)
        #: Records that may be out.
        self.limit = max(1, math.ceil(rate * latency / size))
        self._stage = max(1, self.limit // stages)

    def grant(self, lengths: Sequence[int], now: float, connections: int = 1) -> int:
        granted = 0
        while granted < len(lengths) and self.records_out + granted + self._stage <= self.limit:
            granted = min(granted + self._stage, len(lengths))
        return granted

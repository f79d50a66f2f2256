"""The three times from which a cluster's intervals and leases derive; ARCHITECTURE.md lists the cost of failures."""

from __future__ import annotations

#: Interval of heartbeats, in seconds.
HEARTBEAT_S = 1.0
#: The shortest lease, in seconds, after which a silent shard's keys are reassigned. One lost heartbeat does no harm.
LEASE_S = 5.0
#: How long a start may take without progress, in seconds.
START_S = 60.0

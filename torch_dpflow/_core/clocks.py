"""The three times from which a cluster's intervals and leases derive; ARCHITECTURE.md lists the cost of failures."""

from __future__ import annotations

#: How often a process shows that it lives, seconds.
HEARTBEAT_S = 1.0
#: The shortest lease, seconds: keys of a shard are reassigned after it. Longer than a heartbeat that is repeated.
LEASE_S = 5.0
#: How long a start may take without progress, seconds.
START_S = 60.0

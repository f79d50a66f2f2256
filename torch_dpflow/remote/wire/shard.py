"""Bodies of the calls to a shard, and of what it answers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from torch_dpflow.remote.wire.body import MAX_SAMPLES, Body, SampleKeys
from torch_dpflow.remote.wire.fields import Count
from torch_dpflow.remote.wire.flow_spec import FlowSpec
from torch_dpflow.remote.wire.parcel_table import ParcelTable
from torch_dpflow.remote.wire.router import JobId

#: Workers that a sample may take down before it is given up.
POISON_LIMIT = 3


class Ask(Body):
    """To a shard: samples that the job will need (`want`), or waits for (`fetch`). Each has a ticket.

    A fetch is answered with `Served`, with all of the samples or some.
    """

    job: JobId
    #: Of the routing table by which the job has chosen this shard.
    routing: Count
    epoch: Count
    #: Decides what is drawn by chance. None: what the deterministic part of a flow in two parts gives is wanted.
    draw: Count | None
    tickets: SampleKeys
    keys: SampleKeys
    #: Tickets whose samples the job has.
    taken: SampleKeys
    #: How many of the samples, the last ones, a fetch does not wait for yet.
    ahead: Count = 0

    @property
    def awaited(self) -> list[tuple[int, int]]:
        """Ticket and key of each sample that a fetch waits for."""
        most = len(self.tickets) - self.ahead
        return list(zip(self.tickets[:most], self.keys[:most]))


#: What a sample came to: itself, an exception of the code that loads it, or the death of its workers.
SAMPLE, FAILED, POISONED = range(3)


class ServedSample(Body):
    """One sample; its parcel's frames follow."""

    ticket: Count
    kind: Annotated[int, msgspec.Meta(ge=SAMPLE, le=POISONED)]
    parcel: ParcelTable


class Served(Body):
    """From a shard: samples; their frames follow, in order."""

    samples: Annotated[list[ServedSample], msgspec.Meta(max_length=MAX_SAMPLES)]
    #: Samples that the shard has given to jobs since it was started, these among them, and those that it has loaded.
    served: Count = 0
    decodes: Count = 0


class ShardSettings(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What of a shard may change while it runs."""

    #: How many workers it has.
    workers: int
    #: Room of its pool, bytes.
    memory_bytes: int


class ShardArguments(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The arguments of a shard's role."""

    #: The id of the router's process.
    router: str
    spec: FlowSpec

"""Bodies of the calls to a shard, and of its answers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from torch_dpflow.cluster.messages.flow_spec import FlowSpec
from torch_dpflow.cluster.messages.router import JobId
from torch_dpflow.ipc.messages.fields import MAX_SAMPLES, Body, Count, SampleKeys
from torch_dpflow.ipc.messages.payload_table import PayloadTable

#: How many workers a sample may kill before it is given up.
POISON_LIMIT = 3


class Ask(Body):
    """To a shard: samples that the job will need (`want`), or waits for (`fetch`). Each has a ticket.

    A fetch is answered with `Served`, which has all of the samples or some.
    """

    job: JobId
    #: Generation of the routing table by which the job has chosen this shard.
    routing: Count
    epoch: Count
    #: Decides the random draws. None: the job reads the output of the cacheable stage.
    draw: Count | None
    tickets: SampleKeys
    keys: SampleKeys
    #: Tickets that the job releases: it has their samples, or does not need them any more.
    taken: SampleKeys
    #: How many of the samples, the last ones, will be needed later: a fetch does not wait for them.
    ahead: Count = 0

    @property
    def awaited(self) -> list[tuple[int, int]]:
        """Ticket and key of each sample that a fetch waits for."""
        most = len(self.tickets) - self.ahead
        return list(zip(self.tickets[:most], self.keys[:most]))


#: The outcome of loading a sample: the sample, an exception of the code that loads it, the death of its workers, or
#: that no worker can be had, which no sample is to blame for.
SAMPLE, FAILED, POISONED, WORKERLESS = range(4)


class ServedSample(Body):
    """One sample; its payload's frames follow."""

    ticket: Count
    kind: Annotated[int, msgspec.Meta(ge=SAMPLE, le=WORKERLESS)]
    payload: PayloadTable


class Served(Body):
    """From a shard: samples; their frames follow, in order."""

    samples: Annotated[list[ServedSample], msgspec.Meta(max_length=MAX_SAMPLES)]
    #: How many samples the shard has given to jobs since it started, these included, and how many it has loaded: in
    #: every answer, so that a job that ends before its first heartbeat has them too.
    served: Count = 0
    decodes: Count = 0


class ShardSettings(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The settings of a shard, which may change while it runs."""

    #: How many workers it has.
    workers: int
    #: Memory of its pool, bytes.
    memory_bytes: int


class ShardArguments(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The arguments of a shard's role."""

    #: The id of the router's process.
    router: str
    spec: FlowSpec

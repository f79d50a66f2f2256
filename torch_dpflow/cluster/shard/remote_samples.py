"""The worker of a flow on another host: a member loads single samples by it."""

from __future__ import annotations

import io

from torch_dpflow._core.torch_private import set_worker_signal_handlers
from torch_dpflow.cluster.shard.sample_worker import SampleWorker
from torch_dpflow.ipc.rpc.compression import compress
from torch_dpflow.ipc.transport import Connection
from torch_dpflow.workers.result_outbox import ResultOutbox
from torch_dpflow.workers.sched_batch import use_sched_batch


class MemberSampleWorker(SampleWorker):
    """Says hello once: its other connection notices where that is lost, or the shard does not answer."""

    hello_s = None
    idle_s = None


def load_samples(
    packed: bytes, number: int, incarnation: int, connection: Connection, *, is_near: bool, directory: str
) -> None:
    """Load single samples until the shard says that it is enough.

    packed: a `SampleAssignment`. is_near: as of `work`. directory: removed where it ends with its shard.
    """
    set_worker_signal_handlers()
    outbox = ResultOutbox(connection, compress=None if is_near else compress)
    worker = MemberSampleWorker(
        connection,
        number,
        incarnation,
        lambda digest, on_progress: io.BytesIO(packed),
        outbox=outbox,
        directory=directory,
    )
    use_sched_batch()  # not before: the threads of sockets have to answer quickly
    worker.work()

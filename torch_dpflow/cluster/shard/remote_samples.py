"""Remote worker of a flow: loads single samples on another host."""

from __future__ import annotations

import io

from torch_dpflow._core.torch_private import set_worker_signal_handlers
from torch_dpflow.cluster.shard.sample_worker import SampleWorker
from torch_dpflow.ipc.rpc.carrier import compress
from torch_dpflow.ipc.transport import Connection
from torch_dpflow.workers.process_control import use_sched_batch
from torch_dpflow.workers.result_outbox import ResultOutbox


class MemberSampleWorker(SampleWorker):
    """Sample worker that greets once: its control connection notices a lost greeting or a silent shard."""

    hello_s = None
    idle_s = None


def load_samples(
    packed: bytes, number: int, incarnation: int, connection: Connection, *, is_near: bool, directory: str
) -> None:
    """Load single samples until the shard ends the worker.

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

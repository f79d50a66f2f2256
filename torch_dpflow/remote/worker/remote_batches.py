"""Loading of batches in a remote worker: unpickling of the load spec, and the loop that loads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch_dpflow._core.torch_private import set_worker_signal_handlers
from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.memory.headroom import machine_total
from torch_dpflow.ipc.rpc.carrier import compress
from torch_dpflow.ipc.transport import Connection
from torch_dpflow.remote.shipping.content_pack import unpack_load_spec
from torch_dpflow.remote.shipping.own_check import guard_script
from torch_dpflow.workers.batch_worker import BatchWorker
from torch_dpflow.workers.batches import SHARED_FRACTION, LoadSpec


def open_spec(packed: bytes) -> LoadSpec:
    """Return the `LoadSpec` in a pickle. Raises any error of unpickling; MessageError if it contains another object."""
    spec: Any = unpack_load_spec(packed)
    if isinstance(spec, tuple):
        beginning, spec = spec
        guard_script(beginning.state)
    if not isinstance(spec, LoadSpec):
        raise MessageError(f"the content is a {type(spec).__name__}; a LoadSpec belongs there")
    if spec.shared_memory is None:
        spec = replace(spec, shared_memory=machine_total() // SHARED_FRACTION // spec.num_workers)
    opened: LoadSpec = spec
    return opened


def work(spec: LoadSpec, number: int, incarnation: int, connection: Connection, *, is_near: bool) -> None:
    """Load batches until the shard stops this worker. Raises WorkerRefusedError if the shard rejects it.

    is_near: whether the shard is on this host.
    """
    set_worker_signal_handlers()
    BatchWorker(spec, number, incarnation, connection, compress=None if is_near else compress).work()

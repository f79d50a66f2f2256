"""Makes a batch of the samples that shards have sent, or finds the error in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch_dpflow._core.channels_last import collate_channels_last
from torch_dpflow._core.torch_private import ExceptionWrapper
from torch_dpflow.cluster.client.collate import collate_payloads, collate_samples
from torch_dpflow.cluster.client.ready_batches import ReadyBatch
from torch_dpflow.cluster.messages.shard import POISONED, WORKERLESS, ServedSample
from torch_dpflow.errors import MessageError, PoisonTaskError, WorkerError, WorkerStartError
from torch_dpflow.ipc.messages.payload_table import Frame, PayloadTable
from torch_dpflow.ipc.serialization.codec import decode

#: A payload and its frames, or an error in its place.
Received: TypeAlias = tuple[PayloadTable, list[Frame]] | WorkerError


def build_batch(
    ready: ReadyBatch,
    came: list[Received | None],
    collate: Callable[[list[Any]], Any],
    how_workers_ended: Callable[[], str] = str,
) -> None:
    """Set the value of `ready` to the batch, or its error to the first error among the samples.

    how_workers_ended: for the error of a sample that took down its workers.
    """
    keeps_layout = collate is collate_channels_last
    if keeps_layout or collate is collate_samples:
        ready.value = _made_at_once(came, keeps_layout)
        if ready.value is not None:
            return
    values = [_opened(one) if isinstance(one, tuple) else one for one in came]
    broken = next(((key, value) for key, value in zip(ready.keys, values) if _is_error(value)), None)
    if broken is not None:
        ready.error = _error_of(*broken, how_workers_ended)
        return
    try:
        ready.value = collate(values)
    except Exception:
        ready.error = ExceptionWrapper(where="while putting a batch together")


def received_sample(sample: ServedSample, frames: list[memoryview]) -> Received:
    """The payload of a sample that a shard has sent, or the error in its place."""
    if sample.kind == POISONED:
        return PoisonTaskError(bytes(frames[0]).decode(errors="replace"))
    if sample.kind == WORKERLESS:
        return WorkerStartError(bytes(frames[0]).decode(errors="replace"))
    return sample.payload, [*frames]


def _made_at_once(came: list[Received | None], keep_layout: bool) -> Any | None:
    payloads = [one for one in came if isinstance(one, tuple)]
    if len(payloads) < len(came):
        return None
    try:
        return collate_payloads(payloads, keep_layout=keep_layout)
    except Exception:  # opening the samples one by one raises it again, and names the sample
        return None


def _opened(came: tuple[PayloadTable, list[Frame]]) -> Any:
    try:
        return decode(*came)
    except MessageError:
        # The payload itself is valid, as a worker made it: a class of the sample cannot be unpickled here.
        return ExceptionWrapper(where="while opening a sample")


def _is_error(value: Any) -> bool:
    return isinstance(value, ExceptionWrapper | WorkerError)


def _error_of(key: int, value: Any, how_workers_ended: Callable[[], str]) -> BaseException | ExceptionWrapper:
    if isinstance(value, PoisonTaskError):
        how = how_workers_ended()
        ends = f"; the last that ended: {how}" if how else ""
        return PoisonTaskError(
            f"sample {key}: {value}{ends}; leave it out of the job's samples, or repair it"
        )
    if isinstance(value, WorkerStartError):
        return WorkerStartError(f"no worker for sample {key}: {value}")
    wrapper: ExceptionWrapper = value
    return wrapper

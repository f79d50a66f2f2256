"""What has come of a batch's samples, and the batch that is made of them, or the error in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch_dpflow.errors import MessageError, PoisonTaskError
from torch_dpflow.remote.job.assemble import assemble as assemble_samples
from torch_dpflow.remote.job.assemble import assemble_parcels
from torch_dpflow.remote.job.ready_batches import Ready
from torch_dpflow.remote.parcel.codec import decode
from torch_dpflow.remote.wire.parcel_table import Frame, ParcelTable
from torch_dpflow.remote.wire.shard import POISONED, ServedSample
from torch_dpflow.torch_private import ExceptionWrapper

#: A parcel and its frames, or an error in its place.
Came: TypeAlias = tuple[ParcelTable, list[Frame]] | PoisonTaskError


def put_together(ready: Ready, came: list[Came | None], assemble: Callable[[list[Any]], Any]) -> None:
    """Make the batch of what has come, or find the error in place of it."""
    if assemble is assemble_samples and (made := _made_at_once(came)) is not None:
        ready.value = made
        return
    values = [_opened(one) if isinstance(one, tuple) else one for one in came]
    broken = next(((key, value) for key, value in zip(ready.keys, values) if _is_error(value)), None)
    if broken is not None:
        ready.error = _error_of(*broken)
        return
    try:
        ready.value = assemble(values)
    except Exception:
        ready.error = ExceptionWrapper(where="while putting a batch together")


def came_of(sample: ServedSample, frames: list[memoryview]) -> Came:
    if sample.kind == POISONED:
        return PoisonTaskError(bytes(frames[0]).decode(errors="replace"))
    return sample.parcel, [*frames]


def _made_at_once(came: list[Came | None]) -> Any | None:
    parcels = [one for one in came if isinstance(one, tuple)]
    if len(parcels) < len(came):
        return None
    try:
        return assemble_parcels(parcels)
    except Exception:  # it comes again, and is told of, where each is opened
        return None


def _opened(came: tuple[ParcelTable, list[Frame]]) -> Any:
    try:
        return decode(*came)
    except MessageError:
        # A worker of ours made it: a class of the sample fails to unpickle here.
        return ExceptionWrapper(where="while opening a sample")


def _is_error(value: Any) -> bool:
    return isinstance(value, ExceptionWrapper | PoisonTaskError)


def _error_of(key: int, value: Any) -> BaseException | ExceptionWrapper:
    if isinstance(value, PoisonTaskError):
        return PoisonTaskError(f"sample {key}: {value}; leave it out of the job's samples, or mend it")
    wrapper: ExceptionWrapper = value
    return wrapper

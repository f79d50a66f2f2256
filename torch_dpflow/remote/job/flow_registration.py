"""How a job describes a flow and brings it to the coordinator."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch_dpflow.backoff import Backoff
from torch_dpflow.caches import ALSDCache
from torch_dpflow.caches.capacity import parse_capacity
from torch_dpflow.errors import (
    DeadlineError,
    ErrorKind,
    OptionError,
    OptionTypeError,
    RemoteCallError,
    UsageError,
)
from torch_dpflow.remote.access.cluster_address import Cluster, keys_hint
from torch_dpflow.remote.job.job_options import DEFAULT_MEMORY_BYTES, JobOptions
from torch_dpflow.remote.parcel.fingerprint import SCRIPT, fingerprint
from torch_dpflow.remote.rpc import RpcClient
from torch_dpflow.remote.wire.coordinator import CONTENT_PIECE_BYTES, MAX_CONTENT_BYTES, ContentPiece
from torch_dpflow.remote.wire.flow_spec import FlowSpec
from torch_dpflow.remote.worker.sample_source import Parts, SampleAssignment, Transformed

#: Room for what is on its way, beside what a cache around the dataset may hold, bytes.
UNDER_WAY_BYTES = 256 << 20
#: The pause before a piece of a content is sent again to a coordinator that has too many, seconds.
PAUSE_S, LONGEST_PAUSE_S = 0.1, 0.5
#: How often a flow is registered again because nobody knew of it any more when its content came.
_ATTEMPTS = 5


@dataclass(frozen=True, kw_only=True)
class JobDataset:
    """What a job's dataset is to the workers of its flow, and what of that may be kept."""

    parts: Parts
    #: Whether loading a sample twice gives the same.
    repeatable: bool
    #: Whether what the first part gives may be kept, and the rest is drawn for each job.
    staged: bool
    #: The cache that the dataset was wrapped in, which is the flow's own now.
    cache: ALSDCache | None


def source_of(dataset: Any, options: JobOptions) -> JobDataset:
    """How a dataset is loaded by a flow: whole, or in two parts where it says which of them may be kept."""
    cache = dataset if isinstance(dataset, ALSDCache) else None
    if cache is not None:
        dataset = Parts(cache.dataset, None if cache.transform is None else Transformed(cache.transform))
    elif not isinstance(dataset, Parts):
        return JobDataset(parts=Parts(dataset), repeatable=bool(options.repeatable), staged=False, cache=None)
    if dataset.rest is not None and options.repeatable is not None:
        # All of it is repeatable, or nothing is: there is one part.
        dataset = Parts(replace(dataset, stand_in=None), stand_in=dataset.stand_in)
    repeatable = dataset.rest is None and (
        cache is not None if options.repeatable is None else options.repeatable
    )
    return JobDataset(parts=dataset, repeatable=repeatable, staged=dataset.rest is not None, cache=cache)


def length_of(dataset: Any) -> int:
    """Samples of a dataset. OptionTypeError where it has no length, OptionError where it has none."""
    try:
        size = len(dataset)
    except Exception as error:  # whatever a dataset raises that cannot say
        raise OptionTypeError(
            f"dataset is a {type(dataset).__name__} without a length; a shared flow needs a map-style dataset"
        ) from error
    if size < 1:
        raise OptionError(f"dataset is a {type(dataset).__name__} of {size} samples; at least one is needed")
    return size


def describe(
    flow: str,
    version: int,
    source: JobDataset,
    assignment: SampleAssignment,
    packed: bytes,
    *,
    size: int,
    workers: int,
    options: JobOptions,
) -> FlowSpec:
    """The description under which a job registers its flow. Raises OptionError where it is not possible."""
    if len(packed) > MAX_CONTENT_BYTES:
        raise OptionError(
            f"flow {flow!r}: the dataset and what else its workers need take {len(packed):,} bytes when they are "
            f"packed; {MAX_CONTENT_BYTES:,} are allowed. Have the dataset read its samples from files, not hold them"
        )
    kind = type(source.parts.first)
    module = SCRIPT[0] if kind.__module__ in SCRIPT else kind.__module__
    spec = FlowSpec(
        name=flow,
        version=version,
        size=size,
        content=hashlib.sha256(packed).hexdigest(),
        fingerprint={
            "dataset": f"{module}.{kind.__qualname__} of {size} samples",
            **_content_of(assignment, options),
            "repeatable": "its first part" if source.staged else str(source.repeatable),
        },
        repeatable=source.repeatable,
        staged=source.staged,
        shards=options.shards,
        workers=workers,
        memory_bytes=_memory_of(source, options),
        policy=options.policy or ("alsd" if source.cache is None else source.cache.policy),
        strategy=options.strategy,
        cache_samples=options.cache_samples or _samples_of(source, size),
        idle_s=options.idle_s,
        task_timeout_s=options.task_timeout_s,
    )
    spec.check()
    return spec


def _content_of(assignment: SampleAssignment, options: JobOptions) -> dict[str, str]:
    if options.fingerprint is not None:
        return {"its content": options.fingerprint}
    return {
        "its content": fingerprint(assignment.parts),
        "worker_init_fn": _called(assignment.worker_init_fn),
    }


def _called(function: Callable[[int], Any] | None) -> str:
    """A function's name, with what tells it from another of that name; "none" where there is none."""
    if function is None:
        return "none"
    return f"{getattr(function, '__qualname__', type(function).__qualname__):.200} ({fingerprint(function)})"


def _memory_of(source: JobDataset, options: JobOptions) -> int:
    """Room of the pools: what was asked for, or what the cache around the dataset may hold and what is on its way."""
    if options.memory_bytes is not None:
        return options.memory_bytes
    held = None if source.cache is None else parse_capacity(source.cache.capacity).bytes
    return DEFAULT_MEMORY_BYTES if held is None else held + UNDER_WAY_BYTES


def _samples_of(source: JobDataset, size: int) -> int:
    """How many samples the cache around the dataset may hold, where it says so; else 0."""
    held = None if source.cache is None else parse_capacity(source.cache.capacity).items
    return min(held or 0, size)


def register(cluster: Cluster, spec: FlowSpec, packed: bytes, *, patience_s: float) -> None:
    """Register a flow, and bring what its workers load unless it is there. UsageError where it is refused."""
    backoff = Backoff(PAUSE_S, LONGEST_PAUSE_S)
    with cluster.connect(timeout_s=patience_s) as coordinator:
        for attempt in range(_ATTEMPTS):
            try:
                if coordinator.call("register", spec, reply_type=bool).body:
                    return
                if _bring(coordinator, spec.content, packed, patience_s):
                    return
            except RemoteCallError as error:
                if error.kind is ErrorKind.USAGE:
                    raise UsageError(error.text) from error
                if error.kind is not ErrorKind.INTERNAL or attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(backoff.pause_s())  # both calls may be made twice
            except DeadlineError as error:
                raise DeadlineError(
                    f"flow {spec.name!r}: no cluster answers at {cluster.address} within {patience_s:g} s; is it up "
                    f"(`python -m torch_dpflow.cli status`)? {keys_hint(cluster.address)}".rstrip()
                ) from error
    raise UsageError(
        f"flow {spec.name!r} was deleted, or its coordinator restarted, {_ATTEMPTS} times while what its workers load "
        "was under way; try again"
    )


def _bring(coordinator: RpcClient, digest: str, packed: bytes, patience_s: float) -> bool:
    """Bring a content, piece by piece; False where no flow is known any more that loads it.

    Raises RemoteCallError where the coordinator has put it off for longer than `patience_s`.
    """
    whole, held = memoryview(packed), 0
    since, backoff = time.monotonic(), Backoff(PAUSE_S, LONGEST_PAUSE_S)
    while held < len(packed):
        piece = ContentPiece(digest, held, len(packed))
        try:
            answer = coordinator.call(
                "store", piece, [whole[held : held + CONTENT_PIECE_BYTES]], reply_type=int | None
            )
        except RemoteCallError as error:
            if error.kind is not ErrorKind.OVERLOADED or time.monotonic() - since >= patience_s:
                raise
            time.sleep(backoff.pause_s())
            continue
        if answer.body is None:
            return False
        held, since = answer.body, time.monotonic()
    return True

"""How a job describes a flow and brings it to the coordinator."""

from __future__ import annotations

import hashlib
from typing import Any

from torch_dpflow.caches import ALSDCache
from torch_dpflow.errors import OptionError, OptionTypeError, RemoteCallError, UsageError
from torch_dpflow.remote.cluster_address import Cluster
from torch_dpflow.remote.fingerprint import fingerprint
from torch_dpflow.remote.flow_spec import FlowSpec
from torch_dpflow.remote.job_options import JobOptions
from torch_dpflow.remote.samples import SampleAssignment

#: How often a flow is registered again because nobody knew of it any more when its content came.
_ATTEMPTS = 5


def unwrap(dataset: Any, options: JobOptions) -> tuple[Any, bool]:
    """What workers are to load, and whether it is repeatable: a cache around the dataset is the flow's own."""
    if isinstance(dataset, ALSDCache) and dataset.transform is None:
        return dataset.dataset, options.repeatable is not False
    return dataset, bool(options.repeatable)


def length_of(dataset: Any) -> int:
    """Samples of a dataset. OptionTypeError where it has no length, OptionError where it has none."""
    try:
        size = len(dataset)
    except TypeError as error:
        raise OptionTypeError(
            f"dataset is a {type(dataset).__name__} without a length; a shared flow needs a map-style dataset"
        ) from error
    if size < 1:
        raise OptionError(f"dataset is a {type(dataset).__name__} of {size} samples; at least one is needed")
    return size


def describe(
    flow: str,
    version: int,
    assignment: SampleAssignment,
    packed: bytes,
    *,
    size: int,
    repeatable: bool,
    workers: int,
    options: JobOptions,
) -> FlowSpec:
    """The description under which a job registers its flow. Raises OptionError where it is not possible."""
    kind = type(assignment.dataset)
    spec = FlowSpec(
        name=flow,
        version=version,
        size=size,
        content=hashlib.sha256(packed).hexdigest(),
        fingerprint={
            "dataset": f"{kind.__module__}.{kind.__qualname__} of {size} samples",
            "its content": options.fingerprint or fingerprint(assignment),
            "repeatable": str(repeatable),
        },
        repeatable=repeatable,
        shards=options.shards,
        workers=workers,
        memory_bytes=options.memory_bytes,
        policy=options.policy,
        strategy=options.strategy,
        cache_samples=options.cache_samples,
        idle_s=options.idle_s,
    )
    spec.check()
    return spec


def register(cluster: Cluster, spec: FlowSpec, packed: bytes, *, patience_s: float) -> None:
    """Register a flow, and bring what its workers load unless it is there. UsageError where it is refused."""
    with cluster.connect(timeout_s=patience_s) as coordinator:
        try:
            for _ in range(_ATTEMPTS):
                if coordinator.call("register", spec, reply_type=bool).body:
                    return
                if coordinator.call("store", spec.content, [packed], reply_type=bool).body:
                    return
        except RemoteCallError as error:
            raise UsageError(str(error)) from error
    raise UsageError(
        f"flow {spec.name!r} was deleted, or its coordinator restarted, {_ATTEMPTS} times while what its workers load "
        "was under way; try again"
    )

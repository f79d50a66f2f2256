"""Registration of a job's flow with the coordinator, and upload of the content that its workers load."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch_dpflow._core.backoff import Backoff
from torch_dpflow.caches import ALSDCache
from torch_dpflow.caches.policy import parse_capacity
from torch_dpflow.cluster.client.options import DEFAULT_MEMORY_BYTES, FlowDefinition, JobOptions
from torch_dpflow.cluster.client.outage_log import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MAX_FAULTS,
    MIN_CALL_S,
    SILENCE_S,
    OutageLog,
)
from torch_dpflow.cluster.messages.coordinator import CONTENT_PIECE_BYTES, MAX_CONTENT_BYTES, ContentPiece, FlowSpec
from torch_dpflow.cluster.messages.node import MAX_IMPORTS, FlowImports
from torch_dpflow.cluster.security.connection_file import Cluster, keys_hint
from torch_dpflow.cluster.shard.sample_source import KeylessTransform, TwoStageDataset
from torch_dpflow.errors import (
    DeadlineError,
    ErrorKind,
    MessageError,
    OptionError,
    OptionTypeError,
    RemoteCallError,
    UsageError,
)
from torch_dpflow.ipc.messages.content_parts import RANDOM_STATE, differences
from torch_dpflow.ipc.rpc import RpcClient
from torch_dpflow.ipc.serialization import SCRIPT
from torch_dpflow.lookahead import is_subset
from torch_dpflow.options import Code
from torch_dpflow.remote.shipping.code_bundle import top_level_names
from torch_dpflow.remote.shipping.content_identity import ContentIdentity, identify, script_name
from torch_dpflow.remote.shipping.content_pack import split_content
from torch_dpflow.remote.shipping.modules import installed_modules_in, module_of
from torch_dpflow.samplers.indices import IndexArray, check_indices
from torch_dpflow.workers.script_settings import ScriptSettings

#: Memory for samples in transit, in addition to the capacity of a cache around the dataset (bytes).
UNDER_WAY_BYTES = 256 << 20
#: Longest timeout of a call that registers (seconds). After it, the job looks for a cluster that has replaced this one.
LONGEST_CALL_S = 6.0
#: Parts of the dataset itself, and of what is given with it.
_OWN = re.compile(r"(dataset|transform|stand_in|worker_init_fn)\b")
#: Contents up to this size are searched for the modules that they need (bytes). The search takes the same memory again.
MAX_SEARCHED_BYTES = 32 << 20
#: Timeout of one piece of an upload (seconds). After it, the upload is repeated where it stopped.
PIECE_S = 15.0


@dataclass(frozen=True, kw_only=True)
class JobDataset:
    """Dataset of a job, in the form in which the workers of its flow load it."""

    dataset: TwoStageDataset
    #: Whether loading a sample twice gives the same value.
    repeatable: bool
    #: The `ALSDCache` around the dataset, which the shards' caches replace; None: there is none.
    cache: ALSDCache | None
    #: The flow's sample number for each position in the job's dataset; None: the same numbers.
    places: IndexArray | None = None

    @property
    def staged(self) -> bool:
        """Whether the dataset has a per-draw stage, whose output is not cached."""
        return self.dataset.per_draw is not None


def split_stages(dataset: Any, options: JobOptions) -> JobDataset:
    """Split a dataset into its stages. Only an `ALSDCache` or a `TwoStageDataset` can have a per-draw stage.

    A `Subset`, around the `ALSDCache` or in it, is replaced by the dataset below it, so that jobs with different
    subsets share the flow.
    """
    whole, cache, places = unwrapped(dataset)
    if cache is not None:
        dataset = TwoStageDataset(whole, None if cache.transform is None else KeylessTransform(cache.transform))
    elif not isinstance(dataset, TwoStageDataset):
        return JobDataset(
            dataset=TwoStageDataset(whole), repeatable=bool(options.repeatable), cache=None, places=places
        )
    if dataset.per_draw is not None and options.repeatable is not None:
        # By the user's option all of it is repeatable, or nothing is: both stages become one.
        dataset = TwoStageDataset(replace(dataset, stand_in=None), stand_in=dataset.stand_in)
    repeatable = dataset.per_draw is None and (cache is not None if options.repeatable is None else options.repeatable)
    return JobDataset(dataset=dataset, repeatable=repeatable, cache=cache, places=places)


def unwrapped(dataset: Any) -> tuple[Any, ALSDCache | None, IndexArray | None]:
    """Return (dataset inside nested `Subset` objects and an `ALSDCache`, the cache, sample numbers in this dataset).

    The numbers are those of each position in `dataset`; None without a `Subset`. A `Subset` that contains a sample
    twice, or invalid numbers, is not unwrapped, nor is a subclass of `ALSDCache` that changes the samples.
    """
    cache, places = None, None
    while True:
        if cache is None and _is_cache(dataset):
            cache = dataset
        elif is_subset(dataset):
            try:
                own = check_indices(dataset.indices, len(dataset.dataset))
            except (OptionError, TypeError):
                break
            places = own if places is None else own[places]
        else:
            break
        dataset = dataset.dataset
    return dataset, cache, places


def _is_cache(dataset: Any) -> bool:
    """Return whether a dataset is an `ALSDCache`, or of a subclass that reads samples by the methods of `ALSDCache`."""
    return isinstance(dataset, ALSDCache) and all(
        getattr(type(dataset), name) is getattr(ALSDCache, name) for name in ("__len__", "__getitem__", "__getitems__")
    )


def _own_indices(dataset: Any) -> str:
    """Return why a `Subset` cannot be read as a part of the dataset below it; empty if it can, or is no `Subset`."""
    try:
        if is_subset(dataset):
            check_indices(dataset.indices, len(dataset.dataset))
    except (OptionError, TypeError) as error:
        return f" (no part of another dataset: {error!s:.150})"
    return ""


def length_of(dataset: Any) -> int:
    """Return the length of a dataset. Raises OptionTypeError if it has none, OptionError if it is empty."""
    try:
        size = len(dataset)
    except Exception as error:  # a dataset without a length may raise anything
        raise OptionTypeError(
            f"dataset is a {type(dataset).__name__} without a length; a shared flow needs a map-style dataset"
        ) from error
    if size < 1:
        raise OptionError(f"dataset is a {type(dataset).__name__} of {size} samples; at least one is needed")
    return size


def describe(
    flow: FlowDefinition,
    source: JobDataset,
    packed: bytes,
    content: FlowContent,
    *,
    size: int,
    options: JobOptions,
    imports: FlowImports | None = None,
) -> FlowSpec:
    """Return the description with which a job registers its flow. Raises the errors of `FlowSpec.check`, among others.

    packed: the content that workers fetch, from `join_content`.
    content: from `content_of`. imports: from `imports_of`. size: number of samples of the flow.
    """
    if len(packed) > MAX_CONTENT_BYTES:
        raise OptionError(
            f"flow {flow.name!r}: the dataset and what else its workers need take {len(packed):,} bytes when they are "
            f"packed; {MAX_CONTENT_BYTES:,} are allowed. Have the dataset read its samples from files, not hold them"
        )
    kind = type(source.dataset.cacheable)
    module = SCRIPT[0] if module_of(kind) in SCRIPT else module_of(kind)
    spec = FlowSpec(
        name=flow.name,
        version=flow.version,
        size=size,
        content=hashlib.sha256(packed).hexdigest(),
        fingerprint={
            "dataset": f"{module}.{kind.__qualname__} of {size} samples{_own_indices(source.dataset.cacheable)}",
            **content.labels,
            "what it caches": _cached_part(source),
        },
        repeatable=source.repeatable,
        staged=source.staged,
        shards=options.shards,
        workers=flow.workers,
        memory_bytes=_memory_of(source, options),
        policy=options.policy or ("alsd" if source.cache is None else source.cache.policy),
        strategy=options.strategy,
        cache_samples=options.cache_samples or _samples_of(source, size),
        idle_s=options.idle_s,
        task_timeout_s=options.task_timeout_s,
        parts=content.identity.parts,
        ignore=content.identity.ignore,
        script=script_name()[:100],
        imports=imports,
    )
    spec.check()
    return spec


def imports_of(packed: bytes, settings: ScriptSettings) -> FlowImports | None:
    """Return the modules that a flow's workers need, so that a node can import them once for all workers.

    Returns None if each worker should import them itself, for example if they are not known.
    """
    places = {"directory": settings.directory, "script": settings.script}
    if len(packed) > MAX_SEARCHED_BYTES or replace(settings, directory="", script="") != ScriptSettings():
        return None
    try:
        pickled, code = split_content(memoryview(packed))
        modules, own = installed_modules_in(bytes(pickled)), top_level_names(bytes(code))
    except MessageError:  # an object's own way to be pickled, which only its class reads
        return None
    if not modules or len(own) > MAX_IMPORTS:
        return None
    return FlowImports(tuple(modules[:MAX_IMPORTS]), own, **places)


@dataclass(frozen=True)
class FlowContent:
    """Content of a flow, in the form in which jobs compare it and send it to workers."""

    #: Further values that all jobs of a version must share, by their names in messages.
    labels: dict[str, str]
    #: Parts that are compared, and the user's modules and attributes that are sent to workers.
    identity: ContentIdentity


def content_of(
    dataset: TwoStageDataset,
    worker_init_fn: Callable[[int], Any] | None,
    options: JobOptions,
    settings: ScriptSettings,
    like: FlowContent | None = None,
    *,
    code: Code = "auto",
) -> FlowContent:
    """Return the content of a flow. Takes about as long as pickling the dataset.

    like: the flow's content at an earlier epoch; its modules are used again, and not read.
    code: which of the user's modules are sent, as in `LoaderOptions`.
    """
    transform = dataset.per_draw
    roots = {
        "dataset": dataset.cacheable,
        "transform": transform.transform if isinstance(transform, KeylessTransform) else transform,
        "stand_in": dataset.stand_in,
        "worker_init_fn": worker_init_fn,
    }
    roots = {name: obj for name, obj in roots.items() if obj is not None or name == "dataset"}
    ignore = options.ignore if options.fingerprint is None else ()
    identity = identify(roots, ignore=ignore, code=code, like=None if like is None else like.identity)
    if options.fingerprint is not None:
        return FlowContent({"its content": options.fingerprint}, replace(identity, parts={}))
    described = settings.describe()
    return FlowContent({"the script's settings": described} if described else {}, identity)


def changes(now: FlowContent, then: FlowContent) -> tuple[dict[str, str], dict[str, str]]:
    """Return two dicts of changes, by part: of labels and the dataset with its functions; and all other changes."""
    names = dict.fromkeys([*now.labels, *then.labels])
    own = {name: "other" for name in names if now.labels.get(name) != then.labels.get(name)}
    found = differences(now.identity.parts, then.identity.parts, then.identity.ignore)
    is_own = {path: _OWN.match(path) is not None and text != f"other {RANDOM_STATE}" for path, text in found.items()}
    own |= {path: text for path, text in found.items() if is_own[path]}
    return own, {path: text for path, text in found.items() if not is_own[path]}


def _cached_part(source: JobDataset) -> str:
    """Describe the cached part of the flow's samples, for the error of a job that differs in it."""
    if source.staged:
        return "samples before their transform"
    return "samples" if source.repeatable else "nothing (no ALSDCache, no repeatable=True)"


def _memory_of(source: JobDataset, options: JobOptions) -> int:
    """Return the bytes for all shards: the job's option, else the capacity of the dataset's cache plus a reserve."""
    if options.memory_bytes is not None:
        return options.memory_bytes
    held = None if source.cache is None else parse_capacity(source.cache.capacity).bytes
    return DEFAULT_MEMORY_BYTES if held is None else held + UNDER_WAY_BYTES


def _samples_of(source: JobDataset, size: int) -> int:
    """Return the maximum number of samples of the cache around the dataset; 0 if its capacity is in bytes."""
    held = None if source.cache is None else parse_capacity(source.cache.capacity).items
    return min(held or 0, size)


def register(
    cluster: Cluster,
    spec: FlowSpec,
    packed: bytes,
    *,
    reconnect_timeout_s: float,
    outages: OutageLog | None = None,
    is_replaced: Callable[[], bool] = lambda: False,
) -> bool:
    """Register a flow, and upload its content unless the cluster has it.

    packed: the content. outages: logs calls without an answer and long waits; None: log nothing.
    is_replaced: returns whether another cluster has replaced this one; called after each call without an answer.

    Returns False if the cluster has been replaced: the flow has to be registered with the new cluster. Raises, among
    others, UsageError if the flow is rejected, DeadlineError if no call succeeds for `reconnect_timeout_s`.
    """
    outages = outages or OutageLog(spec.name, "", reconnect_timeout_s=reconnect_timeout_s, muted=True)
    backoff, deadline, attempts = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), time.monotonic() + reconnect_timeout_s, 0
    call_s = SILENCE_S
    with cluster.connect(timeout_s=reconnect_timeout_s) as coordinator:
        while attempts < MAX_FAULTS:
            # Every call is safe to repeat. The first is short, so that the log says soon that none is answered.
            call_s = min(call_s, max(MIN_CALL_S, deadline - time.monotonic()))
            try:
                is_stored = coordinator.call("register", spec, reply_type=bool, timeout_s=call_s).body
                held: int | None = len(packed) if is_stored else 0
                while held is not None and held < len(packed):
                    held = _store(coordinator, spec.content, packed, held, min(PIECE_S, reconnect_timeout_s))
                    deadline = time.monotonic() + reconnect_timeout_s
                if held is not None:
                    outages.on_success()
                    return True
                attempts += 1
                continue
            except RemoteCallError as error:
                attempts += error.kind is ErrorKind.INTERNAL
                kind = outages.on_error(error, attempts)
                if kind not in (ErrorKind.INTERNAL, ErrorKind.OVERLOADED):
                    raise
                if kind is ErrorKind.OVERLOADED and time.monotonic() >= deadline:
                    text = f"flow {spec.name!r}: {error.text} (waited {reconnect_timeout_s:g} s)"
                    raise DeadlineError(text) from error
            except DeadlineError as error:
                call_s = min(2 * call_s, LONGEST_CALL_S)
                outages.on_no_answer(error)
                if is_replaced():
                    return False
                if time.monotonic() >= deadline:
                    raise DeadlineError(
                        f"flow {spec.name!r}: no cluster answers at {cluster.address} within {reconnect_timeout_s:g} s;"
                        f" is it up (`python -m torch_dpflow.cli status`)? {keys_hint(cluster.address)}".rstrip()
                    ) from error
            time.sleep(backoff.pause_s())
    raise UsageError(
        f"flow {spec.name!r} was deleted, or its coordinator restarted, {MAX_FAULTS} times during the upload of what "
        "its workers load; try again"
    )


def _store(coordinator: RpcClient, digest: str, packed: bytes, held: int, timeout_s: float) -> int | None:
    """Send the piece of a content that begins at offset `held`; return the offset of the next piece.

    Returns None if the coordinator has no flow with this content any more.
    """
    piece = [memoryview(packed)[held : held + CONTENT_PIECE_BYTES]]
    body = ContentPiece(digest, held, len(packed))
    stored: int | None = coordinator.call("store", body, piece, reply_type=int | None, timeout_s=timeout_s).body
    return stored

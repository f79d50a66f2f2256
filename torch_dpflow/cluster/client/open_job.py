"""Opening of a job (`open_job`): registration of its flow with a cluster, and connection to the flow's services."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch_dpflow._core.backoff import Backoff
from torch_dpflow._core.channels_last import collate_channels_last
from torch_dpflow._core.threads import repeat
from torch_dpflow.cluster.client.flow_registration import (
    FlowContent,
    JobDataset,
    changes,
    content_of,
    describe,
    imports_of,
    length_of,
    register,
    split_stages,
)
from torch_dpflow.cluster.client.options import (
    Failover,
    FlowDefinition,
    JobDescription,
    JobOptions,
    JobReading,
    Replica,
    draw_name,
)
from torch_dpflow.cluster.client.outage_log import FIRST_PAUSE_S, LONGEST_PAUSE_S, OutageLog
from torch_dpflow.cluster.client.shared_job import SharedJob
from torch_dpflow.cluster.messages.router import JobRank
from torch_dpflow.cluster.security.connection_file import Cluster, find_cluster
from torch_dpflow.cluster.shard.sample_source import SampleAssignment
from torch_dpflow.errors import DPFlowError, OptionError
from torch_dpflow.log import LOADER
from torch_dpflow.remote.shipping.content_identity import ContentIdentity
from torch_dpflow.remote.shipping.content_pack import join_content
from torch_dpflow.samplers.indices import IndexArray, check_indices
from torch_dpflow.workers.script_settings import ScriptSettings

__all__ = ["FlowDefinition", "JobOptions", "JobReading", "Replica", "SharedJob", "open_job"]


def open_job(
    flow: FlowDefinition,
    reading: JobReading | None = None,
    *,
    address: str | None = "auto",
    options: JobOptions | None = None,
    content: FlowContent | None = None,
) -> SharedJob:
    """Open a job that reads `flow`, together with other jobs. The flow's services start if they do not run.

    Args:
        reading: which samples the job reads, and in which batches; None: all samples, in batches of one.
        address: the cluster's address, see `find_cluster`. If its connection file does not exist, the call waits for
            it, up to `options.reconnect_timeout_s`.
        content: `SharedJob.content` of an earlier job of this flow, if it is still valid; None: compute it now.

    Raises:
        OptionError, OptionTypeError: an argument is not allowed, or there is no valid connection file.
        UsageError: the cluster rejects the flow or the job; the message contains the reason.
        NotPicklableError: the dataset cannot be sent to the workers.
        DPFlowError: the cluster does not answer (DeadlineError), or fails repeatedly, among others.
    """
    reading, options = reading or JobReading(), options or JobOptions()
    _check_named(reading.replica, options)
    name = options.name or draw_name()
    outages = OutageLog(flow.name, name, reconnect_timeout_s=options.reconnect_timeout_s)
    source = split_stages(flow.dataset, options)
    size = length_of(source.dataset.cacheable)
    indices = _samples_read(reading, source, size)
    settings = ScriptSettings.capture()
    known = content or content_of(source.dataset, flow.worker_init_fn, options, settings, code=flow.code)
    if unknown := known.identity.state.unknown():
        LOADER.warning(
            "flow %r: variables that can be neither compared nor sent are in workers what their modules make: %s",
            flow.name,
            ", ".join(unknown),
        )
    assignment = SampleAssignment(
        dataset=source.dataset,
        worker_init_fn=flow.worker_init_fn,
        keeps_layout=reading.collate_fn is collate_channels_last,
        settings=settings,
        own_state=known.identity.state,
    )
    registration = _Registration(flow, source, assignment, known, size, options, address)
    cluster = await_cluster(address, outages)
    while not registration.register_with(cluster, options.reconnect_timeout_s, outages):
        cluster = await_cluster(address, outages)
    job = JobDescription(
        **{**vars(reading), "indices": indices, "collate_fn": None},
        flow=flow.name,
        version=flow.version,
        name=name,
        size=size,
        places=source.places,
        rank=_rank_of(name, reading.replica),
        weight=options.weight,
        caches=(source.repeatable or source.staged) and options.policy != "none",
    )
    failover = Failover(find=partial(_found, address), register=registration.register_with)
    return SharedJob(cluster, job, reading.collate_fn, options, failover, content=known)


@dataclass(frozen=True)
class _Registration:
    """Registration of a job's flow, with its first cluster and with each cluster that replaces that."""

    flow: FlowDefinition
    source: JobDataset
    assignment: SampleAssignment
    content: FlowContent
    size: int
    options: JobOptions
    address: str | None

    def register_with(self, cluster: Cluster, reconnect_timeout_s: float, outages: OutageLog | None = None) -> bool:
        """Register the flow; see `register`. Return False if another cluster has replaced this one."""
        packed = _packed_for(cluster, self.assignment, self.content.identity)
        spec = describe(
            self.flow,
            self.source,
            packed,
            self.content,
            size=self.size,
            options=self.options,
            imports=imports_of(packed, self.assignment.settings),
        )
        return register(
            cluster,
            spec,
            packed,
            reconnect_timeout_s=reconnect_timeout_s,
            outages=outages,
            is_replaced=lambda: _found(self.address) not in (None, cluster),
        )


def _check_named(replica: Replica | None, options: JobOptions) -> None:
    """Raise OptionError if a job of several ranks has no name."""
    if replica is not None and replica.num_replicas > 1 and options.name is None:
        raise OptionError(
            f"replica={replica!r} without a name: the ranks of a job find each other by its name, so give all of them "
            "the same JobOptions(name=...), and no other job that one"
        )


def _samples_read(reading: JobReading, source: JobDataset, size: int) -> IndexArray | None:
    """Return the flow's sample numbers that a job reads; None: all. Raises the errors of `check_indices`.

    size: number of samples of the flow.
    """
    places = source.places
    if reading.indices is None:
        return places
    indices = check_indices(reading.indices, size if places is None else len(places))
    return indices if places is None else places[indices]


def changes_of_flow(
    flow: FlowDefinition, options: JobOptions, then: FlowContent
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the changes of a flow's content since it was `then`, as the pair of dicts that `changes` returns."""
    dataset = split_stages(flow.dataset, options).dataset
    now = content_of(dataset, flow.worker_init_fn, options, ScriptSettings.capture(), then)
    return changes(now, then)


def _packed_for(cluster: Cluster, assignment: SampleAssignment, identity: ContentIdentity) -> bytes:
    """Pack what the cluster's workers load, with the user's modules; without storage keys if a platform runs them."""
    if not cluster.sends_code:
        packed = assignment.pack(identity.sent_arguments)
    else:
        from torch_dpflow.datasets.storage.credentials import leave_out_keys

        with leave_out_keys():
            packed = assignment.pack(identity.sent_arguments)
    return join_content(packed, b"" if identity.bundle is None else identity.bundle.data)


def _rank_of(name: str, replica: Replica | None) -> JobRank | None:
    if replica is None:
        return None
    return JobRank(name, replica.rank, replica.num_replicas, replica.drop_last)


def await_cluster(address: str | None, outages: OutageLog) -> Cluster:
    """Return the cluster at `address`. Wait for its connection file, which is missing while a cluster is replaced.

    Raises the errors of `find_cluster`; for a missing file, only after `outages.reconnect_timeout_s`.
    """

    def check(error: DPFlowError, is_late: bool) -> None:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise error
        outages.on_wait(str(error))
        if is_late:
            raise OptionError(f"{error} (waited {outages.reconnect_timeout_s:g} s)") from error

    backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    return repeat(lambda: find_cluster(address), check, outages.reconnect_timeout_s, backoff)


def _found(address: str | None) -> Cluster | None:
    try:
        return find_cluster(address)
    except OptionError:
        return None

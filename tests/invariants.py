"""Invariants of the caches and state machines of the package. `validate` checks any of these objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from functools import singledispatch
from itertools import pairwise
from typing import Any

import numpy as np

from torch_dpflow._core import lazy_heap
from torch_dpflow._core.lazy_heap import LazyHeap
from torch_dpflow._core.need_counts import READ
from torch_dpflow.cluster.cache import objects
from torch_dpflow.cluster.cache.object_table import ObjectTable
from torch_dpflow.cluster.cache.objects import CacheEntry, LoadQueue, RequestTable
from torch_dpflow.cluster.cache.sample_cache import SampleCache
from torch_dpflow.cluster.control.flow_registry import FlowRegistry, FlowState
from torch_dpflow.cluster.control.joint_order import MAX_EPOCHS, JointOrder
from torch_dpflow.cluster.control.node_table import NodeTable
from torch_dpflow.cluster.control.reader_names import ReaderNames
from torch_dpflow.cluster.control.worker_owners import WorkerOwners
from torch_dpflow.ipc.rpc.leases import MAX_REMEMBERED, Expiry, Leases
from torch_dpflow.pool.planning.allocator import StripeAllocator
from torch_dpflow.pool.planning.free_space import FreeSpace
from torch_dpflow.pool.planning.read_ahead import ReadAhead
from torch_dpflow.samplers import directory as directories
from torch_dpflow.samplers.buffered import MAX_JOBS, BufferedGroup, Cells
from torch_dpflow.samplers.directory import LISTED, Directory
from torch_dpflow.samplers.fixed_order import FixedOrderGroup
from torch_dpflow.samplers.group import SamplingGroup
from torch_dpflow.samplers.shared_epoch import SharedEpoch
from torch_dpflow.samplers.shared_log import SharedLogGroup


@singledispatch
def validate(machine: Any, *arguments: Any) -> None:
    """Raise AssertionError unless all invariants of an object hold."""
    raise TypeError(f"no invariants of {type(machine).__name__} are known")


@validate.register
def _lazy_heap(heap: LazyHeap) -> None:
    entries = set(map(id, heap._heap))
    assert all(id(entry) in entries and entry[2] == item for item, entry in heap.items())
    assert len(heap._heap) <= 2 * len(heap) + lazy_heap._MAX_STALE


@validate.register
def _load_queue(queue: LoadQueue) -> None:
    _lazy_heap(queue)
    for wanted, (rank, then, _) in queue.items():
        assert rank == wanted.distance
        assert then == wanted.number
        assert wanted.is_waiting


@validate.register
def _cache_entry(entry: CacheEntry) -> None:
    assert not (entry.ready and entry.loading)
    assert entry.ready or entry.value is None
    assert entry.ready or (entry.tickets and not entry.cached and not entry.served)
    assert entry.tickets or entry.cached
    assert entry.loads or not (entry.ready or entry.loading)
    assert entry.claimed
    assert entry.served == sum(entry.tickets.values())
    assert (entry.distance == 0) == bool(entry.requests)
    assert not entry.requests or entry.tickets
    assert not objects._NO_REQUESTS


@validate.register
def _request_table(requests: RequestTable) -> None:
    for number, request in requests._open.items():
        wanted = [request.job.wants[ticket] for ticket in request.tickets]
        assert number in request.job.requests
        assert all((number, ticket) in entry.requests for ticket, entry in zip(request.tickets, wanted))
        assert request.missing == sum(not entry.ready for entry in wanted)
        assert request.missing > 0, "a complete request is unanswered"


@validate.register
def _object_table(table: ObjectTable, readers: Collection[str], jobs: Collection[str]) -> None:
    entries = [entry for same in table._by_key.values() for entry in same]
    names = set(readers)
    for entry in entries:
        _cache_entry(entry)  # without a dispatch for each of hundreds of thousands
        assert {reader for reader, _ in entry.tickets} <= names
        assert table._repeatable or not (entry.cached and entry.claimed.issuperset(jobs))
        assert table._spare is None or entry in table._spare or not entry.is_spare
    ready = [entry for entry in entries if entry.ready]
    assert table.held == sum(entry.size for entry in ready)
    assert table.ready == len(ready)
    assert table.running == sum(entry.loading > 0 for entry in entries)
    assert table.pinned == sum(entry.size for entry in ready if entry.tickets)
    assert table.reserved == sum(entry.size for entry in entries if entry.loading)
    assert {id(entry) for entry in entries if entry.cached} == set(map(id, table._cached.values()))
    assert table._policy is None or set(table._policy) == set(table._cached)
    validate(table.queue)
    if table._spare is not None:
        validate(table._spare)
        assert set(table._spare) <= set(ready)


@validate.register
def _sample_cache(cache: SampleCache) -> None:
    readers = {**cache._readers, cache._inputs.name: cache._inputs}
    for reader in readers.values():
        assert all((reader.name, ticket) in wanted.tickets for ticket, wanted in reader.wants.items())
    assert cache._jobs == Counter(reader.job for reader in cache._readers.values())
    assert all(entry.loading == load for load, entry in cache._loading.items())
    drawn = [load for load, entry in cache._loading.items() if cache._table_of(entry) is cache._drawn]
    assert cache._inputs.wants.keys() == {*drawn}
    assert sum(table.running for table in cache._tables) == len(cache._loading)
    validate(cache._requests)
    for table in cache._tables:
        validate(table, readers, cache._jobs)


@validate.register
def _read_ahead(ahead: ReadAhead) -> None:
    validate(ahead._cache)
    for name, state in ahead._readers.items():
        wanted = [one for one in range(len(state)) if ahead._cache.is_wanted(name, one)]
        assert all(state.is_taken(position) for position in wanted)
        assert len(wanted) == state.out


@validate.register
def _flow_registry(registry: FlowRegistry) -> None:
    for instance, flow in registry._flows.items():
        assert flow.spec.instance == instance
        assert (flow.state is FlowState.ACCESSED) == (flow.jobs > 0)
        assert flow.state is not FlowState.DELETED
        versions = [other.spec.version for other in registry.flows if other.spec.name == flow.spec.name]
        assert flow.replaced == (flow.spec.version < max(versions))
        assert registry.find(instance) is flow
        assert flow.replaced or registry.find(flow.spec.name) is flow


def _check_joint_epoch(epoch: Any) -> None:
    filled, empty = epoch._open.part(0, epoch._filled), epoch._open.part(epoch._filled, len(epoch._open))
    assert (epoch._slots[filled] > 0).all() or epoch._kept_from
    assert not epoch._slots[empty].any()


@validate.register
def _joint_order(order: JointOrder) -> None:
    assert len(order._epochs) <= MAX_EPOCHS
    assert not order._epochs or {rank for rank, _ in order._at} == {*range(order._shares.replicas)}
    assert order._epochs or order.awaited
    for joint in order._epochs.values():
        _check_joint_epoch(joint)


@validate.register
def _node_table(table: NodeTable) -> None:
    generations = [node.record.generation for node in table._nodes.values()]
    assert len({*generations}) == len(generations)
    assert max(generations, default=0) <= table._generation
    assert all(node.record.name == name for name, node in table._nodes.items())
    assert table._nodes.keys() == {*table._leases}
    assert all(view.node in table._nodes for view in table.processes)


@validate.register
def _worker_owners(owners: WorkerOwners) -> None:
    assert {owner for owner in owners._members.values() if isinstance(owner, str)} <= owners._owners.keys()
    assert {*owners._leases} == owners._owners.keys()


@validate.register
def _expiry(expiry: Expiry) -> None:
    assert [*expiry._renewed.values()] == sorted(expiry._renewed.values())
    assert all(renewed <= expiry._now for renewed in expiry._renewed.values())


@validate.register
def _leases(leases: Leases) -> None:
    validate(leases._members)
    validate(leases._gone)
    assert {*leases._members}.isdisjoint(leases._gone)
    assert leases._newest.keys() == {*leases._members, *leases._gone}
    assert len(leases._gone) <= MAX_REMEMBERED


@validate.register
def _reader_names(names: ReaderNames) -> None:
    _leases(names)
    assert names._holders.keys() == names.members.keys()


@validate.register
def _stripe_allocator(allocator: StripeAllocator) -> None:
    validate(allocator._leases)
    assert allocator._capacity.keys() == allocator._room.keys() == allocator._leases.members.keys()
    for server, capacity in allocator._capacity.items():
        held = sum(one.bytes_of(one.held.get(server, ())) for one in allocator._datasets.values())
        assert held + allocator._room[server] == capacity
        assert allocator._room[server] >= 0
    for one in allocator._datasets.values():
        assert all(owner is None or owner in allocator._capacity for owner in one.owners)
        assert one.readers.keys() | one.held.keys() <= allocator._capacity.keys()
        assert all(one.held[name].issuperset(stripes) for name, stripes in one.owned().items())


@validate.register
def _free_space(space: FreeSpace) -> None:
    assert all(sum(one) < other[0] for one, other in pairwise(space._gaps))
    assert all(0 <= offset < offset + length <= space.capacity for offset, length in space._gaps)


@validate.register
def _cells(cells: Cells) -> None:
    samples = np.concatenate([np.empty(0, np.int64), *(samples for _, samples in cells.items())])
    assert len(np.unique(samples)) == len(samples)
    assert 0 not in cells._place
    for job in range(MAX_JOBS):
        assert cells.needed[job] == cells.samples_in(cells.needed_by(1 << job)), job


@validate.register
def _directory(directory: Directory) -> None:
    directory._end_piece()
    listed, numbers = directories._joined([directory._current(*piece) for piece in directory._log])
    assert np.array_equal(np.sort(listed), np.flatnonzero(directory._held))
    assert len(listed) == directory._residents <= directory.capacity
    assert (np.diff(numbers) > 0).all()


@validate.register
def _shared_epoch(epoch: SharedEpoch) -> None:
    needed = epoch.need[epoch._pile[:]] != READ
    before = np.concatenate([[0], np.cumsum(needed)])
    starts = np.concatenate([[0], epoch._ends[:-1]])
    assert np.array_equal(before[epoch._ends] - before[starts], epoch._unread)
    assert np.array_equal(before[epoch._next_leads], before[starts]), "a sample that is needed was passed over"
    if epoch._sequence is not None:
        assert np.array_equal(epoch.quota(len(epoch._sequence)), epoch._unread)
    listed = epoch._backlog[: epoch._backlog_length]
    listed = np.sort(listed[epoch.need[listed] == LISTED])
    assert np.array_equal(listed, np.flatnonzero(epoch.need == LISTED))


@validate.register
def _sampling_group(group: SamplingGroup) -> None:
    for member in group._members.values():
        assert 0 <= member.position <= member.length, member


@validate.register
def _buffered_group(group: BufferedGroup) -> None:
    _sampling_group(group)
    validate(group._cells)
    for name, buffer in group._buffers.items():
        member = group._members[name]
        left = member.length - member.position
        assert len(buffer) + group._unpicked(member) == left, name


@validate.register
def _fixed_order_group(group: FixedOrderGroup) -> None:
    _sampling_group(group)
    for name, order in group._orders.items():
        assert np.array_equal(np.sort(order[:]), np.sort(group._members[name].samples())), name


@validate.register
def _shared_log_group(group: SharedLogGroup) -> None:
    _sampling_group(group)
    validate(group._directory)
    needed = np.zeros(group.size, np.int64)
    for name, epoch in group._epochs.items():
        validate(epoch)
        member = group._members[name]
        assert int(np.count_nonzero(epoch.need != READ)) == member.length - member.position, name
        needed += epoch.need != READ
    assert np.array_equal(needed, group._directory.needed.of(np.arange(group.size)))

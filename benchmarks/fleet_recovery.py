"""Parts of `benchmarks.fleet`: the provisioner, flows that run at once, and services that are killed.

A service is whole again once each client has what it had before.
"""

import os
import signal
import time
from contextlib import ExitStack, suppress

import numpy as np
import torch
from torch.utils.data import TensorDataset

from benchmarks.cluster import use_by_role
from benchmarks.fleet_services import (
    BATCH,
    CLUSTER,
    IDLE_S,
    Service,
    at_rest,
    connected,
    load,
    register,
    spec_of,
    spent_us,
)
from benchmarks.fleet_services import coordinator as cluster_of
from benchmarks.report import Figures
from torch_dpflow import DPFlowDataLoader, JobOptions, LoaderOptions
from torch_dpflow.cluster.messages.coordinator import Cost, CostRequest
from torch_dpflow.cluster.messages.provisioner import (
    MAX_REQUESTS,
    Attach,
    Attached,
    Events,
    EventsRequest,
    OwnedWorker,
    Requests,
    StartRequest,
)
from torch_dpflow.cluster.messages.router import DrawSamples, EpochPlace, JobId, Join, Joined, StartEpoch
from torch_dpflow.errors import DPFlowError
from torch_dpflow.ipc.rpc import ClientOptions, RpcClient
from torch_dpflow.remote.launchers.contract import prefix_of

#: Samples of a flow whose router resumes up to a thousand jobs: each takes 9 bytes for each of them.
SMALL = 100_000
#: Most flows that run at once on this machine: each has a router, a shard and a worker.
MAX_RUNNING = 16
SHARD, GROUP = "fleet:v1/shard-000", "0123456789"
LATEST_S = 120.0
#: Jobs that join between two heartbeats of the shard.
BEATS = 50


def provisioner(count: int, calls: int) -> Figures:
    """A provisioner that has started so many workers; a call is one of a shard that requests nothing.

    It is killed, and whole again once the shard has attached with all of them.
    """
    names = [f"{prefix_of(CLUSTER, GROUP)}{number}-{number + 1}" for number in range(count)]
    with ExitStack() as stack:
        service = Service("provisioner", count, stack)
        client = service.client()

        def start() -> None:
            client.call("attach", Attach(SHARD, 1, []), reply_type=Attached)
            seen = started = 0
            for first in range(0, count, MAX_REQUESTS):
                requests = [StartRequest(name, b"spec") for name in names[first : first + MAX_REQUESTS]]
                assert client.call("request", Requests(SHARD, 1, requests), reply_type=bool).body
            while started < count:
                events: Events = client.call("events", EventsRequest(SHARD, 1, seen), reply_type=Events).body
                seen, started = seen + len(events.events), started + len(events.events)

        def request() -> None:
            for _ in range(calls):
                assert client.call("request", Requests(SHARD, 1, []), reply_type=bool).body

        figures = {"join_ms": spent_us(service.pid, count, start) / 1e3}
        figures["call_us"] = spent_us(service.pid, calls, request)
        figures |= at_rest(service.pid)
        killed = time.perf_counter()
        service.restart()
        owned = [OwnedWorker(name, name) for name in names]
        service.client().call("attach", Attach(SHARD, 1, owned), reply_type=Attached)
        return {**figures, "whole_s": time.perf_counter() - killed}


def running(count: int, calls: int) -> Figures:
    """So many flows that run at once, at most 16, each with a job; the first batch is that of the slowest.

    The coordinator's and the node's processor time is that while no job reads.
    """
    data = TensorDataset(torch.arange(1000))
    options, code = JobOptions(idle_s=60.0), LoaderOptions(code=None)
    with ExitStack() as stack:
        _, pid, address = stack.enter_context(cluster_of())
        kept: list[object] = []
        stack.callback(kept.clear)  # jobs leave as their iterators are freed

        def begin(number: int) -> float:
            common = {"flow": f"fleet/{number}", "address": address, "job": options, "options": code}
            begun = time.perf_counter()
            iterator = iter(DPFlowDataLoader(data, batch_size=10, num_workers=1, **common))
            kept.append(iterator)
            next(iterator)
            return time.perf_counter() - begun

        first = max(begin(number) for number in range(min(count, MAX_RUNNING)))
        before = use_by_role(address)["node"].cpu_s
        figures = at_rest(pid)
        spent = use_by_role(address)["node"].cpu_s - before
        return {**figures, "first_s": first, "node_ms_per_s": spent / IDLE_S * 1e3}


def router(count: int, calls: int) -> Figures:
    """A router with so many jobs is killed in mid-epoch; whole again once each has drawn from the next one."""
    with ExitStack() as stack:
        service = Service("router", 1, stack, size=SMALL)
        flow, places = spec_of(size=SMALL).instance, np.zeros(SMALL, np.bool_)
        places[:BATCH] = True
        marks = np.packbits(places).tobytes()

        def draw(position: int) -> None:
            client = service.client()
            for number in range(count):
                if not number % BEATS:
                    register(client, 0)
                name = f"job-{number}"
                body = Join(name, flow, number + 1, 0, BATCH, None, False)
                id = JobId(name, client.call("join", body, reply_type=Joined).body.generation, flow, "")
                place = EpochPlace(0, position, False)
                client.call("start", StartEpoch(id, [place], not position), [marks if position else b""])
                client.call("draw", DrawSamples(id, 0, position, BATCH))

        draw(0)
        killed = time.perf_counter()
        service.restart()
        draw(BATCH)
        return {"whole_s": time.perf_counter() - killed, **at_rest(service.pid)}


def shard(count: int, calls: int) -> Figures:
    """A shard with so many workers is killed; whole again once all are ready and have loaded for its job."""
    ahead = max(BATCH, 4 * count)
    with ExitStack() as stack:
        service = Service("shard", count, stack)
        with ExitStack() as before:
            load(service.client(), connected(service.address, count, before), range(ahead), ahead=ahead)
        killed = time.perf_counter()
        service.restart()
        load(service.client(), connected(service.address, count, stack), range(ahead), ahead=ahead)
        return {"whole_s": time.perf_counter() - killed, **at_rest(service.pid)}


def coordinator(count: int, calls: int) -> Figures:
    """A coordinator with so many flows is killed; whole again once it has answered for each of them."""
    flows = [spec_of(f"fleet/{number}") for number in range(count)]
    with cluster_of() as (client, pid, _), ExitStack() as stack:
        for flow in flows:
            client.call("register", flow, reply_type=bool)
        os.kill(pid, signal.SIGKILL)
        killed = time.perf_counter()
        again = stack.enter_context(RpcClient(client.address, options=ClientOptions(timeout_s=5.0)))
        for flow in flows:
            request = CostRequest(flow.instance, "job")
            while True:
                with suppress(DPFlowError):
                    again.call("cost", request, reply_type=Cost)
                    break
                if time.perf_counter() - killed > LATEST_S:
                    raise TimeoutError(f"the coordinator is not whole after {LATEST_S:g} s")
                time.sleep(0.05)
        return {"whole_s": time.perf_counter() - killed}

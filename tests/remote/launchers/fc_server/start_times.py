"""How long workers of Function Compute take to their first sample beyond the cold start, which is injected.

    python -m tests.remote.launchers.fc_server.start_times [--workers 64] [--cold-start 2] [--rounds 3]

The vendor's client, the entry and the workers are real; they share this machine's cores, where on the platform each has
its own. Instances have booted before, as that is part of the platform's cold start: so nothing is said about it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import closing
from typing import Any

from tests.remote.launchers.fc_server.account import KEYS
from tests.remote.launchers.fc_server.server import FunctionServer
from torch_dpflow import DPFlowDataLoader
from torch_dpflow.remote import FunctionCompute
from torch_dpflow.remote.launchers.fc_deploy import deploy


class Times:
    """Item `i` is which invocation has loaded it, and when, by this host's clock; slow, so that all get some."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[str, str, str]:
        now, cpu_s = time.monotonic(), time.process_time()
        time.sleep(0.1)
        return os.environ["ALIBABA_CLOUD_SECURITY_TOKEN"].removeprefix("token-for-"), str(now), str(cpu_s)


def measure(server: FunctionServer, workers: int) -> tuple[list[float], list[float]]:
    """For each worker how long after it was asked for its first sample began, and its CPU time until then, seconds."""
    # With a role each invocation has a token of its own, by which it is known.
    spec = FunctionCompute(max_workers=workers, endpoint=server.endpoint, role="acs:ram::1:role/data")
    assert [*deploy(spec, "r/i:1")]
    server.prepare(spec.function, workers)
    loader: Any = DPFlowDataLoader(Times(100 * workers), batch_size=1, num_workers=workers, platform=spec)
    firsts: dict[str, tuple[float, float]] = {}
    iterator = iter(loader)
    with closing(iterator._shard):
        for (name,), (when,), (cpu_s,) in iterator:
            firsts.setdefault(name, (float(when) - server.tasks[name].asked, float(cpu_s)))
            if len(firsts) == workers:
                break
    times, used = zip(*firsts.values(), strict=True)
    return sorted(times), sorted(used)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--cold-start", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    os.environ["ALIBABA_CLOUD_ACCESS_KEY_ID"] = "AKtest"
    os.environ["ALIBABA_CLOUD_ACCESS_KEY_SECRET"] = KEYS["AKtest"].secret
    os.environ["ALIBABA_CLOUD_SECURITY_TOKEN"] = KEYS["AKtest"].token
    for _ in range(arguments.rounds):
        with FunctionServer(KEYS, cold_start_s=arguments.cold_start) as server:
            firsts, used = measure(server, arguments.workers)
        beyond = [first - arguments.cold_start for first in firsts]
        print(
            f"{len(firsts)} workers, cold start {arguments.cold_start:g} s, {os.cpu_count()} cores: first sample "
            f"beyond it after {statistics.median(beyond):.2f} s (median; {beyond[0]:.2f} to {beyond[-1]:.2f}), "
            f"each with {1000 * statistics.median(used):.0f} ms of CPU time of its own",
            flush=True,
        )


if __name__ == "__main__":
    main()

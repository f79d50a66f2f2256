"""How much longer a training loop waits where workers of Function Compute are replaced all the time.

    python -m tests.remote.launchers.fc_server.rotation_stall [--lifetime 25s] [--seconds 150] [--workers 2]

Two loaders take turns, step by step: the workers of one live for the lifetime, those of the other for an hour.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any

from tests.remote.launchers.fc_server.account import KEYS
from tests.remote.launchers.fc_server.server import FunctionServer
from torch_dpflow import DPFlowDataLoader, LoaderOptions
from torch_dpflow.remote import FunctionCompute
from torch_dpflow.remote.launchers.fc_deploy import deploy

#: How long the loading of a sample and a step of the training take, seconds.
SAMPLE_S, STEP_S = 0.02, 0.05


class Slow:
    """Item `i` is `i`, after a while."""

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> int:
        time.sleep(SAMPLE_S)
        return index


class Side:
    """One loader: what it has waited, and whether each sample came once, in order."""

    def __init__(self, server: FunctionServer, name: str, lifetime: str, workers: int) -> None:
        self.spec = FunctionCompute(max_workers=2 * workers, endpoint=server.endpoint, function=name, lifetime=lifetime)
        assert [*deploy(self.spec, "r/i:1")]
        options = LoaderOptions(seeding="worker")
        loader: Any = DPFlowDataLoader(Slow(), batch_size=2, num_workers=workers, platform=self.spec, options=options)
        self.iterator: Any = iter(loader)
        self.read, self.waited_s, self.longest_s = 0, 0.0, 0.0
        self.step()
        self.waited_s = self.longest_s = 0.0

    def step(self) -> None:
        began = time.monotonic()
        batch = next(self.iterator)
        wait_s = time.monotonic() - began
        assert batch.tolist() == [self.read, self.read + 1]
        self.read, self.waited_s, self.longest_s = (
            self.read + 2,
            self.waited_s + wait_s,
            max(self.longest_s, wait_s),
        )


def steps(seconds: float) -> Iterator[None]:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        yield
        time.sleep(STEP_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lifetime", default="25s")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    os.environ["ALIBABA_CLOUD_ACCESS_KEY_ID"] = "AKtest"
    os.environ["ALIBABA_CLOUD_ACCESS_KEY_SECRET"] = KEYS["AKtest"].secret
    os.environ["ALIBABA_CLOUD_SECURITY_TOKEN"] = KEYS["AKtest"].token
    with FunctionServer(KEYS) as server:
        sides = {
            lifetime: Side(server, name, lifetime, arguments.workers)
            for name, lifetime in (("replaced", arguments.lifetime), ("staying", "1h"))
        }
        for _ in steps(arguments.seconds):
            for side in sides.values():
                side.step()
        for lifetime, side in sides.items():
            begun = sum(task.function == side.spec.function for task in server.tasks.values())
            share = 100 * side.waited_s / arguments.seconds
            print(
                f"lifetime {lifetime}: waited {share:.2f}% of {arguments.seconds:g} s, "
                f"{side.longest_s:.2f} s at most; {begun} workers begun, {side.read:,} samples, each once",
                flush=True,
            )
            side.iterator._shutdown_workers()


if __name__ == "__main__":
    main()

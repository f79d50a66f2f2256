"""One side of `benchmarks.platforms`, once, in this process, which does nothing else."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.loader_workloads import JpegCrops
from benchmarks.meter import Read, time_epochs
from benchmarks.report import Figures
from tests.support.hosts import Hosts, OnHosts
from torch_dpflow import DPFlowDataLoader

BATCH, SAMPLES = 64, 2048
#: Of each platform, its sides; the first is the baseline.
SIDES = {
    "hosts": {"local": "local", "2 hosts, tcp with CURVE": "hosts"},
    "ray": {"Ray Data, tasks": "ray-data-tasks", "Ray Data, actors": "ray-data-actors", "dpflow": "ray"},
}
SLEEPERS = {"sample_s": 0.050, "batch_size": 8, "hosts": 4}
#: How many samples a worker loads in an epoch of the part `linear`.
SLEEPS = 160

#: Opens a side.
Open = Callable[[Dataset[torch.Tensor]], AbstractContextManager[Read]]


@contextmanager
def local(dataset: Dataset[torch.Tensor], **options: Any) -> Iterator[Read]:
    """Ours, with two workers that stay."""
    loader = DPFlowDataLoader(dataset, batch_size=BATCH, num_workers=2, persistent_workers=True, **options)
    yield lambda: loader
    loader._iterator._shutdown_workers()  # type: ignore[union-attr]


@contextmanager
def on_hosts(dataset: Dataset[torch.Tensor]) -> Iterator[Read]:
    """The same, each worker on a host of its own."""
    with Hosts(2) as hosts, local(dataset, platform=OnHosts.of(hosts)) as read:
        yield read


@contextmanager
def ray_cluster() -> Iterator[None]:
    """Ray, with two processors."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    yield
    ray.shutdown()


@contextmanager
def on_ray(dataset: Dataset[torch.Tensor]) -> Iterator[Read]:
    """Ours, with its workers as actors."""
    with ray_cluster(), local(dataset, platform="ray") as read:
        yield read


class Decode:
    """Ray Data's stateful transform: a dataset's samples by their indices."""

    def __init__(self, dataset: Dataset[torch.Tensor]) -> None:
        self.dataset = dataset

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        return {"id": rows["id"], "image": torch.stack([self.dataset[int(n)] for n in rows["id"]]).numpy()}


def ray_data(kind: str) -> Open:
    """Ray Data as its guides on performance and on training say: blocks as large as batches, batches ahead of need.

    kind: "tasks", which share Ray's processes, or "actors", which keep what they have made in their constructor.
    """

    @contextmanager
    def opened(dataset: Dataset[torch.Tensor]) -> Iterator[Read]:
        with ray_cluster():
            import ray

            ray.data.DataContext.get_current().enable_progress_bars = False
            # Not `range`: its tasks would wait for ever for the processors that actors hold.
            samples = len(dataset)  # type: ignore[arg-type]
            rows = ray.data.from_items([{"id": n} for n in range(samples)], override_num_blocks=-(-samples // BATCH))
            if kind == "tasks":
                images = rows.map_batches(Decode(dataset).__call__, batch_size=BATCH)
            else:
                pool = ray.data.ActorPoolStrategy(size=2)
                images = rows.map_batches(
                    Decode, fn_constructor_args=(dataset,), batch_size=BATCH, compute=pool, num_cpus=0.5
                )
            yield lambda: (
                batch["image"]
                for batch in images.iter_torch_batches(batch_size=BATCH, prefetch_batches=4, device="cpu")
            )

    return opened


OPENERS: dict[str, Open] = {
    "local": local,
    "hosts": on_hosts,
    "ray": on_ray,
    "ray-data-tasks": ray_data("tasks"),
    "ray-data-actors": ray_data("actors"),
}


def digest(opened: Open, dataset: Dataset[torch.Tensor]) -> dict[str, str]:
    """A hash of all samples, whatever their order: Ray Data keeps none unless it is told to."""
    with opened(dataset) as read:
        samples = (sample for batch in read() for sample in batch)
        hashes = sorted(hashlib.sha256(sample.contiguous().numpy().tobytes()).hexdigest() for sample in samples)
    return {"digest": hashlib.sha256("".join(hashes).encode()).hexdigest()}


class Sleeping(Dataset[int]):
    """Every sample takes a while and no processor time."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(SLEEPERS["sample_s"])
        return index


class SleepingLoader:
    """A loader with many workers on hosts, whose round trip can be set."""

    def __init__(self, quick: bool) -> None:
        self.workers = 4 if quick else 64
        self._dataset = Sleeping(self.workers * (SLEEPS // 8 if quick else SLEEPS))
        # Not quite nothing, so that it can be set.
        self._hosts = Hosts(int(SLEEPERS["hosts"]), rtt_s=1e-9)
        self._loader = DPFlowDataLoader(
            self._dataset,
            batch_size=int(SLEEPERS["batch_size"]),
            num_workers=self.workers,
            persistent_workers=True,
            platform=OnHosts.of(self._hosts, starts_per_s=0.75),
        )
        self._read_until_all_work()

    def _read_until_all_work(self) -> None:
        """They come one after the other: an epoch takes as long as in the end only once all are there."""
        while self.read(0.0)["of_linear"] < 0.8:
            continue

    def read(self, rtt_s: float) -> Figures:
        """Read an epoch with these round trips."""
        for host in self._hosts:
            host.delay(rtt_s)
        begun = time.perf_counter()
        times = [time.perf_counter() for _ in self._loader]
        # Begin and end of an epoch depend on its length: a worker with nothing to do waits for another's last batch.
        tenth = len(times) // 10
        steady_s = times[-tenth] - times[tenth]
        batch, rate = SLEEPERS["batch_size"], self.workers / SLEEPERS["sample_s"]
        per_s = (len(times) - 2 * tenth) * batch / steady_s
        whole_per_s = len(times) * batch / (times[-1] - begun)
        return {
            "samples_per_s": per_s,
            "of_linear": per_s / rate,
            "whole_epoch_of_linear": whole_per_s / rate,
        }

    def close(self) -> None:
        """End all of them."""
        self._loader._iterator._shutdown_workers()  # type: ignore[union-attr]
        self._hosts.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.platforms_run", description=__doc__)
    parser.add_argument("side", choices=[*OPENERS, *(f"{side}-digest" for side in OPENERS)])
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    files = sorted(arguments.images.glob("train/*/*.jpg"))
    dataset = JpegCrops(files, SAMPLES // 8 if arguments.quick else SAMPLES, as_float=False)
    side = arguments.side.removesuffix("-digest")
    if arguments.side.endswith("-digest"):
        print(json.dumps(digest(OPENERS[side], dataset)))
        return
    with OPENERS[side](dataset) as read:
        print(json.dumps(time_epochs(read)))


if __name__ == "__main__":
    main()

"""What `benchmarks.loader` measures: datasets with a known cost, and the loaders that read them."""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import Dataset, TensorDataset

WORKERS = 2
SKEW = 100
READ_LATENCY_S = 0.030
LIGHT_SAMPLE_S = 0.001
SLOW_SAMPLE_S = 0.010
#: Of workloads h and i.
MANY_WORKERS = 8


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a run needs to know of the machine and of the whole benchmark."""

    #: folder of JPEGs, made by `examples.natural_images`
    images: Path
    #: rounds of hashing that take LIGHT_SAMPLE_S on this machine
    spin: int
    #: a fraction of the work
    quick: bool = False

    def samples(self, full: int) -> int:
        return full // 8 if self.quick else full


class JpegCrops(Dataset[torch.Tensor]):
    """Decode one of `files` and cut a random, resized crop of 224x224 out of it; uint8 or float32, CHW.

    The crop is drawn from a seed of the index, so that every loader must deliver the same bits.
    """

    def __init__(self, files: list[Path], length: int, *, as_float: bool) -> None:
        # Here, so that the workloads without images do without torchvision's memory and start-up time.
        from torchvision import transforms

        self.files, self.length = files, length
        steps: list[Any] = [transforms.RandomResizedCrop(224), transforms.PILToTensor()]
        if as_float:
            steps.append(transforms.ConvertImageDtype(torch.float32))
        self.transform = transforms.Compose(steps)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        from PIL import Image

        torch.manual_seed(index)
        with Image.open(self.files[index % len(self.files)]) as image:
            crop: torch.Tensor = self.transform(image.convert("RGB"))
        return crop


class SkewedCost(Dataset[int]):
    """One sample in a hundred, at places that look random, costs a hundred times the CPU time of the rest.

    The work is a fixed number of rounds of hashing, not a length of time, so it stays the same work when
    processes share a core.
    """

    def __init__(self, length: int, spin: int) -> None:
        generator = torch.Generator().manual_seed(0)
        heavy = torch.randperm(length, generator=generator)[: length // SKEW]
        self.costs = torch.full((length,), spin, dtype=torch.int64)
        self.costs[heavy] *= SKEW

    def __len__(self) -> int:
        return len(self.costs)

    def __getitem__(self, index: int) -> int:
        spin(int(self.costs[index]))
        return index


class SkewedReads(SkewedCost):
    """The same, but a sample's cost is a sleep of that many milliseconds, as reads have it whose tail is long."""

    def __getitem__(self, index: int) -> int:
        time.sleep(int(self.costs[index]) / 1e3)
        return index


class SlowStorage(Dataset[torch.Tensor]):
    """Every read takes 30 ms, as an object store's does: a sleep, and no CPU time."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(READ_LATENCY_S)
        return torch.full((256,), index, dtype=torch.float32)


class SlowSamples(SlowStorage):
    """Every sample takes 10 ms: a sleep, and no CPU time."""

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SLOW_SAMPLE_S)
        return torch.full((256,), index, dtype=torch.float32)


class Ready(Dataset[torch.Tensor]):
    """The same small sample at every index, so that a batch costs nothing but its loader."""

    def __init__(self, length: int) -> None:
        self.length, self.sample = length, torch.zeros(16)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


def rows_of_1_kb(length: int) -> TensorDataset:
    """Rows of 256 float32, the same in every process."""
    return TensorDataset(torch.randn(length, 256, generator=torch.Generator().manual_seed(0)))


def spin(rounds: int) -> None:
    """Do `rounds` of hashing."""
    hashlib.pbkdf2_hmac("sha256", b"benchmark", b"salt", rounds)


def calibrate_spin() -> int:
    """Rounds of hashing that take LIGHT_SAMPLE_S on this machine, as the fastest of a few tries."""
    rounds = 100_000
    timings = []
    for _ in range(5):
        begun = time.process_time()
        spin(rounds)
        timings.append(time.process_time() - begun)
    return max(1, round(rounds * LIGHT_SAMPLE_S / min(timings)))


@dataclass(frozen=True, kw_only=True)
class Side:
    """One loader in one configuration."""

    #: "torch" or "dpflow"
    loader: str
    #: constructor arguments beyond the workload's
    arguments: Mapping[str, Any] = field(default_factory=dict)
    #: of LoaderOptions
    options: Mapping[str, Any] = field(default_factory=dict)

    def loader_class(self) -> Any:
        """The class, imported where it was not yet; torch's comes with torch."""
        if self.loader == "torch":
            return torch.utils.data.DataLoader
        from torch_dpflow import DPFlowDataLoader

        return DPFlowDataLoader

    def build(self, workload: "Workload", dataset: Dataset[Any]) -> "torch.utils.data.DataLoader[Any]":
        arguments = {"num_workers": WORKERS, "batch_size": workload.batch_size, **self.arguments}
        if self.options:
            from torch_dpflow import LoaderOptions

            arguments["options"] = LoaderOptions(**self.options)
        loader: torch.utils.data.DataLoader[Any] = self.loader_class()(dataset, **arguments)
        return loader


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One dataset, and the sides that are compared on it; the first side is the baseline."""

    title: str
    dataset: Callable[[Setting], Dataset[Any]]
    batch_size: int
    sides: Mapping[str, Side]
    #: read whole epochs, or (start-up) only the first batch of several
    whole_epoch: bool = True
    parameters: Mapping[str, object] = field(default_factory=dict)


def _jpeg_crops(setting: Setting, *, as_float: bool) -> Dataset[Any]:
    files = sorted(setting.images.glob("train/*/*.jpg"))
    return JpegCrops(files, setting.samples(4096), as_float=as_float)


def _rows(setting: Setting) -> Dataset[Any]:
    return rows_of_1_kb(setting.samples(512_000))


def _few_rows(setting: Setting) -> Dataset[Any]:
    return rows_of_1_kb(4096)


BOTH = {"torch": Side(loader="torch"), "dpflow": Side(loader="dpflow")}


def _with(**arguments: Any) -> dict[str, Side]:
    return {name: Side(loader=name, arguments=arguments) for name in BOTH}


#: How the workers of workload e start.
STARTS = {
    **{method: _with(multiprocessing_context=method) for method in ("fork", "spawn", "forkserver")},
    "persistent": _with(persistent_workers=True),
}

WORKLOADS: Mapping[str, Workload] = {
    "a": Workload(
        title="JPEG crops, float32",
        dataset=lambda setting: _jpeg_crops(setting, as_float=True),
        batch_size=64,
        sides=BOTH,
    ),
    "b": Workload(
        title="JPEG crops, uint8",
        dataset=lambda setting: _jpeg_crops(setting, as_float=False),
        batch_size=64,
        sides=BOTH,
    ),
    "c": Workload(title="rows of 1 kB", dataset=_rows, batch_size=256, sides=BOTH),
    "d": Workload(
        title="skewed cost",
        dataset=lambda setting: SkewedCost(setting.samples(8000), setting.spin),
        batch_size=8,
        # Ours lets more batches be in flight while a worker would idle; torch with twice its own default shows how
        # much of the gain that alone would bring.
        sides={
            "torch": Side(loader="torch"),
            "torch, prefetch_factor=4": Side(loader="torch", arguments={"prefetch_factor": 4}),
            "dpflow": Side(loader="dpflow"),
            "dpflow, prefetch_growth=1": Side(loader="dpflow", options={"prefetch_growth": 1.0}),
        },
        parameters={"light_sample_s": LIGHT_SAMPLE_S, "skew": SKEW, "cost": "CPU"},
    ),
    **{
        f"e {name}": Workload(
            title=f"first batch, {name}", dataset=_few_rows, batch_size=32, sides=sides, whole_epoch=False
        )
        for name, sides in STARTS.items()
    },
    "f": Workload(
        title="storage of 30 ms a read",
        dataset=lambda setting: SlowStorage(setting.samples(512)),
        batch_size=16,
        sides={**BOTH, "dpflow, read_threads=16": Side(loader="dpflow", options={"read_threads": 16})},
        parameters={"read_latency_s": READ_LATENCY_S, "cost": "sleep"},
    ),
    "g": Workload(
        title="batches that cost nothing",
        dataset=lambda setting: Ready(setting.samples(8000)),
        batch_size=1,
        sides=BOTH,
    ),
    "h": Workload(
        title="first batch of samples of 10 ms, 8 workers",
        dataset=lambda setting: SlowSamples(setting.samples(4096)),
        batch_size=256,
        sides=_with(num_workers=MANY_WORKERS),
        whole_epoch=False,
        parameters={"sample_s": SLOW_SAMPLE_S, "workers": MANY_WORKERS, "cost": "sleep"},
    ),
    "i": Workload(
        title="skewed reads, 8 workers",
        dataset=lambda setting: SkewedReads(setting.samples(8000), 1),
        batch_size=8,
        sides=_with(num_workers=MANY_WORKERS),
        parameters={"light_sample_s": LIGHT_SAMPLE_S, "skew": SKEW, "workers": MANY_WORKERS, "cost": "sleep"},
    ),
}

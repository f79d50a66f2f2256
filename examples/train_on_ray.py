"""Train a digit classifier with Ray Train, whose workers read through actors of the same Ray cluster.

    python -m examples.train_on_ray --trainers 2 --loaders 2

It uses the Ray that `RAY_ADDRESS` names, or that runs on this host. Without one it starts its own, which ends with it.
The workers that load are actors beside the trainers' reservation, so the cluster needs capacity for both.
"""

import argparse
import os
import tempfile
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, DistributedSampler

from torch_dpflow import DPFlowDataLoader
from torch_dpflow.errors import UnavailableError
from torch_dpflow.remote import Ray

#: CPUs of an actor that loads: little is decoded here.
LOADER_CPUS = 0.25


class Digits(Dataset[Any]):
    """Images of 8 by 8 pixels, of which all but every fifth are for training."""

    def __init__(self, *, train: bool) -> None:
        images, labels = load_digits(return_X_y=True)
        chosen = (np.arange(len(labels)) % 5 != 0) == train
        self.images, self.labels = images[chosen].astype(np.float32) / 16, labels[chosen]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.images[index]), int(self.labels[index])


def loader_of(dataset: Dataset[Any], workers: int, **arguments: Any) -> DPFlowDataLoader[Any]:
    return DPFlowDataLoader(dataset, batch_size=32, num_workers=workers, platform=Ray(cpus=LOADER_CPUS), **arguments)


def train(config: dict[str, Any]) -> None:
    """Train in one trainer process."""
    torch.manual_seed(0)
    dataset = Digits(train=True)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, shuffle=True)
    loader = loader_of(dataset, config["loaders"], sampler=sampler, persistent_workers=True)
    model = prepare_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for epoch in range(config["epochs"]):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    test = Digits(train=False)
    with torch.no_grad():
        predicted = model(torch.from_numpy(test.images)).argmax(1).numpy()
    accuracy = float((predicted == test.labels).mean())
    ray.train.report({"accuracy": accuracy, "samples": loader.stats().samples})
    if ray.train.get_context().get_world_rank() == 0:
        print(f"accuracy {accuracy:.3f} after {loader.stats().samples} samples of each trainer")


def join_ray(cpus: int) -> None:
    """Connect to the Ray that `RAY_ADDRESS` names or this host runs; without one, start one with so many CPUs."""
    try:
        Ray().launcher()
    except UnavailableError:
        if "RAY_ADDRESS" in os.environ:
            raise
        ray.init(address="local", num_cpus=cpus)
    # For the processes that this one starts: more than one Ray may run on this host.
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", type=int, default=2, help="workers of Ray Train")
    parser.add_argument("--loaders", type=int, default=2, help="workers that load, of each trainer")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    join_ray(2 * options.trainers + options.loaders)
    with tempfile.TemporaryDirectory() as storage:
        trainer = TorchTrainer(
            train,
            train_loop_config={"loaders": options.loaders, "epochs": options.epochs},
            scaling_config=ScalingConfig(num_workers=options.trainers, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(storage_path=storage),
        )
        trainer.fit()


if __name__ == "__main__":
    main()

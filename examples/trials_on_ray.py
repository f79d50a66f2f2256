"""Try four learning rates on Ray at once: the trials share one flow, whose workers are actors of the same Ray cluster.

    python -m examples.trials_on_ray --loaders 2

It uses the Ray that `RAY_ADDRESS` names, or that runs on this host. Without one it starts its own, which ends with it.
It also starts `dpflow up --platform ray`, whose workers take a quarter of a CPU each. The trials run on this node, and
share what this cluster loads.
"""

import argparse
import os
from typing import Any

import ray
import torch
from torch import nn

from examples.cluster import loads, started
from examples.train_on_ray import LOADER_CPUS, Digits, join_ray
from torch_dpflow import DPFlowDataLoader

RATES = (1e-4, 1e-3, 1e-2, 1e-1)
EPOCHS = 3


def train(rate: float, address: str, loaders: int) -> tuple[float, int]:
    """Run one trial; return its accuracy on test images, and how many samples it has read."""
    torch.manual_seed(0)
    loader: DPFlowDataLoader[Any] = DPFlowDataLoader(
        Digits(train=True), batch_size=32, shuffle=True, num_workers=loaders, flow="digits", address=address
    )
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for _ in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    test = Digits(train=False)
    with torch.no_grad():
        predicted = model(torch.from_numpy(test.images)).argmax(1).numpy()
    return float((predicted == test.labels).mean()), loader.stats().samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loaders", type=int, default=2, help="workers that load, for all trials together")
    options = parser.parse_args()
    join_ray(len(RATES) + options.loaders)
    os.environ["DPFLOW_PLATFORM_RAY_CPUS"] = str(LOADER_CPUS)
    with started(platform="ray") as address:
        trial = ray.remote(num_cpus=0.5)(train)
        found = ray.get([trial.remote(rate, address, options.loaders) for rate in RATES])
        loaded = loads(address)
    for rate, (accuracy, samples) in zip(RATES, found):
        print(f"learning rate {rate:g}: accuracy {accuracy:.3f} after {samples} samples")
    print(f"{sum(samples for _, samples in found)} samples read, {loaded} loaded")


if __name__ == "__main__":
    main()

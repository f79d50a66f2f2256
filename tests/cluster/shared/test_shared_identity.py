"""Jobs of real scripts on one flow: what they send is compared, and what differs is named."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.utils.data import Dataset

from tests.cluster_command import CommandedCluster
from tests.new_process import ROOT
from tests.shared_cluster import TestCluster
from torch_dpflow import DPFlowDataLoader
from torch_dpflow.errors import UsageError

#: A search: the dataset reads `args.size`, and training `args.lr`.
SEARCH = """
import argparse, sys, torch
import loading
from torch_dpflow import ALSDCache, DPFlowDataLoader, JobOptions

parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int, default=3)
parser.add_argument("--lr", type=float)
parser.add_argument("--look", action="store_true")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--ignore", nargs="*")
args = parser.parse_args()
seen = []

class Crop:
    def __call__(self, sample):
        return sample * args.size

class Images(torch.utils.data.Dataset):
    def __init__(self):
        self.crop = Crop()
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return self.crop(loading.read(index))

dataset = Images()
if args.look:
    [dataset[index] for index in range(3)]
job = JobOptions(ignore=args.ignore)
cached = ALSDCache(dataset, "1MiB")
loader = DPFlowDataLoader(cached, batch_size=8, shuffle=True, num_workers=1, flow="search", job=job)
for epoch in range(args.epochs):
    assert sorted(torch.cat([*loader]).tolist()) == [index * args.size + args.size for index in range(40)]
print("served", loader.stats().flow_served, "decoded", loader.stats().flow_decodes)
"""
LOADING = """
SHIFT = 1
CACHE = {}
def read(index):
    CACHE[index] = index
    return index + SHIFT
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that is not where the cluster was started."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "search.py").write_text(SEARCH)
    (folder / "loading.py").write_text(LOADING)
    return folder


@pytest.mark.slow
def test_a_search_shares_one_loading_and_what_differs_is_refused_by_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cluster = CommandedCluster.up(tmp_path, "--workers", "1")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, folder / "search.py", *arguments],
            env={"PYTHONPATH": str(ROOT), "DPFLOW_ADDRESS": cluster.address},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )

    try:
        # Modules in the script's folder are sent. A class that copying changes does not count as a change of the flow.
        with ThreadPoolExecutor() as pool:
            trials = [*pool.map(lambda lr: run("--lr", lr), ("0.1", "0.01", "0.001", "0.0001"))]
        for trial in trials:
            assert trial.returncode == 0, trial.stderr
        served, decoded = max(tuple(map(int, trial.stdout.split()[1::2])) for trial in trials)
        assert served <= 4 * 2 * 40
        assert decoded <= 0.3 * 4 * 40, "each sample is decoded once for four trials"

        looked = run("--look", "--lr", "1")
        assert "loading.CACHE: 3 entries here, no entries in the flow" in looked.stderr
        assert "JobOptions(ignore=['loading.CACHE'])" in looked.stderr
        assert run("--look", "--lr", "1", "--ignore", "loading.CACHE", "search.args").returncode == 0

        other = run("--lr", "1", "--size", "4")
        assert "search.args.size: 4 here, 3 in the flow" in other.stderr
        (folder / "loading.py").write_text(LOADING.replace("index + SHIFT", "SHIFT + index"))
        edited = run("--lr", "1")
        assert "version 1 is registered and differs: loading.read: other code;" in edited.stderr
    finally:
        cluster.stop()


def test_a_counter_is_logged_once_and_a_changed_dataset_ends_the_job(
    cluster: TestCluster, flow: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Counted(Dataset[int]):
        loads = 0

        def __init__(self) -> None:
            self.scale = 1

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return index * self.scale

    dataset = Counted()
    loader = DPFlowDataLoader(dataset, batch_size=4, num_workers=1, flow=flow, address=cluster.address)
    for epoch in range(3):
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3]]
        Counted.loads = epoch + 1
    logged = [one.getMessage() for one in caplog.records if "has changed since it was sent" in one.getMessage()]
    assert len(logged) == 1
    assert "Counted.loads: 1 here, 0 in the flow" in logged[0]
    dataset.scale = 2
    with pytest.raises(UsageError, match=r"has changed since .*: dataset\.scale: 2 here, 1 in the flow"):
        list(loader)

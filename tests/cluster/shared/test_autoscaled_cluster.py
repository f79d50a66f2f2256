"""A cluster whose number of workers follows what its jobs need: with real processes, and a cold start of five seconds.

The law is tested by itself, in `tests/cluster/control/test_autoscale.py`; here it gets real figures.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.cluster_command import CommandedCluster
from tests.shared_cluster import open_job, wait
from tests.shared_datasets import SlowNumbers
from torch_dpflow.cli.main import root
from torch_dpflow.cluster.messages.coordinator import AutoscaleLimits, ClusterLimits
from torch_dpflow.cluster.services.local_cluster import ClusterOptions
from torch_dpflow.errors import OptionError

COLD_S, COST_S, BATCH, STEP_S = 5.0, 0.1, 4, 0.1
#: Workers that one job keeps busy, and those that two do.
ONE_NEEDS, TWO_NEED = BATCH / STEP_S * COST_S, 2 * BATCH / STEP_S * COST_S


def start_cold(worker: int) -> None:
    time.sleep(COLD_S)


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[CommandedCluster]:
    started = CommandedCluster.up(tmp_path, *getattr(request, "param", ("--autoscale", "0:16")))
    yield started
    started.stop()


def figures(cluster: CommandedCluster) -> dict[str, Any]:
    """Of the only flow, as `dpflow workers` tells them."""
    result = CliRunner().invoke(root, ["workers", "--json", "--address", cluster.address])
    assert result.exit_code == 0, result.output
    (flow,) = json.loads(result.output)["flows"]
    assert isinstance(flow, dict)
    return flow


def busy(cluster: CommandedCluster) -> tuple[float, int]:
    """For how long the flow's workers have had a sample to load, seconds, and how many they have loaded."""
    status = next(view.status for view in cluster.processes("/shard") if "busy_s" in view.status)
    return float(status["busy_s"]), int(status["loads_done"])


@dataclass
class Reader:
    """A job that takes a batch each tenth of a second, in a thread."""

    cluster: CommandedCluster
    name: str
    keys: range
    cold: bool = True
    #: When each batch was asked for, and for how long it was waited.
    waits: list[tuple[float, float]] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        dataset = SlowNumbers(100_000, COST_S)
        init = start_cold if self.cold else None
        given = {"workers": 2, "worker_init_fn": init, "batch_size": BATCH}
        with open_job("scaled", dataset, address=self.cluster.address, **given) as job:
            plan = [range(first, first + BATCH) for first in self.keys[::BATCH]]
            batches = iter(job.read(plan, 0))
            while not self.ended.is_set():
                began = time.monotonic()
                batch = next(batches, None)
                if batch is None:
                    return
                self.waits.append((began, time.monotonic() - began))
                self.read += [int(key) for key in batch[1]]
                time.sleep(STEP_S)

    def stalled_at(self, since: float) -> float:
        """The last moment at which it had waited for more than 5% of the five seconds before, from `since` on."""
        latest = 0.0
        for end, _ in self.waits:
            if end > since + 5.0:
                waited = sum(wait_s for began, wait_s in self.waits if end - 5.0 < began <= end)
                latest = end - since if waited > 0.05 * 5.0 else latest
        return latest


def start(reader: Reader) -> threading.Thread:
    thread = threading.Thread(target=reader.run)
    thread.start()
    return thread


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "cluster",
    [
        ("--autoscale", "0:16"),
        ("--autoscale", "0:16", "--platform", "processes", "--worker-listen", "tcp://127.0.0.1:0"),
    ],
    indirect=True,
    ids=["local", "platform"],
)
def test_two_jobs_one_after_the_other(cluster: CommandedCluster) -> None:
    first, second = (
        Reader(cluster, "first", range(50_000)),
        Reader(cluster, "second", range(50_000, 100_000)),
    )
    threads = [start(first)]
    # By then what was loaded ahead is steady, and what it needs is seen.
    wait(lambda: len(first.read) > 900, within_s=90.0, what="the first job's samples")
    before, began, (busy_s, loads) = figures(cluster)["worker_seconds"], time.monotonic(), busy(cluster)
    threads.append(start(second))
    wait(lambda: second.waits, what="the second job's first batch")
    joined = second.waits[0][0]
    wait(lambda: len(second.read) > 2_400, within_s=150.0, what="the second job's samples")
    after, ended, (busy_until_s, loads_until) = figures(cluster), time.monotonic(), busy(cluster)
    settled = max(first.stalled_at(joined), second.stalled_at(joined))
    ratio = (after["worker_seconds"] - before) / (ONE_NEEDS * (joined - began) + TWO_NEED * (ended - joined))
    print(
        f"stall below 5% after {settled:.1f} s; {ratio:.2f} times the worker-seconds that were needed; "
        f"{after['desired']} workers for {TWO_NEED:g} busy ones, limited by {after['limited_by']!r}; a sample of "
        f"{1000 * COST_S:g} ms took a worker {1000 * (busy_until_s - busy_s) / (loads_until - loads):.0f} ms here"
    )
    for reader in (first, second):
        reader.ended.set()
    for thread in threads:
        thread.join()
    for reader in (first, second):
        assert reader.read == list(reader.keys[: len(reader.read)])
    left = time.monotonic()
    wait(lambda: not cluster.processes("/worker-") and not figures(cluster)["desired"], within_s=20.0)
    print(f"no worker {time.monotonic() - left:.1f} s after the last job")
    assert math.isclose(sum(after["jobs"].values()), after["worker_seconds"], rel_tol=0.05)


@pytest.mark.slow
def test_workers_go_with_the_last_job_and_come_with_the_next(cluster: CommandedCluster) -> None:
    for number in range(2):
        reader = Reader(cluster, "job", range(200), cold=False)
        reader.run()
        assert reader.read == [*range(200)], number
        wait(lambda: not cluster.processes("/worker-"), what="the workers' end")
        wait(lambda: not figures(cluster)["desired"])
    taken = figures(cluster)
    assert 0 < sum(taken["jobs"].values()) <= taken["worker_seconds"]
    shown = CliRunner().invoke(root, ["workers", "--address", cluster.address], env={"COLUMNS": "200"})
    assert "worker-hours" in shown.output


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for text in ("5:2", ":", "", "4", "-1:4", "0:0", "0:5000", "a:b", "1:2:3", "0 :4"):
        with pytest.raises(OptionError, match="give MIN:MAX, bounds of the number of workers"):
            ClusterOptions(autoscale=text)
    with pytest.raises(OptionError, match="--workers 8 and --autoscale '0:16' differ"):
        ClusterOptions(autoscale="0:16", limits=ClusterLimits(workers=8))
    path = tmp_path / "dpflow.toml"
    monkeypatch.setenv("DPFLOW_CONFIG", str(path))
    for text, message in (
        ("min = 5\nmax = 2", "autoscale.min=5 is above autoscale.max=2"),
        ("min = 5", "autoscale.min without autoscale.max"),
        ("max = 0", "autoscale.max=0"),
        ('hold = "soon"', "is no time"),
        ("least = 5", "autoscale has no 'least'"),
    ):
        path.write_text(f"[autoscale]\n{text}\n")
        with pytest.raises(OptionError, match=message):
            ClusterOptions()
    path.write_text('[autoscale]\nmin = 2\nmax = 9\nhold = "3m"\n')
    assert ClusterOptions().limits.autoscale == AutoscaleLimits(2, 9, 180.0)
    assert ClusterOptions(autoscale="0:4").limits.autoscale == AutoscaleLimits(0, 4, 180.0)
    assert ClusterOptions(limits=ClusterLimits(workers=5)).limits.autoscale == AutoscaleLimits(2, 5, 180.0)
    with pytest.raises(OptionError, match=r"--workers 1 is below autoscale.min=2"):
        ClusterOptions(limits=ClusterLimits(workers=1))
    assert ClusterOptions(autoscale="0:4").limits.workers == 4

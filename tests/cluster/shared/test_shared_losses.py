"""What a job is told where its samples kill every worker, and where its cluster is gone or comes back."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.new_process import in_fork
from tests.shared_cluster import TestCluster, open_job
from tests.shared_datasets import Numbers
from torch_dpflow.cluster.client.open_job import JobOptions, SharedJob
from torch_dpflow.cluster.client.outage_log import SILENCE_S, OutageLog
from torch_dpflow.errors import DeadlineError, PoisonTaskError

Join = Callable[..., SharedJob]


class AllDeadly(Numbers):
    """No sample can be loaded."""

    def __getitem__(self, index: int) -> Any:
        os._exit(3)


def keys(batches: Any) -> list[int]:
    return [int(key) for _, labels in batches for key in labels]


def test_batches_of_samples_that_all_kill_are_given_up_one_by_one(join: Join, flow: str) -> None:
    batches = join(flow, AllDeadly(64), batch_size=16).traverse(0)
    for _ in range(2):
        with pytest.raises(PoisonTaskError, match=r"sample \d+: .*took down 3 workers"):
            next(batches)


class LargeAndOnceDeadly(Numbers):
    """Samples that fill a block of shared memory each; some end their worker the first time."""

    def __init__(self, length: int, directory: Path) -> None:
        super().__init__(length)
        self.directory = str(directory)

    def __getitem__(self, index: int) -> Any:
        if index % 64 == 40:
            with suppress(FileExistsError):
                os.close(os.open(f"{self.directory}/{index}", os.O_CREAT | os.O_EXCL))
                os._exit(3)
        return torch.full((1 << 16,), index % 251, dtype=torch.uint8), index


def test_large_results_that_wait_when_their_worker_dies_are_loaded_again(join: Join, flow: str, tmp_path: Path) -> None:
    seen: list[int] = []
    for images, labels in join(flow, LargeAndOnceDeadly(192, tmp_path), batch_size=16, workers=2).traverse(0):
        assert (images == (labels % 251)[:, None]).all()
        seen += labels.tolist()
    assert sorted(seen) == list(range(192))
    assert len([*tmp_path.iterdir()]) == 3


def close_and_read(job: SharedJob) -> int:
    job.close()
    return 7


def test_a_forked_child_that_closes_a_job_leaves_it_as_it_is(join: Join, flow: str) -> None:
    job = join(flow, Numbers(40), batch_size=8)
    batches = job.traverse(0)
    seen = keys(islice(batches, 2))
    assert in_fork(close_and_read, job) == 7
    assert sorted(seen + keys(batches)) == list(range(40))


@pytest.fixture
def own(tmp_path: Path) -> Any:
    """A cluster that a test may end."""
    started = TestCluster.start(tmp_path)
    started.flows()  # it answers: its start is no part of anybody's patience
    yield started
    started.stop()


def open_at(cluster: TestCluster, flow: str, reconnect_timeout_s: float) -> SharedJob:
    options = JobOptions(reconnect_timeout_s=reconnect_timeout_s, ready=1, requested=2)
    return open_job(flow, Numbers(400), address=cluster.address, batch_size=4, options=options)


@pytest.mark.slow
def test_a_job_goes_on_with_the_cluster_that_takes_the_place_of_its_own_and_is_told_when_none_does(
    own: TestCluster, flow: str, tmp_path: Path
) -> None:
    with open_at(own, flow, 60.0) as job:
        batches = job.traverse(0)
        seen = keys(islice(batches, 3))
        own.stop()
        other = TestCluster.start(tmp_path)
        try:
            assert sorted(seen + keys(batches)) == list(range(400))
            assert sorted(keys(job.traverse(1))) == list(range(400))
            assert f"{flow}:v1" in other.flows()
            job.close()
            with open_at(other, flow, 3.0) as impatient:
                batches = impatient.traverse(0)
                next(batches)
                other.stop()
                with pytest.raises(
                    DeadlineError, match=rf"flow '{flow}', job '.*reconnect_timeout_s=3 s.*start it again"
                ):
                    list(batches)
        finally:
            other.stop()


def test_a_silence_is_told_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    outages = OutageLog("images", "one", reconnect_timeout_s=9.0, clock=lambda: now)
    with caplog.at_level(logging.WARNING, "torch_dpflow"):
        outages.on_no_answer(DeadlineError("no answer"))
        assert outages.is_out
        assert not caplog.messages
        now = SILENCE_S
        for _ in range(3):
            outages.on_no_answer(DeadlineError("no answer"))
        outages.on_answer()
        outages.on_answer()
    assert not outages.is_out
    (silence, end) = caplog.messages
    assert "flow 'images', job 'one': no answer" in silence
    assert "reconnect_timeout_s=9 s" in silence
    assert "answer again, after 3 s" in end


def test_a_wait_for_others_is_told_at_growing_intervals_with_its_reason_and_so_is_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    outages = OutageLog("images", "one", reconnect_timeout_s=9.0, clock=lambda: now)
    with caplog.at_level(logging.WARNING, "torch_dpflow"):
        outages.on_wait("rank 1 has not begun to read")
        outages.on_answer()  # they answer, and ask to wait
        assert not caplog.messages
        now = SILENCE_S
        for _ in range(3):
            outages.on_wait("rank 1 has not begun to read")
            outages.on_answer()
        for at in (2 * SILENCE_S - 0.1, 2 * SILENCE_S, 4 * SILENCE_S - 0.1):
            now = at
            outages.on_wait("rank 2 has not begun to read")
        outages.on_success()
        outages.on_success()
        outages.on_wait("another wait")
    (wait, again, end) = caplog.messages
    assert "has waited for 6 s" in again
    assert again.endswith("rank 2 has not begun to read")
    assert "flow 'images', job 'one': has waited for 3 s" in wait
    assert "reconnect_timeout_s=9 s" in wait
    assert wait.endswith("rank 1 has not begun to read")
    assert "continues after 12 s" in end


def test_nothing_is_told_once_a_job_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    outages = OutageLog("images", "one", reconnect_timeout_s=9.0, clock=lambda: now)
    outages.muted = True
    now = 2 * SILENCE_S
    with caplog.at_level(logging.WARNING, "torch_dpflow"):
        outages.on_no_answer(DeadlineError("no answer"))
        outages.on_answer()
    assert not caplog.messages

"""What is drawn by chance for a job: the same whenever it reads alone, whoever was there before, and after a resume."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tests.shared_datasets import Draws
from torch_dpflow.cluster.client.open_job import SharedJob

Join = Callable[..., SharedJob]


def drawn(batches: Iterable[Any]) -> dict[int, tuple[float, ...]]:
    return {int(key): tuple(value.tolist()) for keys, values in batches for key, value in zip(keys, values)}


def test_a_job_alone_draws_the_same_again_while_its_flow_lives(join: Join, flow: str) -> None:
    epochs = []
    for _ in range(3):
        with join(flow, Draws(40), batch_size=8, seed=5) as job:
            epochs.append(drawn(job.traverse(0)))
    assert epochs[0] == epochs[1] == epochs[2]


def test_jobs_with_one_seed_draw_alike_whoever_came_first(join: Join, flow: str) -> None:
    jobs = [join(flow, Draws(40), batch_size=8, seed=5) for _ in range(2)]
    one, other = (drawn(job.traverse(0)) for job in jobs)
    assert one == other


def test_a_job_that_is_resumed_goes_on_with_what_it_would_have_drawn(join: Join, flow: str) -> None:
    with join(flow, Draws(40), batch_size=8, seed=9), join(flow, Draws(40), batch_size=8, seed=5) as job:
        whole = drawn(job.traverse(1))
        reading = job.traverse(1)
        first = drawn(next(reading) for _ in range(2))
        state = job.state()
    with join(flow, Draws(40), batch_size=8, seed=5) as again:
        rest = drawn(again.traverse(1, done=state))
        assert {**first, **rest} == whole

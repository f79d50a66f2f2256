"""What the live page makes of what is observed: rates, a bounded history, and what is told of changes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from torch_dpflow._core.stage_times import StageTimes
from torch_dpflow.cluster.messages.node import ProcessView
from torch_dpflow.cluster.monitoring.cluster_figures import FlowRow, JobRow, ShardFigures
from torch_dpflow.cluster.monitoring.page_figures import (
    MAX_PROCESSES,
    Headline,
    History,
    Observation,
    ProcessRow,
    Update,
    observation_of,
)
from torch_dpflow.cluster.monitoring.page_history import MAX_POINTS, MAX_SERIES, PageHistory
from torch_dpflow.ipc.messages.remote_worker import RemoteWorkerView

SERIES = ("stall", "rate", "hit_rate", "decodes")


def job(name: str = "j", **counts: Any) -> JobRow:
    usual = {"stall_s": 0.0, "reading_s": 0.0, "batches": 0, "samples": 0, "bytes": 0}
    return JobRow(flow="f:v1", job=name, **{**usual, **counts})


def flow(limited_by: str = "", restarts: int = 0, **figures: int) -> FlowRow:
    return FlowRow(
        flow="f:v1",
        state="accessed",
        jobs=1,
        generation=1,
        shards=1,
        figures=ShardFigures(**figures),
        sharing="",
        restarts=restarts,
        limited_by=limited_by,
    )


def worker(number: int, **given: Any) -> ProcessRow:
    usual = {"flow": "f:v1", "role": "worker", "state": "running"}
    return ProcessRow(id=f"f:v1/shard-000/worker-{number}", **{**usual, **given})


def test_rates_are_of_the_last_seconds_and_limits_of_jobs_that_wait() -> None:
    page = PageHistory("cluster", "here")
    page.observe(
        Observation(
            flows=[flow("storage", wants=100, hits=0, decodes=100, served=100)],
            jobs=[job("slow", stall_s=9.0, reading_s=10.0, samples=100), job("fast", reading_s=10.0)],
        ),
        100.0,
    )
    seen = Observation(
        flows=[flow("storage", wants=300, hits=150, decodes=150, served=300)],
        jobs=[
            job("slow", stall_s=10.0, reading_s=12.0, samples=300),
            job("fast", reading_s=12.0, samples=10),
            job("idle"),
        ],
        limits={"f:v1 fast": ("processors", "decode faster")},
    )
    update = page.observe(seen, 102.0)
    slow, fast, idle = update.jobs
    assert (slow.stall_now, slow.samples_per_s, slow.limited_by) == (0.5, 100.0, "storage")
    assert (fast.stall_now, fast.samples_per_s, fast.limited_by) == (0.0, 5.0, "job")
    assert (idle.stall_now, idle.samples_per_s, idle.limited_by) == (None, None, "")
    assert slow.stall == round(10 / 12, 4)
    waits = [job("fast", stall_s=2.0, reading_s=14.0)]
    (fast,) = page.observe(Observation(jobs=waits, limits=seen.limits), 102.0).jobs
    assert (fast.stall_now, fast.limited_by, fast.advice) == (0.5, "processors", "decode faster")
    (line,) = update.flows
    assert (line.hit_rate_now, line.hit_rate, line.decodes_now, line.decodes) == (0.75, 0.5, 0.25, 0.5)
    assert (update.summary.stall, update.summary.samples_per_s) == (0.25, 105.0)
    assert (update.summary.hit_rate, update.summary.decodes) == (0.75, 0.25)
    others = replace(seen.flows[0], flow="g:v1")
    late = page.observe(Observation(flows=[*seen.flows, others], jobs=seen.jobs), 102.5)
    assert late.summary.hit_rate == 0.75, "what is seen for the first time has not just happened"
    fell = page.observe(Observation(flows=[flow(wants=1, hits=1)], jobs=[job("slow", samples=5)]), 103.0)
    assert (fell.flows[0].hit_rate_now, fell.flows[0].samples_per_s) == (None, None), "a shard was restarted"
    assert (fell.jobs[0].stall_now, fell.jobs[0].samples_per_s) == (None, None)


def headline(*jobs: tuple[float, str], kind: str = "cluster", **figures: int) -> Headline:
    """Of jobs that have waited such a share of the last 2 s, of a flow limited by the last one's word."""
    page = PageHistory(kind, "here")
    by = jobs[-1][1] if jobs else ""
    advice = "more memory" if figures.get("decodes", 0) else ""
    lines = [replace(flow(by, **figures), cache_advice=advice)] if kind == "cluster" else []
    limits = {f"f:v1 {n}": (word, "num_workers=9") for n, (_, word) in enumerate(jobs)} if not lines else {}
    seen = Observation(flows=lines, jobs=[job(str(n)) for n in range(len(jobs))], limits=limits)
    page.observe(seen, 100.0)
    read = [job(str(n), stall_s=2 * share, reading_s=2.0, samples=9) for n, (share, _) in enumerate(jobs)]
    return page.observe(replace(seen, jobs=read), 102.0).headline


@pytest.mark.parametrize(
    ("given", "text", "advice", "state"),
    [
        ({"jobs": [(0.5, "workers")]}, "Limited by too few workers: 0 waits 50%", "flow scale f --w", "bad"),
        ({"jobs": [(0.1, "storage"), (0.9, "storage")]}, "the storage: 1 waits 90%", "ALSDCache", "bad"),
        (
            {"jobs": [(0.0, "workers"), (0.3, "workers")]},
            "1 waits 30% of its time for data (1 of 2 wait)",
            "",
            "bad",
        ),
        (
            {"jobs": [(0.0, "workers"), (0.04, "workers")]},
            "Data is not the bottleneck: all 2",
            "training",
            "good",
        ),
        ({"jobs": [(0.5, "")]}, "the reason is not known yet", "", "wait"),
        ({"jobs": [(0.5, "shard")]}, "Limited by the thread of a shard: 0 waits 50%", "f --shards auto", "bad"),
        ({"jobs": [(0.5, "job")]}, "in its own process", "collate_fn", "wait"),
        ({"jobs": [(0.5, "quota")]}, "Limited by the platform: quota", "ask the platform", "bad"),
        ({"jobs": [(0.5, "workers")], "decodes": 9}, "too few workers", "cache misses: more memory", "bad"),
        ({"jobs": [(0.5, "processors")], "kind": "loader"}, "the processors", "num_workers=9", "bad"),
        ({"jobs": []}, "No job reads now", "", "wait"),
        ({"jobs": [], "kind": "loader"}, "No loader reads now", "", "wait"),
    ],
)
def test_the_first_line_says_what_limits_the_run_and_what_to_try(
    given: dict[str, Any], text: str, advice: str, state: str
) -> None:
    jobs = given.pop("jobs")
    told = headline(*jobs, **given)
    assert (text in told.text, advice in told.advice, told.state) == (True, True, state), told


def test_a_flow_without_jobs_shows_nothing_of_the_last_seconds() -> None:
    page = PageHistory("cluster", "here")
    page.observe(Observation(flows=[flow(wants=1)], jobs=[job()]), 100.0)
    busy = flow(wants=5001, hits=2000, decodes=3000, served=4000)
    update = page.observe(Observation(flows=[busy], jobs=[job(reading_s=2.0, samples=4000)]), 102.0)
    assert (update.flows[0].samples_per_s, update.summary.samples_per_s) == (2000.0, 2000.0)
    left = page.observe(Observation(flows=[replace(busy, jobs=0, state="ready")]), 103.0)
    (line,) = left.flows
    assert (line.samples_per_s, line.hit_rate_now, line.decodes_now) == (None, None, None)
    assert (left.summary.samples_per_s, left.summary.hit_rate, left.summary.decodes) == (None, None, None)
    assert line.hit_rate == round(2000 / 5001, 4), "what it has done in all stays"


def events(page: PageHistory, seen: Observation, at: float) -> list[tuple[str, str, str]]:
    return [(event.kind, event.subject, event.text) for event in page.observe(seen, at).events]


def test_the_log_says_who_was_restarted_and_why_and_sums_up_crowds() -> None:
    page = PageHistory("cluster", "here")
    assert events(page, Observation(processes=[worker(0), worker(1)]), 0.0) == [], "it was so before"
    seen = Observation(processes=[worker(0, restarts=1, ended="pid 5 was ended by SIGKILL"), worker(1, state="down")])
    assert events(page, seen, 1.0) == [
        ("restart", "f:v1/shard-000/worker-0", "was restarted: pid 5 was ended by SIGKILL"),
        ("end", "f:v1/shard-000/worker-1", "ended, and will be started again"),
    ]
    crowd = Observation(processes=[worker(n, restarts=2) for n in range(50)], jobs=[job()])
    assert events(page, crowd, 2.0) == [
        ("restart", "f:v1/shard-000/worker-0", "was restarted"),
        ("restart", "f:v1/shard-000/worker-1", "was restarted"),
        ("begin", "workers of f:v1", "48 began, f:v1/shard-000/worker-2 first"),
        ("begin", "j", "reads f:v1"),
    ]
    assert events(page, Observation(failure="does not answer"), 3.0) == [
        ("failure", "coordinator", "does not answer"),
        ("end", "workers of f:v1", "50 ended, f:v1/shard-000/worker-0 first"),
        ("end", "j", "has left f:v1"),
    ]
    assert events(page, Observation(), 4.0) == [("change", "coordinator", "answers again")]
    numbers = [event.number for event in page.whole().events]
    assert numbers == list(range(1, len(numbers) + 1))


def test_processes_and_members_are_shown_with_their_states() -> None:
    member = RemoteWorkerView("dpf-1", 0, "on deck", 3.0, "host-a pid 9")
    views = [
        ProcessView("coordinator", "coordinator", 1, 5, "ipc://x", {}),
        ProcessView("a/b:v2/shard-000", "shard", 2, 6, "", {"remote_workers": msgspec.to_builtins([member])}),
        ProcessView("a/b:v2/shard-000/worker-0", "worker", 3, 7, "", {"up": True}),
        ProcessView("a/b:v2/shard-000/worker-1", "worker", 4, 8, "", {}, 2, True, "exited with code 1"),
        ProcessView("a/b:v2/router", "router", 5, 0, "", {"remote_workers": "many"}, 1, False),
        ProcessView("a/b:v2/shard-001", "shard", 0, 0, "", {}, 0, False),
        ProcessView("a/b:v2/shard-002", "shard", 6, 0, "", {}, 0, False, "exited with code 1"),
    ]
    rows = observation_of([], views).processes
    assert [(row.flow, row.role, row.state, row.where) for row in rows] == [
        ("", "coordinator", "running", "pid 5"),
        ("a/b:v2", "shard", "starting", "pid 6"),
        ("a/b:v2", "worker", "on deck", "host-a pid 9"),
        ("a/b:v2", "worker", "running", "pid 7"),
        ("a/b:v2", "worker", "starting", "pid 8"),
        ("a/b:v2", "router", "down", ""),
        ("a/b:v2", "shard", "starting", ""),
        ("a/b:v2", "shard", "down", ""),
    ]
    assert (rows[4].restarts, rows[4].ended) == (2, "exited with code 1")


counts = st.integers(0, 50)
observations = st.builds(
    Observation,
    flows=st.lists(st.builds(flow, wants=counts, hits=counts, decodes=counts, served=counts), min_size=0, max_size=1),
    jobs=st.dictionaries(st.sampled_from("abc"), st.tuples(counts, counts, counts), max_size=3).map(
        lambda given: [job(name, stall_s=a, reading_s=b, samples=c) for name, (a, b, c) in given.items()]
    ),
    processes=st.dictionaries(
        st.integers(0, 5), st.tuples(counts, st.sampled_from(["down", "running"])), max_size=6
    ).map(lambda given: [worker(n, restarts=i, state=state) for n, (i, state) in given.items()]),
)


def follow(kept: History, update: Update) -> None:
    """As the page's script does with each update."""
    kept.at += update.history.at
    for name in SERIES:
        series, news = getattr(kept, name), getattr(update.history, name)
        for key in news:
            series.setdefault(key, [None] * (len(kept.at) - 1))
        for key, values in series.items():
            values.append(news.get(key, [None])[0])


@given(st.lists(st.tuples(observations, st.floats(-3, 10)), min_size=1, max_size=20))
def test_who_follows_the_updates_knows_what_who_comes_late_is_told(
    steps: list[tuple[Observation, float]],
) -> None:
    page, at, told = PageHistory("cluster", "here"), 1000.0, []
    kept = History(at=[], stall={}, rate={}, hit_rate={}, decodes={})
    for seen, passed in steps:
        at += passed  # a wall clock may be set back
        update = page.observe(seen, at)
        assert not update.whole
        follow(kept, update)
        told += update.events
        for share in (
            *(line.stall_now for line in update.jobs),
            *(line.hit_rate_now for line in update.flows),
        ):
            assert share is None or 0 <= share <= 1
        msgspec.json.encode(update)  # no NaN, no infinity: strict JSON
    late = page.whole()
    assert late.whole
    assert late.events == told[-200:]
    assert late.history.at == kept.at
    for name in SERIES:
        known = {key: one for key, one in getattr(kept, name).items() if any(v is not None for v in one)}
        assert known == {key: one for key, one in getattr(late.history, name).items() if key in known}
        assert all(len(one) == len(kept.at) for one in getattr(late.history, name).values())


def test_nothing_grows_without_end() -> None:
    page = PageHistory("cluster", "here")
    for second in range(MAX_POINTS + 50):
        seen = [job(f"{second}-{n}", stall_s=second, reading_s=second, samples=second) for n in range(2)]
        page.observe(Observation(jobs=[*seen, job("stays", reading_s=second)]), float(second))
    history = page.whole().history
    assert len(history.at) == len(history.stall["f:v1 stays"]) == MAX_POINTS
    assert all(len(getattr(history, name)) <= MAX_SERIES for name in SERIES)
    many = [worker(n) for n in range(MAX_PROCESSES + 10)] + [worker(99999, state="down")]
    update = page.observe(Observation(processes=many), 9999.0)
    assert len(update.processes) == MAX_PROCESSES
    assert update.more_processes == 11
    assert update.processes[0].state == "down", "what does not work is not left out"


def test_the_time_of_a_sample_is_that_of_the_last_seconds() -> None:
    def times(read_s: float, counts: dict[int, int]) -> StageTimes:
        return StageTimes(read_s=read_s, dataset_s=1.0, counts=counts)

    page = PageHistory("loader", "here")
    quick, slow = times(1.0, {80: 10}), times(2.0, {80: 10, 160: 5})
    (first,) = page.observe(Observation(jobs=[job(times=quick)]), 10.0).jobs
    assert (first.sample, first.stages) == (quick.shown())  # all there is, as nothing was observed before
    flows = [flow()]
    now = page.observe(Observation(jobs=[job(times=slow)], flows=flows), 12.0)
    assert now.jobs[0].sample == "p50 1.04 s, p90 1.04 s, p99 1.04 s"
    assert now.jobs[0].stages == "read 100%"
    assert (now.flows[0].sample, now.flows[0].stages) == ("", "")
    later = page.observe(Observation(jobs=[job(times=slow)]), 30.0)
    assert later.jobs[0].sample == slow.shown()[0]
    assert page.observe(Observation(jobs=[job()]), 31.0).jobs[0].sample == ""  # a job of a flow

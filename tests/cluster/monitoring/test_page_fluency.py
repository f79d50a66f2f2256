"""How the live page keeps up in a real browser with many jobs and workers; prints frame times, asserts none."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest

from tests.browser import opened
from tests.missing_parts import NO_CHROMIUM, find_chromium
from torch_dpflow.cluster.monitoring.cluster_figures import FlowRow, JobRow, ShardFigures
from torch_dpflow.cluster.monitoring.page_access import PagePlace, listen_at
from torch_dpflow.cluster.monitoring.page_figures import Observation, ProcessRow
from torch_dpflow.cluster.monitoring.page_history import MAX_POINTS, PageHistory
from torch_dpflow.cluster.monitoring.page_server import PageServer

JOBS, WORKERS, SECONDS = 32, 256, 10
#: The times between frames while the page is shown, and how long its longest tasks took, ms.
MEASURE = f"""new Promise(done => {{
    const frames = [], tasks = [];
    const note = list => tasks.push(...list.getEntries().map(one => one.duration));
    new PerformanceObserver(note).observe({{type: "longtask"}});
    let last = performance.now();
    const end = last + 1000 * {SECONDS};
    const step = now => {{
        frames.push(now - last);
        last = now;
        now < end ? requestAnimationFrame(step) : done({{frames: frames.slice(1), tasks}});
    }};
    requestAnimationFrame(step);
}})"""


def observation(second: int) -> Observation:
    """A cluster in which everything changes each second, and every tenth of it is restarted now and then."""
    figures = ShardFigures(
        wants=900 * second, hits=600 * second, decodes=300 * second, served=900 * second, workers=WORKERS
    )
    return Observation(
        flows=[
            FlowRow(
                flow="images:v1",
                state="accessed",
                jobs=JOBS,
                generation=1,
                shards=4,
                figures=figures,
                sharing="",
                restarts=second,
                limited_by="workers",
            )
        ],
        jobs=[
            JobRow(
                flow="images:v1",
                job=f"job-{n}",
                stall_s=second * (0.5 + 0.4 * math.sin(n + second / 30)),
                reading_s=second,
                batches=second,
                samples=1000 * second + n,
                bytes=150_000 * second,
            )
            for n in range(JOBS)
        ],
        processes=[
            ProcessRow(
                id=f"images:v1/shard-{n % 4:03}/worker-{n // 4}",
                flow="images:v1",
                role="worker",
                state="starting" if (n + second) % 10 == 0 else "running",
                where=f"pid {1000 + n}",
                restarts=(n + second) // 10,
            )
            for n in range(WORKERS)
        ],
    )


@contextmanager
def served() -> Iterator[str]:
    """The address of a page that is told something new each second."""
    history = PageHistory("cluster", "many")
    for second in range(MAX_POINTS):
        history.observe(observation(second), float(second))
    listener = listen_at("127.0.0.1", 0)
    place = PagePlace("127.0.0.1", listener.getsockname()[1])
    page, ended = PageServer(listener, place.authenticator, history), threading.Event()
    page.start()

    def tell() -> None:
        for second in count(MAX_POINTS):
            page.observe(observation(second))
            if ended.wait(1.0):
                return

    teller = threading.Thread(target=tell)
    teller.start()
    try:
        yield place.url
    finally:
        ended.set()
        teller.join()
        page.close()


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason=NO_CHROMIUM)
def test_many_jobs_and_workers_are_shown_fluently() -> None:
    with served() as url, opened(str(find_chromium())) as browser:
        browser.open(url)
        browser.await_(f"document.querySelectorAll('#workers tr').length === {WORKERS}")
        measured = browser.tell(MEASURE)
        assert browser.tell("document.querySelectorAll('#jobs tr').length") == JOBS
        assert browser.complaints == []
    frames = sorted(measured["frames"])
    at = {share: frames[int(share * (len(frames) - 1))] for share in (0.5, 0.95, 0.99, 1.0)}
    print(f"{JOBS} jobs, {WORKERS} workers, {SECONDS} s: {len(frames) / SECONDS:.0f} frames a second")
    print("ms between frames:", ", ".join(f"{share:.0%} {value:.1f}" for share, value in at.items()))
    print("long tasks, ms:", [round(one) for one in measured["tasks"]])

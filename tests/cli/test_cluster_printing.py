"""What people see of a cluster is whole, however narrow their terminal, and where it goes into a pipe."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import redirect_stdout

import pytest

from torch_dpflow.cli.cluster_views import print_ended, print_missing, print_processes, print_sharing, print_top
from torch_dpflow.cluster.messages.coordinator import EndedJob, FlowSpec, FlowView, Part
from torch_dpflow.cluster.messages.node import ProcessView
from torch_dpflow.cluster.monitoring.cluster_figures import ClusterFigures, JobRow, figures_of

FLOW = "imagenet/train-with-a-name-that-says-all-of-it:v17"
PROCESS = ProcessView(
    f"{FLOW}/shard-000/worker-13",
    "worker",
    1,
    123456,
    "ipc:///tmp/dpflow-1000-abcdefgh/0123456789abcdef",
    {},
    99,
)
JOB = JobRow(
    flow=FLOW,
    job="the-job-of-the-night-shift",
    stall_s=1.0,
    reading_s=2.0,
    batches=12,
    samples=34_567,
    bytes=89,
)


def show_processes() -> None:
    print_processes([PROCESS])


def show_top() -> None:
    print_top(ClusterFigures(flows=[], shards=[], jobs=[JOB]), None, clear=False)


@pytest.mark.parametrize(
    ("show", "cells"),
    [
        (show_processes, [PROCESS.id, "worker", "123456", "99", PROCESS.address]),
        (show_top, [FLOW, JOB.job, "12", "34,567", "89 B", "50%"]),
    ],
)
def test_what_goes_into_a_pipe_is_one_whole_line(
    show: Callable[[], None],
    cells: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    show()
    rows = capsys.readouterr().out.splitlines()
    assert rows[-1].split() == " ".join(cells).split()


def test_a_narrow_terminal_folds_what_it_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    ours, terminal = os.openpty()
    try:
        with open(terminal, "w") as out, redirect_stdout(out):
            show_processes()
            out.flush()
            shown = re.sub(r"\x1b\[\d*m", "", os.read(ours, 1 << 16).decode())
    finally:
        os.close(ours)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 60
    assert "…" not in shown
    heading = next(line for line in lines if line.startswith("process "))
    ends = heading.index("role")
    rows = lines[lines.index(heading) + 1 :]
    assert "".join(row[:ends].strip() for row in rows) == PROCESS.id
    begins = heading.index("address")
    assert "".join(row[begins:].strip() for row in rows) == PROCESS.address


def test_jobs_that_have_ended_are_listed_with_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [EndedJob("a:v1", f"job-{by}", 0, 1_234, 2.0, 4.0, by) for by in ("processors", "job", "")]
    print_ended(jobs)
    out = capsys.readouterr().out
    assert re.findall(r"job-\w*", out) == ["job-", "job-job", "job-processors"]
    assert out.count("50%") == 3
    assert "processors: limited by the processors of the workers' host" in out
    assert "run workers on other hosts" in out


def test_what_is_missing_and_since_when_is_counted_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    spec = FlowSpec(name="a", version=1, size=9, content="0" * 64, fingerprint={}, workers=4)
    flow = FlowView(spec, "accessed", 1, False, [], Part(1, 3, 1 << 30))
    status = {"workers": 2, "served": 5, "decodes": 4}
    for restarts, since in ((0, ""), (1, " since its shards were last started")):
        figures = figures_of([flow], [ProcessView("a:v1/shard-000", "shard", 1, 2, "", status, restarts)])
        print_missing([flow], figures)
        print_sharing(figures)
        missing, sharing = capsys.readouterr().out.splitlines()
        assert missing.startswith("a:v1: 2 of its 3 workers run; ")
        assert sharing.startswith(f"a:v1: jobs received 5 samples{since}, for which 4 were loaded.")

"""`DPFLOW_TRACE`: what is in the file, also after deaths, and that it stays valid and bounded."""

from __future__ import annotations

import json
import resource
import signal
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.new_process import run_interpreter
from torch_dpflow import DPFlowDataLoader
from torch_dpflow._core.stage_times import StageTimes
from torch_dpflow.errors import OptionError
from torch_dpflow.loader.trace import LoaderTrace, TraceFile

SCRIPT = """
import os, signal, sys, time
import torch
from torch_dpflow import DPFlowDataLoader

class Mortal(torch.utils.data.Dataset):
    def __init__(self, mark): self.mark = mark
    def __len__(self): return 40
    def __getitem__(self, index):
        if index == 17:
            try:
                with open(self.mark, "x") as file: file.write(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:  # a batch that was moved as it was begun is loaded twice: its death comes first
                while not (pid := open(self.mark).read()) or os.path.exists(f"/proc/{pid}"): time.sleep(0.001)
        return index

mortal = Mortal(sys.argv[1])
loader = DPFlowDataLoader(mortal, batch_size=4, num_workers=2)
assert [int(one) for batch in loader for one in batch] == list(range(40))
assert loader.stats().restarts == 1, loader.stats()
here = DPFlowDataLoader(mortal, batch_size=4)
for _ in range(2): list(here)
from torch_dpflow.loader import trace
(file,) = trace._files.values()
if sys.argv[2] == "killed":
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run(tmp_path: Path, how: str, **environment: str) -> list[dict[str, Any]]:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([{"name": "of an earlier run"}] * 1000, indent=0))
    done = run_interpreter(SCRIPT, str(tmp_path / "mark"), how, env={"DPFLOW_TRACE": str(path), **environment})
    assert done.returncode == (-signal.SIGKILL if how == "killed" else 0), done.stderr
    (written,) = (one for one in tmp_path.glob("*.json") if "of an earlier" not in one.read_text())
    assert (written.name == "trace-rank3.json") is ("RANK" in environment)
    events: list[dict[str, Any]] = json.loads(written.read_text())
    return events


@pytest.mark.parametrize("how", ["ended", "killed"])
def test_a_trace_has_batches_stages_waits_and_deaths(tmp_path: Path, how: str) -> None:
    events = run(tmp_path, how, **({} if how == "killed" else {"RANK": "3"}))
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert names == {(1, 0): "training loop", (1, 1): "worker 0", (1, 2): "worker 1", (2, 0): "training loop"}
    assert [one["args"]["name"] for one in events if one["name"] == "process_name"] == [
        "loader 1: Mortal",
        "loader 2: Mortal",
    ]
    batches = [one for one in events if one["name"] == "batch"]
    assert sorted(one["args"]["batch"] for one in batches if one["pid"] == 1) == list(range(10))
    assert [one["args"]["batch"] for one in batches if one["pid"] == 2] == 2 * list(range(10))
    assert sum(one["args"]["samples"] for one in batches) >= 3 * 40  # some may have been loaded twice
    assert sum(one["name"] == "wait" and one["pid"] == 2 for one in events) == 2 * 11  # with the end of each epoch
    assert [one["args"]["epoch"] for one in events if one["name"] == "epoch"] == [1, 1, 2]
    (death,) = (one for one in events if one["name"] == "worker ended")
    assert death["tid"] in (1, 2)
    assert {"dataset", "collate", "hand-over"} <= {one["name"] for one in events}
    check_spans(events)


def check_spans(events: list[dict[str, Any]]) -> None:
    """Of each track, two spans lie apart or one within the other, as viewers require."""
    tracks = defaultdict(list)
    for one in events:
        if one["ph"] == "X":
            tracks[one["pid"], one["tid"]].append((one["ts"], one["ts"] + one["dur"]))
    for spans in tracks.values():
        open_until: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= begin + 0.5:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.5  # microseconds, rounded to tenths
            open_until.append(end)


def test_times_of_threads_are_drawn_within_the_time_that_passed(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path / "trace.json"))
    one, now = LoaderTrace(file, "Rows"), file._began
    times = StageTimes(read_s=30.0, dataset_s=10.0, counts={80: 4})
    one.loaded(0, 0, times, now + 100)
    one.loaded(0, 1, times, now + 120)  # 40 seconds of samples in 20
    one.loaded(0, 2, times, now + 120)  # two results of one message
    file.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    check_spans(events)
    spans = {(one["name"], one["args"].get("batch")): one for one in events if one["name"] == "batch"}
    assert (spans["batch", 1]["ts"], spans["batch", 1]["dur"]) == (100e6, 20e6)
    assert [one["args"]["seconds"] for one in events if one["name"] == "read"] == [30.0] * 3


def test_the_first_batch_of_a_worker_begins_no_earlier_than_its_epoch(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path / "trace.json"))
    one = LoaderTrace(file, "Rows")
    one.epoch(0, file._began)
    one.loaded(0, 0, StageTimes(read_s=30.0, counts={80: 4}), file._began + 10)  # by threads
    file.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    assert [(one["ts"], one["dur"]) for one in events if one["name"] == "batch"] == [(0, 10e6)]


def test_only_a_trace_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch\n")
    with pytest.raises(OSError, match="is no trace"):
        TraceFile(str(path))
    assert path.read_text() == "import torch\n"
    for events in ([], [{"ph": "i"}], []):
        path = tmp_path / "trace.json"
        file = TraceFile(str(path))
        file.add(*events)
        file.close()
        assert json.loads(path.read_text()) == events


def test_a_file_is_bounded_and_valid_after_each_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(str(path), max_bytes=20_000)
    assert json.loads(path.read_text()) == []
    for number in range(2000):
        file.add({"name": f"event {number}", "ph": "i"})
        if number % 20 == 0:
            file.flush()
            assert json.loads(path.read_text())[-1]["name"].startswith("event ")
    file.close()
    assert 15_000 < path.stat().st_size <= 20_000
    assert [one["name"] for one in json.loads(path.read_text())][:2] == ["event 0", "event 1"]
    assert caplog.text.count("is full") == 1


@pytest.mark.parametrize("written", [0, 3])
def test_a_file_on_a_full_disk_stays_valid(tmp_path: Path, caplog: pytest.LogCaptureFixture, written: int) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(str(path))
    for number in range(written):
        file.add({"name": f"event {number}", "ph": "i"})
    file.flush()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    file.add(*({"name": f"event {number}", "ph": "i"} for number in range(written, 100)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))  # as on a full disk, a write may be a short one
    try:
        file.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.close()
    assert [one["name"] for one in json.loads(path.read_text())] == [f"event {number}" for number in range(written)]
    assert caplog.text.count("no space is left") == 1


def test_threads_share_a_file(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path / "trace.json"))
    threads = [threading.Thread(target=lambda: [file.add({"ph": "i"}) for _ in range(3000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()
    assert len(json.loads((tmp_path / "trace.json").read_text())) == 12_000


def test_a_second_process_does_not_write_the_file_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    first = TraceFile(str(path))
    first.add({"name": "own", "ph": "i"})
    with pytest.raises(BlockingIOError):
        TraceFile(str(path))
    first.close()
    assert len(json.loads(path.read_text())) == 1


@pytest.mark.parametrize("name", ["absent/trace.json", "."])
def test_a_path_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: Any, name: str) -> None:
    monkeypatch.setenv("DPFLOW_TRACE", str(tmp_path / name))
    with pytest.raises(OptionError, match=r"DPFLOW_TRACE='.*' cannot be written: .*; give the path of a file"):
        DPFlowDataLoader(range(3))  # type: ignore[arg-type]

"""A private loader on a live page: a process of its own shows it, and the training takes no notice."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

from tests.new_process import ROOT, interpreter
from tests.shared_cluster import PATIENCE_S, free_port, wait
from torch_dpflow import DPFlowDataLoader, LoaderOptions
from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.loader import watch

#: Reads for ever; says first what it has imported, and whether the second of its loaders is shown too.
TRAINING = """
import logging, sys, time
from torch_dpflow import DPFlowDataLoader, LoaderOptions

class Slow(list):
    def __getitem__(self, index):
        time.sleep(0.002)
        return index

if __name__ == "__main__":
    logging.basicConfig(level="WARNING", stream=sys.stdout)
    data = Slow(range(64))
    list(DPFlowDataLoader(data, num_workers=1))
    assert "torch_dpflow.loader.watch" not in sys.modules
    watched = LoaderOptions(watch=sys.argv[1])
    loader = DPFlowDataLoader(data, batch_size=8, num_workers=2, persistent_workers=True, options=watched)
    other = DPFlowDataLoader(data, options=LoaderOptions(watch=sys.argv[2]))
    assert len(list(other)) == 64, "what cannot be shown reads all the same"
    assert not {"uvicorn", "starlette"} & set(sys.modules)
    print("reading", flush=True)
    while True:
        for batch in loader:
            pass
"""


def await_state(address: str, what: str, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def holds() -> bool:
        try:
            with urllib.request.urlopen(f"http://{address}/api/state", timeout=PATIENCE_S) as answer:
                found.append(json.load(answer))
        except OSError:
            return False
        return bool(condition(found[-1]))

    wait(holds, what=what)
    return found[-1]


def test_a_loader_is_shown_with_its_workers_until_the_training_ends(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    port = free_port()
    address, below = f"127.0.0.1:{port}", f"127.0.0.1:{port - 1}"
    program = f"import runpy, sys; sys.argv[0] = {str(script)!r}; runpy.run_path({str(script)!r}, run_name='__main__')"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        others = f"127.0.0.1:{taken.getsockname()[1] - 1}"
        # A training that is killed leaves the directory of its socket to the next sweep.
        env = {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "LOCAL_RANK": "1", "RANK": "5"}
        with interpreter(program, below, others, env=env) as training:
            assert training.stdout is not None
            lines = [training.stdout.readline()]
            while lines[-1] not in ("reading\n", ""):
                lines.append(training.stdout.readline())
            assert lines[-1] == "reading\n", lines
            assert any(f"'{others}': Address already in use" in line for line in lines), lines
            told = await_state(address, "a loader that reads", lambda told: told["jobs"] and told["jobs"][0]["batches"])
            assert (told["kind"], told["title"]) == ("loader", f"train.py, rank 5, pid {training.pid}")
            (job,) = told["jobs"]
            assert job["job"] == "Slow 1"
            await_state(address, "what to change", lambda told: told["jobs"][0]["advice"])
            told = await_state(address, "its workers", lambda told: len(told["processes"]) == 2)
            row = told["processes"][0]
            assert (row["id"], row["role"], row["state"]) == ("Slow 1/worker-0", "worker", "running")
            os.kill(int(row["where"].removeprefix("pid ")), signal.SIGKILL)
            told = await_state(address, "the restart", lambda told: told["events"])
            assert [(event["kind"], event["subject"]) for event in told["events"]] == [("restart", row["id"])]
            assert "SIGKILL" in told["events"][0]["text"]
            assert told["processes"][0]["restarts"] == 1
            await_state(address, "the count", lambda told: told["summary"]["restarts"] == 1)
            training.kill()
            wait(lambda: not _listens(address), what="the end of the page with the training's")


class MakesLoaders(Dataset[int]):
    """Makes a loader that is to be watched, where a sample is loaded."""

    def __init__(self, address: str) -> None:
        self.options = LoaderOptions(watch=address)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        DPFlowDataLoader([1], options=self.options)
        return sum(pid == os.getpid() for pid, *_ in watch._pages)


def test_loaders_in_workers_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFLOW_WATCH", "")  # as if it were not set
    data = MakesLoaders(f"127.0.0.1:{free_port()}")
    assert list(DPFlowDataLoader(data, batch_size=None, num_workers=1)) == [0]


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE_S).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("8265", r"watch='8265': give HOST:PORT, such as 127\.0\.0\.1:8265"),
        ("0.0.0.0:8265", "watch='0.0.0.0:8265' reaches beyond this machine.*DPFLOW_WEB_TOKEN_FILE"),
    ],
)
def test_an_address_that_cannot_be_is_refused_with_the_loader(
    address: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OptionError, match=message):
        DPFlowDataLoader([1, 2], options=LoaderOptions(watch=address))
    monkeypatch.setenv("DPFLOW_WATCH", address)
    with pytest.raises(OptionError, match=message.replace("watch=", "DPFLOW_WATCH=", 1)):
        DPFlowDataLoader([1, 2])


def test_what_is_no_address_at_all_is_refused_with_the_options() -> None:
    with pytest.raises(OptionTypeError, match="watch=8265 is of type int; give HOST:PORT"):
        LoaderOptions(watch=8265)  # type: ignore[arg-type]

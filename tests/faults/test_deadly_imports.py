"""A module of the user that ends every worker of a private loader at its import: the error names it, and the ends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.new_process import Interpreter
from tests.shared_datasets import Importing
from torch_dpflow.errors import WorkerStartError
from torch_dpflow.options import LoaderOptions
from torch_dpflow.remote.fleet import lifecycle

HERE, REMOTE = {"multiprocessing_context": "forkserver"}, {"platform": "processes"}


@pytest.mark.parametrize(
    ("where", "what", "how"),
    [
        (HERE, "sys.exit(0)", "exited with code 0"),
        (HERE, "os._exit(5)", "exited with code 5"),
        (HERE, "os.abort()", "was ended by SIGABRT"),
        (HERE, "os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        (REMOTE, "sys.exit(3)", "SystemExit: 3"),
        (REMOTE, "os._exit(5)", "exited with code 5"),
        (REMOTE, "os.abort()", "was ended by SIGABRT"),
        (REMOTE, "os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        (REMOTE, "ctypes.PyDLL(None).sleep(10**6)  # keeps the interpreter's lock", "no heartbeat for 10 s"),
    ],
)
def test_the_error_names_the_module_and_how_the_workers_ended(
    OurLoader: Any, tmp_path: Path, where: dict[str, Any], what: str, how: str
) -> None:
    (tmp_path / "unfit.py").write_text(f"import ctypes, os, sys\n{what}\n")
    dataset = Importing(str(tmp_path), "unfit")
    loader = OurLoader(dataset, num_workers=1, options=LoaderOptions(restart_limit=0), **where)
    with pytest.raises(WorkerStartError) as raised:
        next(iter(loader))
    said = str(raised.value)
    assert how in said
    assert "unfit" in said


def test_a_script_that_runs_its_loop_unguarded_is_told(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from torch_dpflow import DPFlowDataLoader, LoaderOptions\n"
        "options = LoaderOptions(restart_limit=0)\n"
        "list(DPFlowDataLoader([1, 2], num_workers=1, multiprocessing_context='spawn', options=options))\n"
    )
    with Interpreter([sys.executable, str(script)]) as job:
        _, errors = job.communicate()
    assert job.returncode == 1
    assert '`if __name__ == "__main__":`; the loop belongs there' in errors.splitlines()[-1]


@pytest.mark.slow
def test_the_error_names_the_module_at_which_remote_workers_hang(
    OurLoader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "READY_S", 30.0)
    (tmp_path / "unfit.py").write_text("import time\ntime.sleep(10**6)\n")
    loader = OurLoader(Importing(str(tmp_path), "unfit"), num_workers=1, **REMOTE)
    with pytest.raises(WorkerStartError, match="has not become ready within 30 s; it was importing unfit"):
        next(iter(loader))

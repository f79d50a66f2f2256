"""A module of the user that ends every worker at its import: the job's error names the module and how they ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.shared_cluster import wait
from tests.shared_datasets import Importing
from torch_dpflow.cluster.client.open_job import SharedJob
from torch_dpflow.errors import WorkerStartError

Join = Callable[..., SharedJob]

#: What a module does at its import, and what the error says of the workers' ends.
ENDS = {
    "sys.exit(0)": "exited with code 0",
    "sys.exit(3)": "exited with code 3",
    "os._exit(0)": "exited with code 0",
    "os._exit(5)": "exited with code 5",
    "os.abort()": "was ended by SIGABRT",
    "os.kill(os.getpid(), 11)": "was ended by SIGSEGV",
    "os.kill(os.getpid(), 9)": "was ended by SIGKILL",
    "time.sleep(10**6)": "was killed: requested by its shard",
}


@pytest.mark.parametrize("what", ENDS)
def test_the_error_names_the_module_and_how_the_workers_ended(join: Join, flow: str, tmp_path: Path, what: str) -> None:
    (tmp_path / "unfit.py").write_text(f"import os, sys, time\n{what}\n")
    job = join(flow, Importing(str(tmp_path), "unfit"), workers=1, task_timeout_s=6.0)
    with pytest.raises(WorkerStartError, match="no worker for sample 0: ") as raised:
        next(job.read([[0]], 0))
    said = str(raised.value)
    assert ENDS[what] in said
    assert "unfit" in said.partition("The workers that ended last")[2]
    assert (job.sharing.served, job.sharing.decodes, job._figures().samples) == (0, 0, 0), "an error is no sample"


def test_a_job_is_told_early_which_module_hangs_and_where(
    join: Join, flow: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "unfit.py").write_text("import time\ntime.sleep(10**6)\n")
    job = join(flow, Importing(str(tmp_path), "unfit"), workers=1, task_timeout_s=None)
    batches = job.read([[0]], 0)

    def is_told() -> bool:
        said = [text for text in caplog.messages if "worker 0 starts: it was importing unfit" in text]
        return any("most recent call first" in text and "unfit.py" in text for text in said)

    wait(is_told, what="the module, and the stacks of the import")
    batches.close()

"""What the fork server imports may raise, end it or hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.new_process import ROOT
from tests.shared_cluster import wait
from tests.worker_cases import has_ended
from torch_dpflow.workers.fork_server import progress_of

#: A process that begins a fork server with a module, and prints why it cannot.
PROGRAM = """
import sys
from torch_dpflow.errors import LaunchError
from torch_dpflow.workers.fork_server import ForkServerPlatform

if __name__ == "__main__":
    try:
        ForkServerPlatform(preload=["json", "preloaded", "csv"], timeouts_s=(60.0, 60.0), outlived=True).begin()
    except LaunchError as error:
        sys.exit(str(error))
"""


def started(folder: Path, module: str) -> subprocess.Popen[str]:
    (folder / "preloaded.py").write_text(module)
    (folder / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return subprocess.Popen(
        [sys.executable, str(folder / "program.py")], env=environment, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("module", "how"),
    [
        ("raise ValueError('no GPU')", "exited with code 1"),
        ("import os; os._exit(3)", "exited with code 3"),
        ("raise SystemExit(0)", "exited with code 0"),
        ("import os; os.abort()", "was ended by SIGABRT"),
        ("import os; os.kill(os.getpid(), 11)", "was ended by SIGSEGV"),
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
    ],
)
def test_a_module_that_ends_the_fork_server_is_named(tmp_path: Path, module: str, how: str) -> None:
    process = started(tmp_path, module)
    _, printed = process.communicate(timeout=60.0)
    assert process.returncode == 1
    assert f"the import of preloaded has ended it: it {how}" in printed
    assert ("ValueError: no GPU" in printed) is ("no GPU" in module)


def test_progress_shows_of_a_process_whose_name_is_no_text() -> None:
    program = "import time\nopen('/proc/self/comm', 'wb').write(b'\\xff')\nprint(flush=True)\ntime.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        counters = progress_of(process.pid)
        process.kill()
    assert len(counters) == 3


def test_a_fork_server_in_an_import_ends_with_a_killed_parent(tmp_path: Path) -> None:
    process = started(
        tmp_path, f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}} ')\ntime.sleep(600)"
    )
    wait(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith(" "))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait(lambda: has_ended(int((tmp_path / "pid").read_text())))

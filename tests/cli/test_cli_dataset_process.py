"""`dpflow dataset` in a process of its own: what it imports, and how Control-C ends it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.new_process import interpreter, run_interpreter
from torch_dpflow.cli.main import COMMANDS
from torch_dpflow.datasets import DatasetStore


def test_iterables_are_found_from_where_one_stands(tmp_path: Path) -> None:
    (tmp_path / "squares_here.py").write_text("def samples():\n    return [(b'%d' % n, {'n': n}) for n in range(5)]")
    program = """
import os, sys
os.chdir(sys.argv.pop(1))
sys.path.remove("")
from torch_dpflow.cli import main
main()
"""
    arguments = ["import", "iterable", "core/squares:v1", "train=squares_here:samples"]
    run = run_interpreter(program, str(tmp_path), "dataset", *arguments, "--store", str(tmp_path / "store"))
    assert run.returncode == 0, run.stderr
    stored = DatasetStore(str(tmp_path / "store")).open("core/squares:v1:train")
    assert stored.sample(4).fields() == {"n": 4}


SLOWLY = """
import itertools, pathlib
def samples():
    for number in itertools.count():
        end = pathlib.Path("end")
        if end.exists() and number == int(end.read_text()):
            return
        yield b"%d" % number, {"n": number}
"""


INTERRUPTED_AT = """
import importlib.abc, signal, sys
class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == last:
            signal.raise_signal(signal.SIGINT)
last = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupting())
from torch_dpflow.cli import main
main()
"""


@pytest.mark.parametrize("module", ["click", "torch_dpflow.cli.dataset", "torch_dpflow.datasets.versions"])
def test_control_c_while_modules_are_imported_is_one_line(module: str) -> None:
    run = run_interpreter(INTERRUPTED_AT, module, "dataset", "list", fresh=True)
    assert (run.returncode, run.stderr) == (130, "Aborted!\n")


INTERRUPTED_IN = """
import signal, sys
def interrupt(frame, event, argument):
    if frame.f_code.co_name == last:
        sys.setprofile(None)
        signal.raise_signal(signal.SIGINT)
last = sys.argv.pop(1)
sys.setprofile(interrupt)
from torch_dpflow.cli import main
main()
"""


IGNORED = """
import importlib.abc, signal, sys
class Dying:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch_dpflow.cli.dataset":
            Dying()
            while True:  # no wait that a signal just before it would not end
                pass
sys.meta_path.insert(0, Interrupting())
from torch_dpflow.cli import main
main()
"""


def test_control_c_that_python_ignores_ends_a_command_too() -> None:
    run = run_interpreter(IGNORED, "dataset", "list", fresh=True)
    assert (run.returncode, run.stderr) == (130, "Aborted!\n")


def test_control_c_while_arguments_are_read_has_the_same_status() -> None:
    run = run_interpreter(INTERRUPTED_IN, "parse_args", "dataset", "list", "--store", "none")
    assert (run.returncode, run.stderr) == (130, "Aborted!\n")


def test_an_interrupted_import_goes_on(tmp_path: Path, eventually: Callable[..., None]) -> None:
    (tmp_path / "slowly.py").write_text(SLOWLY)
    program = "import os, sys; os.chdir(sys.argv.pop(1)); from torch_dpflow.cli import main; main()"
    arguments = ["dataset", "import", "iterable", "core/x:v1", "train=slowly:samples", "--store", "store"]
    arguments += ["--shard-size", "4"]
    drafts = tmp_path / "store/core/x/drafts/v1/train"
    with interpreter(program, str(tmp_path), *arguments) as process:
        eventually(lambda: (drafts / "ms-5.json").exists(), what="a shard")
        process.send_signal(signal.SIGINT)
        told = process.communicate()[1]
    assert process.returncode == 130, told
    assert "Interrupted. Run the same command again to continue." in told
    assert "Traceback" not in told
    written = 4 * len(list(drafts.glob("ms-*.json")))
    end = written + 4 + 3  # the shard after those that are noted may be there too, of four samples
    (tmp_path / "end").write_text(str(end))
    run = run_interpreter(program, str(tmp_path), *arguments)
    assert run.stdout == f"core/x:v1:train: {end} samples\n", run.stderr
    stored = DatasetStore(str(tmp_path / "store")).open("core/x")
    assert [sample.fields()["n"] for sample in stored.samples()] == list(range(end))


def test_the_command_line_in_a_process_of_its_own() -> None:
    program = "import sys; sys.argv = ['dpflow', *sys.argv[1:]]; from torch_dpflow.cli import main; main()"
    shown = run_interpreter(program, "--help", fresh=True)
    assert shown.returncode == 0, shown.stderr
    for name, (_, _, what) in COMMANDS.items():
        assert name in shown.stdout
        assert what.split()[0] in shown.stdout

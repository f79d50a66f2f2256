"""What becomes of the workers when the training process is killed, forks, or comes to its end."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.loader_cases import Indices
from tests.new_process import in_fork, interpreter, run_interpreter
from tests.worker_cases import has_ended, stop_descendants, worker_pids
from torch_dpflow._core.processes import sweep
from torch_dpflow.errors import LifetimeError

BLOCKED = """
import json, multiprocessing, sys, threading
import tests.loader_cases as cases
if sys.argv[1] == "dpflow":
    from torch_dpflow import DPFlowDataLoader as Loader
else:
    from torch.utils.data import DataLoader as Loader

context = multiprocessing.get_context(sys.argv[2])
gates = {index: context.Event() for index in json.loads(sys.argv[3])}
dataset = cases.Gated(1000, gates)
iterator = iter(Loader(dataset, batch_size=2, num_workers=2, multiprocessing_context=context))
if __name__ == "__main__":
    next(iterator)
    print(json.dumps([child.pid for child in multiprocessing.active_children()]), flush=True)
    threading.Event().wait()
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory for temporary files whose path is short enough for a socket in it."""
    path = Path(tempfile.mkdtemp(prefix="k"))
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize(
    ("number", "method", "hung"),
    [
        (signal.SIGTERM, "fork", []),
        (signal.SIGKILL, "fork", [2, 3, 4, 5]),
        pytest.param(signal.SIGKILL, "forkserver", [], marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "forkserver", [], marks=pytest.mark.slow),
    ],
    ids=["fork", "hung", "forkserver-kill", "forkserver-term"],
)
def test_nothing_outlives_a_killed_training_process(
    OurLoader: Any,
    eventually: Any,
    monkeypatch: pytest.MonkeyPatch,
    place: Path,
    number: int,
    method: str,
    hung: list[int],
) -> None:
    """Not even workers that hang in the user's code; and files only until the next loader is made."""
    env = {"TMPDIR": str(place)}
    shared = set(os.listdir("/dev/shm"))
    with interpreter(BLOCKED, "dpflow", method, json.dumps(hung), env=env) as training:
        assert training.stdout is not None
        workers = json.loads(training.stdout.readline())
        assert len(workers) == 2
        training.send_signal(number)
        training.wait()
        eventually(lambda: all(map(has_ended, workers)), what="the end of the workers")
    monkeypatch.setattr(tempfile, "tempdir", str(place))

    def swept() -> bool:
        sweep()  # as the next loader does
        return not left_in(place)

    # A process has ended in the eyes of others once its first thread has; its lock goes with the last one.
    eventually(swept, what="the end of the directory")
    mine = {name for name in set(os.listdir("/dev/shm")) - shared if str(training.pid) in name}
    assert not mine


KEEPING_THE_LOCK = """
import json, multiprocessing, re, threading
from tests.loader_cases import Indices
from torch_dpflow import DPFlowDataLoader

class Backtracking(Indices):
    def __getitem__(self, index):
        if index >= 4:
            re.match(r"(a+)+$", "a" * 60 + "b")  # takes years, inside one call that no other thread interrupts
        return index

iterator = iter(DPFlowDataLoader(Backtracking(100), batch_size=2, num_workers=2))
next(iterator), next(iterator)
print(json.dumps([child.pid for child in multiprocessing.active_children()]), flush=True)
threading.Event().wait()
"""


def test_not_even_workers_that_keep_the_interpreters_lock(OurLoader: Any, eventually: Any, place: Path) -> None:
    with interpreter(KEEPING_THE_LOCK, env={"TMPDIR": str(place)}) as training:
        assert training.stdout is not None
        workers = json.loads(training.stdout.readline())
        training.kill()
        training.wait()
        eventually(lambda: all(map(has_ended, workers)), what="the end of the workers")


REMOTE = """
import re, threading
from tests.loader_cases import Indices
from torch_dpflow import DPFlowDataLoader
from torch_dpflow.remote.fleet import worker_listener

class Backtracking(Indices):
    def __getitem__(self, index):
        if index >= 4:
            re.match(r"(a+)+$", "a" * 60 + "b")  # takes years, inside one call that no other thread interrupts
        return index

worker_listener.SILENCE_S = 4.0
iterator = iter(DPFlowDataLoader(Backtracking(100), batch_size=2, num_workers=1, platform="processes"))
next(iterator), next(iterator)
print("read", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_remote_workers_end_that_keep_the_lock_or_are_stopped(eventually: Any, place: Path, stopped: bool) -> None:
    """Their shard answers no more, and no thread of theirs can end them."""
    with interpreter(REMOTE, env={"TMPDIR": str(place)}) as training:
        assert training.stdout is not None
        assert training.stdout.readline() == "read\n"
        workers = [child.pid for child in psutil.Process(training.pid).children()]
        assert workers
        if stopped:
            stop_descendants(training.pid)
        training.kill()
        training.wait()
        eventually(lambda: all(map(has_ended, workers)), what="the end of the workers")


IN_A_THREAD = """
import multiprocessing, sys, threading
import tests.loader_cases as cases
from torch_dpflow import DPFlowDataLoader

def read():
    iterator = iter(DPFlowDataLoader(cases.Indices(1000), num_workers=2, multiprocessing_context=sys.argv[1]))
    next(iterator)
    print("read", flush=True)
    threading.Event().wait()

if __name__ == "__main__":
    reading = threading.Thread(target=read)
    reading.start()
    reading.join()  # Python 3.12 forks no process once its main thread has ended
"""


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_processes_that_are_stopped_end_with_a_killed_training_process(
    OurLoader: Any, eventually: Any, place: Path, method: str
) -> None:
    """So do processes that a thread other than the main one started: the kernel does not kill those."""
    with interpreter(IN_A_THREAD, method, env={"TMPDIR": str(place)}) as training:
        assert training.stdout is not None
        assert training.stdout.readline() == "read\n"
        pids = stop_descendants(training.pid)
        assert len(pids) >= 2
        training.kill()
        training.wait()
        eventually(lambda: all(map(has_ended, pids)), what="the end of the stopped processes")


def left_in(directory: Path) -> list[str]:
    # multiprocessing leaves its own directory when it is killed.
    return [name for name in os.listdir(directory) if not name.startswith("pymp-")]


#: Ways in which a script may end while an iterator lives: what it runs, and its exit code.
ENDINGS = {
    "the end of the script": ("iterator = iter(Loader(data, num_workers=2)); next(iterator)", 0),
    "persistent workers": (
        "loader = Loader(data, num_workers=2, persistent_workers=True)\nfor _ in loader: break",
        0,
    ),
    "a whole epoch of persistent workers": (
        "loader = Loader(data, num_workers=2, persistent_workers=True)\nfor _ in loader: pass",
        0,
    ),
    "sys.exit in the loop": ("for _ in Loader(data, num_workers=2): sys.exit(5)", 5),
    "in a function": ("def train():\n    for _ in Loader(data, num_workers=2): sys.exit(6)\ntrain()", 6),
    "in a cycle": (
        "class Trainer: pass\ntrainer = Trainer(); trainer.me = trainer\n"
        "trainer.iterator = iter(Loader(data, num_workers=2)); next(trainer.iterator); del trainer",
        0,
    ),
    "a daemon thread iterates": (
        "import threading\nfirst = threading.Event()\n"
        "def consume():\n    while True:\n        for _ in Loader(data, num_workers=1): first.set()\n"
        "threading.Thread(target=consume, daemon=True).start(); first.wait()",
        0,
    ),
    "a thread holds it": (
        "import threading\nkept = []\n"
        "def consume():\n    kept.append(iter(Loader(data, num_workers=2))); next(kept[0])\n"
        "thread = threading.Thread(target=consume); thread.start(); thread.join()",
        0,
    ),
    "a hung worker": ("iterator = iter(Loader(cases.Gated(9, {1: gate}), num_workers=2)); next(iterator)", 0),
    "it is held by an atexit function": (
        "import atexit\niterator = iter(Loader(data, num_workers=2)); next(iterator)\n"
        "atexit.register(lambda: next(iterator))",
        0,
    ),
    "it was never iterated": ("iterator = iter(Loader(data, num_workers=2))", 0),
    "an exception": ("for _ in Loader(data, num_workers=2): raise SystemExit('the end')", 1),
}

#: Imports once, and lets each ending happen in a forked interpreter of its own, which then comes to its end.
ENDING = """
import gc, json, multiprocessing, os, sys
import tests.loader_cases as cases
if sys.argv[2] == "dpflow":
    from torch_dpflow import DPFlowDataLoader as Loader
else:
    from torch.utils.data import DataLoader as Loader
from pathlib import Path

gc.freeze()  # what was imported is no matter of how a script ends, and takes most of that time
endings = json.loads(Path(sys.argv[1], "endings.json").read_text())
gate = multiprocessing.get_context("fork").Event()
children = {}
for number, (name, (program, _code)) in enumerate(endings.items()):
    child = os.fork()
    if child == 0:
        place = Path(sys.argv[1], str(number)); place.mkdir()
        import tempfile
        os.environ["TMPDIR"] = tempfile.tempdir = str(place / "t")
        (place / "t").mkdir()
        os.setpgid(0, 0)
        os.dup2(os.open(place / "said", os.O_CREAT | os.O_WRONLY), 1)
        os.dup2(1, 2)
        data = cases.Indices(200)
        break
    children[name] = child
if child:
    codes = {name: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for name, child in children.items()}
    print(json.dumps([codes, children]))
else:
    exec(program)
"""


def test_a_script_may_end_anyhow(Loader: Any, eventually: Any, place: Path) -> None:
    """No hang, no noise, no process, no file."""
    (place / "endings.json").write_text(json.dumps(ENDINGS))
    name_of_class = "dpflow" if "DPFlow" in Loader.__name__ else "torch"
    done = run_interpreter(ENDING, str(place), name_of_class, fresh=True)
    assert done.returncode == 0, done.stderr
    codes, groups = json.loads(done.stdout)
    failures = {}
    for number, (name, (_program, code)) in enumerate(ENDINGS.items()):
        said = (place / str(number) / "said").read_text().replace("the end\n", "")
        if said or codes[name] != code:
            failures[name] = f"exit code {codes[name]}, said: {said}"
    assert not failures
    for name, group in groups.items():
        eventually(lambda group=group: is_empty(group), what=f"the end of the processes after {name!r}")
    left = {
        name: left_in(place / str(number) / "t")
        for number, name in enumerate(ENDINGS)
        if left_in(place / str(number) / "t")
    }
    assert not left


def is_empty(process_group: int) -> bool:
    return all(
        has_ended(int(entry)) or group_of(int(entry)) != process_group
        for entry in os.listdir("/proc")
        if entry.isdecimal()
    )


def group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


@pytest.mark.slow
def test_a_spawning_script_may_end_in_mid_epoch(OurLoader: Any, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from torch_dpflow import DPFlowDataLoader\n"
        "from tests.loader_cases import Indices\n"
        "if __name__ == '__main__':\n"
        "    iterator = iter(DPFlowDataLoader(Indices(99), num_workers=1, multiprocessing_context='spawn'))\n"
        "    print(next(iterator).tolist())\n"
    )
    done = run_interpreter(f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')", destructors=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0]\n", "")


def test_control_c_ends_a_script_at_once(OurLoader: Any, eventually: Any, place: Path) -> None:
    """As at a terminal: the signal goes to the whole process group."""
    env = {"TMPDIR": str(place)}
    with interpreter(BLOCKED, "dpflow", "fork", "[3]", env=env, start_new_session=True) as training:
        assert training.stdout is not None
        assert training.stderr is not None
        workers = json.loads(training.stdout.readline())
        os.killpg(training.pid, signal.SIGINT)
        said = training.stderr.read()
        assert training.wait() == -signal.SIGINT
    eventually(lambda: all(map(has_ended, workers)), what="the end of the workers")
    assert said.count("Traceback") == 1
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert not left_in(place)


def test_a_forked_child_leaves_the_parents_workers_alone(OurLoader: Any) -> None:
    """Whatever a child that was forked in mid-epoch does with what it inherited, it is not the child's."""
    loader = OurLoader(Indices(60), batch_size=2, num_workers=2)
    iterator = iter(loader)
    seen = next(iterator).tolist()
    pids = worker_pids()
    child = os.fork()
    if child == 0:
        try:
            del iterator, loader
            gc.collect()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not any(map(has_ended, pids))
    seen += [int(index) for batch in iterator for index in batch]
    assert seen == list(range(60))


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_forked_child_may_use_the_loader(OurLoader: Any, persistent_workers: bool) -> None:
    loader = OurLoader(Indices(20), batch_size=2, num_workers=1, persistent_workers=persistent_workers)
    iterator = iter(loader)
    next(iterator)
    assert in_fork(lambda: [int(index) for batch in loader for index in batch]) == list(range(20))
    assert [int(index) for batch in iterator for index in batch] == list(range(2, 20))


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_an_inherited_iterator_says_that_it_belongs_to_another_process(
    OurLoader: Any, persistent_workers: bool
) -> None:
    loader = OurLoader(Indices(20), batch_size=2, num_workers=1, persistent_workers=persistent_workers)
    iterator = iter(loader)
    next(iterator)

    def use() -> str:
        with pytest.raises(LifetimeError) as raised:
            next(iterator)
        return str(raised.value)

    assert f"process {os.getpid()}" in in_fork(use)
    assert [int(index) for batch in iterator for index in batch] == list(range(2, 20))

"""What a script or a notebook defines goes through a flow and comes back as its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.cluster_command import CommandedCluster
from tests.new_process import ROOT, Interpreter
from tests.shared_cluster import TestCluster

#: Reads one flow as itself and in a process that it spawns, whose module is `__mp_main__`.
SCRIPT = '''
import enum, functools, multiprocessing, sys
from typing import NamedTuple
import torch
from torch.utils.data import Dataset
from torch_dpflow import DPFlowDataLoader, JobOptions

class Mood(enum.Enum):
    GOOD = 1

class Pair(NamedTuple):
    left: int
    right: torch.Tensor

class Outer:
    class Inner:
        def __init__(self, value):
            self.value = value

class Box(Outer.Inner):
    """Holds a number."""

class Wrong(Exception):
    """A sample is."""

class Tensor(torch.Tensor):
    """A subclass."""

def double(value):
    return 2 * value

class Data(Dataset):
    def __init__(self):
        super().__init__()
        self.makes = Outer
    def __len__(self):
        return 6
    def __getitem__(self, index):
        if index == 5:
            raise Wrong(f"{index} is five")
        whole = torch.full((4,), index)
        return [
            Box(index), Pair(index, whole), self.makes.Inner(index), functools.partial(double, index),
            whole.as_subclass(Tensor),
        ][index], Mood.GOOD

def main():
    loader = DPFlowDataLoader(
        Data(), batch_size=None, num_workers=1, flow=sys.argv[1], address=sys.argv[2],
        job=JobOptions(idle_s=3.0),
    )
    samples = iter(loader)
    (box, good), (pair, _), (inner, _), (function, _), (tensor, _) = (next(samples) for _ in range(5))
    assert (type(box), box.value, good) == (Box, 0, Mood.GOOD)
    assert (type(pair), pair.left, pair.right.tolist()) == (Pair, 1, [1] * 4)
    assert (type(inner), inner.value) == (Outer.Inner, 2)
    assert (function.func, function()) == (double, 6)
    assert (type(tensor), tensor.tolist()) == (Tensor, [4] * 4)
    try:
        next(samples)
    except Wrong as error:
        assert "5 is five" in str(error)
    else:
        raise AssertionError("no error")

if __name__ == "__main__":
    main()
    child = multiprocessing.get_context("spawn").Process(target=main)
    child.start()
    child.join()
    sys.exit(child.exitcode)
'''

#: As a notebook runs its cells, all in one module; the second has been changed and run again.
CELLS = '''
import sys
from torch_dpflow import DPFlowDataLoader, DataLoadFlow, JobOptions

BOX = """
class Box:
    def __init__(self, value):
        self.value = value + SHIFT
"""
DATA = """
class Data:
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return Box(index)
"""
READ = """
def read(data, version):
    loader = DPFlowDataLoader(
        data, batch_size=3, num_workers=1, collate_fn=list, flow=sys.argv[1] + version, address=sys.argv[2],
        job=JobOptions(idle_s=3.0),
    )
    (boxes,) = loader
    assert {type(box) for box in boxes} == {Box}, boxes
    return [box.value for box in boxes], loader
"""

def run(cell):
    exec(compile(cell, "<cell>", "exec"), globals())

run("SHIFT = 0")
run(BOX)
run(DATA)
run(READ)
first, loader = read(Data(), "")
run(BOX)
again, _ = read(Data(), "")
((*boxes,),) = loader
assert {type(box) for box in boxes} == {Box}
kept = [Box(7), Box(8), Box(9)]
run("SHIFT = 10")
run(BOX)
assert type(kept[0]) is not Box
assert [first, again, read(Data(), ":v2")[0], read(kept, ":v3")[0]] == [[0, 1, 2]] * 2 + [[10, 11, 12], [7, 8, 9]]
'''

#: Reads what another module in its folder defines.
TRIAL = """
import sys
from beside import Data
from torch_dpflow import DPFlowDataLoader
loader = DPFlowDataLoader(Data(), batch_size=3, num_workers=1, flow="beside/train", address=sys.argv[1])
assert [batch.tolist() for batch in loader] == [[0, 1, 2]]
"""
BESIDE = """
class Data:
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return index
"""


def run(path: Path, script: str, *arguments: str) -> None:
    path.write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with Interpreter([sys.executable, str(path), *arguments], env=environment) as script_run:
        _, errors = script_run.communicate(timeout=250)
    assert script_run.returncode == 0, errors


def test_samples_and_errors_of_a_scripts_own_classes(cluster: TestCluster, flow: str, tmp_path: Path) -> None:
    run(tmp_path / "script.py", SCRIPT, flow, cluster.address)


def test_cells_that_are_run_again(cluster: TestCluster, flow: str, tmp_path: Path) -> None:
    run(tmp_path / "notebook.py", CELLS, flow, cluster.address)


@pytest.mark.slow
def test_modules_are_found_in_the_folder_in_which_the_command_was_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text(BESIDE)
    monkeypatch.chdir(tmp_path)
    # The path is that of a console script, not of `python -m`; an empty part of PYTHONPATH would be this folder.
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("DPFLOW_ADDRESS", "another")
    cluster = CommandedCluster.up(tmp_path, "--workers", "1")
    try:
        assert "DPFLOW_ADDRESS='another': jobs and commands with this variable" in cluster.log.read_text()
        run(tmp_path / "trial.py", TRIAL, cluster.address)
    finally:
        cluster.stop()

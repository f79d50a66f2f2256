"""The fingerprint of a dataset: the same in every process that makes the same, another where it differs."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.new_process import run_interpreter
from torch_dpflow.cluster.client.fingerprint import fingerprint

SCRIPT = """
import abc
import functools

def scale(sample, by=2.0):
    return [part * by for part in sample if part in {"some", "words", "here"}]

def halve(sample):
    return sample / DIVISOR if sample or not __name__ else halve(sample)

@functools.lru_cache
def cached(sample):
    return sample + CACHED

class Counted:
    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.calls = 0
    def __call__(self, *given):
        return self.__wrapped__(*given)

@Counted
def counted(sample):
    return sample + COUNTED

class Base(abc.ABC):
    limit = LIMIT
    def __len__(self):
        return self.limit

class Data(Base):
    def __init__(self, transform):
        super().__init__()
        self.transform, self.names = transform, {"a", "b", "c"}
    @staticmethod
    def open(name):
        return name
    @property
    def first(self):
        return self[0]
    @functools.cached_property
    def last(self):
        return self[LAST]
    @functools.lru_cache
    def most(self):
        return MOST
    def __getitem__(self, index):
        return cached(counted(CHANGE))

factor = FACTOR
steps = [scale, functools.partial(scale, by=3.0), lambda sample: sample * 2, (lambda f: lambda x: x * f)(factor)]
made = Data(steps)
"""
#: What is replaced in the script; the first is the script that the others differ from.
VARIANTS = [
    {},
    {"LIMIT": "11"},
    {"CHANGE": "self.transform[1](index)"},
    {"FACTOR": "2.0"},
    {"sample * 2": "sample * 3"},
    {"DIVISOR": "3"},
    *({name: "3"} for name in ("CACHED", "COUNTED", "LAST", "MOST")),
    {"halve(sample)\n": "halve(-sample)\n"},
]
AS_IT_IS = {"LIMIT": "10", "CHANGE": "self.transform[0](halve(index))", "FACTOR": "1.0", "DIVISOR": "2"}
AS_IT_IS |= {"CACHED": "1", "COUNTED": "1", "LAST": "-1", "MOST": "1"}
#: Tells the fingerprints of what the scripts make and of tensors.
PROGRAM = """
import sys
import torch
from torch.utils.data import TensorDataset
from torch_dpflow.cluster.client.fingerprint import fingerprint

for script in sys.argv[2:]:
    own = {"__name__": sys.argv[1]}
    exec(script, own)
    print(fingerprint(own["made"]))
tensors = [torch.arange(6.0).reshape(2, 3), torch.tensor([3, 4]), torch.tensor(1j).conj(), torch.zeros(0, 2)]
for one in (*tensors, tensors[0].T, TensorDataset(*tensors[:2])):
    print(fingerprint(one))
"""


def scripts() -> list[str]:
    made = []
    for variant in VARIANTS:
        script = SCRIPT
        as_it_is = {name: value for name, value in AS_IT_IS.items() if name not in variant}
        for name, value in {**variant, **as_it_is}.items():
            script = script.replace(name, value)
        made.append(script)
    return made


#: Global variables, the code that reads them, and whether the two digests are equal.
GLOBALS = [
    ("(0.5, 0.2)", "(0.5, 0.3)", "given", False),
    ("[0.5, 0.2]", "[0.5, 0.3]", "index - given[0]", True),
    ("[0.5, 0.2]", "[0.6, 0.2]", "index - given[0]", False),
    ("torch.arange(3)", "torch.arange(1, 4)", "given", False),
    ("np.arange(3)", "np.arange(1, 4)", "(lambda: given[index])()", False),
    ("None", "1", "given", False),
    ("argparse.Namespace(size=3, lr=1)", "argparse.Namespace(size=3, lr=2)", "given.size", True),
    ("argparse.Namespace(size=3, lr=1)", "argparse.Namespace(size=4, lr=1)", "given.size", False),
    ("argparse.Namespace(size=3, lr=1)", "argparse.Namespace(size=3, lr=2)", "str(given)", False),
    ("{'size': 3, 'lr': 1}", "{'size': 3, 'lr': 2}", "given['size']", True),
    ("{'size': 3, 'lr': 1}", "{'size': 4, 'lr': 1}", "given['size']", False),
    ("{'size': 3, 'lr': 1}", "{'size': 4, 'lr': 1}", "given.get('size')", False),
    ("{'size': 3, 'lr': 1}", "{'size': 4, 'lr': 1}", "given['other']", False),
    ("functools.partial(round, ndigits=1)", "functools.partial(round, ndigits=2)", "given(index)", False),
    ("pathlib.PurePath('a')", "pathlib.PurePath('b')", "given / 'c'", False),
    ("random.Random(1)", "random.Random(2)", "given.random()", True),
    ("logging.getLogger('a')", "logging.getLogger('b')", "given.info('c')", True),
    ("json", "random", "given.dumps", True),
    # What a function changes is state, and differs between processes. Other functions do not make it so.
    ("{}", "{1: 2}", "given.setdefault(index, index)", True),
    ("[]", "[1]", "given.append(index)", True),
    ("[]", "[1]", "len(given)", False),
]


@pytest.mark.parametrize(("one", "other", "code", "equal"), GLOBALS)
def test_global_variables_of_a_script_count_as_far_as_its_code_reads_them(
    one: str, other: str, code: str, equal: bool
) -> None:
    found = []
    for value in (one, other, one):
        script = f"""
import argparse, functools, json, logging, pathlib, random
import numpy as np
import torch
given = {value}
def main():
    given.append(1)
class Data:
    def __getitem__(self, index):
        return {code}
"""
        own: dict[str, Any] = {"__name__": "__main__"}
        exec(script, own)
        found.append(fingerprint(own["Data"]()))
    assert (found[0] == found[1]) is equal
    assert found[0] == found[2]


#: A dataset and a helper of the user's own modules; what is replaced there; and whether the two digests are equal.
OWN = {
    "own_data": """
import math
import own_helper
from own_helper import scaled
kept, opened = {}, None
class Data:
    def __getitem__(self, index):
        global opened
        opened = opened or object()
        kept[index] = scaled(index)
        return kept[index] + own_helper.SHIFT + own_helper.own_part.end() + math.pi
""",
    "own_part": """
def end():
    return 5
""",
    "own_helper": """
import own_part
SHIFT, FACTOR, LR = 1, (2, 3), 4
def scaled(index):
    return index * FACTOR[1]
def other(index):
    return LR
""",
}
CHANGES = [
    ("import math", "# another comment\nimport math", True),
    ("index * FACTOR", "index + FACTOR", False),
    ("(2, 3)", "(2, 4)", False),
    ("(2, 3)", "(9, 3)", True),
    ("SHIFT, FACTOR, LR = 1", "SHIFT, FACTOR, LR = 2", False),
    ("return LR", "return 2 * LR", True),
    ("return 5", "return 6", False),
    ("{}, None", "{1: 2}, object()", True),
]


def test_code_of_the_users_own_modules_counts(tmp_path: Path) -> None:
    """Each version is imported from its own directory by a process of its own."""
    program = """
import os, sys
from torch_dpflow.cluster.client.fingerprint import fingerprint
for folder in sys.argv[1:]:
    if not os.fork():
        sys.path.insert(0, folder)
        from own_data import Data
        print(fingerprint(Data()), flush=True)
        os._exit(0)
    os.wait()
"""
    folders = []
    for number, (before, after, _) in enumerate([("", "", True), *CHANGES]):
        folders.append(tmp_path / str(number))
        folders[-1].mkdir()
        for name, code in OWN.items():
            (folders[-1] / f"{name}.py").write_text(code.replace(before, after) if before else code)
    done = run_interpreter(program, *map(str, folders))
    assert done.returncode == 0, done.stderr
    first, *others = done.stdout.split()
    assert [one == first for one in others] == [equal for _, _, equal in CHANGES]


def test_it_is_the_same_in_every_process_and_another_where_code_state_or_values_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in a process that the script has spawned, where its module has another name."""
    done = run_interpreter(PROGRAM, "__main__", *scripts())
    assert done.returncode == 0, done.stderr
    told = done.stdout.split()
    monkeypatch.setattr(sys, "argv", ["-c", "__mp_main__", *scripts()])
    exec(PROGRAM, {"__name__": "__main__"})
    assert capsys.readouterr().out.split() == told
    assert len(told) == len(set(told)) == len(VARIANTS) + 6
    assert {len(one) for one in told} == {16}


@pytest.mark.parametrize("use", [copy.copy, copy.deepcopy, pickle.dumps, lambda part: type(part).__annotations__, str])
def test_use_of_an_object_leaves_the_digest_of_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Any], object]
) -> None:
    """Copying and pickling add members to a class; a loader's own epochs would differ by them."""
    code = "class Crop:\n    size = 1\n    def __call__(self, index):\n        return index * self.size\n"
    (tmp_path / "own_crop.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_crop", raising=False)
    kind = importlib.import_module("own_crop").Crop
    before = fingerprint(kind)
    use(kind())
    assert fingerprint(kind) == before
    kind.size = 2
    assert fingerprint(kind) != before


def test_what_cannot_be_pickled_counts_by_its_type() -> None:
    class Unpicklable:
        def __reduce__(self) -> str:
            raise TypeError("holds a lock")

    assert fingerprint(Unpicklable()) == fingerprint(Unpicklable())


@pytest.mark.parametrize("pair", [(1, 2), ("a", "b"), ({1, 2}, {1, 3}), (len, max)])
def test_different_things_differ(pair: tuple[object, object]) -> None:
    assert fingerprint(pair[0]) != fingerprint(pair[1])


def test_tensors_of_other_values_shapes_or_types_differ() -> None:
    tensor = torch.arange(6.0)
    others = [tensor + 1, tensor.reshape(2, 3), tensor.double(), torch.nn.Parameter(tensor)]
    assert len({fingerprint(one) for one in (tensor, *others)}) == 5
    assert fingerprint(tensor.reshape(2, 3).T) == fingerprint(tensor.reshape(2, 3).T.contiguous())

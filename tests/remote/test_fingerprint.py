"""The fingerprint of a dataset: the same in every process that makes the same, another where it differs."""

from __future__ import annotations

import pytest
import torch

from tests.new_process import run_interpreter
from torch_dpflow.remote.fingerprint import fingerprint

PROGRAM = """
from functools import partial
from torch_dpflow.remote.fingerprint import fingerprint

def scale(sample, by=2.0):
    return [part * by for part in sample if part in {"some", "words", "here"}]

class Base:
    limit = LIMIT
    def __len__(self):
        return self.limit

class Data(Base):
    def __init__(self, transform):
        self.transform, self.names = transform, {"a", "b", "c"}
    @staticmethod
    def open(name):
        return name
    @property
    def first(self):
        return self[0]
    def __getitem__(self, index):
        return CHANGE

factor = FACTOR
steps = [scale, partial(scale, by=3.0), lambda sample: sample * 2, (lambda f: lambda x: x * f)(factor)]
print(fingerprint(Data(steps)))
"""


def of(limit: int = 10, change: str = "self.transform[0](index)", factor: float = 1.0) -> str:
    program = PROGRAM.replace("LIMIT", str(limit)).replace("CHANGE", change).replace("FACTOR", str(factor))
    done = run_interpreter(program)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_is_the_same_in_every_process_and_another_where_code_or_state_differs() -> None:
    first = of()
    assert len(first) == 16
    assert of() == first
    assert len({first, of(limit=11), of(change="self.transform[1](index)"), of(factor=2.0)}) == 4


def test_what_cannot_be_pickled_counts_by_its_type() -> None:
    class Unpicklable:
        def __reduce__(self) -> str:
            raise TypeError("holds a lock")

    assert fingerprint(Unpicklable()) == fingerprint(Unpicklable())


@pytest.mark.parametrize("pair", [(1, 2), ("a", "b"), ({1, 2}, {1, 3}), (len, max)])
def test_different_things_differ(pair: tuple[object, object]) -> None:
    assert fingerprint(pair[0]) != fingerprint(pair[1])


TENSORS = """
import torch
from torch.utils.data import TensorDataset
from torch_dpflow.remote.fingerprint import fingerprint
tensors = [torch.arange(6.0).reshape(2, 3), torch.tensor([3, 4]), torch.tensor(1j).conj(), torch.zeros(0, 2)]
print(*[fingerprint(one) for one in (*tensors, tensors[0].T, TensorDataset(*tensors[:2]))])
"""


def test_tensors_count_by_their_values_in_every_process() -> None:
    first, again = (run_interpreter(TENSORS).stdout.split() for _ in range(2))
    assert first == again
    assert len(set(first)) == 6


def test_tensors_of_other_values_shapes_or_types_differ() -> None:
    tensor = torch.arange(6.0)
    others = [tensor + 1, tensor.reshape(2, 3), tensor.double(), torch.nn.Parameter(tensor)]
    assert len({fingerprint(one) for one in (tensor, *others)}) == 5
    assert fingerprint(tensor.reshape(2, 3).T) == fingerprint(tensor.reshape(2, 3).T.contiguous())

"""Exceptions of the user's code: the type, the worker's traceback, and that the loader can be used again."""

from __future__ import annotations

import builtins
import os
import re
import sys
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from tests.loader_cases import WORKERS, Failing, Indices, Messaged, Samples, assert_same
from torch_dpflow.errors import NotPicklableError, PoisonTaskError, WorkerError


class TwoArguments(Exception):
    """Cannot be made from a message alone."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


class KeywordOnly(ValueError):
    """Takes its message by keyword, and has a `message`."""

    message = "kept here"

    def __init__(self, *, message: str) -> None:
        super().__init__(message)
        self.message = message


#: Which Python has from 3.11 on.
GROUPS: list[Exception] = (
    [builtins.ExceptionGroup("several", [ValueError("bad value")])] if sys.version_info >= (3, 11) else []
)


class Unconstructible(Exception):
    """Cannot be made a second time."""

    def __init__(self, _text: str, *, secret: object) -> None:
        super().__init__("made once")


class Silent(Exception):
    """Has no text and fails to be shown."""

    def __str__(self) -> str:
        raise RuntimeError("cannot be shown")


ERRORS: dict[str, BaseException] = {
    "ValueError": ValueError("bad value"),
    "KeyError": KeyError("missing key"),
    "IndexError": IndexError("beyond the end"),
    "OSError": FileNotFoundError(2, "No such file", "image.jpg"),
    "UnicodeDecodeError": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "MemoryError": MemoryError("out of memory"),
    "RecursionError": RecursionError("too deep"),
    "NotImplementedError": NotImplementedError(),
    "AssertionError": AssertionError("wrong shape"),
    "StopIteration": StopIteration("no more"),
    "two arguments": TwoArguments(3, "reasons"),
    "keyword only": KeywordOnly(message="by keyword"),
    "unconstructible": Unconstructible("x", secret=1),
}


def outcomes(loader: Any) -> list[Any]:
    """What each `next()` gave: a value, or the type and the message of an exception."""
    seen: list[Any] = []
    iterator = iter(loader)
    while len(seen) < 40:
        try:
            seen.append(next(iterator))
        except StopIteration as stop:
            seen.append(("stop", bool(stop.args)))
            if not stop.args:
                return seen
        except Exception as error:
            seen.append((type(error), portable(str(error))))
    raise AssertionError("the loader does not come to an end")


def portable(message: str) -> str:
    """Without the frames of the loader itself, which are not the same in two loaders."""
    inside = re.compile(r'  File "[^"]*(torch/utils/data|torch_dpflow)[^"]*".*\n(    .*\n)*')
    return inside.sub("", message)


def test_errors_in_getitem_arrive_as_from_torch(Loader: Any) -> None:
    """With their types and the worker's traceback; and the batches after each follow."""
    dataset = Failing(4 * len(ERRORS), {4 * number + 1: error for number, error in enumerate(ERRORS.values())})
    arguments = {"batch_size": 2, "num_workers": 1}
    expected = outcomes(DataLoader(dataset, **arguments))
    assert_same(outcomes(Loader(dataset, **arguments)), expected)
    assert len(expected) == 2 * len(ERRORS) + 1


@pytest.mark.parametrize(("num_workers", "persistent_workers"), WORKERS)
def test_after_an_error_the_loader_can_be_iterated_again(
    Loader: Any, num_workers: int, persistent_workers: bool
) -> None:
    dataset = Failing(6, {4: ValueError("bad value")})
    loader = Loader(dataset, batch_size=None, num_workers=num_workers, persistent_workers=persistent_workers)
    for _ in range(3):
        iterator = iter(loader)
        assert [next(iterator) for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="bad value"):
            next(iterator)


def test_the_message_names_the_worker_and_holds_the_traceback(Loader: Any) -> None:
    loader = Loader(Failing(2, {0: ValueError("bad value")}), num_workers=1)
    with pytest.raises(ValueError) as raised:
        next(iter(loader))
    message = str(raised.value)
    assert message.startswith("Caught ValueError in DataLoader worker process 0.")
    assert "Original Traceback" in message
    assert "loader_cases.py" in message
    assert message.rstrip().endswith("ValueError: bad value")


def broken_collate(samples: list[int]) -> Any:
    raise LookupError(f"cannot collate {samples}")


def broken_init(worker: int) -> None:
    raise LookupError(f"cannot begin worker {worker}")


def test_an_error_in_collate_fn(Loader: Any) -> None:
    loader = Loader(Indices(4), batch_size=2, num_workers=2, collate_fn=broken_collate)
    for _ in range(2):
        with pytest.raises(LookupError, match=r"cannot collate \[0, 1\]"):
            list(loader)


def test_an_error_in_worker_init_fn(Loader: Any) -> None:
    loader = Loader(Indices(4), batch_size=2, num_workers=2, worker_init_fn=broken_init)
    for _ in range(2):
        with pytest.raises(LookupError, match="cannot begin worker 0"):
            list(loader)


def test_samples_of_different_shape(Loader: Any) -> None:
    dataset = Samples([torch.ones(2), torch.ones(3)])
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        list(Loader(dataset, batch_size=2, num_workers=1))


class BreakingSampler(Sampler[int]):
    """Gives four indices and raises."""

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[int]:
        yield from range(4)
        raise LookupError("the sampler broke")


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_an_error_in_the_sampler(Loader: Any, num_workers: int) -> None:
    loader = Loader(Indices(9), batch_size=None, sampler=BreakingSampler(), num_workers=num_workers)
    for _ in range(2):
        with pytest.raises(LookupError, match="the sampler broke"):
            list(loader)


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_the_sampler_loses_no_batch(OurLoader: Any, num_workers: int, error: type[BaseException]) -> None:
    """torch's loader drops the batch that it was about to give."""

    def order() -> Iterator[int]:
        yield from range(9)
        raise error("the sampler broke")

    loader = OurLoader(Indices(9), batch_size=None, sampler=order(), num_workers=num_workers)
    iterator = iter(loader)
    seen: list[int] = []
    with pytest.raises(error):
        seen += iterator
    assert loader.state_dict()["position"] == len(seen)
    with suppress(WorkerError):  # after Control-C nobody knows whether the sampler would have had more
        seen += iterator
    assert seen == list(range(9))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_index_out_of_range(Loader: Any, num_workers: int) -> None:
    loader = Loader([10, 20], sampler=[0, 1, 2], batch_size=None, num_workers=num_workers)
    with pytest.raises(IndexError, match="list index out of range"):
        list(loader)


def test_a_dataset_that_shrinks(Loader: Any) -> None:
    rows = [10, 20, 30]
    loader = Loader(rows, batch_size=None, num_workers=1, sampler=[0, 1, 2])
    assert list(loader) == rows
    rows.pop()
    with pytest.raises(IndexError, match="out of range"):
        list(loader)
    rows.append(31)
    assert list(loader) == rows


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_worker_that_ends_itself(Loader: Any, error: type[BaseException]) -> None:
    """As in torch, these take the worker down; the loader says so and can be used again."""
    loader = Loader(Failing(6, {2: error()}), batch_size=None, num_workers=1)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            list(loader)


class Fatal(BaseException):
    """No Exception."""


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), Fatal("x")], ids=repr)
def test_without_workers_what_is_no_exception_costs_its_batch_alone(Loader: Any, error: BaseException) -> None:
    iterator = iter(Loader(Failing(6, {2: error}), batch_size=2))
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(type(error)):
        next(iterator)
    assert [batch.tolist() for batch in iterator] == [[4, 5]]


def test_a_state_saved_on_the_way_out_holds_the_batch_that_was_left(OurLoader: Any) -> None:
    """As where a handler of SIGTERM raises SystemExit."""
    loader = OurLoader(Failing(6, {2: SystemExit()}), batch_size=2)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(SystemExit):
        next(iterator)
    left = loader.state_dict()
    assert next(iterator).tolist() == [4, 5]
    assert (left["position"], loader.state_dict()["position"]) == (1, 3)
    again = OurLoader(Indices(6), batch_size=2)
    again.load_state_dict(left)
    assert [batch.tolist() for batch in again] == [[2, 3], [4, 5]]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_worker_that_ends_itself_says_where(OurLoader: Any, error: type[BaseException]) -> None:
    loader = OurLoader(Failing(6, {2: error()}), batch_size=None, num_workers=1)
    with pytest.raises(PoisonTaskError, match=rf"(?s)in __getitem__.*{error.__name__}"):
        list(loader)


def test_an_exception_that_cannot_be_shown(OurLoader: Any) -> None:
    """torch's loader loses its worker here."""
    iterator = iter(OurLoader(Failing(4, {1: Silent()}), batch_size=None, num_workers=1))
    assert next(iterator) == 0
    with pytest.raises(Silent):
        next(iterator)
    assert list(iterator) == [2, 3]


def test_an_exception_of_a_class_that_cannot_be_pickled(OurLoader: Any) -> None:
    """torch's loader waits for ever here."""

    class Local(Exception):
        pass

    iterator = iter(OurLoader(Failing(4, {1: Local("the reason")}), batch_size=None, num_workers=1))
    assert next(iterator) == 0
    with pytest.raises(RuntimeError, match="the reason") as raised:
        next(iterator)
    assert "Local" in str(raised.value)
    assert "loader_cases.py" in str(raised.value)
    assert list(iterator) == [2, 3]


@pytest.mark.parametrize("error", [Messaged("bad value"), *GROUPS], ids=lambda error: type(error).__name__)
def test_an_exception_that_torch_cannot_make_again_arrives_with_its_text(OurLoader: Any, error: Exception) -> None:
    """Under torch's loader a bare TypeError comes, of its own attempt to make one."""
    iterator = iter(OurLoader(Failing(1, {0: error}), num_workers=1))
    with pytest.raises(RuntimeError, match=r"(?s)in DataLoader worker process 0.*Traceback.*bad value"):
        next(iterator)


def test_a_batch_that_cannot_be_pickled(OurLoader: Any) -> None:
    """torch's loader waits for ever here."""
    iterator = iter(
        OurLoader(Indices(4), batch_size=None, num_workers=1, collate_fn=lambda i: (lambda: i) if i == 1 else i)
    )
    assert next(iterator) == 0
    with pytest.raises(TypeError, match="pickle"):
        next(iterator)
    assert list(iterator) == [2, 3]


class Unreadable:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return _refuse, (os.getpid(),)


def _refuse(_pid: int) -> Any:
    raise LookupError("cannot be made again")


def test_a_batch_that_cannot_be_unpickled(OurLoader: Any) -> None:
    loader = OurLoader(Samples([0, Unreadable(), 2]), batch_size=None, num_workers=1)
    iterator = iter(loader)
    assert next(iterator) == 0
    with pytest.raises(LookupError, match="cannot be made again"):
        next(iterator)
    assert list(iterator) == [2]


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")
@pytest.mark.parametrize("part", ["dataset", "collate_fn", "worker_init_fn"])
def test_what_cannot_be_pickled_cannot_be_spawned(Loader: Any, part: str) -> None:
    arguments: dict[str, Any] = {"dataset": Indices(4)}
    arguments[part] = Samples([lambda: 0]) if part == "dataset" else lambda given: given
    loader = Loader(num_workers=1, multiprocessing_context="spawn", **arguments)
    for _ in range(2):
        with pytest.raises(AttributeError, match="pickle"):
            list(loader)


#: What a cell of a notebook defines.
CELL = """
class Cell(list):
    pass

def collate(samples):
    return samples
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("part", ["Cell", "collate"])
def test_what_a_notebook_defines_cannot_be_spawned(
    OurLoader: Any, monkeypatch: pytest.MonkeyPatch, method: str, part: str
) -> None:
    notebook = types.ModuleType("__main__")
    exec(CELL, vars(notebook))
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    arguments = {"Cell": (notebook.Cell([1, 2]), None), "collate": ([1, 2], notebook.collate)}[part]
    loader = OurLoader(arguments[0], num_workers=1, multiprocessing_context=method, collate_fn=arguments[1])
    with pytest.raises(NotPicklableError, match=rf"{part} is defined in a notebook or an interactive session"):
        next(iter(loader))


def test_the_refusal_to_spawn_says_what_to_do(OurLoader: Any) -> None:
    loader = OurLoader(Samples([lambda: 0]), num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(Exception) as raised:
        iter(loader)
    message = str(raised.value)
    assert "spawn" in message
    assert "fork" in message
    assert "dataset" in message

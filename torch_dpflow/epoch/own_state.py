"""States of datasets, samplers and their iterators with a `state_dict` of their own: saved, carried, restored.

Iterating never depends on them. If a `state_dict` fails, its error is kept and raised by the loader's `state_dict`.
"""

import copy
import inspect
import pickle
from typing import Any

from torch_dpflow._core.checks import working
from torch_dpflow._core.torch_private import ExceptionWrapper
from torch_dpflow.errors import StateError


def has_state(part: Any) -> bool:
    """Whether `part` has a state of its own that can be restored."""
    return callable(working(part, "state_dict")) and callable(working(part, "load_state_dict"))


class Unsaved:
    """In place of the state of `part`, whose `state_dict` raised the error that is being handled."""

    def __init__(self, part: Any) -> None:
        self.part = type(part).__name__
        self._failure = ExceptionWrapper(where=f"in the state_dict() of a {self.part}")
        try:
            pickle.dumps(self._failure)
        except Exception:  # its class cannot be pickled; its text can
            self._failure.exc_type = RuntimeError

    def reraise(self) -> None:
        """Raise StateError, with the error as its cause."""
        try:
            self._failure.reraise()
        except Exception as cause:
            raise StateError(
                f"the position cannot be saved: {self.part} has a state_dict() of its own, and it failed "
                f"({self._failure.exc_type.__name__}); let it take no arguments and return what can be pickled, or "
                "give the dataset or sampler none, so that the loader skips what was delivered"
            ) from cause


class Pickled:
    """The pickled state of `part` between processes; unpickled only where it is needed."""

    def __init__(self, part: Any, value: Any) -> None:
        self.part = type(part).__name__
        self._bytes = pickle.dumps(value)

    def open(self) -> Any:
        """The state. Raises whatever unpickling it raises."""
        return pickle.loads(self._bytes)


def state_of(part: Any, **arguments: Any) -> Any:
    """The state of `part`; None if it has none, `Unsaved` if its `state_dict` fails. Raises nothing."""
    try:
        return part.state_dict(**arguments) if has_state(part) else None
    except Exception:
        return Unsaved(part)


def copied_state_of(part: Any, **arguments: Any) -> Any:
    """As `state_of`, a copy."""
    return copied(part, state_of(part, **arguments))


def copied(part: Any, state: Any) -> Any:
    """A copy of the state of `part`, which may continue to change the original; `Unsaved` if it cannot be copied."""
    try:
        return copy.deepcopy(state)
    except Exception:
        return Unsaved(part)


def takes(part: Any, argument: str) -> bool:
    """Whether the `state_dict` of `part` has this argument."""
    try:
        return has_state(part) and argument in inspect.signature(part.state_dict).parameters
    except Exception:  # not every function has a signature
        return False


def sealed(part: Any, state: Any) -> Any:
    """The state of `part` in a form that can be sent."""
    if state is None or isinstance(state, Unsaved):
        return state
    try:
        return Pickled(part, state)
    except Exception:
        return Unsaved(part)


def opened(state: Any) -> Any:
    """A state, unpickled if `sealed` had pickled it.

    Raises:
        StateError: its `state_dict` failed, or it cannot be unpickled here.
    """
    if isinstance(state, Unsaved):
        state.reraise()
    if not isinstance(state, Pickled):
        return state
    try:
        return state.open()
    except Exception as error:
        raise StateError(
            f"what {state.part}.state_dict() gave in a worker cannot be unpickled here ({error!r}); let it return "
            "plain values"
        ) from error


def restore_state(part: Any, state: Any, kind: str) -> None:
    """Restore the own state of `part`.

    Args:
        kind: its kind in errors: "dataset" or "sampler".

    Raises:
        StateError: it has no `load_state_dict`, or that failed.
    """
    if not has_state(part):
        raise StateError(
            f"the state holds that of a {kind}, but {type(part).__name__} has no load_state_dict(); resume with the "
            f"{kind} that the state was taken with"
        )
    try:
        part.load_state_dict(copy.deepcopy(state))  # a copy, because it may change its argument later
    except Exception as error:
        raise StateError(
            f"{type(part).__name__}.load_state_dict() failed on the state of the {kind} ({error!r}); resume with the "
            f"{kind} that the state was taken with, or begin an epoch afresh"
        ) from error

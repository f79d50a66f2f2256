"""Stage: one step of preprocessing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import cloudpickle

from torch_dpflow.errors import OptionError, OptionTypeError, StageError
from torch_dpflow.flows.transforms import MapTransform

#: Whether a stage's output may be kept and used again: "always" if it depends on the input alone, such as
#: decoding; "never" if it is random, such as augmentation.
CacheControl = Literal["always", "never"]


@dataclass(frozen=True)
class Stage:
    """One step of preprocessing, with a name. Its pickle includes its code, lambdas too.

    Raises:
        OptionError, OptionTypeError: an argument is not allowed.
    """

    name: str
    function: Callable[[Any], Any]
    transform: MapTransform
    cache: CacheControl

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or not self.name.isprintable():
            raise OptionError(f"name={self.name!r} names no stage; give a printable string")
        if not callable(self.function):
            raise OptionTypeError(f"stage {self.name!r}: {self.function!r} cannot be called; give a function")
        if not isinstance(self.transform, MapTransform):
            raise OptionTypeError(
                f"stage {self.name!r}: transform={self.transform!r} has no process_arg and process_ret; "
                "give a MapTransform such as DataTransform()"
            )
        if isinstance(self.transform, type):
            raise OptionTypeError(
                f"stage {self.name!r}: transform={self.transform.__name__} is a class; give one of it, such as "
                "DataTransform()"
            )
        if self.cache not in get_args(CacheControl):
            raise OptionError(
                f"stage {self.name!r}: cache={self.cache!r} is not one of {get_args(CacheControl)}"
            )

    def apply(self, sample: Any) -> Any:
        """The next sample. Raises StageError, whose cause is the function's error."""
        try:
            argument = self.transform.process_arg(sample)
            return self.transform.process_ret(sample, self.function(argument))
        except Exception as error:
            raise StageError(
                f"stage {self.name!r} failed: {type(error).__name__}: {error}", self.name
            ) from error

    def __str__(self) -> str:
        return f"Map({self.name})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (cloudpickle.dumps(self._parts()),)

    def __reduce_by_value__(self) -> tuple[Any, ...]:
        return Stage, self._parts()

    def _parts(self) -> tuple[Any, ...]:
        return self.name, self.function, self.transform, self.cache


def _restored(parts: bytes) -> Stage:
    return Stage(*cloudpickle.loads(parts))

"""The part of a sample that a stage's function gets and replaces (thesis, section 3.3.2)."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class MapTransform(Protocol):
    """Selects the function's argument from a sample. Must pickle if the stage has to."""

    def process_arg(self, arg: Any) -> Any:
        """The function's argument, from the sample `arg`."""

    def process_ret(self, arg: Any, ret: Any) -> Any:
        """The next stage's sample, from the sample `arg` and the function's result `ret`."""


class SampleTransform:
    """The function gets the whole sample and returns the next one: to change an image and its boxes, for example."""

    def process_arg(self, arg: Any) -> Any:
        return arg

    def process_ret(self, arg: Any, ret: Any) -> Any:
        return ret


class DataTransform:
    """The function gets and returns the data of a `(data, target)` sample; the target stays."""

    def process_arg(self, arg: tuple[Any, Any]) -> Any:
        return arg[0]

    def process_ret(self, arg: tuple[Any, Any], ret: Any) -> tuple[Any, Any]:
        return ret, arg[1]


class TargetTransform:
    """The function gets and returns the target of a `(data, target)` sample; the data stay."""

    def process_arg(self, arg: tuple[Any, Any]) -> Any:
        return arg[1]

    def process_ret(self, arg: tuple[Any, Any], ret: Any) -> tuple[Any, Any]:
        return arg[0], ret

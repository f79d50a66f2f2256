"""What a stage's function gets of a sample, and where its result goes (thesis, section 3.3.2)."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class MapTransform(Protocol):
    """Stands between a sample and a stage's function. Must pickle if the stage is to."""

    def process_arg(self, arg: Any) -> Any:
        """What the function is called with, of the sample `arg`."""

    def process_ret(self, arg: Any, ret: Any) -> Any:
        """The sample that the next stage gets, of the sample `arg` and the function's result `ret`."""


class SampleTransform:
    """The function gets the whole sample and gives the next one: for what changes an image and its boxes."""

    def process_arg(self, arg: Any) -> Any:
        return arg

    def process_ret(self, arg: Any, ret: Any) -> Any:
        return ret


class DataTransform:
    """The function gets and gives the data of a `(data, target)` sample; the target stays."""

    def process_arg(self, arg: tuple[Any, Any]) -> Any:
        return arg[0]

    def process_ret(self, arg: tuple[Any, Any], ret: Any) -> tuple[Any, Any]:
        return ret, arg[1]


class TargetTransform:
    """The function gets and gives the target of a `(data, target)` sample; the data stay."""

    def process_arg(self, arg: tuple[Any, Any]) -> Any:
        return arg[1]

    def process_ret(self, arg: tuple[Any, Any], ret: Any) -> tuple[Any, Any]:
        return arg[0], ret

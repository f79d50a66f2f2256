"""Stage: one step of preprocessing, the part of a sample that its function gets, and functions that decode."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import cloudpickle

from torch_dpflow._core.lazy import imported
from torch_dpflow._core.stage_clock import stage
from torch_dpflow.errors import MissingExtraError, OptionError, OptionTypeError, StageError


@runtime_checkable
class MapTransform(Protocol):
    """Selects the function's argument from a sample. Must pickle if the stage has to."""

    def process_arg(self, arg: Any) -> Any:
        """Return the function's argument, from the sample `arg`."""

    def process_ret(self, arg: Any, ret: Any) -> Any:
        """Return the next stage's sample, from the sample `arg` and the function's result `ret`."""


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


#: "always" if a stage's output depends on the input alone and may be kept, such as decoding; "never" if it is random.
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
            raise OptionError(f"stage {self.name!r}: cache={self.cache!r} is not one of {get_args(CacheControl)}")

    def apply(self, sample: Any) -> Any:
        """Return the next sample. Raises StageError, whose cause is the function's error."""
        try:
            argument = self.transform.process_arg(sample)
            return self.transform.process_ret(sample, self.function(argument))
        except Exception as error:
            raise StageError(f"stage {self.name!r} failed: {type(error).__name__}: {error}", self.name) from error

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


#: What decodes JPEGs: Pillow, or libjpeg-turbo by simplejpeg.
JpegDecoder = Literal["pillow", "simplejpeg"]


class ImagePilDecode:
    """Decodes an image of any format that Pillow supports. Truncated ones raise an error.

    Args:
        mode: Pillow's mode of the result, "RGB" or "L" for example; None: that of the file.
        decoder: "simplejpeg" decodes JPEGs in three quarters of the time, to the same pixels unless Pillow was built
            with another release of libjpeg-turbo. For mode "RGB" only. Part of the flow, as any argument.

    Raises:
        MissingExtraError: Pillow or the requested decoder is not installed.
        OptionError: there is no such decoder, or not for this mode.
    """

    _decoder: JpegDecoder = "pillow"

    def __init__(self, mode: str | None = "RGB", *, decoder: JpegDecoder = "pillow") -> None:
        if decoder not in get_args(JpegDecoder) or (decoder != "pillow" and mode != "RGB"):
            raise OptionError(f"decoder={decoder!r} with mode={mode!r}: give 'pillow', or 'simplejpeg' with mode 'RGB'")
        self._open = imported("PIL.Image", "ImagePilDecode needs Pillow", "vision").open
        self._mode = mode
        if decoder == "simplejpeg":
            _check_simplejpeg()
            self._decoder = decoder  # only then, so that the pickle of the default does not change

    def __call__(self, data: bytes) -> Any:
        if self._decoder == "simplejpeg":
            from torch_dpflow.vision.encoded import load_image

            return load_image(data)
        with stage("decode"), self._open(io.BytesIO(data)) as image:
            if self._mode is None:
                image.load()
                return image.copy()
            return image.convert(self._mode)


def _check_simplejpeg() -> None:
    from torch_dpflow.vision import DECODER

    if DECODER != "simplejpeg":
        raise MissingExtraError(
            "decoder='simplejpeg' needs simplejpeg; install it with: pip install 'torch_dpflow[vision]'"
        )

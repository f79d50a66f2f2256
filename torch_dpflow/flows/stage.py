"""Stages of preprocessing, decoding functions, and a dataset that applies stages to samples."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import cloudpickle
import torch
from torch.utils.data import Dataset

from torch_dpflow._core.checks import working
from torch_dpflow._core.lazy import imported
from torch_dpflow._core.stage_clock import stage
from torch_dpflow.epoch.rng import loading_epoch, preserved_rng, seed_batch
from torch_dpflow.errors import DPFlowError, OptionError, OptionTypeError, StageError
from torch_dpflow.lookahead import Order, announce_order


@runtime_checkable
class MapTransform(Protocol):
    """Adapter between samples and a stage's function. It must be picklable if the stage is sent to workers."""

    def process_arg(self, arg: Any) -> Any:
        """Return the function's argument, taken from the sample `arg`."""

    def process_ret(self, arg: Any, ret: Any) -> Any:
        """Return the next stage's sample, made from the sample `arg` and the function's result `ret`."""


class SampleTransform:
    """Transform whose function gets and returns a whole sample, for example to change an image and its boxes."""

    def process_arg(self, arg: Any) -> Any:
        return arg

    def process_ret(self, arg: Any, ret: Any) -> Any:
        return ret


class DataTransform:
    """Transform whose function gets and returns the data of a `(data, target)` sample; the target is unchanged."""

    def process_arg(self, arg: tuple[Any, Any]) -> Any:
        return arg[0]

    def process_ret(self, arg: tuple[Any, Any], ret: Any) -> tuple[Any, Any]:
        return ret, arg[1]


class TargetTransform:
    """Transform whose function gets and returns the target of a `(data, target)` sample; the data are unchanged."""

    def process_arg(self, arg: tuple[Any, Any]) -> Any:
        return arg[1]

    def process_ret(self, arg: tuple[Any, Any], ret: Any) -> tuple[Any, Any]:
        return arg[0], ret


#: "always" if a stage's output depends on the input alone and may be kept, such as decoding; "never" if it is random.
CacheControl = Literal["always", "never"]


@dataclass(frozen=True)
class Stage:
    """Named step of preprocessing. Its function is pickled by cloudpickle, so it may be a lambda.

    For the arguments see `DataLoadFlow.map`.

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
        """Return the output of this stage for a sample. Raises StageError, whose cause is the error of the function."""
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


#: The library that decodes JPEGs: Pillow, or simplejpeg, which uses libjpeg-turbo.
JpegDecoder = Literal["pillow", "simplejpeg"]


class ImagePilDecode:
    """Decoder of images in any format that Pillow supports. A truncated image raises an error.

    Args:
        mode: Pillow's mode of the result, "RGB" or "L" for example; None: the file's mode.
        decoder: "simplejpeg" takes 25% less time for JPEGs, and supports only the mode "RGB". The pixels are the same,
            unless Pillow was built with another release of libjpeg-turbo.

    Raises:
        MissingExtraError: Pillow or the requested decoder is not installed.
        OptionError: the decoder is unknown, or does not support this mode.
    """

    _decoder: JpegDecoder = "pillow"

    def __init__(self, mode: str | None = "RGB", *, decoder: JpegDecoder = "pillow") -> None:
        if decoder not in get_args(JpegDecoder) or (decoder != "pillow" and mode != "RGB"):
            raise OptionError(f"decoder={decoder!r} with mode={mode!r}: give 'pillow', or 'simplejpeg' with mode 'RGB'")
        self._open = imported("PIL.Image", "ImagePilDecode needs Pillow", "vision").open
        self._mode = mode
        if decoder == "simplejpeg":
            imported("simplejpeg", "decoder='simplejpeg' needs simplejpeg", "vision")
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


#: First fields of the counter: whether an epoch was set, which, and the counted epoch.
_IS_SET, _SET, _COUNTED, _HEAD = range(4)


class EpochCounter:
    """Counter that returns the epoch in which a sample is read. Shared by a process and its workers.

    The epoch is the first of these that is known:

    - the epoch that was passed to `set`;
    - the epoch of the DPFlowDataLoader that loads the sample;
    - how often the sample was read before, or the highest epoch that any sample has reached if that is higher. In
      passes over all samples this is the number of the pass. Two processes that count at once may return equal numbers.

    Args:
        samples: the number of samples.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        words: Any = torch.zeros(_HEAD + (samples + 1) // 2, dtype=torch.int64)
        self._open(words.share_memory_())

    def set(self, epoch: int) -> None:
        """Set the epoch, in running workers too."""
        self._head[_SET] = epoch
        self._head[_IS_SET] = 1

    def of(self, sample: int) -> int:
        """Return the epoch in which this sample is read now. If reads are counted, count this read."""
        if self._head[_IS_SET]:
            return int(self._head[_SET])
        loading = loading_epoch()
        if loading is not None:
            return loading
        epoch = max(int(self._head[_COUNTED]), int(self._reads[sample]))
        self._head[_COUNTED] = epoch
        self._reads[sample] = epoch + 1
        return epoch

    def _open(self, words: Any) -> None:
        self._words = words
        self._head = words.numpy()[:_HEAD]
        self._reads = words.numpy()[_HEAD:].view("int32")

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is not None:
            return _shared, (self._samples, self._words)
        # Other processes than workers count for themselves; and a flow's fingerprint must not contain counts.
        was_set = int(self._head[_SET]) if self._head[_IS_SET] else None
        return _without_counts, (self._samples, was_set)


def _shared(samples: int, words: Any) -> EpochCounter:
    counter = EpochCounter.__new__(EpochCounter)
    counter._samples = samples
    counter._open(words)
    return counter


def _without_counts(samples: int, was_set: int | None) -> EpochCounter:
    counter = EpochCounter(samples)
    if was_set is not None:
        counter.set(was_set)
    return counter


@dataclass(frozen=True)
class Failed:
    """Placeholder for a sample that could not be loaded; `error` is the reason."""

    error: Exception


class StagedDataset(Dataset[Any]):
    """Map-style dataset that applies stages to samples. It is thread-safe if the dataset and the stages' functions are.

    Args:
        samples: a map-style dataset. `__getitems__` is used if it exists, so that reads overlap.
        stages: the stages to apply, in order.
        flow: name of the flow in errors.
        seed: torch's, Python's and numpy's generators are seeded by (seed, epoch, index) for each sample, and restored
            afterwards. Use it in one thread only, because threads share the generators. None: stages draw from the
            generators without seeding.
    """

    def __init__(self, samples: Any, stages: Sequence[Stage], flow: str, *, seed: int | None = None) -> None:
        self._samples = samples
        self._stages = tuple(stages)
        self._flow = flow
        self._seed = seed
        #: The epochs by which samples are seeded; None without a seed.
        self.epochs = None if seed is None else EpochCounter(len(samples))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self.through(index, self._samples[index])

    def __getitems__(self, indices: list[int]) -> list[Any]:
        together = working(self._samples, "__getitems__")
        if together is None:
            return [self[index] for index in indices]
        samples = list(together(indices))
        if len(samples) != len(indices):
            # The dataset leaves samples out; reading one by one shows which.
            return [self[index] for index in indices]
        return [self.through(index, sample) for index, sample in zip(indices, samples)]

    def announce_order(self, order: Order, spread: int, extends: bool = False) -> None:
        """Announce the order of an epoch to the wrapped dataset; see `lookahead.announce_order`."""
        announce_order(self._samples, order, spread, extends)

    def load_each(self, indices: list[int]) -> list[Any]:
        """Return the samples, in order, with a Failed in place of each sample that raised an error."""
        return [
            sample if isinstance(sample, Failed) else _attempt(self.through, index, sample)
            for index, sample in zip(indices, _each(self._samples, indices))
        ]

    def through(self, index: int, sample: Any) -> Any:
        """Return the output of all stages for `sample`, whose number is `index`. Raises StageError if a stage fails."""
        if self._seed is None or self.epochs is None:
            return self._staged(index, sample)
        with preserved_rng():
            seed_batch(self._seed, self.epochs.of(index), index)
            return self._staged(index, sample)

    def _staged(self, index: int, sample: Any) -> Any:
        for step in self._stages:
            try:
                sample = step.apply(sample)
            except StageError as error:
                text = f"{self._flow}, sample {index}: {error}"
                raise StageError(text, error.stage) from error.__cause__
        return sample


def _each(samples: Any, indices: list[int]) -> list[Any]:
    """Return a dataset's samples, with a Failed in place of each failed sample; read in one call if possible."""
    if isinstance(samples, StagedDataset):
        return samples.load_each(indices)
    if (read_each := working(samples, "read_each")) is not None:
        found = read_each(indices)
        return [Failed(sample) if isinstance(sample, DPFlowError) else sample for sample in found]
    if (read_together := working(samples, "__getitems__")) is not None:
        together = _attempt(read_together, indices)
        # Fewer samples: it is not known which of them the dataset left out.
        if not isinstance(together, Failed) and len(together) == len(indices):
            return list(together)
    return [_attempt(samples.__getitem__, index) for index in indices]


def _attempt(load: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return load(*arguments)
    except Exception as error:
        return Failed(error)

"""Generate an ImageFolder of JPEGs with natural-image statistics and classes that can be learnt.

    python -m examples.natural_images DIR --classes 4 --train 400 --val 80 --seed 0

Photographs have amplitude spectra that fall as 1/f, and colour channels that rise and fall together
(Ruderman, Cronin and Chiao 1998: most of the variance is luminance, little is blue-yellow, least is
red-green). An image here is such a random field of about 500x375 pixels and about 100 kB, so that it costs a
decoder what a photograph costs. A class leans towards an orientation, a steepness of the spectrum and a cast
of colour; the images of a class vary around it so far that neighbouring classes overlap. Every trait survives
random crops and horizontal flips.

An image depends on the seed and its own place alone. `DIR` appears when it is complete, by one rename. Until then
the work is in `DIR.partial`, and a run that was interrupted continues where it stopped.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import json
import math
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from tqdm import tqdm

#: Raised when the images of an unchanged specification change.
FORMAT = 1
SPECIFICATION_FILE = "specification.json"
SPLITS = ("train", "val")
#: Widths and heights, and how often each is drawn.
SIZES = ((500, 375), (500, 333), (375, 500))
SIZE_WEIGHTS = (0.7, 0.15, 0.15)
#: Rows: luminance, blue-yellow, red-green; columns: R, G, B. Orthonormal.
OPPONENT_AXES = np.array([[1, 1, 1], [1, 1, -2], [1, -1, 0]], np.float32) / np.sqrt(
    np.array([[3], [6], [2]], np.float32)
)
#: Standard deviations along OPPONENT_AXES, in units of full scale (0 to 1).
CONTRAST = np.array([0.27, 0.05, 0.022], np.float32)

Pixels = npt.NDArray[np.float32]


class DirectoryInUseError(ValueError):
    """The directory contains something other than what was requested."""


@dataclass(frozen=True, kw_only=True)
class Specification:
    """Specification of the images; equal ones give equal images on one machine.

    `train` and `val` count the images of all classes together, which share them out evenly.
    """

    classes: int = 4
    train: int = 400
    val: int = 80
    seed: int = 0

    def __post_init__(self) -> None:
        if self.classes < 2:
            raise ValueError(f"classes={self.classes}: at least 2 are needed")
        for split in SPLITS:
            if self.count(split) < self.classes:
                raise ValueError(f"{split}={self.count(split)}: at least one image for each of {self.classes} classes")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}: must be 0 or more")

    def count(self, split: str) -> int:
        return int(getattr(self, split))

    def images(self) -> Iterator[tuple[str, int, int]]:
        """Yield (split, class, number) of every image; classes take turns."""
        for split in SPLITS:
            for number in range(self.count(split)):
                yield split, number % self.classes, number


@dataclass(frozen=True, kw_only=True)
class Look:
    """Traits of the images of a class, or of one image."""

    #: radians; 0 gives structure that runs from left to right. Mirror images share a value in [0, pi/2]
    orientation: float
    #: exponent of the amplitude spectrum: amplitude ~ 1 / frequency ** slope
    slope: float
    #: angle of the colour cast in the plane of blue-yellow and red-green, radians
    hue: float


def prototype(label: int, classes: int) -> Look:
    """The centre of a class."""
    return Look(
        orientation=math.pi / 2 * label / (classes - 1),
        slope=1.0 + 0.1 * (1 if label % 2 else -1),
        hue=2 * math.pi * label / classes,
    )


def variation(centre: Look, rng: np.random.Generator) -> Look:
    """One image's look, drawn around its class's."""
    return Look(
        orientation=centre.orientation + rng.normal(0, math.pi / 10),
        slope=centre.slope + rng.normal(0, 0.1),
        hue=centre.hue + rng.normal(0, 0.9),
    )


def render(look: Look, width: int, height: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return one image of `look`, uint8, shape (height, width, 3)."""
    fields = random_fields(look, width, height, rng) * CONTRAST[:, None, None]
    cast = 0.06 * np.array([0, math.cos(look.hue), math.sin(look.hue)], np.float32)
    exposure = np.array([math.sqrt(3) * rng.uniform(0.38, 0.55), 0, 0], np.float32)
    fields += (cast + exposure)[:, None, None]
    rgb = np.einsum("khw,kc->hwc", fields, OPPONENT_AXES)
    pixels: npt.NDArray[np.uint8] = np.clip(np.rint(rgb * 255), 0, 255).astype(np.uint8)
    return pixels


def random_fields(look: Look, width: int, height: int, rng: np.random.Generator) -> Pixels:
    """Three independent Gaussian fields of mean 0 and variance 1, shape (3, height, width).

    Their amplitude spectra fall as frequency ** -slope, along an ellipse that `look.orientation` turns.
    """
    amplitude = _amplitudes(look, width, height)
    shape = (3, *amplitude.shape)
    spectrum = rng.standard_normal(shape, np.float32) + 1j * rng.standard_normal(shape, np.float32)
    fields: Pixels = np.fft.irfft2(spectrum * amplitude, s=(height, width), axes=(1, 2)).astype(np.float32)
    fields /= fields.std(axis=(1, 2), keepdims=True)
    return fields


def _amplitudes(look: Look, width: int, height: int, elongation: float = 1.6) -> Pixels:
    # In cycles per pixel along both axes, so that the spectrum is the same in a tall and in a wide image.
    down = np.fft.fftfreq(height).astype(np.float32)[:, None]
    across = np.fft.rfftfreq(width).astype(np.float32)[None, :]
    along = across * math.cos(look.orientation) + down * math.sin(look.orientation)
    athwart = down * math.cos(look.orientation) - across * math.sin(look.orientation)
    squared = (along * elongation) ** 2 + (athwart / elongation) ** 2
    squared[0, 0] = np.inf  # the mean is the exposure's to set
    amplitudes: Pixels = squared ** np.float32(-look.slope / 2)
    return amplitudes


def write_image(path: Path, specification: Specification, split: str, label: int, number: int) -> None:
    """Render one image and write it to `path`, whole or not at all."""
    rng = np.random.default_rng([FORMAT, specification.seed, SPLITS.index(split), label, number])
    width, height = SIZES[rng.choice(len(SIZES), p=SIZE_WEIGHTS)]
    look = variation(prototype(label, specification.classes), rng)
    pixels = render(look, width, height, rng)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    Image.fromarray(pixels).save(unfinished, "JPEG", quality=int(rng.integers(90, 96)))
    os.replace(unfinished, path)


def generate(
    directory: Path, specification: Specification, *, processes: int | None = None, progress: bool = True
) -> bool:
    """Make `directory` an ImageFolder with train/ and val/; return False if it was there already.

    `processes` defaults to the number of usable cores. Raises DirectoryInUseError, and touches nothing, if
    `directory` exists and was not made from an equal specification.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _alone_in(directory.parent):
        if directory.exists():
            _check_complete(directory, specification)
            return False
        partial = _open_partial(directory, specification)
        todo = [task for task in _tasks(partial, specification) if not task[0].exists()]
        _write_all(todo, processes or len(os.sched_getaffinity(0)), progress)
        os.rename(partial, directory)
    return True


def partial_directory(directory: Path) -> Path:
    """Return the path of the unfinished work until `directory` is complete."""
    return directory.with_name(f"{directory.name}.partial")


Task = tuple[Path, Specification, str, int, int]


def _tasks(root: Path, specification: Specification) -> Iterator[Task]:
    for split, label, number in specification.images():
        path = root / split / f"class_{label:02d}" / f"{number:06d}.jpg"
        yield path, specification, split, label, number


def _check_complete(directory: Path, specification: Specification) -> None:
    found = _read_specification(directory)
    if found != _described(specification):
        raise DirectoryInUseError(
            f"{directory} holds {found or 'other files'}, not {_described(specification)}: "
            "name another directory, or remove this one"
        )


def _open_partial(directory: Path, specification: Specification) -> Path:
    partial = partial_directory(directory)
    if partial.exists() and _read_specification(partial) != _described(specification):
        shutil.rmtree(partial)
    for split in SPLITS:
        for label in range(specification.classes):
            (partial / split / f"class_{label:02d}").mkdir(parents=True, exist_ok=True)
    for unfinished in partial.glob("*/*/*.tmp"):
        unfinished.unlink()
    (partial / SPECIFICATION_FILE).write_text(json.dumps(_described(specification)), encoding="utf-8")
    return partial


def _read_specification(directory: Path) -> object:
    try:
        return json.loads((directory / SPECIFICATION_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _described(specification: Specification) -> dict[str, int]:
    return {"format": FORMAT, **dataclasses.asdict(specification)}


def _write_all(todo: list[Task], processes: int, progress: bool) -> None:
    with contextlib.ExitStack() as stack:
        written: Iterable[None]
        if processes == 1:
            written = map(_write, todo)
        else:
            written = stack.enter_context(_pool(processes)).map(_write, todo, chunksize=8)
        if progress:
            written = tqdm(written, total=len(todo), desc="generating JPEGs", unit="image")
        collections.deque(written, maxlen=0)


@contextlib.contextmanager
def _pool(processes: int) -> Iterator[concurrent.futures.Executor]:
    # spawn, because the caller may have threads (torch, tqdm), which fork would lose in mid-lock.
    pool = concurrent.futures.ProcessPoolExecutor(
        processes, mp_context=multiprocessing.get_context("spawn"), initializer=_live_and_die_with_parent
    )
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _live_and_die_with_parent() -> None:
    # Ctrl-C reaches the whole process group; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The pool's queue never reports to its readers that the parent was killed.
    threading.Thread(target=_exit_after_parent, daemon=True).start()


def _exit_after_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _write(task: Task) -> None:
    write_image(*task)


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Hold off other generators of this directory's children; the kernel lets go when the process ends."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.natural_images", description=str(__doc__).split("\n", maxsplit=1)[0]
    )
    parser.add_argument("directory", type=Path, help="where to put train/ and val/")
    for option in dataclasses.fields(Specification):
        parser.add_argument(f"--{option.name}", type=int, default=option.default, help="default: %(default)s")
    parser.add_argument("--processes", type=int, help="default: one for each core")
    arguments = vars(parser.parse_args())
    directory, processes = arguments.pop("directory"), arguments.pop("processes")
    try:
        made = generate(directory, Specification(**arguments), processes=processes)
    except ValueError as error:
        parser.error(str(error))
    print(f"{directory}: {'generated' if made else 'was complete already'}")


if __name__ == "__main__":
    main()

"""What decoding and resizing a JPEG costs, by itself: one thread, milliseconds of processor time an image.

    python -m benchmarks.vision [--json] [--part decode,reduce,resize,crop] [--rounds 5] [--quick]

The images are those of `benchmarks.loader`. Packages that are not installed take no part.
"""

import argparse
import io
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch.nn.functional import interpolate
from torchvision import transforms
from torchvision.transforms import v2

from benchmarks.loader import IMAGES, SPECIFICATION
from benchmarks.report import Comparison, Figures, Metric, Side, add_arguments, alternate, publish
from examples.natural_images import generate
from torch_dpflow import vision

SIZE = 224
METRICS = (
    Metric(name="cpu_ms", label="CPU ms/image", higher_is_better=False),
    Metric(name="images_per_s", label="images/s of a core", spec=",.0f"),
)

Work = Callable[[bytes], Any]


def installed(name: str) -> Any:
    """A module, or None where it is not installed, or lacks a library."""
    try:
        return import_module(name)
    except (ImportError, OSError, RuntimeError):
        return None


def decoders() -> dict[str, Work]:
    """Decoders of a whole JPEG; the first is the baseline."""
    found: dict[str, Work] = {
        "Pillow": lambda data: Image.open(io.BytesIO(data)).convert("RGB"),
        "simplejpeg": lambda data: simplejpeg.decode_jpeg(data, "RGB"),
        "simplejpeg, fast DCT and upsampling": lambda data: simplejpeg.decode_jpeg(
            data, "RGB", fastdct=True, fastupsample=True
        ),
        "vision.load_rgb": vision.load_rgb,
    }
    if (cv2 := installed("cv2")) is not None:
        cv2.setNumThreads(1)
        found["OpenCV"] = lambda data: cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
    if (turbo := py_turbo_jpeg()) is not None:
        found["PyTurboJPEG"] = turbo.decode
    if hasattr(torch.ops.image, "decode_jpeg") and (tv := installed("torchvision.io")) is not None:
        found["torchvision.io"] = lambda data: tv.decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return found


def py_turbo_jpeg() -> Any:
    """PyTurboJPEG's decoder, where it finds the system's library."""
    module = installed("turbojpeg")
    try:
        return None if module is None else module.TurboJPEG()
    except (OSError, RuntimeError):
        return None


def reductions() -> dict[str, Work]:
    """Decoding every second, fourth and eighth pixel, by the transform's coefficients."""
    found: dict[str, Work] = {
        "Pillow, whole": decoders()["Pillow"],
        "simplejpeg, whole": decoders()["simplejpeg"],
    }
    cv2 = installed("cv2")
    for k in (2, 4, 8):
        found[f"Pillow's draft, 1/{k}"] = partial(drafted, k)
        found[f"simplejpeg, 1/{k}"] = partial(reduced, k)
        if cv2 is not None:
            flag = getattr(cv2, f"IMREAD_REDUCED_COLOR_{k}")
            found[f"OpenCV, 1/{k}"] = lambda data, flag=flag: cv2.imdecode(np.frombuffer(data, np.uint8), flag)
    return found


def drafted(k: int, data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.draft("RGB", (image.width // k, image.height // k))
    return image.convert("RGB")


def reduced(k: int, data: bytes) -> Any:
    height, width = simplejpeg.decode_jpeg_header(data)[:2]
    return simplejpeg.decode_jpeg(data, "RGB", min_height=-(-height // k), min_width=-(-width // k))


def resizers(data: list[bytes]) -> dict[str, Callable[[int], Any]]:
    """Resizing whole images, decoded before, with antialiasing."""
    pictures = [Image.open(io.BytesIO(one)).convert("RGB") for one in data]
    tensors = [vision.load_rgb(one) for one in data]
    contiguous = [tensor.contiguous() for tensor in tensors]
    resize = v2.Resize((SIZE, SIZE))
    found: dict[str, Callable[[int], Any]] = {
        "Pillow": lambda at: pictures[at].resize((SIZE, SIZE), Image.Resampling.BILINEAR),
        "torch, pixel by pixel in memory": lambda at: antialiased(tensors[at]),
        "torch, plane by plane in memory": lambda at: antialiased(contiguous[at]),
        "torchvision v2, pixel by pixel": lambda at: resize(tensors[at]),
        "torchvision v2, plane by plane": lambda at: resize(contiguous[at]),
    }
    if (cv2 := installed("cv2")) is not None:
        arrays = [tensor.permute(1, 2, 0).numpy() for tensor in tensors]
        found["OpenCV, area"] = lambda at: cv2.resize(arrays[at], (SIZE, SIZE), interpolation=cv2.INTER_AREA)
        found["OpenCV, no antialiasing"] = lambda at: cv2.resize(arrays[at], (SIZE, SIZE))
    return found


def antialiased(image: torch.Tensor) -> torch.Tensor:
    return interpolate(image[None], (SIZE, SIZE), mode="bilinear", antialias=True)


def crops() -> dict[str, Work]:
    """A random resized crop from the encoded image, as a dataset makes it; all draw the same boxes."""
    on_pillow = transforms.Compose([transforms.RandomResizedCrop(SIZE), transforms.PILToTensor()])
    on_tensors = v2.RandomResizedCrop(SIZE)
    return {
        "Pillow, torchvision": lambda data: on_pillow(Image.open(io.BytesIO(data)).convert("RGB")),
        "vision.load_rgb, torchvision v2": lambda data: on_tensors(vision.load_rgb(data)),
        "vision.DecodeRandomResizedCrop": vision.DecodeRandomResizedCrop(SIZE),
    }


def timed(work: Callable[[Any], Any], arguments: list[Any]) -> Figures:
    torch.manual_seed(0)
    work(arguments[0])
    begun = time.process_time()
    for argument in arguments:
        work(argument)
    each_s = (time.process_time() - begun) / len(arguments)
    return {"cpu_ms": each_s * 1e3, "images_per_s": 1 / each_s}


def sides(part: str, data: list[bytes]) -> Mapping[str, Side]:
    """The sides of one part of the table."""
    if part == "resize":
        numbers = list(range(len(data)))
        return {name: partial(timed, work, numbers) for name, work in resizers(data).items()}
    works = {"decode": decoders, "reduce": reductions, "crop": crops}[part]()
    return {name: partial(timed, work, data) for name, work in works.items()}


TITLES = {
    "decode": "decode to RGB",
    "reduce": "decode to a part of the size",
    "resize": f"resize to {SIZE}x{SIZE}",
    "crop": f"random resized crop of {SIZE}x{SIZE}",
}


def compare(part: str, data: list[bytes], rounds: int) -> Comparison:
    mean = round(sum(map(len, data)) / len(data) / 1e3)
    return alternate(
        "vision",
        TITLES[part],
        sides(part, data),
        rounds=rounds,
        parameters={"images": len(data), "mean_kb": mean},
    )


def chosen(text: str) -> list[str]:
    parts = text.split(",")
    for part in parts:
        if part not in TITLES:
            raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(TITLES)}")
    return parts


def sample(folder: Path, count: int) -> list[bytes]:
    """So many images, spread over all."""
    files = sorted(folder.glob("train/*/*.jpg"))
    return [files[number * len(files) // count].read_bytes() for number in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vision", description="decoding and resizing by themselves"
    )
    parser.add_argument("--part", type=chosen, default=list(TITLES), help="e.g. decode,crop (default: all)")
    add_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generate(IMAGES, SPECIFICATION)
    data = sample(IMAGES, 16 if arguments.quick else 256)
    rounds = 1 if arguments.quick else arguments.rounds
    publish([compare(part, data, rounds) for part in arguments.part], METRICS, arguments)


if __name__ == "__main__":
    main()

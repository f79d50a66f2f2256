"""Decode and crop JPEGs on the GPU, while workers only read files and draw boxes.

    loader = DPFlowDataLoader(EncodedCrops(ImageFolder(root).samples), batch_size=256, num_workers=2,
                              collate_fn=only_batch)
    for images, labels in crops_ahead(loader, size=224):
        ...

For a GPU with few processor cores, where decoding on the CPU limits the training run. nvJPEG decodes whole images
(`torchvision.io.decode_jpeg`); one Triton kernel then crops, resizes with antialiasing, flips and normalises the batch.
Workers draw the boxes and flips, so the augmentation does not depend on the number of workers. nvJPEG copies files to
pinned memory itself, so the loader needs no `pin_memory`. Needs CUDA, a torchvision with nvJPEG, and Triton.
"""

import contextlib
import io
import os
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.utils.data import Dataset
from torchvision.io import ImageReadMode, decode_jpeg

from torch_dpflow.vision import random_resized_crop_params
from torch_dpflow.vision.encoded import read_frame

#: Batches that are decoded ahead of the training step.
DEPTH = 2
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
#: Output pixels of one program of the kernel.
BLOCK = 256


class EncodedBatch(NamedTuple):
    """Encoded images, one after the other, and where each is cropped."""

    data: torch.Tensor  # (bytes,), uint8: all files
    ends: torch.Tensor  # (batch,), int64: where each file ends in `data`
    boxes: torch.Tensor  # (batch, 5), int32: top, left, height, width, whether to flip
    labels: torch.Tensor  # (batch,), int64


class EncodedCrops(Dataset[EncodedBatch]):
    """Files with a random crop and a random flip of each, a batch at a time: use it with `collate_fn=only_batch`.

    Args:
        samples: paths of JPEGs with their labels, as `ImageFolder(root).samples` has them.

    Raises:
        ValueError: a file is no JPEG with one or three components of eight bits, by its path.
    """

    def __init__(self, samples: Sequence[tuple[str, int]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> EncodedBatch:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[EncodedBatch]:
        with contextlib.ExitStack() as opened:
            files = [opened.enter_context(open(self.samples[index][0], "rb", buffering=0)) for index in indices]
            ends = torch.tensor([os.fstat(file.fileno()).st_size for file in files]).cumsum(0)
            data = torch.empty(int(ends[-1]), dtype=torch.uint8)
            memory, start, boxes = memoryview(data.numpy()), 0, []
            for index, file, end in zip(indices, files, ends.tolist(), strict=True):
                part, start = memory[start:end], end
                boxes.append(self._read(self.samples[index][0], file, part))
        labels = torch.tensor([self.samples[index][1] for index in indices])
        return [EncodedBatch(data, ends, torch.tensor(boxes, dtype=torch.int32), labels)]

    @staticmethod
    def _read(path: str, file: io.FileIO, into: memoryview) -> list[int]:
        """Read a whole file, and draw its crop."""
        if file.readinto(into) != len(into):
            raise ValueError(f"{path}: the file became shorter while it was read")
        frame = read_frame(into)
        if frame is None:
            raise ValueError(f"{path}: only JPEGs with one or three components of eight bits can be decoded here")
        return [*random_resized_crop_params(frame.height, frame.width), int(torch.randint(2, ()))]


def only_batch(batches: Sequence[EncodedBatch]) -> EncodedBatch:
    """Return the batch that `EncodedCrops.__getitems__` made."""
    (batch,) = batches
    return batch


@triton.jit
def _crop(pointers, sizes, boxes, out, mean, std, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Resize one box of one planar image by the triangle filter, as `interpolate(antialias=True)` does."""
    image = tl.program_id(0)
    pixel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = pixel < SIZE * SIZE
    y, x = pixel // SIZE, pixel % SIZE
    start = tl.load(pointers + image).to(tl.pointer_type(tl.uint8))
    rows, columns = tl.load(sizes + 2 * image), tl.load(sizes + 2 * image + 1)
    top, left = tl.load(boxes + 5 * image), tl.load(boxes + 5 * image + 1)
    height, width = tl.load(boxes + 5 * image + 2), tl.load(boxes + 5 * image + 3)
    x = tl.where(tl.load(boxes + 5 * image + 4) != 0, SIZE - 1 - x, x)
    scale_y, scale_x = height.to(tl.float32) / SIZE, width.to(tl.float32) / SIZE
    reach_y, reach_x = tl.maximum(scale_y, 1.0), tl.maximum(scale_x, 1.0)
    at_y, at_x = (y.to(tl.float32) + 0.5) * scale_y, (x.to(tl.float32) + 0.5) * scale_x
    first_y = tl.maximum((at_y - reach_y + 0.5).to(tl.int32), 0)
    first_x = tl.maximum((at_x - reach_x + 0.5).to(tl.int32), 0)
    last_y = tl.minimum((at_y + reach_y + 0.5).to(tl.int32), height)
    last_x = tl.minimum((at_x + reach_x + 0.5).to(tl.int32), width)
    red = tl.zeros([BLOCK], tl.float32)
    green = tl.zeros([BLOCK], tl.float32)
    blue = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    plane = rows * columns
    for step_y in range((2.0 * reach_y + 1.0).to(tl.int32) + 1):
        from_y = first_y + step_y
        weight_y = tl.maximum(1.0 - tl.abs((from_y.to(tl.float32) + 0.5 - at_y) / reach_y), 0.0)
        weight_y = tl.where(from_y < last_y, weight_y, 0.0)
        for step_x in range((2.0 * reach_x + 1.0).to(tl.int32) + 1):
            from_x = first_x + step_x
            weight = tl.maximum(1.0 - tl.abs((from_x.to(tl.float32) + 0.5 - at_x) / reach_x), 0.0)
            weight = tl.where(from_x < last_x, weight, 0.0) * weight_y
            where = (top + from_y) * columns + left + from_x
            read = inside & (weight > 0.0)
            red += weight * tl.load(start + where, mask=read, other=0).to(tl.float32)
            green += weight * tl.load(start + plane + where, mask=read, other=0).to(tl.float32)
            blue += weight * tl.load(start + 2 * plane + where, mask=read, other=0).to(tl.float32)
            total += weight
    to = out + (image * SIZE * SIZE + pixel) * 3
    scale = 1.0 / (255.0 * total)
    tl.store(to, ((red * scale - tl.load(mean)) / tl.load(std)).to(out.dtype.element_ty), mask=inside)
    tl.store(to + 1, ((green * scale - tl.load(mean + 1)) / tl.load(std + 1)).to(out.dtype.element_ty), mask=inside)
    tl.store(to + 2, ((blue * scale - tl.load(mean + 2)) / tl.load(std + 2)).to(out.dtype.element_ty), mask=inside)


def crop_on_gpu(images: Sequence[torch.Tensor], boxes: torch.Tensor, *, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return normalised crops of shape (batch, 3, size, size), channels last.

    Args:
        images: decoded images on one GPU, uint8 of shape (3, height, width).
        boxes: int32 of shape (batch, 5), on the CPU: top, left, height, width, whether to flip.
    """
    device = images[0].device
    images = [image.contiguous() for image in images]
    pointers = torch.tensor([image.data_ptr() for image in images]).pin_memory().to(device, non_blocking=True)
    sizes = torch.tensor([image.shape[1:] for image in images], dtype=torch.int32).pin_memory()
    out = torch.empty(len(images), 3, size, size, dtype=dtype, device=device, memory_format=torch.channels_last)
    mean, std = torch.tensor(MEAN, device=device), torch.tensor(STD, device=device)
    grid = (len(images), triton.cdiv(size * size, BLOCK))
    there = (sizes.to(device, non_blocking=True), boxes.to(device, non_blocking=True))
    _crop[grid](pointers, *there, out, mean, std, SIZE=size, BLOCK=BLOCK)
    return out


def decode_and_crop(batch: EncodedBatch, *, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return crops and labels of an encoded batch on the current GPU."""
    starts = [0, *batch.ends.tolist()]
    files = [batch.data[start:end] for start, end in pairwise(starts)]
    images = decode_jpeg(files, mode=ImageReadMode.RGB, device="cuda")
    return crop_on_gpu(images, batch.boxes, size=size, dtype=dtype), batch.labels.cuda(non_blocking=True)


def crops_ahead(
    loader: Iterable[EncodedBatch], *, size: int, dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield crops and labels, decoded in a thread on a CUDA stream while the GPU trains on earlier batches."""
    stream = torch.cuda.Stream()
    ready: queue.Queue[Any] = queue.Queue(DEPTH)
    ended = threading.Event()

    def offer(item: Any) -> None:
        while not ended.is_set():
            try:
                ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return

    def decode() -> None:
        try:
            with torch.cuda.stream(stream):
                for batch in loader:
                    images, labels = decode_and_crop(batch, size=size, dtype=dtype)
                    offer((images, labels, stream.record_event()))
                    if ended.is_set():
                        return
            offer(None)
        except BaseException as error:
            offer(error)

    thread = threading.Thread(target=decode, name="gpu-crops", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            images, labels, decoded = item
            training = torch.cuda.current_stream()
            training.wait_event(decoded)
            images.record_stream(training)
            labels.record_stream(training)
            yield images, labels
    finally:
        ended.set()
        thread.join()

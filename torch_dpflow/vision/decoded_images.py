"""Dataset of image files that are decoded a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Dataset

from torch_dpflow._core.checks import check_type, working
from torch_dpflow.errors import OptionTypeError
from torch_dpflow.vision.encoded import Source, naming


class DecodedImages(Dataset[tuple[Any, Any]]):
    """Images and their targets, like torchvision's `ImageFolder`, decoded a batch at a time.

    torch's loader and ours fetch a batch by `__getitems__`. Each sample is (image, target)::

        DecodedImages(ImageFolder(root).samples, DecodeRandomResizedCrop(224), transform=...)

    An error of an image names its file. For a batch, the crops of all its images are drawn first, then the random
    numbers of the transforms, image after image.

    Args:
        samples: (path, target) of each image; encoded images instead of paths are allowed.
        decode: decodes one image. If it has a method `batch`, like `DecodeRandomResizedCrop`, that decodes several.
        transform, target_transform: of an image, and of a target, as in ImageFolder.

    Raises:
        OptionTypeError: an argument is not allowed.
    """

    def __init__(
        self,
        samples: Sequence[tuple[Source, Any]],
        decode: Callable[[Source], Any],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        check_type("samples", samples, Sequence, "a sequence of (path, target)")
        for name, function in (
            ("decode", decode),
            ("transform", transform),
            ("target_transform", target_transform),
        ):
            if not callable(function) and (name == "decode" or function is not None):
                raise OptionTypeError(f"{name} is {function!r}; give a function of one argument")
        self.samples = samples
        self._decode = decode
        self._transform = transform
        self._target_transform = target_transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        source, target = self.samples[index]
        with naming(source):
            return self._transformed(self._decode(source), target)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """Return the samples of a batch."""
        samples = [self.samples[index] for index in indices]
        images = self._decoded([source for source, _ in samples])
        found = []
        for image, (source, target) in zip(images, samples, strict=True):
            with naming(source):
                found.append(self._transformed(image, target))
        return found

    def _decoded(self, sources: list[Source]) -> Any:
        batch = working(self._decode, "batch")
        if batch is not None:
            return batch(sources).unbind()
        images = []
        for source in sources:
            with naming(source):
                images.append(self._decode(source))
        return images

    def _transformed(self, image: Any, target: Any) -> tuple[Any, Any]:
        return (
            image if self._transform is None else self._transform(image),
            target if self._target_transform is None else self._target_transform(target),
        )

"""Images with the channels of a pixel next to each other in memory, as they were decoded, and batches of them.

Not in `vision`, because serialization needs it without Pillow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_dpflow._core.torch_private import collate, default_collate_fn_map


def collate_channels_last(samples: list[Any]) -> Any:
    """Collate like torch's `default_collate`, but batch images that are stored pixel by pixel in `torch.channels_last`.

    The shape is the same, (images, channels, height, width). Such a batch is copied three times as fast as one whose
    pixels are sorted into planes, and suits convolutions on GPUs. If a tensor has a different layout, its batch is
    collated as torch does, and so are all other values.

    Raises:
        The errors of `default_collate`.
    """
    return collate(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: _stack})


def _stack(batch: Sequence[torch.Tensor], *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None) -> Any:
    # In our workers the registry's function stacks into shared memory.
    stack = default_collate_fn_map[torch.Tensor]
    if all(has_channels_last(one) for one in batch):
        rows = [one.permute(1, 2, 0) for one in batch]
        return stack(rows, collate_fn_map=collate_fn_map).permute(0, 3, 1, 2)
    return stack(batch, collate_fn_map=collate_fn_map)


def has_channels_last(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is an image, (channels, height, width), whose pixels have adjacent channels."""
    if tensor.dim() != 3 or tensor.layout is not torch.strided or tensor.is_contiguous():
        return False
    return tensor.permute(1, 2, 0).is_contiguous()

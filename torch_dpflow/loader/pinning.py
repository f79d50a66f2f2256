"""Pinned memory, as torch's loader gives it: copied in a thread of ours, for the device that is current."""

from __future__ import annotations

from typing import Any

import torch

from torch_dpflow._core.torch_private import pin_memory


class Pin:
    """Copies a batch into pinned memory. Made in the training thread, called in the shard's.

    Args:
        device: the kind of accelerator, as torch's iterator has found it.
    """

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._index = torch.accelerator.current_device_index()
        self._ready = False

    def __call__(self, batch: Any) -> Any:
        if not self._ready:
            # As torch's pinning thread does first: a new thread has device 0 and uses every core.
            torch.set_num_threads(1)
            torch.accelerator.set_device_index(self._index)
            self._ready = True
        return pin_memory(batch, self._device)

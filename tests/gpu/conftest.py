"""The GPU is initialised before the first test: CUDA keeps its descriptors until the process ends."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image


@pytest.fixture(autouse=True, scope="session")
def cuda() -> None:
    """Skip without a GPU; else start CUDA and nvJPEG once."""
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU with CUDA here")
    from torchvision.io import decode_jpeg

    file = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(file, "JPEG")
    decode_jpeg(torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8), device="cuda")
    torch.ones(1).pin_memory()
    torch.cuda.synchronize()

"""The benchmark of workers beyond this host measures what its sides do."""

from __future__ import annotations

import torch

from benchmarks.platforms_run import BATCH, digest, local, time_epochs
from tests.loader_cases import Samples


def test_a_side_is_measured() -> None:
    images = Samples([torch.full((3, 4, 4), value, dtype=torch.uint8) for value in range(BATCH + 1)])
    figures = time_epochs(local, images)
    assert figures["samples_per_s"] > 0
    assert figures["first_batch_ms"] > 0
    assert digest(local, images) == digest(local, Samples(images.samples[::-1]))

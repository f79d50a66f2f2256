"""The benchmark of workers beyond this host measures what its sides do."""

from __future__ import annotations

import pytest
import torch

from benchmarks.meter import time_epochs
from benchmarks.platforms_run import BATCH, digest, local
from tests.loader_cases import Samples


def test_a_side_is_measured() -> None:
    images = Samples([torch.full((3, 4, 4), value, dtype=torch.uint8) for value in range(BATCH + 1)])
    with local(images) as read:
        figures = time_epochs(read)
    assert figures["samples_per_s"] > 0
    assert figures["first_batch_ms"] > 0
    assert digest(local, images) == digest(local, Samples(images.samples[::-1]))


def test_a_side_that_reads_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to read"):
        time_epochs(list)

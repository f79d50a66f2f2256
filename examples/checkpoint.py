"""Checkpoints of a training run: one file of plain data and tensors, written whole or not at all."""

import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch


class CheckpointError(ValueError):
    """The checkpoint does not belong to this run."""


def save(path: Path, contents: Mapping[str, Any]) -> None:
    """Write `contents` to `path`; a run that dies meanwhile leaves the earlier checkpoint."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    torch.save(dict(contents), unfinished)
    os.replace(unfinished, path)


def load(path: Path, device: torch.device, expected: Mapping[str, object]) -> dict[str, Any]:
    """Read what `save` wrote; raise CheckpointError if its "options" differ from `expected`."""
    # weights_only: a checkpoint is data, and opening one from an unknown source must not run code.
    contents: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    found = contents["options"]
    different = {key: (found.get(key), value) for key, value in expected.items() if found.get(key) != value}
    if different:
        differences = ", ".join(f"{key} is {was!r}, not {now!r}" for key, (was, now) in different.items())
        raise CheckpointError(f"{path} is of another run: {differences}. Give the same options, or start afresh")
    return contents


def rng_states() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's global generators."""
    numpy_state: Any = np.random.get_state()
    name, keys, position, has_gauss, gauss = numpy_state
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng_states(states: Mapping[str, Any]) -> None:
    """Undo everything that was drawn since `rng_states`."""
    random.setstate(states["python"])
    name, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["torch"].cpu())
    if states["cuda"]:
        torch.cuda.set_rng_state_all([state.cpu() for state in states["cuda"]])

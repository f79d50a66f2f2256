"""The three global random generators of a process (torch, `random`, numpy's legacy one): seed, capture, restore."""

import base64
import hashlib
import json
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import numpy as np
import torch

from torch_dpflow.errors import StateError

#: A generator that a sampler may hold.
Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

#: The epoch for which samples are loaded in this context; None outside of loading. Reset it in a `finally`, because a
#: signal could interrupt a context manager.
EPOCH_HERE: ContextVar[int | None] = ContextVar("epoch", default=None)
_epoch_of_worker: int | None = None

#: The three generators' states, of plain types and base64 text so that they survive JSON.
RngState = dict[str, Any]


def seed_batch(base_seed: int, epoch: int, position: int) -> None:
    """Seed torch, random and numpy from (base seed, epoch, batch position).

    A batch draws the same numbers in any worker, and each time it is loaded.
    """
    _seed(struct.pack("<qqq", base_seed, epoch, position), b"dpflow-batch")


def seed_sample(base_seed: int, epoch: int, position: int, row: int) -> None:
    """Seed torch, random and numpy from (base seed, epoch, batch position, row in the batch)."""
    _seed(struct.pack("<qqqq", base_seed, epoch, position, row), b"dpflow-sample")


def _seed(key: bytes, person: bytes) -> None:
    digest = hashlib.blake2b(key, digest_size=32, person=person).digest()
    # One word for numpy: with more words seeding takes six times as long, 1% of the time of a small sample.
    torch_seed, python_seed, numpy_seed = struct.unpack_from("<qQI", digest)
    # Not negative: torch.initial_seed() must fit into a tensor, as with torch's own seeds.
    torch.default_generator.manual_seed(torch_seed & 0x7FFF_FFFF_FFFF_FFFF)
    random.seed(python_seed)
    np.random.seed(numpy_seed)


def has_drawn_since(seed: Callable[[], None]) -> bool:
    """Return whether one of the three generators was used since `seed` was called. Their states do not change.

    seed: function that seeds the generators, each time to the same states.
    """
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    seed()
    fresh = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    if torch.equal(fresh[0], states[0]) and fresh[1] == states[1]:
        (_, key, *others), (_, numpy_key, *numpy_others) = fresh[2], states[2]
        if others == numpy_others and np.array_equal(key, numpy_key):
            return False
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    return True


def loading_epoch() -> int | None:
    """Return the epoch for which a loader of this package loads samples in this context; None outside of loading."""
    here = EPOCH_HERE.get()
    return _epoch_of_worker if here is None else here


def begin_epoch_of_worker(epoch: int) -> None:
    """Set the epoch that `loading_epoch` returns in all threads of this worker process."""
    global _epoch_of_worker
    EPOCH_HERE.set(None)  # inherited by a fork from a parent that was loading
    _epoch_of_worker = epoch


def is_own_generator(value: Any) -> bool:
    """Return whether the value is a random generator, except numpy's and Python's global ones and SystemRandom."""
    of_process = value is getattr(random, "_inst", None) or value is getattr(np.random.mtrand, "_rand", None)
    return isinstance(value, Generator) and not (of_process or isinstance(value, random.SystemRandom))


def encode_generator(generator: Generator) -> str:
    """Return the state of a generator as text: base64 for torch's (about 7 kB), JSON for others."""
    if isinstance(generator, torch.Generator):
        return _text(generator.get_state().numpy().tobytes())
    if isinstance(generator, random.Random):
        return json.dumps(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return json.dumps(generator.get_state(legacy=False), default=np.ndarray.tolist)
    return json.dumps(generator.bit_generator.state, default=np.ndarray.tolist)


def generator_state(generator: torch.Generator | None) -> str | None:
    return None if generator is None else encode_generator(generator)


def restore_generator(generator: Generator, state: str) -> None:
    """Restore a generator from a text of `encode_generator`. Raises StateError if the text does not fit."""
    try:
        if isinstance(generator, torch.Generator):
            generator.set_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))
        elif isinstance(generator, random.Random):
            version, internal, gauss = json.loads(state)
            generator.setstate((version, tuple(internal), gauss))
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(json.loads(state))
        else:
            generator.bit_generator.state = json.loads(state)
    except (LookupError, ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise StateError(f"the state of a random number generator cannot be restored: {error}") from error


def capture_rng() -> RngState:
    """Return the state of the process's three generators: about 14 kB of text."""
    version, internal, gauss = random.getstate()
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)
    return {
        "torch": encode_generator(torch.default_generator),
        "random": [version, _text(struct.pack(f"<{len(internal)}I", *internal)), gauss],
        "numpy": [
            numpy_state["bit_generator"],
            _text(numpy_state["state"]["key"].tobytes()),
            int(numpy_state["state"]["pos"]),
            int(numpy_state["has_gauss"]),
            float(numpy_state["gauss"]),
        ],
    }


def restore_rng(state: RngState) -> None:
    """Restore the process's three generators from a state of `capture_rng`. Raises StateError if it is damaged."""
    try:
        version, words, gauss = state["random"]
        raw = base64.b64decode(words)
        kind, keys, position, has_gauss, cached = state["numpy"]
        restore_generator(torch.default_generator, state["torch"])
        random.setstate((version, struct.unpack(f"<{len(raw) // 4}I", raw), gauss))
        key = np.frombuffer(base64.b64decode(keys), np.uint32)
        if not 0 <= position <= len(key):  # numpy would read beyond its words
            raise ValueError(f"position {position} of {len(key)} words")
        np.random.set_state((kind, key, position, has_gauss, cached))
    except (KeyError, ValueError, TypeError, OverflowError, struct.error) as error:
        raise StateError(f"the state of the random number generators is damaged: {error!r}") from error


def fingerprints(state: RngState) -> dict[str, str]:
    """Return a digest of each generator's state, by the generator's name."""
    return {name: hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest() for name, value in state.items()}


def unchanged_generators(state: RngState, began: dict[str, str]) -> set[str]:
    """Return the names of the process's generators whose present state is in `state`, or whose digest is in `began`."""
    now = capture_rng()
    marks = fingerprints(now)
    return {name for name in now if now[name] == state.get(name) or marks[name] == began.get(name)}


@contextmanager
def preserved_rng_except(names: set[str]) -> Iterator[None]:
    """Restore the process's generators after the `with` block, except those with these names."""
    before = capture_rng()
    try:
        yield
    finally:
        after = capture_rng()
        restore_rng({name: (after if name in names else before)[name] for name in before})


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the process's generators after the `with` block."""
    before = capture_rng()
    try:
        yield
    finally:
        restore_rng(before)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")

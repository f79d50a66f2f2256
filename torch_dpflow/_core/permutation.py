"""Permutations that are drawn as they are read, place by place as `torch.randperm` draws them.

torch draws fewer than 2**32 / 20 places by the forward Fisher-Yates shuffle: step i exchanges place i with itself or a
later one, so place i is final after it. A reader of the first places therefore need not draw the others.
"""

from __future__ import annotations

import sys
from functools import cache
from math import isqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torch_dpflow._core.sparse_zeros import sparse_zeros

if TYPE_CHECKING:
    import torch

#: torch shuffles this many numbers or more by a different algorithm, in which no place is final before the last step.
MAX_TORCH = (2**32 - 1) // 20
#: Shorter permutations are drawn as a whole at once.
MIN_LENGTH = 1 << 16
#: Random numbers that are drawn at once.
_PIECE = 1 << 14
#: The last places are exchanged one by one.
_TAIL = 1 << 10
#: Words of a Mersenne Twister; where a torch generator's state has their number left, the next one, and the words.
_WORDS, _LEFT, _NEXT, _KEY = 624, slice(8, 12), slice(16, 24), slice(24, 24 + 624 * 8)

Order = NDArray[np.signedinteger[Any]]


class Permutation:
    """The numbers 0 to `length` - 1 in random order; slices of it are arrays. Not thread-safe.

    Numbers are drawn when a slice is read: all up to its end. It takes 4 bytes for each of `length` numbers, or 8 if
    `length` is 2**31 or more, but less while few numbers are drawn.

    Args:
        bits: source of the random numbers; the caller must not draw from it.
    """

    def __init__(self, length: int, bits: np.random.MT19937) -> None:
        self._bits = bits
        #: The number at each place minus the place.
        self._moved: Order = sparse_zeros(length, np.int32 if length < 2**31 else np.int64)
        #: Number of places that are final.
        self.drawn = 0

    def __len__(self) -> int:
        return len(self._moved)

    def __getitem__(self, places: slice) -> Order:
        start, stop, step = places.indices(len(self))
        wanted = range(start, stop, step)
        if wanted:
            self._draw(max(wanted[0], wanted[-1]) + 1)
        found: Order = self._moved[places] + np.arange(start, stop, step, dtype=self._moved.dtype)
        return found

    def _draw(self, end: int) -> None:
        while self.drawn < end:
            left = len(self) - self.drawn
            if left <= _TAIL:
                self._draw_tail()
                return
            count = min(_PIECE, left - _TAIL)
            targets = self._targets(left - np.arange(count, dtype=np.uint64))
            while len(targets):
                done = self._exchange(targets[: max(1, isqrt(len(self) - self.drawn) // 2)])
                targets = targets[done:]

    def _targets(self, left: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Draw, for each of the next places, the place with which it is exchanged: itself or a later one.

        left: for each of the next places, the number of places from it to the end, itself included.
        """
        raw = self._bits.random_raw(len(left))
        if len(self) >= MAX_TORCH:
            raw = raw << np.uint64(32) | self._bits.random_raw(len(left))
        return (raw % left).astype(np.int64) + np.arange(self.drawn, self.drawn + len(left))

    def _exchange(self, targets: NDArray[np.int64]) -> int:
        """Exchange the next places with `targets`, and return their number.

        Ends before the first place that depends on an earlier exchange.
        """
        first, count = self.drawn, len(targets)
        places = np.arange(first, first + count)
        inside = targets[(targets < first + count) & (targets > places)]
        if len(inside):
            count = int(inside.min()) - first
        ordered = np.sort(targets)
        if (ordered[1:] == ordered[:-1]).any():
            order = targets.argsort(kind="stable")
            count = min(count, int(order[1:][ordered[1:] == ordered[:-1]].min()))
        targets, places = targets[:count], places[:count]
        moved, dtype = self._moved, self._moved.dtype
        theirs, own = moved[targets] + targets, moved[first : first + count] + places
        moved[targets] = (own - targets).astype(dtype)
        moved[first : first + count] = (theirs - places).astype(dtype)
        self.drawn += count
        return count

    def _draw_tail(self) -> None:
        first, left = self.drawn, len(self) - self.drawn
        numbers = (self._moved[first:] + np.arange(first, len(self))).tolist()
        targets = self._targets(left - np.arange(left - 1, dtype=np.uint64)) - first
        for place, target in enumerate(targets.tolist()):
            numbers[place], numbers[target] = numbers[target], numbers[place]
        self._moved[first:] = np.array(numbers, np.int64) - np.arange(first, len(self))
        self.drawn = len(self)


def seeded(seed: int) -> np.random.MT19937:
    """Return a source of the random numbers of torch's CPU generator with this seed (torch uses 32 bits of it)."""
    state: Any = np.random.RandomState(seed & (2**32 - 1)).get_state(legacy=True)
    return _bits(state[1], state[2])


def bits_of(generator: torch.Generator) -> np.random.MT19937:
    """Return a source of the next random numbers of a CPU generator of torch. The generator itself does not advance."""
    state = generator.get_state().numpy()
    left, following = int(state[_LEFT].view(np.int32)[0]), int(state[_NEXT].view(np.uint64)[0])
    return _bits(state[_KEY].view(np.uint64).astype(np.uint32), _WORDS if left == 1 else following)


def _bits(key: NDArray[np.uint32], place: int) -> np.random.MT19937:
    bits = np.random.MT19937(0)
    bits.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": place}}
    return bits


def advance(generator: torch.Generator, draws: int) -> None:
    """Advance a CPU generator of torch as if `draws` numbers of 32 bits were drawn; 3 ns for each."""
    if not draws:
        return
    bits = bits_of(generator)
    bits.random_raw(draws, output=False)
    kept = bits.state["state"]
    tensor = generator.get_state()
    state = tensor.numpy()
    state[_LEFT].view(np.int32)[0] = _WORDS + 1 - kept["pos"]
    state[_NEXT].view(np.uint64)[0] = kept["pos"]
    state[_KEY].view(np.uint64)[:] = kept["key"]
    generator.set_state(tensor)


def drawn_as(generator: torch.Generator, length: int) -> Permutation | Order:
    """Return the permutation that `torch.randperm` would draw, and advance the generator as it would."""
    import torch

    if length < MIN_LENGTH or length >= MAX_TORCH or generator.device.type != "cpu" or not draws_as_torch():
        # The width changes the memory that is written, not the numbers that are drawn.
        dtype = torch.int32 if length < 2**31 else torch.int64
        whole: Order = torch.randperm(length, generator=generator, dtype=dtype).numpy()
        return whole
    drawn = Permutation(length, bits_of(generator))
    advance(generator, length - 1)
    return drawn


def torch_order(length: int, seed: int) -> Permutation | Order:
    """Return the order that torch's RandomSampler and DistributedSampler draw with a generator of this seed.

    If torch is not imported yet, only lengths below `MIN_LENGTH` or from `MAX_TORCH` import it.
    """
    if MIN_LENGTH <= length < MAX_TORCH and ("torch" not in sys.modules or draws_as_torch()):
        return Permutation(length, seeded(seed))
    import torch

    generator = torch.Generator()
    generator.manual_seed(seed)
    return drawn_as(generator, length)


def epoch_order(length: int, seed: int) -> Permutation | Order:
    """Return `torch_order`, or for `MAX_TORCH` places or more a different order that can be drawn as it is read."""
    return torch_order(length, seed) if length < MAX_TORCH else Permutation(length, seeded(seed))


@cache
def draws_as_torch() -> bool:
    """Return whether the installed version of torch shuffles like `Permutation`."""
    import torch

    generator, ours = torch.Generator(), torch.Generator()
    length = 4 * _TAIL
    for one in (generator, ours):
        one.manual_seed(1)
        torch.empty(5, dtype=torch.int32).random_(generator=one)
    try:
        expected = torch.randperm(length, generator=generator).numpy()
        drawn = Permutation(length, bits_of(ours))[:]
        advance(ours, length - 1)
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError):  # the state has another form
        return False
    return bool(np.array_equal(expected, drawn)) and torch.equal(generator.get_state(), ours.get_state())

"""Format of a loader's `state_dict`, which JSON, pickle and torch's checkpoints can store.

A state has the same keys at every position; its key "state" holds all values as text. The reason is torch's distributed
checkpoint: it loads only keys that a new loader's state has, and may take each key from a different rank.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import msgspec
import torch

from torch_dpflow._core.decoding import converted
from torch_dpflow.epoch.rng import RngState
from torch_dpflow.errors import StateError

_PLAIN = (str, int, float, bool, type(None))


class HeldObjects:
    """Container of those dataset and sampler states that cannot become text; pickled with the loader's state."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeldObjects) and bool(self.values == other.values)

    __hash__ = None  # type: ignore[assignment]


def is_plain(value: Any) -> bool:
    """Return whether JSON preserves the value: only lists, dicts with str keys, str, int, float, bool and None."""
    if type(value) is list:
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(type(key) is str for key in value) and all(map(is_plain, value.values()))
    return type(value) in _PLAIN


def packed(value: Any, objects: list[Any]) -> Any:
    """Return `value`, the state that a dataset or sampler reported, as plain data; None stays None.

    Tensors and other values that `torch.load` accepts with `weights_only` become text. Any other value is appended to
    `objects`, and the result holds its index there.
    """
    if value is None:
        return None
    if is_plain(value):
        return {"plain": value}
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (pickle.UnpicklingError, pickle.PicklingError, TypeError, AttributeError, RuntimeError):
        objects.append(value)
        return {"object": len(objects) - 1}
    return {"torch": base64.b64encode(buffer.getvalue()).decode("ascii")}


def unpacked(value: Any, objects: list[Any]) -> Any:
    """Return the value that was given to `packed`, from its result. Raises StateError if the result is damaged."""
    try:
        if value is None:
            return None
        ((form, content),) = value.items()
        if form == "plain":
            return content
        if form == "object":
            return objects[content]
        if form == "torch":
            return torch.load(io.BytesIO(base64.b64decode(content, validate=True)), weights_only=True)
        raise ValueError(f"form {form!r}")
    except Exception as error:
        raise StateError(f"the state is damaged: the own state of a dataset or sampler: {error!r:.200}") from error


def from_text(text: Any) -> dict[str, Any]:
    """Return the dict in a state's JSON text. Raises StateError if the text is damaged."""
    try:
        values = json.loads(text)
        if type(values) is not dict:
            raise ValueError(f"{type(values).__name__} in place of a dict")
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(f"the state is damaged: its text cannot be read: {error}") from error
    return values


VERSION = 2

#: Keys that accelerate adds to the state of a loader that it has wrapped.
_OTHERS_KEYS = frozenset({"_iterator_finished"})
#: Keys that a state repeats outside its text, which contains everything.
_SHOWN = ("version", "epoch", "fresh", "position", "samples")
_KEYS = frozenset({*_SHOWN, "state", "objects"})
#: The own states of datasets, samplers and flows.
_OWN = ("sampler", "dataset", "shared")

#: A step that begins an epoch: "order" calls `iter` of the sampler, "seed" draws the base seed.
OpeningStep = Literal["order", "seed"]


@dataclass(kw_only=True)
class StreamState:
    """Position of one worker's stream: batches that only it can load, because of its dataset copy or random state."""

    #: Batches of this worker that were delivered.
    delivered: int = 0
    #: How many of the delivered batches were errors.
    failed: int = 0
    ended: bool = False
    #: The own states of the "dataset" and its "iterator" after these batches, and whether the dataset has "ended" in a
    #: short batch; None if neither has a state. Workers send it in the form of `own_state.sealed`.
    dataset: Any = None
    #: The worker's generators after these batches; or before the first batch if the dataset has no state, because the
    #: delivered batches are then read again. None: as seeded.
    rng: RngState | None = None


@dataclass(kw_only=True)
class LoaderState:
    """The position of a loader: the epoch, the batch, and the generators and seeds for the remaining epoch."""

    version: int = VERSION
    kind: Literal["map", "iterable"] = "map"
    #: Number of iterations begun before this one; random augmentation is seeded with it.
    epoch: int = 0
    #: Whether the next iteration begins an epoch. `opening` and the generators are then those of the previous epoch, if
    #: there was one.
    fresh: bool = True
    #: Position of the first batch that was not delivered, from 0.
    position: int = 0
    #: Number of samples in the batches before `position`.
    samples: int = 0
    #: Later positions that were delivered out of order (`in_order=False`), and the number of samples at each.
    ahead: list[int] = field(default_factory=list)
    ahead_samples: list[int] = field(default_factory=list)
    #: The seed from which the random numbers of workers and batches derive. If `fresh`, the next epoch uses it
    #: (persistent workers); None: the next epoch draws another.
    base_seed: int | None = None
    #: The seed of a data pipe's shuffling, in all workers and ranks.
    shared_seed: int | None = None
    #: The steps that began the epoch, each of which may draw random numbers. With workers, torch calls the sampler
    #: twice; later epochs of persistent workers draw no base seed.
    opening: list[OpeningStep] = field(default_factory=list)
    #: The process's generators before the steps in `opening`.
    plan_rng: RngState | None = None
    #: Fingerprints of the process's generators at the beginning of the first epoch.
    began: dict[str, str] = field(default_factory=dict)
    #: The process's generators before the first batch was drawn, if they were used since the steps in `opening`.
    draw_rng: RngState | None = None
    #: The loader's `generator` before the steps in `opening`.
    plan_generator: str | None = None
    #: The samplers' generators before the steps in `opening`.
    plan_sampler_generators: list[str] = field(default_factory=list)
    #: The loader's `generator` and the samplers' generators when the state was taken.
    generator: str | None = None
    sampler_generators: list[str] = field(default_factory=list)
    #: The own states of the "sampler" and its "iterator", if either has one.
    sampler: dict[str, Any] | None = None
    #: In a fresh state: the own state of a dataset that is read in the training process, as in a `StreamState`.
    dataset: dict[str, Any] | None = None
    #: Whether the sampler has yielded all batches of this epoch; `sampler` is then the state after them.
    ended: bool = False
    #: Number of batches in a whole epoch, if known. When resuming, this and `made_of` are compared with the loader's.
    length: int | None = None
    #: Properties of the loader, such as the batch size, by the names in `LoaderShape.parts`; None if unknown.
    made_of: dict[str, int | str | bool | None] = field(default_factory=dict)
    #: One entry per worker if batches belong to workers, else empty.
    streams: list[StreamState] = field(default_factory=list)
    #: The workers of the next batches, in order (only with `streams`).
    due: list[int] = field(default_factory=list)
    #: The worker of the batch after those of `due`.
    next_worker: int = 0
    #: In a shared flow whose router decides the order: the samples that the job has read, or its next epoch.
    shared: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the state as a dict with the same keys for all states.

        States of dataset and sampler that cannot become text are not copied: see `HeldObjects`.
        """
        objects: list[Any] = []
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {name: packed(values[name], objects) for name in _OWN}
        values["streams"] = [vars(one) | {"dataset": packed(one.dataset, objects)} for one in self.streams]
        shown = {name: values[name] for name in _SHOWN}
        return {
            **shown,
            "state": json.dumps(values, separators=(",", ":")),
            "objects": HeldObjects(objects) if objects else None,
        }

    @classmethod
    def from_dict(cls, state: Any) -> LoaderState:
        """Return the state in a result of `as_dict`. Raises StateError if it is damaged, or its version differs."""
        if not isinstance(state, dict):
            raise StateError(
                f"load_state_dict() takes the dict that state_dict() returned, not a {type(state).__name__}"
            )
        state = {key: value for key, value in state.items() if key not in _OTHERS_KEYS}
        if "version" not in state or "position" not in state:
            raise StateError(
                f"this dict with keys {sorted(map(str, state))[:8]} is not a state of DPFlowDataLoader; "
                "pass what its state_dict() returned"
            )
        if state["version"] != VERSION:
            raise StateError(
                f"the state is of version {state['version']!r}, this torch_dpflow reads version {VERSION}; "
                "resume with the release that wrote it, or begin the epoch again"
            )
        if set(state) != _KEYS:
            raise StateError(
                f"the state has the keys {sorted(map(str, state))[:12]} and not {sorted(_KEYS)}; it is damaged or of "
                "another release"
            )
        values = from_text(state["state"])
        kinds = [type(values.get(name)) for name in _SHOWN]
        if kinds != [type(state[name]) for name in _SHOWN] or any(state[n] != values[n] for n in _alike(values)):
            raise StateError(
                "the state is damaged: it was changed, or put together from the states of several ranks; save each "
                "rank's state under a separate key"
            )
        return cls._of_values(values, _objects_of(state["objects"]))

    @classmethod
    def _of_values(cls, state: dict[str, Any], objects: list[Any]) -> LoaderState:
        known = {f.name for f in fields(cls)}
        if unknown := set(state) - known:
            raise StateError(f"the state has unknown keys {sorted(unknown)}; it is damaged or of another release")
        if missing := known - set(state):
            raise StateError(f"the state lacks {sorted(missing)}; it is damaged or of another release")
        try:
            own = {name: unpacked(state[name], objects) for name in _OWN}
            streams = [one | {"dataset": unpacked(one["dataset"], objects)} for one in state["streams"]]
            loaded = converted(state | own | {"streams": streams}, cls)
        except (msgspec.ValidationError, TypeError, KeyError) as error:
            raise StateError(f"the state is damaged: {error}") from error
        loaded._check()
        return loaded

    def _check(self) -> None:
        for name in ("epoch", "position", "samples", "next_worker"):
            if getattr(self, name) < 0:
                raise StateError(f"the state's {name} is {getattr(self, name)}; it must be an int >= 0")
        if self.shared is not None and self.base_seed is None and not self.fresh:
            raise StateError("the state is damaged: it is of a shared flow but lacks the job's seed")
        for name in ("epoch", "base_seed"):
            if not -(1 << 63) <= (getattr(self, name) or 0) < (1 << 63):
                raise StateError(f"the state's {name} is {getattr(self, name)}; it must be below 2**63")
        has_origin = self.plan_rng is not None and self.base_seed is not None and self.opening
        if not (self.fresh or self.shared is not None or has_origin):
            raise StateError("the state is damaged: it is in mid-epoch but lacks what its plan was drawn from")
        _check_own("sampler", self.sampler, {"sampler", "iterator"})
        for kept in (self.dataset, *(stream.dataset for stream in self.streams)):
            _check_own("dataset", kept, {"dataset", "iterator", "ended"})
        if any(not 0 <= stream.failed <= max(0, stream.delivered) for stream in self.streams):
            raise StateError("the state is damaged: a worker's stream has more failed batches than delivered ones")
        if len(self.ahead_samples) != len(self.ahead) or any(samples < 0 for samples in self.ahead_samples):
            raise StateError(f"the state is damaged: ahead={self.ahead!r:.80}, samples {self.ahead_samples!r:.80}")
        if any(worker not in range(len(self.streams)) for worker in self.due):
            raise StateError(f"the state is damaged: due={self.due} names workers beyond {len(self.streams)}")


def _alike(values: dict[str, Any]) -> list[str]:
    """Return the names of the shown values that are equal in all ranks that are in step.

    A checkpoint may store the text of one rank with the shown values of another. Batches by a budget have other numbers
    of samples in each rank. A rank that has looked at a batch has begun more iterations; its sampler has the epoch.
    """
    own = values.get("sampler")
    for key in ("plain", "sampler"):
        own = own.get(key) if isinstance(own, dict) else None
    has_epoch = values["fresh"] or (isinstance(own, dict) and "epoch" in own)
    return ["version", "fresh", "position"] + ([] if has_epoch else ["epoch"])


def _objects_of(kept: Any) -> list[Any]:
    if kept is not None and not isinstance(kept, HeldObjects):
        raise StateError(f"the state is damaged: objects={kept!r:.80}; give what state_dict() returned")
    return [] if kept is None else deepcopy(kept.values)


def _check_own(kind: str, kept: Any, keys: set[str]) -> None:
    if kept is not None and not (isinstance(kept, dict) and set(kept) == keys):
        raise StateError(f"the state is damaged: the own state of the {kind} is {kept!r:.80}, not of {sorted(keys)}")


def held_ahead(held: int) -> StateError:
    """Return the error to raise if a trainer has read `held` batches ahead, and the state before them is not known."""
    return StateError(
        f"the trainer has read {held} batches ahead, as a dataset has no length, and the state before them is not "
        "known; give the dataset a __len__, or the loader num_workers=1"
    )

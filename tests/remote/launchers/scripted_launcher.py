"""Test doubles of a control plane, which do what a test or chance says, in threads that are real."""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.shared_cluster import PATIENCE_S
from torch_dpflow.errors import AnswerLostError, QuotaError, ThrottledError
from torch_dpflow.remote.launchers.contract import Fate
from torch_dpflow.workers.platform import Limits

#: So short a deadline that hung calls are found soon.
SOON_S = 0.2


class ScriptedLauncher:
    """A test double: a control plane that does what the test says, in threads that are real.

    `raises` are the errors of the next calls of a kind; `gates` hold calls of a kind up until they are opened.
    """

    def __init__(self, **limits: Any) -> None:
        self.limits = Limits(**limits)
        #: What the platform has, by name.
        self.there: dict[str, str] = {}
        self.made: list[tuple[str, Any]] = []
        self.raises: dict[str, list[Exception]] = defaultdict(list)
        self.gates: dict[str, threading.Event] = {}
        self.fates: dict[str, Fate] = {}
        self.at_once: Counter[str] = Counter()
        self.most_at_once = 0
        self.closed = 0
        self._lock = threading.Lock()

    def made_of(self, kind: str) -> list[Any]:
        return [what for made, what in self.made if made == kind]

    @contextmanager
    def _call(self, kind: str, what: Any) -> Iterator[None]:
        with self._lock:
            self.made.append((kind, what))
            self.at_once[kind] += 1
            self.most_at_once = max(self.most_at_once, self.at_once.total())
            error = self.raises[kind].pop(0) if self.raises[kind] else None
        try:
            if kind in self.gates:
                assert self.gates[kind].wait(PATIENCE_S)
            if error is not None and not isinstance(error, AnswerLostError):
                raise error
            yield
            if error is not None:  # it was done, and nobody hears of it
                raise error
        finally:
            with self._lock:
                self.at_once[kind] -= 1

    def check(self) -> list[Any]:
        return []

    def start(self, name: str, launch_spec: bytes, *, deadline_s: float) -> str:
        with self._call("start", name):
            self.there[name] = f"ref of {name}"
        return self.there[name]

    def look(self, workers: Mapping[str, str | None]) -> dict[str, Fate]:
        with self._call("look", dict(workers)):
            return {name: self.fates.get(name, Fate()) for name in workers if name in self.there}

    def stop(self, name: str, ref: str | None) -> None:
        with self._call("stop", (name, ref)):
            self.there.pop(name, None)

    def list(self, prefix: str) -> dict[str, str]:
        return {name: ref for name, ref in self.there.items() if name.startswith(prefix)}

    def close(self) -> None:
        self.closed += 1


class FaultyLauncher(ScriptedLauncher):
    """A test double whose calls take their time and fail as chance, which is seeded, has it."""

    def __init__(self, seed: int) -> None:
        super().__init__(starts_per_s=1000.0, calls_at_once=4)
        self._chance = random.Random(seed)

    @contextmanager
    def _call(self, kind: str, what: Any) -> Iterator[None]:
        with self._lock:
            pause_s = self._chance.choice([0.0, 0.0, 0.001, 0.01, 2 * SOON_S if kind == "start" else 0.0])
            errors: list[Exception | None] = [None, None, ThrottledError("slow down"), ValueError("a fault")]
            if kind == "start":
                errors += [AnswerLostError("timed out"), QuotaError("full")]
            self.raises[kind] = [error for error in [self._chance.choice(errors)] if error is not None]
        threading.Event().wait(pause_s)
        with super()._call(kind, what):
            yield

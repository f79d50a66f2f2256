"""Settings shared by platforms whose workers are invocations of a cloud function, and the answer to an invocation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import msgspec

from torch_dpflow._core.checks import (
    check_fields,
    check_int,
    check_json,
    check_number,
    check_type,
    is_loopback,
    parse_duration,
)
from torch_dpflow._core.decoding import json_decoder
from torch_dpflow.errors import OptionError
from torch_dpflow.remote.launchers.contract import check_tcp
from torch_dpflow.workers.platform import MAX_REPORT_CHARS, End

_LISTEN = (
    "functions cannot reach it: give the address of this host in the function's VPC, as "
    "LoaderOptions(listen='tcp://10.0.0.5:7700') or listen in [network] of dpflow.toml, whose port this host's "
    "security group lets in"
)


@dataclass(frozen=True, kw_only=True)
class FunctionSettings(ABC):
    """Base class of the settings of platforms that invoke a cloud function for each worker."""

    name: ClassVar[str]
    sends_code: ClassVar[bool] = True
    #: How long the platform lets an invocation run, and how much earlier its worker must end, in seconds.
    max_run_s: ClassVar[float]
    margin_s: ClassVar[float]
    #: Maximum invocations whose calls one process holds open; None: calls return before the worker ends.
    max_held: ClassVar[int | None] = None

    function: str = "dpflow-worker"
    region: str = ""
    lifetime: float | str = "14m"
    max_workers: int = 0
    role: str = ""
    vpc: Mapping[str, Any] = field(default_factory=dict)
    price_per_hour: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, check_int, "max_workers", minimum=0)
        check_fields(self, check_number, "price_per_hour")
        for text in ("function", "region", "role"):
            check_type(text, getattr(self, text), str, "text")
        if not self.function:
            raise OptionError("function='' is no name; give that of a function, as dpflow-worker")
        check_type("vpc", self.vpc, Mapping, "a dict")
        _ = self.lifetime_s

    @property
    def lifetime_s(self) -> float:
        """`lifetime` in seconds."""
        return parse_duration("lifetime", self.lifetime, maximum=self.max_run_s - self.margin_s)

    @property
    def timeout_s(self) -> int:
        """Time limit of the deployed function, in seconds: `lifetime`, after which workers exit, and a margin."""
        return int(self.lifetime_s + self.margin_s)

    @abstractmethod
    def is_near(self) -> bool:
        """Return whether the functions run in an emulator on this host."""

    def check_workers(self, workers: int) -> None:
        if not self.max_workers:
            raise OptionError(
                f"platform={self.name!r} bills each worker: say how many there may be at most, by max_workers in "
                f"[platform.{self.name}] of dpflow.toml, DPFLOW_PLATFORM_{self.name.upper()}_MAX_WORKERS, or "
                f"{type(self).__name__}(max_workers=...)"
            )
        most = min(self.max_workers, self.max_held or self.max_workers)
        if workers > most:
            is_held = most < self.max_workers
            what = "the calls that a process can hold" if is_held else f"max_workers={self.max_workers}"
            raise OptionError(f"{workers} workers on platform={self.name!r} are more than {what}: give at most {most}")

    def listen_at(self) -> str:
        if not self.is_near():
            raise OptionError(f"where this process is to listen is not given, and by default {_LISTEN}")
        return "tcp://127.0.0.1:0"

    def check_listen(self, address: str) -> None:
        check_tcp(address)
        check_tcp(address, loopback=not is_loopback(address) or self.is_near(), advice=_LISTEN)


class WorkerAnswer(msgspec.Struct):
    """Answer to an invocation, as JSON: how its worker has ended."""

    code: int | None
    signal: int | None
    report: str
    ran_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    place: str = ""

    @classmethod
    def of(cls, end: End) -> WorkerAnswer:
        return cls(end.code, end.signal, end.report, end.ran_s, end.place)

    def end(self, place: str = "") -> End:
        """Return how the worker ended. place: where it ran, used only if the answer does not contain that."""
        where = self.place[:120] or place
        report = self.report[-MAX_REPORT_CHARS:]
        return End(code=self.code, signal=self.signal, report=report, place=where, ran_s=self.ran_s)


def answer_in(text: bytes | str) -> WorkerAnswer | None:
    """Decode an answer to an invocation; None if it is not that of a worker of this package."""
    with suppress(msgspec.DecodeError, RecursionError):
        data = text.encode() if isinstance(text, str) else text
        check_json(data)
        answer: WorkerAnswer = json_decoder(WorkerAnswer).decode(data)
        return answer
    return None

"""Control-C wherever Python looks for signals."""

from __future__ import annotations

import dis
import gc
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import torch_dpflow

#: The code that may be interrupted: ours, and what of torch's lies around it.
PLACES = (str(Path(torch_dpflow.__file__).parent), torch.utils.data.dataloader.__file__)
#: Instructions after which Python looks for signals.
LOOKS = ("RESUME", "CALL", "JUMP_BACKWARD")
#: From Python 3.12 on. There `sys.settrace` reports no instructions of a function's first call.
HAS_MONITORING = sys.version_info >= (3, 12)


class Interruption:
    """Interrupts what runs in the thread where it is entered, the n-th time that Python would look for signals.

    That is at the beginning of a function, after a call and at a jump backwards. Where there are fewer such places,
    nothing happens.
    """

    def __init__(self, place: int) -> None:
        self._left = place
        self._thread = threading.get_ident()
        #: By frame, the latest instruction.
        self._latest: dict[FrameType, int] = {}

    def __enter__(self) -> None:
        gc.disable()  # what ends workers that others have left is not to be interrupted
        if HAS_MONITORING:
            start_monitoring(self._monitor)
        else:
            sys.settrace(self._enter_frame)

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._latest.clear()
        gc.enable()

    def _stop(self) -> None:
        if HAS_MONITORING:
            stop_monitoring()
        else:
            sys.settrace(None)

    def _monitor(self, code: CodeType, offset: int) -> Any:
        if not code.co_filename.startswith(PLACES):
            return sys.monitoring.DISABLE
        if threading.get_ident() == self._thread:
            self._step(sys._getframe(1), offset)
        return None

    def _enter_frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PLACES):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._trace

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self._step(frame, frame.f_lasti)
        return self._trace

    def _step(self, frame: FrameType, here: int) -> None:
        names, handler = _instructions(frame.f_code)
        before = self._latest.get(frame, here)
        self._latest[frame] = here
        # Python looks at the end of an instruction, and an exception is raised at the beginning of the next one: where
        # that lies in another `try` the interruption would pass by what has to clean up.
        looks = names[before].startswith(LOOKS) and not names[before].startswith("CALL_INTRINSIC")
        if looks and handler(before) == handler(here):
            self._left -= 1
            if self._left < 0:
                self._stop()
                raise KeyboardInterrupt


def start_monitoring(callback: Callable[[CodeType, int], Any]) -> None:
    """Call back before each instruction of each thread."""
    monitoring = sys.monitoring
    monitoring.use_tool_id(monitoring.DEBUGGER_ID, "interruption")
    monitoring.register_callback(monitoring.DEBUGGER_ID, monitoring.events.INSTRUCTION, callback)
    monitoring.set_events(monitoring.DEBUGGER_ID, monitoring.events.INSTRUCTION)


def stop_monitoring() -> None:
    """End what `start_monitoring` began, once or again."""
    monitoring = sys.monitoring
    if monitoring.get_tool(monitoring.DEBUGGER_ID):
        monitoring.set_events(monitoring.DEBUGGER_ID, monitoring.events.NO_EVENTS)
        monitoring.register_callback(monitoring.DEBUGGER_ID, monitoring.events.INSTRUCTION, None)
        monitoring.free_tool_id(monitoring.DEBUGGER_ID)


@cache  # thousands of interruptions pass the same code
def _instructions(code: CodeType) -> tuple[dict[int, str], Callable[[int], int | None]]:
    """The names of its instructions by offset, and what handles their errors."""
    return {one.offset: one.opname for one in dis.get_instructions(code)}, _handlers(code)


def _handlers(code: CodeType) -> Callable[[int], int | None]:
    """Where the code goes on if the instruction at an offset raises; None: it ends."""
    parse = getattr(dis, "_parse_exception_table", lambda _: [])  # from Python 3.11 on
    entries = parse(code)
    return lambda offset: next((one.target for one in entries if one.start <= offset < one.end), None)

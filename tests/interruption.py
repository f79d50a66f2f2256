"""Control-C wherever Python looks for signals."""

from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import torch_dpflow

#: The code that may be interrupted: ours, and what of torch's lies around it.
PLACES = (str(Path(torch_dpflow.__file__).parent), torch.utils.data.dataloader.__file__)


class Interruption:
    """Interrupts what runs in the thread where it is entered, the n-th time that Python would look for signals.

    That is at the beginning of a function, after a call and at a jump backwards. Where there are fewer such places,
    nothing happens.
    """

    def __init__(self, place: int) -> None:
        self._left = place
        #: By frame, the latest instruction.
        self._latest: dict[FrameType, int] = {}

    def __enter__(self) -> None:
        gc.disable()  # what ends workers that others have left is not to be interrupted
        sys.settrace(self._enter_frame)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._latest.clear()
        gc.enable()

    def _enter_frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PLACES):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            code, here = frame.f_code, frame.f_lasti
            names, handler = _instructions(code)
            before = self._latest.get(frame, here)
            self._latest[frame] = here
            # Python looks at the end of an instruction, and a trace function acts at the beginning of the next one:
            # where that lies in another `try` the interruption would pass by what has to clean up.
            looks = names[before].startswith(("RESUME", "CALL", "JUMP_BACKWARD"))
            if looks and handler(before) == handler(here):
                self._left -= 1
                if self._left < 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
        return self._step


@cache  # thousands of interruptions pass the same code
def _instructions(code: CodeType) -> tuple[dict[int, str], Callable[[int], int | None]]:
    """The names of its instructions by offset, and what handles their errors."""
    return {one.offset: one.opname for one in dis.get_instructions(code)}, _handlers(code)


def _handlers(code: CodeType) -> Callable[[int], int | None]:
    """Where the code goes on if the instruction at an offset raises; None: it ends."""
    parse = getattr(dis, "_parse_exception_table", lambda _: [])  # from Python 3.11 on
    entries = parse(code)
    return lambda offset: next((one.target for one in entries if one.start <= offset < one.end), None)

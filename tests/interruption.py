"""Control-C wherever Python looks for signals."""

from __future__ import annotations

import dis
import gc
import sys
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
        #: By frame, what is done before the next look.
        self._latest: dict[FrameType, str] = {}
        self._names: dict[CodeType, dict[int, str]] = {}

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
            latest = self._latest.get(frame, "")
            code = frame.f_code
            if code not in self._names:
                self._names[code] = {one.offset: one.opname for one in dis.get_instructions(code)}
            self._latest[frame] = self._names[code].get(frame.f_lasti, "")
            if latest.startswith(("RESUME", "CALL", "JUMP_BACKWARD")):
                self._left -= 1
                if self._left < 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
        return self._step

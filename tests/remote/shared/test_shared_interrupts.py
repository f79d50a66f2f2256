"""Control-C wherever Python looks for signals in a flow's iterator: no batch is lost, and none comes twice."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import torch_dpflow
from tests.shared_cluster import TestCluster
from tests.shared_datasets import Numbers
from torch_dpflow import DPFlowDataLoader, JobOptions

SIZE = 400
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
        sys.settrace(self._enter_frame)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

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


@pytest.fixture
def make(cluster: TestCluster, flow: str) -> Iterator[Any]:
    def make(**arguments: Any) -> DPFlowDataLoader[Any]:
        job = JobOptions(idle_s=3.0, patience_s=60.0)
        return DPFlowDataLoader(
            Numbers(SIZE),
            batch_size=2,
            flow=flow,
            address=cluster.address,
            job=job,
            num_workers=2,
            **arguments,
        )

    return make


def position_of(state: dict[str, Any]) -> int:
    shared = state["shared"]
    return state["samples"] if shared is None else shared["position"]


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_interruption_anywhere_loses_no_batch(make: Any, shuffle: bool) -> None:
    loader = make(shuffle=shuffle)
    iterator, seen, interrupted = iter(loader), list[int](), 0
    for number in range(SIZE // 2 + 1):
        # At each place in turn; then at another one while what was interrupted is made up for.
        for place in (number % 100, number // 4):
            try:
                with Interruption(place):
                    batch = next(iterator, None)
                break
            except KeyboardInterrupt:
                interrupted += 1
                assert position_of(loader.state_dict()) == len(seen)
        else:
            batch = next(iterator, None)
        seen += [] if batch is None else batch[1].tolist()
    assert batch is None
    assert interrupted > 50
    assert sorted(seen) == list(range(SIZE))
    assert loader.state_dict()["fresh"]

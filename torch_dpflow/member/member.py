"""The life of a member: calls, fetches what it is to load, and works as any worker does."""

from __future__ import annotations

import faulthandler
import io
import platform
import sys
import traceback

from torch_dpflow._version import __version__
from torch_dpflow.errors import MessageError
from torch_dpflow.member.line import Line, RefusedMemberError
from torch_dpflow.remote.wire.order import Order, decode_order


def run(order: bytes) -> int:
    """Work as this order says, in the main thread of a process, until told to leave; returns the exit code.

    0: it was told to leave, or is not wanted. Else the reason is on standard error, and at the shard, if that answers.

    Raises:
        MessageError: it is no order.
    """
    told = decode_order(order)
    if told.role != "worker":
        raise MessageError(f"the order is for a {told.role}; this release can be a worker")
    line = Line(told, _versions())
    line.start()
    try:
        _work(told, line)
    except RefusedMemberError as error:
        print(f"{told.name} is not wanted: {error}", file=sys.stderr)
        return 0
    except BaseException as error:
        words = "".join(traceback.format_exception(error))
        print(words, file=sys.stderr)
        line.bye(words)
        return 1
    line.bye("")
    return 0


def _work(order: Order, line: Line) -> None:
    if not faulthandler.is_enabled():
        faulthandler.enable()
    # While the contents come: importing torch takes seconds.
    from torch_dpflow.remote.worker import member_worker

    welcome, contents = line.contents()
    try:
        spec = member_worker.open_spec(io.BytesIO(contents.pop(welcome.content)))
        member_worker.work(spec, order.number, order.incarnation, line.connect())
    except member_worker.RefusedError as error:
        raise RefusedMemberError(str(error)) from error


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch_dpflow": __version__}

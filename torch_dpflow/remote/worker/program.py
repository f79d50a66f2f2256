"""The life of a member: calls, fetches what it is to load, and works as any worker does."""

from __future__ import annotations

import faulthandler
import sys
import traceback
from importlib import import_module

from torch_dpflow._core.directory import PrivateDirectory
from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.messages.order import Order, decode_order
from torch_dpflow.ipc.transport import is_loopback
from torch_dpflow.remote.shipping.code_bundle import install_bundle
from torch_dpflow.remote.shipping.fit import missing_modules, required_modules, versions_here
from torch_dpflow.remote.worker.control_connection import Line, RefusedMemberError

#: The module that loads single samples: named and not imported, since flows lie above the workers of any loader.
SAMPLES = "torch_dpflow.cluster.shard.remote_samples"


def run(order: bytes) -> int:
    """Work as this order says, in the main thread of a process, until told to leave; returns the exit code.

    0: it was told to leave, or is not wanted. Else the reason is on standard error, and at the shard, if that answers.

    Raises:
        MessageError: it is no order.
    """
    told = decode_order(order)
    if told.role == "node":
        raise MessageError(f"the order is for a {told.role}; this release can be a worker")
    line = Line(told, versions_here())
    line.start()
    try:
        _work(told, line)
    except RefusedMemberError as error:
        if str(error):
            print(f"{told.name} is not wanted: {error}", file=sys.stderr)
        return 0
    except BaseException as error:
        words = "".join(traceback.format_exception(error))
        print(words, file=sys.stderr)
        line.bye(words)
        return 1
    finally:
        if line.directory is not None:
            line.directory.remove()
    line.bye("")
    return 0


def _work(order: Order, line: Line) -> None:
    if not faulthandler.is_enabled():
        faulthandler.enable()
    welcome, contents = line.contents()
    packed = contents.pop(welcome.content)
    if welcome.code:
        line.directory = PrivateDirectory()
        install_bundle(contents.pop(welcome.code), line.directory.path)
    missing = missing_modules(required_modules(packed))
    if missing:
        line.refused_for(missing)
    from torch_dpflow.remote.worker import (
        remote_batches as member_worker,  # not before: importing torch takes seconds
    )

    if order.role == "sample-worker":
        connection, near = line.connect(), is_loopback(line.address)
        directory = "" if line.directory is None else line.directory.path
        import_module(SAMPLES).load_samples(
            packed, order.number, order.incarnation, connection, is_near=near, directory=directory
        )
        connection.close()
        return
    try:
        try:
            spec = member_worker.open_spec(packed)
        except ModuleNotFoundError as error:  # of a module that those which were sent import
            line.refused_for([error.name or str(error)])
        del packed
        connection = line.connect()
        near = is_loopback(line.address)
        member_worker.work(spec, order.number, order.incarnation, connection, is_near=near)
    except member_worker.RefusedError as error:
        raise RefusedMemberError(str(error)) from error

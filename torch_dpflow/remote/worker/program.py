"""Main function of a remote worker: connect, fetch the content, and load like any other worker."""

from __future__ import annotations

import faulthandler
import sys
import traceback
from importlib import import_module

from torch_dpflow._core.checks import is_loopback
from torch_dpflow._core.processes import PrivateDirectory
from torch_dpflow.ipc.messages.fields import WorkerRefusedError
from torch_dpflow.ipc.messages.remote_worker import LaunchSpec, decode_launch_spec
from torch_dpflow.remote.shipping.code_bundle import install_bundle
from torch_dpflow.remote.shipping.compatibility import missing_modules, required_modules, versions_here
from torch_dpflow.remote.worker.control_connection import ControlConnection
from torch_dpflow.workers.exit_report import report_start

#: Name of the module that loads single samples. It is not imported above, because it belongs to a higher layer.
SAMPLES = "torch_dpflow.cluster.shard.sample_worker"


class _LackingError(Exception):
    def __init__(self, modules: list[str]) -> None:
        super().__init__(f"lacks modules: {', '.join(modules)}")
        self.modules = modules


def run(launch_spec: bytes) -> int:
    """Run the worker of this launch spec, in the main thread of a process, until its shard ends it.

    Returns:
        The exit code. 0: the shard has ended or rejected the worker. Otherwise the reason is written to standard error,
        and sent to the shard if it answers. `ControlConnection` can end the process before this returns.

    Raises MessageError if `launch_spec` is malformed.
    """
    result = decode_launch_spec(launch_spec)
    control = ControlConnection(result, versions_here())
    control.start()
    try:
        _work(result, control)
    except WorkerRefusedError as error:
        if str(error):
            print(f"{result.name} is not wanted: {error}", file=sys.stderr)
        return 0
    except _LackingError as error:
        print(f"{result.name} {error}", file=sys.stderr)
        control.goodbye("", error.modules)
        return 1
    except BaseException as error:
        report = "".join(traceback.format_exception(error))
        print(report, file=sys.stderr)
        control.goodbye(report)
        return 1
    finally:
        if control.directory is not None:
            control.directory.remove()
    control.goodbye("")
    return 0


def _work(launch_spec: LaunchSpec, control: ControlConnection) -> None:
    if not faulthandler.is_enabled():
        faulthandler.enable()
    welcome, contents = control.contents()
    packed = contents.pop(welcome.content)
    if welcome.code:
        control.directory = PrivateDirectory()
        install_bundle(contents.pop(welcome.code), control.directory.path)
    missing = missing_modules(required_modules(packed))
    if missing:
        raise _LackingError(missing)
    from torch_dpflow.remote.worker import remote_batches  # here: importing torch takes seconds

    if launch_spec.role == "sample-worker":
        connection, near = control.connect(), is_loopback(control.address)
        directory = "" if control.directory is None else control.directory.path
        samples = import_module(SAMPLES)
        report_start(announce=control.announce)
        samples.load_samples(
            packed, launch_spec.number, launch_spec.incarnation, connection, is_near=near, directory=directory
        )
        connection.close()
        return
    report_start(announce=control.announce)
    try:
        spec = remote_batches.open_spec(packed)
    except ModuleNotFoundError as error:  # of a module that those which were sent import
        raise _LackingError([error.name or str(error)]) from error
    del packed
    connection, near = control.connect(), is_loopback(control.address)
    remote_batches.work(spec, launch_spec.number, launch_spec.incarnation, connection, is_near=near)

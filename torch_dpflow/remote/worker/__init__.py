"""The program that a platform runs: a remote worker, which connects to the shard that started it and loads for it.

`run` is for platforms that call a function, `python -m torch_dpflow.remote.worker` for those that start a command.
"""


def run(launch_spec: bytes) -> int:
    """Run the worker of this launch spec, in the main thread of a process; return the exit code. See `program.run`."""
    # Once the launch spec is out of the environment.
    from torch_dpflow.remote.worker.program import run as work

    return work(launch_spec)


def warm() -> None:
    """Prepare a process that forks workers, before its first fork: import modules that take seconds, and seed torch."""
    import gc
    from contextlib import suppress
    from importlib import import_module

    import numpy.random  # noqa: F401 - by numpy itself not before it is used
    import torch

    import torch_dpflow.remote.worker.remote_batches  # noqa: F401
    from torch_dpflow.errors import MessageError
    from torch_dpflow.ipc.messages.remote_worker import LAUNCH_SPEC_VERSION, decode_launch_spec
    from torch_dpflow.remote.shipping.compatibility import versions_here
    from torch_dpflow.remote.worker.program import SAMPLES

    import_module(SAMPLES)
    versions_here()
    # What the first call of each looks up stays: types of a launch spec, the sources of the lines that a seed is set
    # by.
    with suppress(MessageError):
        decode_launch_spec(b'{"version": %d}' % LAUNCH_SPEC_VERSION)
    torch.manual_seed(0)
    gc.collect()
    gc.freeze()  # else each fork's collector writes to, and so copies, the pages of all that was imported

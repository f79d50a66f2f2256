"""What a platform runs beyond this host: a member, which calls whoever had it started and works for them.

`run` is for platforms that call a function, `python -m torch_dpflow.member` for those that start a command.
"""


def run(order: bytes) -> int:
    """Work as this order says, in the main thread of a process; returns the exit code. See `member.run`."""
    from torch_dpflow.member.member import run as work  # not before the order is out of the environment

    return work(order)


def warm() -> None:
    """Import what takes seconds: for a process that forks its members."""
    import gc

    import torch_dpflow.member.member
    import torch_dpflow.remote.worker.member_worker  # noqa: F401 - torch
    from torch_dpflow.remote.process.fit import versions_here

    versions_here()
    gc.collect()
    gc.freeze()  # else each fork's collector writes to, and so copies, the pages of all that was imported

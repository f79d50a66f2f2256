"""Everything that crosses a process boundary: messages, shared memory, and the processes on either side of them.

ARCHITECTURE.md lists the rooms, lowest first.
"""

if __name__ != "torch_dpflow.remote":
    raise ImportError(
        f"{__name__!r} was imported from the repository's root; import 'torch_dpflow.remote' instead "
        "(a second copy of its classes would unpickle nowhere)"
    )

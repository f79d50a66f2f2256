"""Watches the processes whose arenas are read here, which proves that they run on this host."""

from __future__ import annotations

import os
import select

from torch_dpflow._core.descriptors import exhausted, is_exhausted


class ArenaPeers:
    """Watches processes by pidfds. Not thread-safe."""

    def __init__(self) -> None:
        self._poller = select.poll()
        #: By the caller's number for each process.
        self._descriptors: dict[int, int] = {}

    def watch(self, number: int, pid: int) -> bool:
        """Watch a process; False where the kernel or a sandbox has no pidfds.

        pid: as the process itself reported it, which is valid on this host only: its arena must have been read.

        Raises DescriptorLimitError.
        """
        try:
            descriptor = self._descriptors[number] = os.pidfd_open(pid)
        except (OSError, AttributeError) as error:
            if is_exhausted(error):
                raise exhausted(f"process {pid} cannot be watched") from error
            return False
        self._poller.register(descriptor, select.POLLIN)
        return True

    def ended(self) -> list[int]:
        """The watched processes that have ended, until they are forgotten."""
        ended = {descriptor for descriptor, _ in self._poller.poll(0)}
        return (
            [number for number, descriptor in self._descriptors.items() if descriptor in ended]
            if ended
            else []
        )

    def forget(self, number: int) -> None:
        """Stop watching this process, if it is watched."""
        descriptor = self._descriptors.pop(number, None)
        if descriptor is not None:
            self._poller.unregister(descriptor)
            os.close(descriptor)

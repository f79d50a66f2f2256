"""The ends of processes whose arenas are read here: that one was read proves that its process is of this host."""

from __future__ import annotations

import os
import select

from torch_dpflow.descriptors import exhausted, is_exhausted


class ArenaPeers:
    """Sees processes end, by the kernel's descriptors of them. Not thread-safe."""

    def __init__(self) -> None:
        self._poller = select.poll()
        #: By the number that the caller knows each process by.
        self._descriptors: dict[int, int] = {}

    def watch(self, number: int, pid: int) -> bool:
        """Whether the end of this process will be seen: some kernels and sandboxes have no descriptors of processes.

        pid: a number that somebody tells of means something only where the arena of that process was read.

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
        """Those that are watched and have ended, until they are forgotten."""
        ended = {descriptor for descriptor, _ in self._poller.poll(0)}
        return (
            [number for number, descriptor in self._descriptors.items() if descriptor in ended]
            if ended
            else []
        )

    def forget(self, number: int) -> None:
        """Do not watch this one any more, if it was."""
        descriptor = self._descriptors.pop(number, None)
        if descriptor is not None:
            self._poller.unregister(descriptor)
            os.close(descriptor)

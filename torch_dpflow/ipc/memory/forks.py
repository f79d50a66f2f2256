"""Counts the forks of this process: a child may read memory for as long as it lives, and no reference here counts it.

Memory that is lent while a process forks is therefore never lent again: the child has a mapping of its own, and the
pages are freed with the last mapping. A process that never forks pays nothing for that.
"""

from __future__ import annotations

import os


class Forks:
    """Stamps what is lent, and compares the stamp when it is released.

    Takes no lock and reads no global: a release runs in any thread, and while the interpreter exits.
    """

    def __init__(self) -> None:
        self._count = 0
        #: One entry for each thread that forks now.
        self._running: list[None] = []
        os.register_at_fork(
            before=self._begin, after_in_parent=self._running.pop, after_in_child=self._running.clear
        )

    def stamp(self) -> int:
        """What a new loan is stamped with."""
        # Another thread may be between its hook and its fork: such a loan counts as forked.
        return -1 if self._running else self._count

    def since(self, stamp: int) -> bool:
        """Whether this process may have forked since a loan with this stamp."""
        return stamp != self._count

    def _begin(self) -> None:
        self._running.append(None)
        self._count += 1


#: Of this process; a child goes on counting from where its parent was.
FORKS = Forks()

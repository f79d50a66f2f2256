"""Everything that crosses a process boundary: messages, shared memory, and the processes on either side of them.

ARCHITECTURE.md lists the rooms, lowest first.
"""

from torch_dpflow._core.lazy import refuse_copy

refuse_copy(__name__)

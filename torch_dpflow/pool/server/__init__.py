"""Pool server: holds datasets in memory, reads them from storage, and leads its pool or follows a leader."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch_dpflow.errors import PoolFullError


def start_thread(run: Callable[[], None], name: str) -> None:
    """Start a daemon thread. Raises PoolFullError if this process cannot start more threads."""
    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        raise PoolFullError(f"the pool server: {error}; allow it more threads (ulimit -u)") from error

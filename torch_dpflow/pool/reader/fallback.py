"""Reports why a reader reads from storage although there may be a server."""

from __future__ import annotations

from contextlib import suppress

from torch_dpflow.errors import DPFlowError, OptionError
from torch_dpflow.log import DATASETS
from torch_dpflow.pool.lanes.pool_address import PoolAddress
from torch_dpflow.pool.messages.protocol import check_private

#: Settings that this process, or the one that it was forked from, has warned of.
_WARNED: set[str] = set()


def check_directory(address: PoolAddress) -> None:
    """Warn if the directory of a server's socket is there and cannot be used. Raises nothing."""
    if address.directory is None:
        return
    with suppress(OSError):  # no server has run here yet
        try:
            check_private(address.directory)
        except OptionError as error:
            log_fallback("the pool is not used, and samples are read from storage", error)


def log_fallback(what: str, error: DPFlowError) -> None:
    """Log that storage is read in place of a server: as a warning, once, where a setting has to be changed for it.

    A server that is not there, or does not answer, may come back, and is no reason to warn.
    """
    if isinstance(error, OptionError) and str(error) not in _WARNED:
        _WARNED.add(str(error))
        DATASETS.warning("%s: %s", what, error)
    else:
        DATASETS.info("%s: %s", what, error)

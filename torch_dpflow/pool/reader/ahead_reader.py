"""Reads samples that a server reads ahead: from mapped memory, or over a data connection from another host."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torch_dpflow.errors import MessageError, PoolFullError, UsageError
from torch_dpflow.log import DATASETS
from torch_dpflow.pool.messages import (
    MAX_ANNOUNCED,
    MAX_RECORDS,
    ON_ITS_WAY,
    AheadOpened,
    AheadPlaces,
    AnnounceAccessPlan,
    ConfirmAhead,
    GetAheadPlaces,
    OpenAhead,
    memory_name,
)
from torch_dpflow.pool.transport.control_connection import PoolConnection
from torch_dpflow.pool.transport.data_connection import WantedRecord
from torch_dpflow.pool.transport.data_reader import DataReader
from torch_dpflow.pool.transport.segments import map_sealed

#: Record, offset and length.
AheadRecord: TypeAlias = tuple[int, int, int]


class RemoteMemory:
    """Memory of another host's server that samples are read ahead into."""

    def __init__(self, data_reader: DataReader, server: str) -> None:
        self._data_reader, self._server = data_reader, server

    def read(self, number: int, there: Sequence[AheadRecord]) -> dict[int, bytes]:
        """Return the requested records that have arrived. number: of the memory."""
        filled = [one for one in there if one[2]]
        name, servers = memory_name(number), [self._server] * len(filled)
        contents = self._data_reader.read(name, servers, [WantedRecord(one[1], one[2]) for one in filled])
        self._data_reader.gone.discard(name)
        empty = {record: b"" for record, _, length in there if not length}
        return empty | {one[0]: content for one, content in zip(filled, contents) if isinstance(content, bytes)}


class AheadReader:
    """Reads one dataset for one process, one call at a time.

    silence_s: after this long without a sample, the rest comes from storage, seconds.
    """

    def __init__(self, identity: bytes, silence_s: float) -> None:
        self._identity, self._silence_s = identity, silence_s
        #: Mapped memory, and its number.
        self._memory: mmap.mmap | None = None
        self._number = 0

    def announce(
        self,
        connection: PoolConnection,
        plan: str,
        keys: npt.NDArray[np.integer[Any]],
        spread: int,
        extends: bool,
    ) -> None:
        """Announce the order in which records are read. Raises as `PoolConnection.request`.

        extends: append to the plan without waiting for the server, as a training loop draws it.
        """
        numbers = keys.astype("<i4")
        for first in range(0, max(len(numbers), not extends), MAX_ANNOUNCED):
            part = AnnounceAccessPlan(
                identity=self._identity,
                plan=plan,
                first=first,
                total=len(numbers),
                spread=spread,
                extends=extends,
                records=numbers[first : first + MAX_ANNOUNCED].tobytes(),
            )
            try:
                if extends:
                    connection.post(part)
                else:
                    connection.request(part)
            except (UsageError, PoolFullError) as error:  # the server has no memory for it
                DATASETS.info("the pool does not read ahead: %s", error)
                return

    def read(
        self, connection: PoolConnection, plan: str, records: Sequence[int], far: RemoteMemory | None
    ) -> dict[int, bytes]:
        """Return the requested records that the server has read ahead or reads now.

        far: the server's memory, if it is on another host.

        Raises as `PoolConnection.request`.
        """
        found: dict[int, bytes] = {}
        left = list(dict.fromkeys(records))
        deadline = time.monotonic() + self._silence_s
        try:
            while left and time.monotonic() < deadline:
                asked, rest = left[:MAX_RECORDS], left[MAX_RECORDS:]
                places, _ = connection.request(GetAheadPlaces(self._identity, plan, asked))
                assert isinstance(places, AheadPlaces)
                there = [one for one in zip(asked, places.offsets, places.lengths) if one[2] >= 0]
                if far is None:
                    copied = self._copies(connection, places.memory, there)
                else:
                    copied = far.read(places.memory, there)
                if copied:
                    connection.request(ConfirmAhead(self._identity, [*copied]))
                    found |= copied
                    deadline = time.monotonic() + self._silence_s
                left = [one for one, length in zip(asked, places.lengths) if length == ON_ITS_WAY] + rest
        except (UsageError, PoolFullError):  # the plan of this process or its parent has ended
            pass
        return found

    def _copies(self, connection: PoolConnection, number: int, there: Sequence[AheadRecord]) -> dict[int, bytes]:
        if not there:
            return {}
        memory = self._mapped(connection, number)
        if any(not 0 <= offset <= offset + length <= len(memory) for _, offset, length in there):
            raise MessageError("the pool reported a place outside of its memory")
        return {record: memory[offset : offset + length] for record, offset, length in there}

    def _mapped(self, connection: PoolConnection, number: int) -> mmap.mmap:
        if self._memory is None or number != self._number:
            opened, fds = connection.request(OpenAhead(self._identity))
            try:
                assert isinstance(opened, AheadOpened)
                self._memory, self._number = map_sealed(fds[0]), opened.memory
            except (OSError, ValueError, IndexError) as error:
                raise MessageError(f"memory of the pool cannot be mapped: {error}") from error
            finally:
                for fd in fds:
                    os.close(fd)
            if number != self._number:
                raise UsageError(f"memory {number} of the pool is gone")
        return self._memory

"""A connection to the pool of this host: what commands and readers ask a server for."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from torch_dpflow.dataservice.protocol import (
    ANSWERS,
    MOST_REGIONS,
    AnySource,
    CountReads,
    ListSets,
    PoolAnswer,
    PoolRefusal,
    PoolRequest,
    PreloadSet,
    SetInfo,
    SetList,
    UnloadSet,
    check_private,
    find_directory,
    receive,
    send,
    socket_path,
)
from torch_dpflow.errors import MessageError, PeerLostError

#: A server that does not answer for so long is taken for dead: by commands, seconds.
_SILENCE_S = 60.0
_POLL_S = 0.1


class PoolConnection:
    """One connection to a server. Thread-safe: one call at a time.

    silence_s: how long an answer may take, seconds.

    Raises:
        PeerLostError: there is no server, or it does not answer.
        OptionError: others may enter the directory of its socket.
    """

    def __init__(self, address: str | os.PathLike[str] = "auto", *, silence_s: float = _SILENCE_S) -> None:
        directory = find_directory(address)
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(silence_s)
        try:
            check_private(directory)
            self._socket.connect(socket_path(directory))
        except OSError as error:
            self._socket.close()
            raise PeerLostError(
                f"no server of the pool answers at {directory} ({error.strerror or error}); start one: "
                "dpflow pool serve --memory 8GiB"
            ) from None
        except BaseException:
            self._socket.close()
            raise

    def ask(self, request: PoolRequest) -> tuple[PoolAnswer, list[int]]:
        """The server's answer, and the descriptors that came with it, which the caller closes.

        Raises:
            PeerLostError: the server has died, or does not answer; the connection is closed.
            DPFlowError: it refuses, by the class that it names.
        """
        with self._lock:
            try:
                send(self._socket, request)
                answer, fds = receive(self._socket, ANSWERS, MOST_REGIONS)
            except (OSError, MessageError, PeerLostError) as error:
                # An answer that came later would be taken for that of the next request.
                self._socket.close()
                raise PeerLostError(f"the server of the pool does not answer: {error}") from error
        if isinstance(answer, PoolRefusal):
            raise answer.error()
        return answer, fds

    def tell(self, message: CountReads) -> bool:
        """Send what has no answer, without waiting; whether it was sent."""
        with self._lock:
            try:
                self._socket.send(msgspec.msgpack.encode(message), socket.MSG_DONTWAIT)
            except OSError:  # it is full or gone, which the next request will tell
                return False
        return True

    def contents(self) -> SetList:
        """Every set, and the memory that is free."""
        found: dict[bytes, SetInfo] = {}
        first = 0
        while True:
            answer, _ = self.ask(ListSets(first))
            assert isinstance(answer, SetList)
            first += len(answer.sets)
            found |= {one.identity: one for one in answer.sets}
            if not answer.sets or first >= answer.total:
                return msgspec.structs.replace(answer, sets=[*found.values()])

    def preload(
        self,
        source: AnySource,
        identity: bytes,
        *,
        whole: bool,
        progress: Callable[[SetInfo], None] = lambda info: None,
    ) -> SetInfo:
        """Have a set held until it is unloaded; returns once every sample was read, or could not be.

        Raises PoolFullError: there is no room for the whole set; and what `ask` does.
        """
        request = PreloadSet(source=source, identity=identity, is_explicit=True, whole=whole)
        while True:
            info, _ = self.ask(request)
            assert isinstance(info, SetInfo)
            progress(info)
            if info.is_placed and info.loaded + info.failed >= info.placed:
                return info
            time.sleep(_POLL_S)

    def unload(self, identity: bytes) -> SetList:
        """Give a set up. Raises UsageError: it is not there."""
        answer, _ = self.ask(UnloadSet(identity))
        assert isinstance(answer, SetList)
        return answer

    def close(self) -> None:
        """Close it; the server then knows that this reader has ended."""
        self._socket.close()

    def __enter__(self) -> PoolConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""What workers elsewhere load, as bytes: pickled once, and sent to each in pieces."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch_dpflow._version import __version__
from torch_dpflow.errors import MessageError, NotPicklableError
from torch_dpflow.remote.parcel.script import pack
from torch_dpflow.remote.wire.headers import PIECE_BYTES, PROTOCOL_VERSION
from torch_dpflow.remote.worker.batches import LoadSpec


class RemoteContent:
    """A `LoadSpec` on its way to workers.

    Raises:
        NotPicklableError: it cannot be sent.
    """

    def __init__(self, spec: LoadSpec) -> None:
        try:
            data = pack(spec)
        except Exception as error:
            raise NotPicklableError(
                f"the dataset, collate_fn or worker_init_fn cannot be sent: {type(error).__name__}: {error}. Leave out "
                "open files, locks and connections, and make them where they are first used"
            ) from error
        self.digest, self.nbytes = _digest(data), len(data)
        self.code_digest, self.code_nbytes = "", 0
        self._contents = {self.digest: memoryview(data)}

    def piece(self, digest: str, offset: int) -> memoryview:
        """A piece that begins here. Raises MessageError if there is none."""
        data = self._contents.get(digest)
        if data is None or not 0 <= offset < data.nbytes or offset % PIECE_BYTES:
            raise MessageError("it asks for a piece of a content which is not there")
        return data[offset : offset + PIECE_BYTES]

    def unfit(self, versions: Mapping[str, str]) -> str:
        """Why a member with these versions cannot load it; empty if it can."""
        return ""


def other_release(version: int) -> str:
    """Why a member is refused that speaks another version of the protocol; empty if it does not."""
    if version == PROTOCOL_VERSION:
        return ""
    return (
        f"it speaks version {version} of the protocol and this process {PROTOCOL_VERSION}: install torch_dpflow "
        f"{__version__} where members run"
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

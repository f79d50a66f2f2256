"""What workers elsewhere load, as bytes that each is sent in pieces."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from torch_dpflow._version import __version__
from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.messages.headers import PIECE_BYTES, PROTOCOL_VERSION
from torch_dpflow.log import LOADER
from torch_dpflow.remote.shipping.fit import missing_text, unfit, versions_here, warnings_of


class RemoteContent:
    """What each worker is sent.

    Args:
        data: what it loads, pickled.
        code: the archive of the user's modules that this needs, see `code_bundle`; empty: none.
    """

    def __init__(self, data: bytes | memoryview, code: bytes | memoryview = b"") -> None:
        self.digest, self.nbytes = hashlib.sha256(data).hexdigest(), len(data)
        self.code_digest, self.code_nbytes = hashlib.sha256(code).hexdigest() if len(code) else "", len(code)
        self._contents = {self.digest: memoryview(data), self.code_digest: memoryview(code)}
        self._versions = versions_here()
        self._warned: set[str] = set()

    def piece(self, digest: str, offset: int) -> memoryview:
        """A piece that begins here. Raises MessageError if there is none."""
        data = self._contents.get(digest)
        if data is None or not 0 <= offset < data.nbytes or offset % PIECE_BYTES:
            raise MessageError("it asks for a piece of a content which is not there")
        return data[offset : offset + PIECE_BYTES]

    def unfit(self, versions: Mapping[str, str]) -> str:
        """Why a member with these versions cannot load it, and what to do; empty if it can."""
        reason = unfit(versions, self._versions)
        for text in () if reason else warnings_of(versions, self._versions):
            if text not in self._warned:
                self._warned.add(text)
                LOADER.warning("%s", text)
        return reason

    def missing(self, modules: Sequence[str]) -> str:
        """Why a member without these modules cannot load it, and what to do."""
        return missing_text(name for name in modules if name.replace(".", "").isidentifier())


def other_release(version: int) -> str:
    """Why a member is refused that speaks another version of the protocol; empty if it does not."""
    if version == PROTOCOL_VERSION:
        return ""
    return (
        f"it speaks version {version} of the protocol and this process {PROTOCOL_VERSION}: install torch_dpflow "
        f"{__version__} where members run"
    )

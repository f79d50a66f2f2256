"""The content of a flow whose workers a platform runs: what they load, and behind it the user's modules."""

from __future__ import annotations

import struct

from torch_dpflow.errors import MessageError

#: Ends such a content: the length of the archive before it, and a mark. A pickle ends with another byte.
_END = struct.Struct("<Q8s")
_MARK = b"dpflow/1"


def join(pickled: bytes, code: bytes) -> bytes:
    """A content of a pickle and an archive of modules, which may be empty. Who unpickles it reads the former only."""
    return b"".join((pickled, code, _END.pack(len(code), _MARK)))


def split(content: memoryview) -> tuple[memoryview, memoryview]:
    """The pickle and the archive. Raises MessageError for a content that was made for workers of the cluster's host."""
    if content.nbytes >= _END.size:
        length, mark = _END.unpack(content[-_END.size :])
        if mark == _MARK and length <= content.nbytes - _END.size:
            pickled = content.nbytes - _END.size - length
            return content[:pickled], content[pickled : pickled + length]
    raise MessageError(
        "the flow was registered by a job that did not know where its workers run: give it the connection file "
        "that `dpflow up` has written, and a new version of the flow"
    )

"""The content of a flow whose workers a platform runs."""

from __future__ import annotations

import io

import pytest

from torch_dpflow.errors import MessageError
from torch_dpflow.remote.shipping.content_pack import code_in, join_content, pack, split_content, unpack


@pytest.mark.parametrize("code", [b"", b"PK-archive"])
def test_both_parts_come_out_as_they_went_in_and_who_unpickles_needs_not_know(code: bytes) -> None:
    pickled = pack([1, 2])
    content = join_content(pickled, code)
    assert [bytes(part) for part in split_content(memoryview(content))] == [pickled, code]
    assert unpack(io.BytesIO(content)) == [1, 2]
    assert code_in(io.BytesIO(content)) == code


@pytest.mark.parametrize("content", [b"", pack([1, 2]), join_content(b"", b"x" * 9)[10:]])
def test_what_is_no_such_content_is_refused_with_what_to_do(content: bytes) -> None:
    with pytest.raises(MessageError, match="give it the connection file"):
        split_content(memoryview(content))
    assert code_in(io.BytesIO(content)) == b""

"""Header decoding: valid headers return as they went, and nothing else gets through."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torch_dpflow._core.decoding import msgpack_decoder
from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.messages import headers as messages
from torch_dpflow.ipc.messages.headers import Header, decode, decode_body, encode, encode_body

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.bin"))
VALID = [path for path in CORPUS if path.name.startswith("valid-")]
BAD = [path for path in CORPUS if path.name.startswith("bad-")]
TAGS = sorted(kind.__struct_config__.tag for kind in get_args(Header))


def names(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


@pytest.mark.parametrize("path", VALID, ids=names(VALID))
def test_valid_header_of_the_corpus_returns_as_it_went(path: Path) -> None:
    content = path.read_bytes()
    assert encode(decode(content)) == content
    assert encode(decode(memoryview(bytearray(content)))) == content


@pytest.mark.parametrize("path", BAD, ids=names(BAD))
def test_bad_header_of_the_corpus_is_refused(path: Path) -> None:
    with pytest.raises(MessageError):
        decode(path.read_bytes())


def test_corpus_has_every_header_of_calls() -> None:
    seen = {type(decode(path.read_bytes())).__name__ for path in VALID}
    assert seen >= {
        "Handshake",
        "Welcome",
        "NoSession",
        "Reading",
        "Request",
        "Reply",
        "Failure",
        "Inquiry",
        "Missing",
    }


@given(st.binary(max_size=300))
def test_any_bytes_are_a_header_or_a_message_error(content: bytes) -> None:
    survives(content)


@given(st.sampled_from(VALID), st.integers(0, 200), st.binary(max_size=8))
def test_header_with_bytes_replaced_is_a_header_or_a_message_error(path: Path, position: int, patch: bytes) -> None:
    content = bytearray(path.read_bytes())
    position %= len(content) + 1
    content[position : position + len(patch)] = patch
    survives(bytes(content))


@given(st.sampled_from(VALID), st.integers(0, 200))
def test_header_cut_short_is_refused(path: Path, length: int) -> None:
    content = path.read_bytes()
    with pytest.raises(MessageError):
        decode(content[: length % len(content)])


fields = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=10)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(st.sampled_from(TAGS), st.lists(fields, max_size=8))
@example(10, [1, "m", float("nan")])
def test_any_fields_are_a_header_or_a_message_error(tag: int, content: list[Any]) -> None:
    survives(msgspec.msgpack.encode([tag, *content]))


def survives(content: bytes) -> None:
    try:
        header = decode(content)
    except MessageError:
        return
    assert encode(decode(encode(header))) == encode(header)


def test_claims_of_gigabytes_allocate_nothing() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    claims = [path.read_bytes() for path in BAD if "claim" in path.name]
    assert len(claims) >= 6
    for content in claims * 50:
        with pytest.raises(MessageError):
            decode(content)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


def test_header_above_the_limit_is_refused_unread() -> None:
    huge = messages.Reply(1, encode_body(bytes(messages.MAX_HEADER_BYTES)))
    with pytest.raises(MessageError, match="let bulk travel in payload frames"):
        encode(huge)
    with pytest.raises(MessageError, match="are allowed"):
        decode(bytes(messages.MAX_HEADER_BYTES + 1))


def test_more_calls_than_allowed_are_refused() -> None:
    with pytest.raises(MessageError, match="length <= 65536"):
        decode(msgspec.msgpack.encode([13, [0] * 65_537]))


@given(fields)
def test_body_returns_as_it_went(body: Any) -> None:
    decoder = msgpack_decoder(Any)
    again = decode_body(encode_body(body), decoder)
    assert encode_body(again) == encode_body(body)


def test_body_of_another_type_is_refused() -> None:
    with pytest.raises(MessageError, match="Expected `int`"):
        decode_body(encode_body("text"), msgpack_decoder(int))


@pytest.mark.parametrize("opening", [b"\x91", b"\x92\x01", b"\x81\xa0", b"\xdc\x00\x01"])
@pytest.mark.parametrize("levels", [99, 101, 500, 5_000])
def test_a_message_is_nested_as_deep_with_every_python(opening: bytes, levels: int) -> None:
    """99 levels in a list of fields; more would be taken by later versions than 3.11, or by shallow callers."""
    body = msgspec.Raw(opening * levels + b"\x00")
    header = encode(messages.Reply(1, body))
    if levels == 99:
        reply = decode(header)
        assert isinstance(reply, messages.Reply)
        assert decode_body(reply.body, msgpack_decoder(Any)) is not None
        return
    for read in (lambda: decode(header), lambda: decode_body(body, msgpack_decoder(Any))):
        with pytest.raises(MessageError, match="nested deeper than 100 levels"):
            read()


def test_tags_are_unique() -> None:
    assert len(TAGS) == len(set(TAGS))

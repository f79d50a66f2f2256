"""The launch spec of a remote worker: what it carries, and that it shows no secret."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.errors import MessageError, OptionError
from torch_dpflow.ipc.messages.remote_worker import (
    MAX_ADDRESSES,
    MAX_LAUNCH_SPEC_BYTES,
    LaunchSpec,
    decode_launch_spec,
    encode_launch_spec,
)

SECRET = "s3cr3t-key-of-one-member-0123456789-ABCD"


def launch_spec(**fields: Any) -> LaunchSpec:
    given = {
        "name": "dpf-0c0ffee0-0123456789-0-1",
        "role": "worker",
        "number": 0,
        "incarnation": 1,
        "addresses": ["tcp://dpflow.internal:7700"],
        "server_public": "s" * 40,
        "public": "p" * 40,
        "secret": SECRET,
        "lifetime_s": None,
        "silence_s": 30.0,
    }
    return LaunchSpec(**{**given, **fields})


def test_a_launch_spec_arrives_as_it_was() -> None:
    one = launch_spec(lifetime_s=900.0)
    data = encode_launch_spec(one)
    assert decode_launch_spec(data) == one
    assert json.loads(data)["lifetime_s"] == 900.0


def test_a_launch_spec_does_not_show_its_secret() -> None:
    assert SECRET not in repr(launch_spec())
    with pytest.raises(OptionError, match="fewer or shorter addresses") as raised:
        encode_launch_spec(launch_spec(addresses=["tcp://" + "x" * 190] * MAX_ADDRESSES * 3))
    assert SECRET not in str(raised.value)


def test_a_launch_spec_of_another_release_says_what_to_do() -> None:
    other = json.loads(encode_launch_spec(launch_spec())) | {"version": 3, "added": 1}
    with pytest.raises(MessageError, match="version 3; this torch_dpflow reads version 2: install the same release"):
        decode_launch_spec(json.dumps(other).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"name": ""},
        {"role": "king"},
        {"number": -1},
        {"addresses": []},
        {"addresses": ["x"] * (MAX_ADDRESSES + 1)},
        {"secret": SECRET + "x"},
        {"silence_s": -1.0},
        {"added": 1},
        {"version": "1"},
    ],
)
def test_what_is_no_launch_spec_is_refused_and_not_quoted(change: dict[str, Any]) -> None:
    data = json.dumps(json.loads(encode_launch_spec(launch_spec())) | change).encode()
    with pytest.raises(MessageError) as raised:
        decode_launch_spec(data)
    assert "s3cr3t" not in str(raised.value)


@pytest.mark.parametrize("levels", [101, 500, 100_000])
def test_a_launch_spec_is_nested_as_deep_with_every_python(levels: int) -> None:
    head = encode_launch_spec(launch_spec())[:-1] + b',"added":'
    levels = min(levels, (MAX_LAUNCH_SPEC_BYTES - len(head) - 1) // 2)
    with pytest.raises(MessageError, match="not a launch spec: it is nested deeper than 100 levels"):
        decode_launch_spec(head + b"[" * levels + b"]" * levels + b"}")


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode_launch_spec(data)


def test_too_many_bytes_are_not_read() -> None:
    with pytest.raises(MessageError, match="at most"):
        decode_launch_spec(b" " * MAX_LAUNCH_SPEC_BYTES + encode_launch_spec(launch_spec()))

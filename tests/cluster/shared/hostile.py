"""Messages that no service should get: random, mutated, cut short, out of range, too large by their own account."""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from torch_dpflow.cluster.messages.coordinator import Access, ContentPiece, ContentRequest, FlowSpec, Scale
from torch_dpflow.cluster.messages.node import Heartbeat
from torch_dpflow.cluster.messages.router import (
    DrawSamples,
    EpochPlace,
    JobFigures,
    JobHeartbeat,
    JobId,
    JobRank,
    Join,
    RegisterShard,
    StartEpoch,
)
from torch_dpflow.cluster.messages.shard import Ask
from torch_dpflow.errors import PeerLostError
from torch_dpflow.ipc.messages.headers import PROTOCOL_VERSION, Handshake, PayloadOffer, encode
from torch_dpflow.ipc.transport import Connection, TransportOptions, connect

_pack = msgspec.msgpack.Encoder().encode
CORPUS = [
    path.read_bytes() for path in sorted((Path(__file__).parents[2] / "ipc" / "messages" / "corpus").glob("*.bin"))
]
#: In place of any field of any message.
VALUES: list[Any] = [
    *(-1, 0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(0.5, -1e308, float("nan"), float("inf"), True, None),
    *("", "x", "x" * 250, "../../etc/passwd", "\0", "\ud7ff\N{PILE OF POO}", b"", bytes(100)),
    *([], [0] * 20_000, [[[[[[[[]]]]]]]], [-1], [2**64 - 1], {}, {"a": {"b": []}}, [None] * 5),
]
#: The tags of all headers, and some that there are not.
TAGS = [*range(8), *range(9, 16), *range(19, 26), *range(29, 38), 99, -1, 2**40]


class Fuzzer:
    """Draws messages for the services of one flow.

    They name jobs that are not there and generations that are past. What only somebody would send who is trusted
    and lies is left out: one cluster is one trust domain, whose members may stop it and end each other's jobs.

    Args:
        job: one that reads meanwhile; messages come that claim an older generation of it.
        shard: the id of one that serves.
    """

    def __init__(self, chance: random.Random, spec: FlowSpec, job: str, shard: str) -> None:
        self._chance = chance
        self._job = job
        other = msgspec.structs.replace(spec, name="fuzz/flow", content="a" * 64)
        self._bodies: dict[str, list[tuple[str, Any]]] = {
            "coordinator": [
                ("register", other),
                ("store", ContentPiece("a" * 64, 0, 9)),
                ("content", ContentRequest("b" * 64, 0)),
                ("access", Access("fuzz/flow", 1)),
                ("scale", Scale("fuzz/flow", 2, 4)),
                ("delete", "fuzz/flow:v1"),
                ("flows", None),
                ("processes", None),
                ("heartbeat", Heartbeat("coordinator", 1, "ipc:///tmp/x", {})),
            ],
            "router": [
                ("register_shard", RegisterShard(shard, 1, "tcp://127.0.0.1:1", "0" * 32)),
                ("join", Join("intruder", spec.instance, 9, 3, 8, JobRank("intruder", 1, 2))),
                (
                    "start",
                    StartEpoch(JobId("intruder", 5, spec.instance), [EpochPlace(1, 2), EpochPlace(0, 5)]),
                ),
                ("draw", DrawSamples(JobId("intruder", 5, spec.instance), 0, 0, 16)),
                (
                    "heartbeat",
                    JobHeartbeat(JobId("intruder", 5, spec.instance), JobFigures(1.0, 2.0, 3, 4, 5)),
                ),
                ("leave", JobId("intruder", 5, spec.instance)),
                ("table", None),
            ],
            "shard": [
                ("want", Ask(JobId("intruder", 5, spec.instance), 1, 0, 0, [1, 2], [3, 4], [])),
                ("fetch", Ask(JobId("intruder", 5, spec.instance), 1, 0, 0, [1, 2], [3, 4], [7], 1)),
                ("heartbeat", JobId("intruder", 5, spec.instance)),
                ("leave", JobId("intruder", 5, spec.instance)),
            ],
        }

    def message(self, role: str) -> list[bytes]:
        """One message for a service of this role."""
        chance = self._chance
        kind = chance.random()
        if kind < 0.15:
            return self._frames(1 + chance.randrange(5))
        if kind < 0.35:
            return [self._mutated(chance.choice(CORPUS)), *self._frames(chance.randrange(3))]
        if kind < 0.5:
            header = [chance.choice(TAGS), *(self._value() for _ in range(chance.randrange(8)))]
            return [_pack(header), *self._frames(chance.randrange(3))]
        if kind < 0.55:
            offer = PayloadOffer(chance.choice([1, os.getpid(), 2**40]), False, msgspec.Raw(_pack(self._value())))
            return [encode(Handshake(chance.choice([0, PROTOCOL_VERSION, PROTOCOL_VERSION, 2**40]), offer))]
        return self._call(role)

    def _call(self, role: str) -> list[bytes]:
        """A request that is almost right."""
        chance = self._chance
        method, body = chance.choice(self._bodies[role])
        if chance.random() < 0.1:
            method = chance.choice(["stopped", "", "__init__", "x" * 201, "beat\0"])
        plain = msgspec.to_builtins(body, builtin_types=(bytes,))
        plain = self._renamed(plain)
        if chance.random() < 0.7:
            plain = self._spoilt(plain)
        packing = chance.choice([None, None, None, [[2**62], None], [[-(2**40)], [1, 0, 4096, 4096, 1, 0]]])
        header: list[Any] = [10, chance.randrange(1 << 20), method, 0, [], 1.0, plain, packing]
        if chance.random() < 0.2:
            header[chance.randrange(len(header))] = self._value()
        frame = _pack(header)
        if chance.random() < 0.1:
            frame = self._mutated(frame)
        return [frame, *self._frames(chance.randrange(2))]

    def _renamed(self, plain: Any) -> Any:
        """The intruder under any of many names, or as an older self of the job that reads."""
        if isinstance(plain, list | tuple):
            return [self._renamed(part) for part in plain]
        if plain == "intruder":
            return self._chance.choice([f"intruder {self._chance.randrange(50)}", "intruder", self._job])
        return plain

    def _spoilt(self, plain: Any) -> Any:
        """The same with another value somewhere."""
        if isinstance(plain, list) and plain and self._chance.random() < 0.8:
            place = self._chance.randrange(len(plain))
            if plain[0] == self._job:
                return plain  # with a generation above its own it would be the job
            return [*plain[:place], self._spoilt(plain[place]), *plain[place + 1 :]]
        return self._value()

    def _value(self) -> Any:
        return self._chance.choice(VALUES)

    def _frames(self, count: int) -> list[bytes]:
        sizes = [0, 1, 7, 100, 1000]
        return [self._chance.randbytes(self._chance.choice(sizes)) for _ in range(count)]

    def _mutated(self, data: bytes) -> bytes:
        """Bits flipped, bytes put in or taken out, or cut short."""
        chance, changed = self._chance, bytearray(data)
        for _ in range(chance.randrange(4)):
            place = chance.randrange(len(changed) + 1)
            match chance.randrange(4):
                case 0 if place < len(changed):
                    changed[place] ^= 1 << chance.randrange(8)
                case 1:
                    changed[place:place] = chance.randbytes(chance.randrange(1, 9))
                case 2:
                    del changed[place : place + chance.randrange(1, 9)]
                case _:
                    del changed[place:]
        return bytes(changed)


class Fiend:
    """A connection that says whatever it is given, under an identity like that of a client or of a worker."""

    def __init__(self, address: str, options: TransportOptions, chance: random.Random) -> None:
        identity = chance.choice([None, b"0/1", b"%d/%d/%x" % (chance.randrange(9), 1, 2**64 - 1), b"\xff" * 255])
        self._connection: Connection = connect(address, identity=identity, options=options)
        if chance.random() < 0.7:
            self.say([[encode(Handshake(PROTOCOL_VERSION, PayloadOffer(os.getpid())))]])

    def say(self, messages: Sequence[list[bytes]]) -> int:
        """How many answers there were by then."""
        answers = 0
        for frames in messages:
            with suppress(PeerLostError):
                self._connection.send(frames)
            while self._connection.receive(0) is not None:
                answers += 1
        return answers

    def close(self) -> None:
        self._connection.close()


#: How every ZMTP 3.0 connection begins.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\0" + bytes(31)


def raw_noise(chance: random.Random) -> bytes:
    """Bytes for the socket itself."""
    command = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER\x08Identity" + bytes(4)
    ready = bytes([4, len(command)]) + command
    return chance.choice(
        [
            b"GET / HTTP/1.1\r\n\r\n",
            chance.randbytes(chance.randrange(1, 2000)),
            GREETING[: chance.randrange(64)],
            GREETING + chance.randbytes(chance.randrange(1, 500)),
            GREETING + ready + chance.randbytes(chance.randrange(1, 500)),
            # Frames that claim 2^31 and 2^63 bytes, and one of many parts whose last never comes.
            GREETING + ready + b"\x02" + struct.pack(">Q", 1 << 31) + bytes(100),
            GREETING + ready + b"\x02" + struct.pack(">Q", 1 << 63) + bytes(100),
            GREETING + ready + b"\x01\x01x" * 200,
        ]
    )


def send_raw(address: str, noise: bytes) -> None:
    """Connect to a service's socket without ZeroMQ, say this, and go."""
    if address.startswith("ipc://"):
        raw = socket.socket(socket.AF_UNIX)
        target: Any = address.removeprefix("ipc://")
    else:
        raw = socket.socket()
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        target = (host, int(port))
    with raw, suppress(ConnectionError):
        raw.connect(target)
        raw.sendall(noise)


def bursts(total: int, size: int) -> Iterator[int]:
    """The sizes of bursts that make up a total."""
    while total > 0:
        yield min(size, total)
        total -= size

"""Decoders are built one at a time: msgspec ends the process where threads first use a struct at once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import torch_dpflow

#: Threads that decode structs for the first time, all at once.
SCRIPT = """
import sys, threading, msgspec
from torch_dpflow._core.decoding import converted, json_decoder, msgpack_decoder

ways = {
    "json": lambda kind, value: json_decoder(kind).decode(msgspec.json.encode(value)),
    "msgpack": lambda kind, value: msgpack_decoder(kind).decode(msgspec.msgpack.encode(value)),
    "convert": lambda kind, value: converted(value, kind),
    "none": lambda kind, value: msgspec.json.decode(msgspec.json.encode(value), type=kind),
}
sys.setswitchinterval(1e-6)
value = {f"f{number}": {"inner": number} for number in range(20)}
for number in range(100):
    fields = [(name, msgspec.defstruct("Inner", [("inner", int)])) for name in value]
    kind = msgspec.defstruct("Kind", fields)
    barrier, found = threading.Barrier(4), []

    def decode():
        barrier.wait()
        found.append(msgspec.to_builtins(ways[sys.argv[1]](kind, value)))

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert found == [value] * 4
"""


@pytest.mark.parametrize("how", ["json", "msgpack", "convert"])
def test_threads_that_decode_a_struct_for_the_first_time(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_else_builds_decoders() -> None:
    folder = Path(torch_dpflow.__file__).parent
    builds = re.compile(r"msgspec\.(convert\(|(json|msgpack)\.(Decoder\([^)]|decode\([^#\n]*type=))")
    files = [path for path in folder.rglob("*.py") if builds.search(path.read_text(encoding="utf-8"))]
    assert [path.relative_to(folder).as_posix() for path in files] == ["_core/decoding.py"]

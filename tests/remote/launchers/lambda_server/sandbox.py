"""An environment of a function: a process of AWS's own runtime client, and the Runtime API that it talks to."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.new_process import ROOT, Interpreter

_PREFIX = "/2018-06-01/runtime"


@dataclass
class Invocation:
    """One call of the function, and its answer."""

    id: str
    payload: bytes
    deadline: float
    body: bytes = b""
    is_error: bool = False
    answered: threading.Event = field(default_factory=threading.Event)

    def answer(self, body: bytes, *, is_error: bool = False) -> None:
        if not self.answered.is_set():
            self.body, self.is_error = body, is_error
            self.answered.set()

    def fail(self, kind: str, text: str) -> None:
        self.answer(json.dumps({"errorType": kind, "errorMessage": text}).encode(), is_error=True)


class QuickHTTPServer(ThreadingHTTPServer):
    """Answers each request in a thread of its own, without the delays of a stream of small packets."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: clients may leave as they like."""


class QuickHandler(BaseHTTPRequestHandler):
    """Reads and answers JSON."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def read_body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def send(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


class Sandbox:
    """Runs one invocation at a time, and is frozen between two."""

    def __init__(self, function: Mapping[str, Any], command: list[str], region: str) -> None:
        self._work: queue.Queue[Invocation | None] = queue.Queue()
        self._current: Invocation | None = None
        self.function = function
        self.is_dead = False
        #: Set once its process has asked for work, or has ended.
        self.is_up = threading.Event()
        self._api = QuickHTTPServer(("127.0.0.1", 0), _handler_of(self))
        threading.Thread(target=self._api.serve_forever, args=(0.05,), daemon=True, name="runtime-api").start()
        self.directory = tempfile.mkdtemp(prefix="sandbox-")
        self.log = Path(self.directory, "log")
        with open(self.log, "wb") as log:
            self.process = Interpreter(
                [sys.executable, *command],
                env=self._env(region),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="sandbox")
        self._watcher.start()

    def invoke(self, invocation: Invocation) -> None:
        """Run one until it is answered, its process has ended, or its time is up."""
        self._current = invocation
        if self.is_dead:
            invocation.fail("Runtime.ExitError", f"RequestId: {invocation.id} Error: Runtime exited")
        self._work.put(invocation)
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)
        if not invocation.answered.wait(max(0.0, invocation.deadline - time.time())):
            timeout_s = self.function["Timeout"]
            invocation.fail(
                "Sandbox.Timedout",
                f"RequestId: {invocation.id} Error: Task timed out after {timeout_s:.2f} seconds",
            )
            self.end()
        self._current = None

    def workers(self) -> list[int]:
        """The processes of its workers."""
        return children_of(self.process.pid)

    def end(self) -> None:
        """Kill it, and what it has started: as a container ends."""
        for pid in [self.process.pid, *children_of(self.process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._watcher.join()
        self._work.put(None)
        self._api.shutdown()
        self._api.server_close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _env(self, region: str) -> dict[str, str]:
        """What Lambda gives, and nothing of this process."""
        host, port = self._api.server_address[:2]
        name = self.function["FunctionName"]
        return {
            "PATH": os.environ["PATH"],
            "LANG": "en_US.UTF-8",
            "TZ": ":UTC",
            "TMPDIR": self.directory,  # Lambda's /tmp
            "PYTHONPATH": str(ROOT),  # an image has it installed
            "OMP_NUM_THREADS": "1",
            "AWS_REGION": region,
            "AWS_ACCESS_KEY_ID": "ASIAOFTHEROLE",
            "AWS_SECRET_ACCESS_KEY": "of-the-role",
            "AWS_SESSION_TOKEN": "of-the-role",
            "AWS_LAMBDA_RUNTIME_API": f"{host!s}:{port}",
            "AWS_LAMBDA_FUNCTION_NAME": name,
            "AWS_LAMBDA_FUNCTION_VERSION": "$LATEST",
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(self.function["MemorySize"]),
            "AWS_LAMBDA_LOG_GROUP_NAME": f"/aws/lambda/{name}",
            "AWS_LAMBDA_LOG_STREAM_NAME": f"2026/11/23/[$LATEST]{self._api.server_address[1]}",
            "LAMBDA_TASK_ROOT": self.directory,
            **self.function.get("Environment", {}).get("Variables", {}),
        }

    def _watch(self) -> None:
        self.process.wait()
        self.is_dead = True
        self.is_up.set()
        if (current := self._current) is not None:
            current.fail("Runtime.ExitError", f"RequestId: {current.id} Error: Runtime exited")

    # -- for the Runtime API -------------------------------------------------------------------------------

    def next(self) -> Invocation | None:
        """The next invocation, for which its process waits frozen."""
        self.is_up.set()
        try:
            return self._work.get_nowait()
        except queue.Empty:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGSTOP)
        work = self._work.get()
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)
        return work

    def take_answer(self, request: str, body: bytes, *, is_error: bool) -> None:
        if (current := self._current) is not None and current.id == request:
            current.answer(body, is_error=is_error)

    def take_init_error(self, body: bytes) -> None:
        if (current := self._current) is not None:
            current.answer(body, is_error=True)


def children_of(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    found = []
    for task in Path("/proc").glob(f"{pid}/task/*/children"):
        with suppress(OSError):
            found += [int(one) for one in task.read_text().split()]
    return [*found, *[grandchild for child in found for grandchild in children_of(child)]]


def _handler_of(sandbox: Sandbox) -> type[QuickHandler]:
    class RuntimeApi(QuickHandler):
        def do_GET(self) -> None:
            assert self.path == f"{_PREFIX}/invocation/next", self.path
            if (work := sandbox.next()) is not None:
                self.send(200, work.payload, _headers_of(work, sandbox.function))

        def do_POST(self) -> None:
            body = self.read_body()
            *_, request, verb = self.path.removeprefix(_PREFIX).split("/")
            if self.path == f"{_PREFIX}/init/error":
                sandbox.take_init_error(body)
            else:
                assert verb in ("response", "error"), self.path
                sandbox.take_answer(request, body, is_error=verb == "error")
            self.send(202)

    return RuntimeApi


def _headers_of(work: Invocation, function: Mapping[str, Any]) -> dict[str, str]:
    return {
        "Content-Type": "application/json",
        "Lambda-Runtime-Aws-Request-Id": work.id,
        "Lambda-Runtime-Deadline-Ms": str(int(work.deadline * 1000)),
        "Lambda-Runtime-Invoked-Function-Arn": function["FunctionArn"],
        "Lambda-Runtime-Trace-Id": "Root=1-5759e988-bd862e3fe1be46a994272793",
    }

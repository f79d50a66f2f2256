"""Function Compute 3.0 without a cloud: an HTTP control plane for the vendor's real client, and real instances.

It knows what the launcher and the commands use: functions, their asynchronous configuration, invocations as tasks. It
checks signatures, expires keys, has a quota, and loses, delays or refuses answers where a test says so. What it cannot
show: how long a cold start takes, images and their pulls, VPCs, roles, billing.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote

from tests.remote.launchers.fc_server.instances import Instance, thaw
from tests.remote.launchers.fc_server.invocations import LIVE, Invocations, Place, Task
from tests.remote.launchers.fc_server.signature import is_signed, key_id_of

VERSION = "/2023-03-30"
_TASK_ID = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,127}", re.ASCII)

MOST_PAYLOAD = 128 * 1024


@dataclass
class Key:
    """An access key."""

    secret: str
    token: str = ""
    expired: bool = False


@dataclass
class Fault:
    """What becomes of one request: refused before anything is done, or done and not answered."""

    status: int = 0
    code: str = ""
    retry_after_ms: int = 0
    #: Done, and the connection closed.
    lose: bool = False


class Refusal(Exception):
    def __init__(self, status: int, code: str, message: str = "refused") -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class Signatures:
    """Which requests are let in: those signed with a key that is valid, each once. Thread-safe.

    keys: those that are valid, by their ids.
    """

    def __init__(self, keys: Mapping[str, Key]) -> None:
        self._keys = keys
        self._nonces: set[str] = set()
        self._lock = threading.Lock()

    def check(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> None:
        """Raise Refusal unless it is let in."""
        key = self._keys.get(key_id_of(headers))
        if key is None:
            raise Refusal(404, "InvalidAccessKeyId.NotFound", "Specified access key is not found.")
        if not is_signed(method, target, headers, body, key.secret):
            raise Refusal(400, "SignatureDoesNotMatch", "Specified signature does not match our calculation.")
        if (headers.get("x-acs-security-token") or "") != key.token or key.expired:
            raise Refusal(403, "InvalidSecurityToken.Expired", "Specified SecurityToken is expired.")
        nonce = headers["x-acs-signature-nonce"]
        with self._lock:
            if nonce in self._nonces:
                raise Refusal(400, "SignatureNonceUsed", "The request signature nonce has been used.")
            self._nonces.add(nonce)


class FunctionServer(Invocations):
    """The control plane of one account in one region.

    Args:
        keys: those that are valid, by their ids.
        cold_start_s: what a new instance takes beyond its processes' start, seconds.
        quota: most instances that run at once.
        queues: whether invocations above the quota wait; else they are refused.
        fork: whether instances are forks of one process that has torch, else each is started by its own command.
        prefix, near: runs a command where instances are, and the address at which they listen there.
        env: variables of instances.
    """

    def __init__(
        self,
        keys: Mapping[str, Key],
        *,
        cold_start_s: float = 2.0,
        quota: int = 100,
        queues: bool = False,
        fork: bool = True,
        prefix: Sequence[str] = (),
        near: str = "127.0.0.1",
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(cold_start_s, quota, Place(fork, prefix, near, dict(env or {})))
        self.keys, self.queues = dict(keys), queues
        self.configs: dict[str, dict[str, Any]] = {}
        self.tasks: dict[str, Task] = {}
        #: By the action, what becomes of the next requests.
        self.faults: dict[str, deque[Fault]] = {}
        #: All that was asked, as (action, status).
        self.log: list[tuple[str, int]] = []
        self._threads: list[threading.Thread] = []
        #: Raises Refusal unless a request may be served.
        self.check = Signatures(self.keys).check
        self._http = _Server(("127.0.0.1", 0), _Handler)
        self._http.owner = self
        self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> FunctionServer:
        self._start(self._http.serve_forever, 0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        for task in [*self.tasks.values()]:
            task.stop.set()
        for instance in self.instances():
            thaw(instance)
            instance.kill()
        for thread in self._threads:
            thread.join(30)
        self._templates.close()

    # --- for tests ---

    def fault(self, action: str, *faults: Fault) -> None:
        """What becomes of the next requests of this kind."""
        self.faults.setdefault(action, deque()).extend(faults)

    def instances(self) -> list[Instance]:
        """Those that run something, and those that wait."""
        with self._changed:
            idle = [one for some in self._idle.values() for one in some]
            return [
                *idle,
                *(task.instance for task in self.tasks.values() if task.instance and not task.ended),
            ]

    def live(self) -> list[Task]:
        with self._changed:
            return [task for task in self.tasks.values() if task.status in LIVE]

    def worker_seconds(self) -> float:
        """What would be billed."""
        now = time.monotonic()
        return sum((task.ended or now) - task.begun for task in self.tasks.values() if task.begun)

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, name="fc-server", daemon=True)
        self._threads.append(thread)
        thread.start()

    # --- requests ---

    def serve(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        """Do what is asked. Raises Refusal."""
        path, _, query = target.removeprefix(VERSION).partition("?")
        asked = {name: values[0] for name, values in parse_qs(query).items()}
        parts = [unquote(part) for part in path.strip("/").split("/")]
        match method, *parts:
            case "POST", "functions":
                return self._create(json.loads(body))
            case _, "functions", name, *_ if name not in self.functions:
                raise Refusal(404, "FunctionNotFound", f"function {name!r} does not exist")
            case "GET", "functions", name:
                return 200, _json(self.functions[name])
            case "PUT", "functions", name:
                self.functions[name].update(json.loads(body))
                self._drop_idle(name)
                return 200, _json(self.functions[name])
            case "DELETE", "functions", name:
                del self.functions[name]
                self.configs.pop(name, None)
                self._drop_idle(name)
                return 204, b""
            case "PUT", "functions", name, "async-invoke-config":
                self.configs[name] = json.loads(body)
                return 200, _json(self.configs[name])
            case "GET", "functions", name, "async-invoke-config":
                if name not in self.configs:
                    raise Refusal(404, "AsyncConfigNotExists", "async config not exists")
                return 200, _json(self.configs[name])
            case "POST", "functions", name, "invocations":
                return self._invoke(name, headers, body)
            case "GET", "functions", name, "async-tasks":
                return 200, _json(self._page(name, asked))
            case "GET", "functions", name, "async-tasks", id_:
                return 200, _json(self._task(id_).to_map())
            case "PUT", "functions", name, "async-tasks", id_, "stop":
                return self._stop(self._task(id_))
        raise Refusal(404, "PathNotSupported", f"{method} {target}")

    def _create(self, given: dict[str, Any]) -> tuple[int, bytes]:
        name = given["functionName"]
        if name in self.functions:
            raise Refusal(409, "FunctionAlreadyExists", f"function {name!r} already exists")
        self.functions[name] = {"timeout": 3, "instanceConcurrency": 1, **given}
        return 200, _json(self.functions[name])

    def _task(self, id_: str) -> Task:
        if id_ not in self.tasks:
            raise Refusal(404, "AsyncTaskNotFound", f"async task {id_!r} does not exist")
        return self.tasks[id_]

    def _page(self, function: str, asked: Mapping[str, str]) -> dict[str, Any]:
        with self._changed:
            found = [
                task.to_map()
                for task in self.tasks.values()
                if task.function == function and task.id.startswith(asked.get("prefix", ""))
                if asked.get("status") in (None, task.status)
            ]
        begin, limit = int(asked.get("nextToken", 0)), int(asked.get("limit", 20))
        more = {"nextToken": str(begin + limit)} if len(found) > begin + limit else {}
        return {"tasks": found[begin : begin + limit], **more}

    def _invoke(self, name: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        id_ = headers.get("x-fc-async-task-id", "")
        config = self.configs.get(name, {})
        if headers.get("x-fc-invocation-type") != "Async" or not config.get("asyncTask"):
            raise Refusal(400, "InvalidArgument", "this function takes asynchronous tasks")
        if not _TASK_ID.fullmatch(id_) or len(body) > MOST_PAYLOAD:
            raise Refusal(400, "InvalidArgument", "task id or payload")
        with self._changed:
            if id_ in self.tasks:
                raise Refusal(409, "AsyncTaskAlreadyExists", f"async task {id_!r} already exists")
            if not self.queues and len([one for one in self.tasks.values() if one.status in LIVE]) >= self.quota:
                raise Refusal(429, "ResourceExhausted", "instances exceed the limit")
            task = self.tasks[id_] = Task(id_, name, body)
        self._start(self._run, task, float(config.get("maxAsyncEventAgeInSeconds", 86400)))
        return 202, b""

    def _stop(self, task: Task) -> tuple[int, bytes]:
        with self._changed:
            if task.status not in LIVE:
                raise Refusal(412, "AsyncTaskFinished", f"async task {task.id!r} is {task.status}")
            task.status, instance = "Stopping", task.instance
            task.stop.set()
        if instance is not None:
            self._start(self._end, instance)
        return 204, b""


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    owner: FunctionServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        self._handle()

    do_PUT = do_POST = do_DELETE = do_GET

    def _handle(self) -> None:
        owner = self.server.owner
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        action = self.headers.get("x-acs-action", "")
        faults = owner.faults.get(action)
        fault = faults.popleft() if faults else Fault()
        retry_after_ms = fault.retry_after_ms
        try:
            owner.check(self.command, self.path, self.headers, body)
            if fault.status:
                raise Refusal(fault.status, fault.code)
            status, answer = owner.serve(self.command, self.path, self.headers, body)
        except Refusal as refusal:
            status = refusal.status
            answer = _json({"Code": refusal.code, "Message": refusal.message, "RequestId": "1-2-3"})
        owner.log.append((action, status))
        if fault.lose:
            self.close_connection = True
            return
        self.send_response(status)
        if retry_after_ms:
            self.send_header("x-acs-retry-after", str(retry_after_ms))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

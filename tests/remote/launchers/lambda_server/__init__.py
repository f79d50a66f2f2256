"""A double of AWS Lambda: its control plane over HTTP, and environments in which AWS's runtime client runs handlers.

AWS's real client talks to it. It verifies signatures, expires credentials, keeps a quota, throttles, loses answers,
runs an invocation twice, and takes two seconds for each new environment unless it is told otherwise.

What it cannot show: how long an image takes to be pulled and an environment to start, roles and their rights, networks,
what is billed, and how Lambda itself fails.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.remote.launchers.lambda_server.sandbox import Invocation, QuickHandler, QuickHTTPServer, Sandbox
from tests.remote.launchers.lambda_server.signatures import Credentials, Refusal, verify

REGION = "eu-central-1"
HANDLER = "torch_dpflow.remote.worker.aws_lambda.handler"
FUNCTION = "dpflow-worker"
#: How long an environment may take to begin before that counts as time of its first invocation, seconds.
INIT_S = 10.0


class ApiError(Exception):
    """An answer that is an error: its status, AWS's code, and what its body has."""

    def __init__(self, status: int, code: str, headers: Mapping[str, str] | None = None, **body: Any) -> None:
        super().__init__(status, code)
        self.status, self.code, self.headers, self.body = status, code, dict(headers or {}), body


class LambdaServer:
    """The service, from its construction to `close`. Its settings may be changed at any time.

    Args:
        cold_start_s: how long a new environment takes, before its process starts, seconds.
        quota: how many invocations may run at once.
    """

    def __init__(self, *, cold_start_s: float = 2.0, quota: int = 1000) -> None:
        self.cold_start_s, self.quota = cold_start_s, quota
        self.credentials = Credentials("AKIDEXAMPLE", "wJalrXUtnFEMI", "t0ken")
        self.functions: dict[str, dict[str, Any]] = {}
        #: What happens to the next invocations, in order: see `_invoke`.
        self.faults: list[str] = []
        #: Of all requests, by operation; how long functions ran, seconds.
        self.requests: Counter[str] = Counter()
        self.billed_s = 0.0
        #: When those that run have begun, by `time.monotonic`.
        self._begun: dict[int, float] = {}
        self._tickets = itertools.count()
        #: Invocations whose functions have ended, and how many requests were refused, by status.
        self.done: list[Invocation] = []
        self.refused: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._idle: dict[str, list[Sandbox]] = {}
        self.sandboxes: set[Sandbox] = set()
        self.running = 0
        self._server = QuickHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True, name="lambda").start()

    def create(self, name: str = FUNCTION, *, handler: str = HANDLER, timeout_s: int = 900) -> None:
        """Have a function, as one that was deployed."""
        self._create(
            {
                "FunctionName": name,
                "PackageType": "Image",
                "Code": {"ImageUri": "registry/dpflow:1"},
                "Role": "arn:aws:iam::123456789012:role/dpflow",
                "Timeout": timeout_s,
                "MemorySize": 2048,
                "ImageConfig": {"EntryPoint": ["python", "-m", "awslambdaric"], "Command": [handler]},
            }
        )

    @property
    def env(self) -> dict[str, str]:
        """Variables with which AWS's clients find this service and may use it."""
        return {
            "AWS_ENDPOINT_URL_LAMBDA": self.url,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ACCESS_KEY_ID": self.credentials.key,
            "AWS_SECRET_ACCESS_KEY": self.credentials.secret,
            "AWS_SESSION_TOKEN": self.credentials.token or "",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
            "AWS_CONFIG_FILE": "/nowhere",
        }

    def worker_seconds(self) -> float:
        """What would be billed until now, seconds: of each invocation and each environment's first process."""
        with self._lock:
            return self.billed_s + sum(time.monotonic() - begun for begun in self._begun.values())

    def end_environments(self) -> None:
        """Kill all environments, as Lambda does with those that are idle, or when it likes."""
        with self._lock:
            sandboxes, self.sandboxes = self.sandboxes, set()
            self._idle.clear()
        for sandbox in sandboxes:
            sandbox.end()

    def close(self) -> None:
        """End everything."""
        self.end_environments()
        self._server.shutdown()
        self._server.server_close()

    # -- requests --------------------------------------------------------------------------------------------

    def answer(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        """What a request is answered with: status, body, headers. Raises ApiError, or ConnectionError for none."""
        try:
            verify(method, target, headers, body, {self.credentials.key: self.credentials}, f"{REGION}/lambda")
        except Refusal as refusal:
            raise ApiError(403, refusal.code, message=refusal.text) from refusal
        url = urlsplit(target)
        parts = [unquote(part) for part in url.path.strip("/").split("/")][1:]
        if parts == ["account-settings"]:
            self.requests["GetAccountSettings"] += 1
            limit = {"ConcurrentExecutions": self.quota, "UnreservedConcurrentExecutions": self.quota}
            return _json(200, {"AccountLimit": limit})
        if parts == ["functions"]:
            self.requests["CreateFunction"] += 1
            return _json(201, self._create(json.loads(body)))
        function = self._function(parts[1])
        what = "/".join(parts[2:])
        self.requests[f"{method} {what}".strip()] += 1
        if (method, what) == ("POST", "invocations"):
            return self._invoke(function, headers.get("x-amz-invocation-type", "RequestResponse"), body)
        if (method, what) == ("GET", "configuration"):
            return _json(200, function)
        if (method, what) == ("GET", ""):
            return _json(200, {"Configuration": function, "Code": {"ImageUri": function["Code"]["ImageUri"]}})
        if (method, what) == ("PUT", "configuration"):
            asked = json.loads(body)
            function.update(asked, ImageConfigResponse={"ImageConfig": asked["ImageConfig"]})
            return _json(200, function)
        if (method, what) == ("PUT", "code"):
            function["Code"] = {"ImageUri": json.loads(body)["ImageUri"]}
            return _json(200, function)
        if (method, what) == ("GET", "concurrency"):
            return _json(200, {})
        assert (method, what) == ("DELETE", ""), (method, what)
        del self.functions[function["FunctionName"]]
        return 204, b"", {}

    def _function(self, name: str) -> dict[str, Any]:
        found = self.functions.get(name.rpartition("function:")[2])
        if found is None:
            arn = _arn_of(name)
            raise ApiError(404, "ResourceNotFoundException", Type="User", Message=f"Function not found: {arn}")
        return found

    def _create(self, asked: dict[str, Any]) -> dict[str, Any]:
        name = asked["FunctionName"]
        if name in self.functions:
            raise ApiError(409, "ResourceConflictException", Type="User", message=f"Function already exist: {name}")
        defaults = {"State": "Active", "LastUpdateStatus": "Successful", "Timeout": 3, "MemorySize": 128}
        self.functions[name] = {**defaults, "FunctionArn": _arn_of(name), **asked}
        self.functions[name]["ImageConfigResponse"] = {"ImageConfig": asked["ImageConfig"]}
        return self.functions[name]

    # -- invocations -------------------------------------------------------------------------------------------

    def _invoke(self, function: dict[str, Any], kind: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        if kind == "DryRun":
            return 204, b"", {}
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "throttle":
            headers = {"Retry-After": "1"}
            raise ApiError(429, "TooManyRequestsException", headers, Reason="CallerRateLimitExceeded", Type="User")
        if fault == "break":
            raise ApiError(500, "ServiceException", Type="Service", Message="oh")
        with self._lock:
            if self.running >= self.quota:
                reason = "ConcurrentInvocationLimitExceeded"
                raise ApiError(429, "TooManyRequestsException", Reason=reason, Type="User", message="Rate Exceeded.")
            self.running += 1
        if fault == "twice":
            with self._lock:
                self.running += 1
            threading.Thread(target=self._run, args=(function, body), daemon=True, name="twin").start()
        if fault == "lose":
            threading.Thread(target=self._run, args=(function, body), daemon=True, name="lost").start()
            raise ConnectionError
        done = self._run(function, body)
        error = {"X-Amz-Function-Error": "Unhandled"} if done.is_error else {}
        return 200, done.body, {"X-Amz-Executed-Version": "$LATEST", **error}

    def _run(self, function: dict[str, Any], body: bytes) -> Invocation:
        name = function["FunctionName"]
        ticket = next(self._tickets)
        try:
            with self._lock:
                idle = self._idle.get(name)
                sandbox = idle.pop() if idle else None
            if sandbox is None:
                time.sleep(self.cold_start_s)
                # What its process takes until it can take an invocation is billed, its place and image are not.
                with self._lock:
                    self._begun[ticket] = time.monotonic()
                sandbox = Sandbox(function, _command_of(function), REGION)
                with self._lock:
                    self.sandboxes.add(sandbox)
                sandbox.is_up.wait(INIT_S)
            with self._lock:
                self._begun.setdefault(ticket, time.monotonic())
            invocation = Invocation(str(uuid.uuid4()), body, time.time() + function["Timeout"])
            sandbox.invoke(invocation)
        finally:
            with self._lock:
                self.running -= 1
                now = time.monotonic()
                self.billed_s += now - self._begun.pop(ticket, now)
        self.done.append(invocation)
        self._release(name, sandbox)
        return invocation

    def _release(self, name: str, sandbox: Sandbox) -> None:
        with self._lock:
            if not sandbox.is_dead and sandbox in self.sandboxes:
                self._idle.setdefault(name, []).append(sandbox)
                return
            is_ours = sandbox in self.sandboxes
            self.sandboxes.discard(sandbox)
        if is_ours:
            sandbox.end()


@contextmanager
def lambda_server(**settings: Any) -> Iterator[LambdaServer]:
    """One with the usual function."""
    server = LambdaServer(**settings)
    try:
        server.create()
        yield server
    finally:
        server.close()


def _arn_of(name: str) -> str:
    return name if name.startswith("arn:") else f"arn:aws:lambda:{REGION}:123456789012:function:{name}"


def _command_of(function: Mapping[str, Any]) -> list[str]:
    """The image's entry point and command, of which the first is the interpreter."""
    config = function["ImageConfig"]
    return [*config["EntryPoint"][1:], *config["Command"]]


def _json(status: int, body: Any) -> tuple[int, bytes, dict[str, str]]:
    return status, json.dumps(body).encode(), {"Content-Type": "application/json"}


def _handler_of(server: LambdaServer) -> type[QuickHandler]:
    class Api(QuickHandler):
        def _do(self) -> None:
            body = self.read_body()
            headers = {name.lower(): value for name, value in self.headers.items()}
            try:
                status, answer, extra = server.answer(self.command, self.path, headers, body)
            except ApiError as error:
                server.refused[error.status] += 1
                status, answer = error.status, json.dumps(error.body).encode()
                extra = {"x-amzn-ErrorType": error.code, "Content-Type": "application/json", **error.headers}
            except ConnectionError:
                self.close_connection = True
                return
            self.send(status, answer, extra)

        do_GET = do_POST = do_PUT = do_DELETE = _do

    return Api

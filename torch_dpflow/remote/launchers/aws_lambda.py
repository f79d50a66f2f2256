"""Workers as invocations of a function of AWS Lambda.

An invocation is answered when its worker has ended, so one call is held open for each worker. Lambda has no call to
list or stop invocations, so workers cannot be listed, or ended by force. A worker ends when its shard rejects it or is
silent, or when its lifetime ends. Lambda may run an invocation twice; the shard rejects the second worker.
"""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from torch_dpflow._core.checks import check_type, format_duration, load_json, parse_bytes
from torch_dpflow.errors import AnswerLostError, OptionError, OptionTypeError, PlatformError, QuotaError
from torch_dpflow.remote.launchers.aws_client import REQUIRED, AwsClient
from torch_dpflow.remote.launchers.contract import (
    AdoptingPlatform,
    Fate,
    Finding,
    Launcher,
    Ref,
    require,
)
from torch_dpflow.remote.launchers.function_settings import FunctionSettings, answer_in
from torch_dpflow.remote.launchers.processes import LOOK_S
from torch_dpflow.remote.launchers.threaded_platform import ThreadedPlatform
from torch_dpflow.workers.platform import MAX_REPORT_CHARS, End, Limits

#: Time after which Lambda ends an invocation, how much later its answer may arrive, and how much earlier workers must
#: be done, in seconds.
MAX_INVOCATION_S, ANSWER_S, MARGIN_S = 900.0, 10.0, 30.0
#: Maximum calls that one process holds, each with a thread and a connection.
MAX_HELD = 256
#: How long a start waits for a rejection, in seconds. Lambda rejects at once, but answers only when the worker ends.
REFUSED_S = 1.0
#: Bytes of a unit of Lambda's memory, and minimum and maximum units.
_MIB, _MIN_MIB, _MAX_MIB = 2**20, 128, 10_240
_PLACE = "its invocation"


@dataclass(frozen=True, kw_only=True)
class Lambda(FunctionSettings):
    """`platform="lambda"`: workers as invocations of a function of AWS Lambda, which `dpflow deploy lambda` creates.

    Credentials are those of AWS's own chain: variables, `~/.aws`, SSO, roles. The function must be able to reach
    this host, so both must be in one VPC.

    Args:
        function: name or ARN of the function; an alias or version can follow after a colon.
        region: the function's region; empty: from AWS's settings.
        lifetime: time after which a worker is replaced, such as "14m", or a number of seconds.
        max_workers: maximum number of concurrent workers; required, because each is billed.
        memory: memory of the deployed function, such as "2GiB"; Lambda adds one processor for each 1.77 GB.
        role: ARN of the deployed function's role, whose permissions must be sufficient for a function in a VPC.
        vpc: VPC of the deployed function: `subnets` and `security_groups`, lists of ids.
        price_per_hour: price of one worker for an hour, for reports.

    Raises:
        OptionError: a value is out of range.
        OptionTypeError: a value is of the wrong type.
    """

    memory: str = "2GiB"

    name = "lambda"
    max_run_s, margin_s, max_held = MAX_INVOCATION_S, MARGIN_S, MAX_HELD

    def __post_init__(self) -> None:
        super().__post_init__()
        check_type("memory", self.memory, str, "text")
        mib, rest = divmod(parse_bytes("memory", self.memory), _MIB)
        if rest or not _MIN_MIB <= mib <= _MAX_MIB:
            raise OptionError(
                f"memory={self.memory!r}: Lambda has whole MiB, from {_MIN_MIB} to {_MAX_MIB}; give as many, as 2GiB"
            )
        for key, ids in self.vpc.items():
            if key not in ("subnets", "security_groups"):
                raise OptionError(f"vpc has {key!r}; it takes 'subnets' and 'security_groups', lists of their ids")
            if isinstance(ids, str) or not all(isinstance(one, str) for one in ids):
                raise OptionTypeError(f"vpc[{key!r}]={ids!r:.80}: give a list of ids")

    @property
    def memory_mib(self) -> int:
        """`memory` in MiB."""
        return parse_bytes("memory", self.memory) // _MIB

    def check_installed(self) -> None:
        require("boto3", *REQUIRED)

    def launcher(self) -> Launcher:
        return LambdaLauncher(self)

    def open(self, *, outlived: bool = False) -> AdoptingPlatform:
        self.check_workers(0)
        return ThreadedPlatform(self.launcher(), sweep_s=LOOK_S)

    def is_near(self) -> bool:
        with closing(_client(self)) as client:
            return client.is_near


class LambdaLauncher:
    """Launcher of workers as invocations of a Lambda function.

    Raises:
        MissingExtraError: boto3 is not installed.
        OptionError: no region is set, or AWS's own settings name a remote service without https.
        PlatformError: AWS's own settings cannot be used, for example because they name a missing profile.
    """

    def __init__(self, settings: Lambda) -> None:
        self._settings = settings
        self.limits = Limits(
            max_lifetime_s=settings.lifetime_s,
            max_workers=settings.max_workers or None,
            # Each start waits a little for a rejection; Lambda itself starts a thousand environments in 10 s.
            calls_at_once=64,
            start_timeout_s=(20.0, 120.0),
            can_list=False,
            can_stop=False,
        )
        self._client = _client(settings)
        self._lock = threading.Lock()
        #: Open calls of workers that were not stopped; all open calls; how workers have ended, until `look` reports it.
        self._held: dict[str, _HeldCall] = {}
        self._open: set[_HeldCall] = set()
        self._ends: dict[str, End] = {}

    def check(self) -> Sequence[Finding]:
        function = self._settings.function
        with self._client.calling(f"function {function!r} cannot be used") as client:
            result = client.get_function_configuration(FunctionName=function)
            client.invoke(FunctionName=function, InvocationType="DryRun")  # whether this is allowed
        return [*_findings_of(result, self._settings, self._client.region), self._capacity_finding()]

    def start(self, name: str, launch_spec: bytes, *, deadline_s: float) -> Ref:
        call = _HeldCall(self, name, json.dumps({"launch_spec": launch_spec.decode()}))
        with self._lock:
            if name in self._held or name in self._ends:
                return name
            if len(self._open) >= MAX_HELD:
                raise QuotaError(f"{name} cannot be started: this process holds {MAX_HELD} invocations, its most")
            call.start()
            self._held[name] = call
            self._open.add(call)
        call.answered.wait(min(REFUSED_S, deadline_s))
        with self._lock:
            call.is_started = True
            if call.refusal is not None:
                raise call.refusal
        return name

    def look(self, workers: Mapping[str, Ref | None]) -> Mapping[str, Fate]:
        with self._lock:
            alive = {name: Fate() for name in workers if name in self._held}
            return alive | {name: Fate(end=end) for name in workers if (end := self._ends.pop(name, None))}

    def stop(self, name: str, ref: Ref | None) -> None:
        """Forget the worker, which Lambda cannot end: it exits by itself, and its call is held open until then."""
        with self._lock:
            self._held.pop(name, None)
            self._ends.pop(name, None)

    def list(self, prefix: str) -> Mapping[str, Ref]:
        return {}

    def close(self) -> None:
        self._client.close()

    def invoke(self, name: str, payload: str) -> End:
        """Invoke the function for a worker, wait for its end, and return how it ended. Raises PlatformError."""
        with self._client.calling(f"{name} cannot be started") as client:
            # A file, since botocore logs the request: the launch spec has a key.
            body = io.BytesIO(payload.encode())
            answer = client.invoke(FunctionName=self._settings.function, Payload=body)
            result = answer["Payload"].read()
        return _end_of(result, is_failure="FunctionError" in answer)

    def note(self, call: _HeldCall, result: End | PlatformError) -> None:
        with self._lock:
            self._open.discard(call)
            if self._held.get(call.worker) is call:
                del self._held[call.worker]
                if isinstance(result, End):
                    # Lambda may run one twice. If this is the answer of the second one, which its shard has rejected,
                    # the first one works and its end is unknown here.
                    if not (result.code == 0 and f"another process is {call.worker} already" in result.report):
                        self._ends[call.worker] = result
                elif not call.is_started:
                    call.refusal = result
                elif not isinstance(result, AnswerLostError):  # else it may run, unknown here
                    self._ends[call.worker] = End(report=str(result), place=_PLACE)

    def _capacity_finding(self) -> Finding:
        most, what = self._settings.max_workers, "the account"
        try:
            with self._client.calling("the account's quota is not known") as client:
                capacity = client.get_account_settings()["AccountLimit"]["UnreservedConcurrentExecutions"]
                own = client.get_function_concurrency(FunctionName=self._settings.function)
        except PlatformError as error:
            return Finding(True, str(error))
        if (reserved := own.get("ReservedConcurrentExecutions")) is not None:
            capacity, what = reserved, "the function's reserved concurrency"
        advice = "" if capacity >= most else f": fewer than max_workers={most}; have it raised, or give fewer"
        return Finding(capacity >= most, f"{what} has room for {capacity} workers at once{advice}")


class _HeldCall(threading.Thread):
    """Thread that holds one invocation's call until its worker has ended."""

    def __init__(self, launcher: LambdaLauncher, worker: str, payload: str) -> None:
        super().__init__(name="dpflow-invocation", daemon=True)
        self.worker = worker
        self._launcher = launcher
        self._payload = payload
        #: Set once the call has returned; whether its start counted as accepted before; else why it was rejected.
        self.answered = threading.Event()
        self.is_started = False
        self.refusal: PlatformError | None = None

    def run(self) -> None:
        """Make the call, and wait for its answer; `start` calls it."""
        try:
            result: End | PlatformError = self._launcher.invoke(self.worker, self._payload)
        except PlatformError as error:
            result = error
        except Exception as error:
            result = AnswerLostError(f"{self.worker} cannot be started: {type(error).__name__}: {error}")
        self._launcher.note(self, result)
        self.answered.set()


def _client(settings: Lambda) -> AwsClient:
    return AwsClient(settings.region, read_timeout_s=MAX_INVOCATION_S + ANSWER_S, connections=MAX_HELD + 8)


def _findings_of(result: Mapping[str, Any], settings: Lambda, region: str) -> list[Finding]:
    """Return findings about the function's state, and about its timeout, which must exceed the workers' lifetime."""
    timeout_s, state = float(result.get("Timeout", 0)), str(result.get("State", "Active"))
    text = f"function {settings.function!r} in {region} is {state}, with {result.get('MemorySize')} MiB"
    if state not in ("Active", "Inactive"):  # the latter is woken by the next invocation
        return [Finding(False, f"{text}: {result.get('StateReason', '')}")]
    needs_s = settings.lifetime_s + MARGIN_S
    if timeout_s < needs_s:
        advice = f"give it {needs_s:g} s, as `dpflow deploy lambda` does, or a shorter lifetime"
        lifetime = format_duration(settings.lifetime_s)
        return [Finding(False, f"{text}; its timeout of {timeout_s:g} s ends workers before {lifetime}: {advice}")]
    return [Finding(True, text)]


def _end_of(body: bytes, *, is_failure: bool) -> End:
    """Return how a worker has ended, from the body of the invocation's answer."""
    if is_failure:  # of the runtime: the handler itself answers for every end of its worker
        with suppress(ValueError, AttributeError):
            result = load_json(body)
            report = f"{result.get('errorType', 'error')}: {result.get('errorMessage', '')}"
            return End(report=report[-MAX_REPORT_CHARS:], place=_PLACE)
    elif (answer := answer_in(body)) is not None:
        return answer.end(_PLACE)
    return End(report="its answer is none of torch_dpflow: is the function's image one of it?", place=_PLACE)

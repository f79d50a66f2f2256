"""Pods of a Kubernetes namespace, with a file for each: the only module that imports its client, when one is wanted."""

from __future__ import annotations

import base64
import importlib.util
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from torch_dpflow._core.depth import load_json
from torch_dpflow.errors import (
    AnswerLostError,
    DeniedError,
    ExpiredError,
    MissingExtraError,
    OptionError,
    PlatformError,
    QuotaError,
    RejectedError,
    ThrottledError,
    UnavailableError,
)

_NOT_INSTALLED = (
    "platform='kubernetes' needs its client; install it with: pip install 'torch_dpflow[kubernetes]'"
)
#: How long a call may take to connect and to be answered, seconds. A start makes two, and a third where an answer is
#: lost, which together stay below `calls.DEADLINE_S`.
CALL_S = (5.0, 15.0)
#: The key of the only file in a pod's secret.
FILE = "launch-spec"
#: Where a pod finds its namespace, and that it has one.
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
#: urllib3's errors before anything was sent.
_NOT_SENT = {"NewConnectionError", "ConnectTimeoutError", "NameResolutionError", "SSLError", "ProxyError"}
#: What it says of somebody who may not do something.
_HAS_NO_RIGHT = re.compile(r" cannot \w+ resource ")

#: What to do where a request names what is not there, by what Kubernetes says of it.
_ADVICE = {
    "error looking up service account": "create that account, or give another service_account",
    'namespaces "': "create that namespace, or give another one, as namespace in [platform.kubernetes]",
}


def check_installed() -> None:
    """Raise MissingExtraError if the client is not installed; does not import it."""
    if importlib.util.find_spec("kubernetes") is None:
        raise MissingExtraError(_NOT_INSTALLED)


class _CoreClient(NamedTuple):
    #: The vendor's, of all kinds of calls, and of those for pods and secrets.
    all: Any
    core: Any
    namespace: str
    #: The API server, for people.
    host: str


class Pods:
    """The pods of a namespace. Thread-safe. Nothing is tried twice.

    Credentials are looked up again once they were refused.

    Args:
        namespace: empty: the kubeconfig's, or this pod's own.
        context: of the kubeconfig; empty: its current one, or where there is no file this pod's service account.

    Raises:
        MissingExtraError: the client is not installed.
        OptionError: there is no cluster to connect to.
    """

    def __init__(self, namespace: str, context: str) -> None:
        self._asked, self._context = namespace, context
        self._lock = threading.Lock()
        self._client: _CoreClient | None = None
        #: Whether the server has known who calls: whom it does not know later, has a token that has expired.
        self._was_known = False
        client = self._current()
        self.namespace, self.host = client.namespace, client.host

    def create(self, body: Mapping[str, Any], *, is_trial: bool = False) -> str:
        """Create a pod, and return its uid; one of its name that is there is taken for it.

        is_trial: have it checked, and not created.
        """
        name = body["metadata"]["name"]
        options = {"dry_run": "All"} if is_trial else {}
        with self._calling(f"{name} cannot be started") as client:
            try:
                # Strict: else a field that it does not know is left out in silence.
                made = _sent(
                    client.core.create_namespaced_pod,
                    client.namespace,
                    body,
                    field_validation="Strict",
                    **options,
                )
            except Exception as error:
                if not _is_there(error):
                    raise
                made = _sent(client.core.read_namespaced_pod, name, client.namespace)
        return str(made["metadata"]["uid"])

    def uid_of(self, name: str) -> str | None:
        """That of a pod; None if it is not there."""
        found: dict[str, Any] = {}
        with self._calling(f"{name} cannot be looked at", missing=True) as client:
            found = _sent(client.core.read_namespaced_pod, name, client.namespace)
        return found["metadata"]["uid"] if found else None

    def give(
        self, name: str, uid: str, labels: Mapping[str, str], content: bytes, *, is_trial: bool = False
    ) -> None:
        """Create the secret that a pod waits for, of its name, which ends with the pod; one that is there stays."""
        options = {"dry_run": "All"} if is_trial else {}
        owner = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "immutable": True,
            "metadata": {"name": name, "labels": {**labels}, "ownerReferences": [owner]},
            "data": {FILE: base64.b64encode(content).decode()},
        }
        with self._calling(f"{name} cannot be given its launch spec") as client:
            try:
                _sent(client.core.create_namespaced_secret, client.namespace, body, **options)
            except Exception as error:
                if not _is_there(error):
                    raise

    def delete(self, name: str, *, grace_s: int, is_trial: bool = False) -> None:
        """End a pod by force after so long; that there is none is no error."""
        options = {"dry_run": "All"} if is_trial else {}
        with self._calling(f"{name} cannot be stopped", missing=True) as client:
            _sent(
                client.core.delete_namespaced_pod,
                name,
                client.namespace,
                grace_period_seconds=grace_s,
                **options,
            )

    def list(self, selector: str) -> list[dict[str, Any]]:
        """All pods that have some labels, as Kubernetes selects them, in its own JSON."""
        with self._calling("workers cannot be listed") as client:
            found: list[dict[str, Any]] = _sent(
                client.core.list_namespaced_pod, client.namespace, label_selector=selector
            )["items"]
        return found

    def close(self) -> None:
        """Release idle connections; calls under way go on. Idempotent."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.all.rest_client.pool_manager.clear()
            client.all.close()

    def _current(self) -> _CoreClient:
        with self._lock:
            if self._client is None:
                self._client = _connect(self._asked, self._context)
            return self._client

    @contextmanager
    def _calling(self, what: str, *, missing: bool = False) -> Iterator[_CoreClient]:
        """The client, whose errors become ours. missing: whether it is none that what is named is not there."""
        try:
            yield self._current()
            self._was_known = True
        except (PlatformError, OptionError):
            raise
        except Exception as error:
            if missing and getattr(error, "status", None) == 404:
                return
            translated = _failure(what, error, was_known=self._was_known)
            if isinstance(translated, DeniedError):
                self.close()
            raise translated from error


def _connect(namespace: str, context: str) -> _CoreClient:
    try:
        from kubernetes import client, config
    except ModuleNotFoundError as error:
        raise MissingExtraError(_NOT_INSTALLED) from error
    settings = client.Configuration()
    try:
        # Not the client's own default, which is what the variable was when it was imported.
        files = os.path.expanduser(os.environ.get("KUBECONFIG") or "~/.kube/config")
        if context or any(os.path.exists(file) for file in files.split(os.pathsep)):
            config.load_kube_config(files, context or None, client_configuration=settings)
            contexts, current = config.list_kube_config_contexts(files)
            named = [one for one in contexts if one["name"] == context] or [current]
            found = named[0]["context"].get("namespace", "")
        else:
            config.load_incluster_config(client_configuration=settings)
            found = _OWN_NAMESPACE.read_text().strip() if _OWN_NAMESPACE.exists() else ""
    except Exception as error:
        raise OptionError(
            f"no Kubernetes cluster is known ({error}): have a kubeconfig at ~/.kube/config or KUBECONFIG, or run "
            "this in a pod with a service account"
        ) from error
    settings.retries = False
    host = str(settings.host)
    if not host.startswith("https://") and not _is_here(host):  # launch specs have keys
        raise OptionError(f"the kubeconfig names {host!r} as its server: give https://HOST")
    api = client.ApiClient(settings)
    return _CoreClient(api, client.CoreV1Api(api), namespace or found or "default", host)


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host.startswith("127.") or host in ("localhost", "::1")


def _sent(call: Any, *arguments: Any, **options: Any) -> Any:
    """The answer to a call, as JSON. Not by the client's own reader, whose log has all of it, and so of a secret."""
    return load_json(call(*arguments, **options, _request_timeout=CALL_S, _preload_content=False).data)


def _failure(what: str, error: Any, *, was_known: bool) -> PlatformError:
    status = getattr(error, "status", None)
    if not isinstance(status, int) or status == 0:
        names = {type(one).__name__ for one in (error, getattr(error, "reason", None))}
        # The client reports what urllib3 says of certificates as an answer of status 0.
        kind = UnavailableError if status == 0 or names & _NOT_SENT else AnswerLostError
        return kind(f"{what}: {type(error).__name__}: {str(error)[:300]}")
    message = str(_told(error).get("message") or getattr(error, "reason", ""))[:600]
    text = f"{what}: {status} {message}"
    if status == 403 and "exceeded quota" in message:
        return QuotaError(text)
    if status == 401:
        # Of a wrong token and of one that has expired it says the same.
        denied = ExpiredError if was_known else DeniedError
        return denied(
            f"{text}; give the user of the kubeconfig, or this pod's service account, a valid token"
        )
    # What else is forbidden, an admission check forbids.
    if status == 403 and (_HAS_NO_RIGHT.search(message) or not _told(error)):
        return DeniedError(
            f"{text}; give that right, by a role in this namespace, to the user of the kubeconfig or this pod's "
            "service account; `dpflow manifest kubernetes` has such a role"
        )
    if status == 429:
        return ThrottledError(text, _seconds_of((error.headers or {}).get("Retry-After")))
    text += next((f"; {advice}" for said, advice in _ADVICE.items() if said in message), "")
    # 409 is a conflict of two changes of the same, as of a quota.
    return (UnavailableError if status >= 500 or status == 409 else RejectedError)(text)


def _is_there(error: Any) -> bool:
    """Whether this is the answer that what was to be created exists."""
    return getattr(error, "status", None) == 409 and _told(error).get("reason") == "AlreadyExists"


def _told(error: Any) -> Mapping[str, Any]:
    """What Kubernetes says of a failure, where it says so as its own Status."""
    try:
        told = load_json(error.body)
    except (ValueError, TypeError):
        return {}
    return told if isinstance(told, dict) else {}


def _seconds_of(text: Any) -> float:
    try:
        return min(max(0.0, float(text)), 3600.0)
    except (TypeError, ValueError):
        return 0.0

"""Pods of a Kubernetes namespace, each with a secret. No other module imports Kubernetes' client."""

from __future__ import annotations

import base64
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch_dpflow._core.checks import is_loopback, load_json
from torch_dpflow.errors import (
    AnswerLostError,
    DeniedError,
    ExpiredError,
    OptionError,
    PlatformError,
    QuotaError,
    RejectedError,
    ThrottledError,
    UnavailableError,
)
from torch_dpflow.remote.launchers.contract import require, seconds_of

#: Arguments of `require`: the client, what needs it, and the extra that installs it.
REQUIRED = ("kubernetes", "platform='kubernetes' needs its client", "kubernetes")
#: Timeouts of a call to connect and to be answered, in seconds. A start makes two calls, and a third if an answer is
#: lost, which together stay below `threaded_platform.DEADLINE_S`.
CALL_S = (5.0, 15.0)
#: The key of the only file in a pod's secret.
FILE = "launch-spec"
#: Where a pod finds its namespace.
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
#: urllib3's errors before anything was sent.
_NOT_SENT = {"NewConnectionError", "ConnectTimeoutError", "NameResolutionError", "SSLError", "ProxyError"}
#: Kubernetes' message about a missing permission.
_HAS_NO_RIGHT = re.compile(r" cannot \w+ resource ")

#: What to do if a request names something that is not there, by Kubernetes' message.
_ADVICE = {
    "error looking up service account": "create that account, or give another service_account",
    'namespaces "': "create that namespace, or give another one, as namespace in [platform.kubernetes]",
}


class _CoreClient(NamedTuple):
    #: The vendor's, of all kinds of calls, and of those for pods and secrets.
    all: Any
    core: Any
    namespace: str
    #: The API server, for display.
    host: str


class Pods:
    """Client of the pods of a namespace. Thread-safe. No call is retried.

    Credentials are looked up again after a rejection.

    Args:
        namespace: name of the namespace; empty: that in the kubeconfig, or this pod's, or "default" without either.
        context: context in the kubeconfig; empty: the current context, or this pod's service account if there is no
            kubeconfig.

    Raises:
        MissingExtraError: the client is not installed.
        OptionError: no cluster is configured, or one on another host without https.
    """

    def __init__(self, namespace: str, context: str) -> None:
        self._namespace, self._context = namespace, context
        self._lock = threading.Lock()
        self._client: _CoreClient | None = None
        #: Whether the server has accepted these credentials: a later rejection then means an expired token.
        self._was_known = False
        client = self._current()
        self.namespace, self.host = client.namespace, client.host

    def create(self, body: Mapping[str, Any], *, is_trial: bool = False) -> str:
        """Create a pod; return its uid, or that of an existing pod of its name. is_trial: only check the request."""
        name = body["metadata"]["name"]
        options = {"dry_run": "All"} if is_trial else {}
        with self._calling(f"{name} cannot be started") as client:
            try:
                # Strict: else an unknown field is ignored silently.
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
        found: dict[str, Any] = {}
        with self._calling(f"{name} cannot be looked at", missing=True) as client:
            found = _sent(client.core.read_namespaced_pod, name, client.namespace)
        return found["metadata"]["uid"] if found else None

    def give(self, name: str, uid: str, labels: Mapping[str, str], content: bytes, *, is_trial: bool = False) -> None:
        """Create the secret that a pod waits for, with the pod's name and this content. uid: uid of the pod.

        The secret is deleted with the pod. If it exists already, it is not changed.
        """
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
        """End a pod by force after `grace_s` seconds; a missing pod is no error."""
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
        """Return all pods that match a label selector, in Kubernetes' JSON."""
        with self._calling("workers cannot be listed") as client:
            found: list[dict[str, Any]] = _sent(
                client.core.list_namespaced_pod, client.namespace, label_selector=selector
            )["items"]
        return found

    def close(self) -> None:
        """Release idle connections; running calls continue. Idempotent."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.all.rest_client.pool_manager.clear()
            client.all.close()

    def _current(self) -> _CoreClient:
        with self._lock:
            if self._client is None:
                self._client = _connect(self._namespace, self._context)
            return self._client

    @contextmanager
    def _calling(self, what: str, *, missing: bool = False) -> Iterator[_CoreClient]:
        """Yield the client, and translate its errors to ours. missing: ignore the error of a missing object."""
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
    require(*REQUIRED)
    from kubernetes import client, config

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
    if not host.startswith("https://") and not is_loopback(host):  # launch specs have keys
        raise OptionError(f"the kubeconfig names {host!r} as its server: give https://HOST")
    api = client.ApiClient(settings)
    return _CoreClient(api, client.CoreV1Api(api), namespace or found or "default", host)


def _sent(call: Any, *arguments: Any, **options: Any) -> Any:
    """Return a call's answer, parsed from JSON. The client's own parser would log all of it, including secrets."""
    return load_json(call(*arguments, **options, _request_timeout=CALL_S, _preload_content=False).data)


def _failure(what: str, error: Any, *, was_known: bool) -> PlatformError:
    status = getattr(error, "status", None)
    if type(error).__name__ == "ValidationError":  # the client checks what it sends, since its version 37
        wrong = [f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors()]
        return RejectedError(f"{what}: {'; '.join(wrong)[:600]}")
    if not isinstance(status, int) or status == 0:
        names = {type(one).__name__ for one in (error, getattr(error, "reason", None))}
        # The client reports urllib3's errors of certificates as an answer of status 0.
        kind = UnavailableError if status == 0 or names & _NOT_SENT else AnswerLostError
        return kind(f"{what}: {type(error).__name__}: {str(error)[:300]}")
    message = str(_status_of(error).get("message") or getattr(error, "reason", ""))[:600]
    text = f"{what}: {status} {message}"
    if status == 403 and "exceeded quota" in message:
        return QuotaError(text)
    if status == 401:
        # Its answers for a wrong token and for an expired one are the same.
        denied = ExpiredError if was_known else DeniedError
        return denied(f"{text}; give the user of the kubeconfig, or this pod's service account, a valid token")
    # Everything else forbidden was forbidden by an admission check.
    if status == 403 and (_HAS_NO_RIGHT.search(message) or not _status_of(error)):
        return DeniedError(
            f"{text}; give that right, by a role in this namespace, to the user of the kubeconfig or this pod's "
            "service account; `dpflow manifest kubernetes` has such a role"
        )
    if status == 429:
        return ThrottledError(text, seconds_of((error.headers or {}).get("Retry-After")))
    text += next((f"; {advice}" for said, advice in _ADVICE.items() if said in message), "")
    # 409 is a conflict of two changes of the same object, such as a quota.
    return (UnavailableError if status >= 500 or status == 409 else RejectedError)(text)


def _is_there(error: Any) -> bool:
    """Return whether an error means that the object exists already."""
    return getattr(error, "status", None) == 409 and _status_of(error).get("reason") == "AlreadyExists"


def _status_of(error: Any) -> Mapping[str, Any]:
    """Return the Status object that Kubernetes sent with an error; empty if there is none."""
    try:
        result = load_json(error.body)
    except (ValueError, TypeError):
        return {}
    return result if isinstance(result, dict) else {}

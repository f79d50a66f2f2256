"""A double of a Kubernetes API server: the pods and files of a namespace, each pod a process of this host.

Kubernetes' own client talks to it. It checks the token and who may do what, knows names that are taken and what is
owned by what, keeps a quota, and gives pods phases, times of grace and ends. What it cannot show: admission,
scheduling, images, networks, nodes, and how long any of them takes.
"""

from __future__ import annotations

import base64
import json
import secrets
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.remote.launchers.kube_server.kubelet import Pod
from tests.remote.launchers.lambda_server.sandbox import QuickHandler, QuickHTTPServer

NAMESPACE = "training"
#: What the documents ask for: what a client may do, as rules of a Role.
RULES = [
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "delete", "get", "list"]},
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
]


class Refused(Exception):
    """An answer that is an error: Kubernetes' Status."""

    def __init__(self, code: int, reason: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(code, reason, message)
        self.code, self.headers = code, dict(headers or {})
        self.body = {
            "kind": "Status",
            "status": "Failure",
            "code": code,
            "reason": reason,
            "message": message,
        }


class KubeServer:
    """The server, from its construction to `close`. Its settings may be changed at any time.

    Args:
        start_s: how long a pod is pending, seconds.
        quota: how many pods the namespace may have.
        second_s: how long a second of pods' times of grace and deadlines is.
        pods: what else pods have, as `Pod`.
    """

    def __init__(self, *, start_s: float = 2.0, quota: int = 100, second_s: float = 0.05, **pods: Any) -> None:
        self.start_s, self.quota, self.second_s, self.token = start_s, quota, second_s, "kube-t0ken"
        self.rules: Collection[Mapping[str, Any]] = RULES
        #: Whether these are of a ClusterRole, and so of all namespaces; which accounts pods may have there.
        self.is_cluster_wide = False
        self.accounts = {"default", "data"}
        self.pods: dict[str, Pod] = {}
        self.secrets: dict[str, dict[str, Any]] = {}
        self.config_maps: dict[str, dict[str, Any]] = {}
        #: What happens to the next creations of pods, and of secrets: "lose" the answer, or a status.
        self.faults: list[str | int] = []
        self.secret_faults: list[str | int] = []
        self.requests: Counter[str] = Counter()
        #: How long the containers of pods that are gone have run, seconds, and how many of these have failed.
        self.seconds, self.failed = 0.0, 0
        #: How much its clock is ahead of this process's, seconds.
        self.ahead_s = 0.0
        self._kubelets: list[threading.Thread] = []
        self._lock = threading.RLock()
        self._server = QuickHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._pod_options = {"config": json.dumps(self.kubeconfig()), **pods}
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True, name="kube")
        self._thread.start()

    def kubeconfig(self) -> dict[str, Any]:
        """As clients have it in a file."""
        context = {"cluster": "here", "user": "me", "namespace": NAMESPACE}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [{"name": "here", "context": context}],
            "clusters": [{"name": "here", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"token": self.token}}],
        }

    def close(self) -> None:
        with self._lock:
            pods = [*self.pods.values()]
        for pod in pods:
            pod.delete(0.0)
        for kubelet in self._kubelets:
            kubelet.join()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def apply(self, *objects: dict[str, Any]) -> None:
        """Take what `kubectl apply` sends, as far as it is known here: whoever calls has the rights of the Role."""
        for one in objects:
            name, namespace = one["metadata"]["name"], one["metadata"]["namespace"]
            assert namespace == NAMESPACE
            match one["kind"]:
                case "Secret":
                    data = {key: base64.b64encode(text.encode()).decode() for key, text in one["stringData"].items()}
                    self.secrets[name] = {**one, "data": data}
                case "ConfigMap":
                    self.config_maps[name] = one
                case "ServiceAccount":
                    self.accounts.add(name)
                case "Role":
                    self.rules = one["rules"]
                case "StatefulSet":
                    metadata = {**one["spec"]["template"]["metadata"], "name": f"{name}-0"}
                    with self._lock:
                        self._create_pod({**one["spec"]["template"], "metadata": metadata}, is_trial=False)
                case "Deployment":
                    self.scale(one, one["spec"]["replicas"])

    def scale(self, deployment: Mapping[str, Any], replicas: int) -> None:
        """Create or delete pods of a Deployment until there are so many; new ones have names that none had."""
        template, name = deployment["spec"]["template"], deployment["metadata"]["name"]
        with self._lock:
            there = [pod for pod in self.pods.values() if pod.name.startswith(f"{name}-") and not pod.is_ending]
            for pod in there[replicas:]:
                pod.delete(None)
            for _ in range(len(there), replicas):
                metadata = {**template["metadata"], "name": f"{name}-{secrets.token_hex(4)}"}
                self._create_pod({**template, "metadata": metadata}, is_trial=False)

    def answer(self, method: str, target: str, token: str, body: bytes) -> dict[str, Any]:
        """Do what a request says. Raises Refused; ConnectionError: without an answer."""
        if token != f"Bearer {self.token}":
            raise Refused(401, "Unauthorized", "Unauthorized")
        url = urlsplit(target)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        parts = url.path.strip("/").split("/")
        assert parts[:3] == ["api", "v1", "namespaces"], target
        namespace, kind, name = parts[3], parts[4], "".join(parts[5:])
        verb = {"GET": "get" if name else "list", "POST": "create", "DELETE": "delete"}[method]
        self.requests[f"{verb} {kind}"] += 1
        self._check_rights(verb, kind, namespace)
        is_trial = query.get("dryRun") == "All"
        if verb == "list":
            return {"kind": "PodList", "apiVersion": "v1", "items": self._list(query["labelSelector"])}
        with self._lock:
            if verb == "create":
                create = self._create_pod if kind == "pods" else self._create_secret
                made = json.loads(body)
                if kind == "pods" and query.get("fieldValidation") == "Strict":
                    _check_fields(made["spec"])
                return create(made, is_trial=is_trial)
            pod = self.pods.get(name)
        if pod is None:
            raise Refused(404, "NotFound", f'{kind} "{name}" not found')
        if verb == "delete" and not is_trial:
            grace_s = query.get("gracePeriodSeconds")
            pod.delete(None if grace_s is None else float(grace_s))
        return pod.view()

    def _check_rights(self, verb: str, kind: str, namespace: str) -> None:
        for rule in self.rules:
            if kind in rule["resources"] and verb in rule["verbs"]:
                if namespace == NAMESPACE:
                    return
                if self.is_cluster_wide:
                    raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')
        raise Refused(
            403,
            "Forbidden",
            f'{kind} is forbidden: User "me" cannot {verb} resource "{kind}" in API group "" in the namespace '
            f'"{namespace}"',
        )

    def _list(self, selector: str) -> list[dict[str, Any]]:
        selector, _, fleets = selector.partition(",app.kubernetes.io/instance in ")
        wanted = dict(one.split("=") for one in selector.split(","))
        named = fleets.strip("()").split(",") if fleets else None
        with self._lock:
            pods = [*self.pods.values()]
        found = []
        for pod in pods:
            labels = pod.body["metadata"]["labels"]
            if wanted.items() <= labels.items() and (named is None or labels["app.kubernetes.io/instance"] in named):
                found.append(pod.view())
        return found

    def _create_pod(self, body: dict[str, Any], *, is_trial: bool) -> dict[str, Any]:
        name = body["metadata"]["name"]
        fault = self.faults.pop(0) if self.faults and not is_trial else ""
        _refuse(fault)
        if name in self.pods:
            raise Refused(409, "AlreadyExists", f'pods "{name}" already exists')
        if len(self.pods) >= self.quota:
            quota = f"exceeded quota: pods, requested: pods=1, used: pods={len(self.pods)}"
            raise Refused(403, "Forbidden", f'pods "{name}" is forbidden: {quota}')
        if (account := body["spec"].get("serviceAccountName", "default")) not in self.accounts:
            text = f'error looking up service account {NAMESPACE}/{account}: serviceaccount "{account}" not found'
            raise Refused(403, "Forbidden", f'pods "{name}" is forbidden: {text}')
        if is_trial:
            return {**body, "metadata": {**body["metadata"], "uid": "0"}}
        pod = self.pods[name] = Pod(
            body,
            start_s=self.start_s,
            second_s=self.second_s,
            files_of=self._files_of,
            ahead_s=lambda: self.ahead_s,
            on_gone=self._forget,
            **self._pod_options,
        )
        self._kubelets.append(pod.thread)
        if fault == "lose":
            raise ConnectionError
        return pod.view()

    def _create_secret(self, body: dict[str, Any], *, is_trial: bool) -> dict[str, Any]:
        name = body["metadata"]["name"]
        fault = self.secret_faults.pop(0) if self.secret_faults and not is_trial else ""
        _refuse(fault)
        if name in self.secrets:
            raise Refused(409, "AlreadyExists", f'secrets "{name}" already exists')
        if not is_trial:
            self.secrets[name] = body
            for pod in self.pods.values():
                pod.wake()
        if fault == "lose":
            raise ConnectionError
        return body

    def _files_of(self, volume: Mapping[str, Any]) -> dict[str, bytes] | None:
        if "configMap" in volume:
            data = self.config_maps[volume["configMap"]["name"]]["data"]
            return {name: text.encode() for name, text in data.items()}
        found = self.secrets.get(volume["secret"]["secretName"])
        return None if found is None else {key: base64.b64decode(text) for key, text in found["data"].items()}

    def _forget(self, pod: Pod) -> None:
        """It is gone, and so is what it owns."""
        with self._lock:
            self.seconds += pod.seconds
            self.failed += bool(pod.process and pod.process.returncode)
            del self.pods[pod.name]
            for name, secret in [*self.secrets.items()]:
                if pod.body["metadata"]["uid"] in [
                    owner["uid"] for owner in secret["metadata"].get("ownerReferences", [])
                ]:
                    del self.secrets[name]


@contextmanager
def kube_server(**settings: Any) -> Iterator[KubeServer]:
    """A server for a block."""
    server = KubeServer(**settings)
    try:
        yield server
    finally:
        server.close()


def _check_fields(spec: Mapping[str, Any]) -> None:
    """Refuse a pod with a field that there is not, at the top."""
    from kubernetes.client import V1PodSpec

    for name in spec.keys() - V1PodSpec.attribute_map.values():
        text = f'Pod in version "v1" cannot be handled as a Pod: strict decoding error: unknown field "spec.{name}"'
        raise Refused(400, "BadRequest", text)


def _refuse(fault: str | int) -> None:
    if isinstance(fault, int):
        reason = "Conflict" if fault == 409 else "Fault"
        raise Refused(fault, reason, "as it was asked for", {"Retry-After": "1"})


def _handler_of(server: KubeServer) -> type[QuickHandler]:
    class Api(QuickHandler):
        def _do(self) -> None:
            body = self.read_body()
            headers: dict[str, str] = {}
            try:
                status = 200
                answer = server.answer(self.command, self.path, self.headers.get("Authorization", ""), body)
            except Refused as refused:
                status, answer, headers = refused.code, refused.body, refused.headers
            except ConnectionError:
                self.close_connection = True
                return
            self.send(status, json.dumps(answer).encode(), {"Content-Type": "application/json", **headers})

        do_GET = do_POST = do_DELETE = _do

    return Api

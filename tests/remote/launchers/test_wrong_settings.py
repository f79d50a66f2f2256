"""A loader on a platform with wrong credentials, or with the name of something that there is not: told at once.

The vendors' clients are real, and so are their refusals' forms; the control planes are ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.holdings import own_threads
from tests.new_process import interpreter
from tests.remote.launchers.function_doubles import NEEDED, FunctionDouble, function_double
from tests.shared_cluster import PATIENCE_S, wait
from torch_dpflow import DPFlowDataLoader
from torch_dpflow.errors import WorkerStartError
from torch_dpflow.remote import FunctionCompute, Kubernetes, Lambda
from torch_dpflow.remote.fleet import worker_states

KINDS = {"fc": FunctionCompute, "lambda": Lambda, "kubernetes": Kubernetes}


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Instead of the check of all tests: the vendors' clients keep connections."""
    before = own_threads()
    yield
    wait(lambda: not own_threads() - before, what="the end of the test's threads")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_states, "RENEW_S", 0.1)


def found(platform: str) -> AbstractContextManager[FunctionDouble]:
    pytest.importorskip(NEEDED[platform])
    return function_double(platform)


def told(double: FunctionDouble, monkeypatch: pytest.MonkeyPatch, env: Mapping[str, str] = {}, **settings: str) -> str:
    """What a loader raises, with these variables and settings beside the right ones."""
    for name, value in {**double.env, **env}.items():
        monkeypatch.setenv(name, value)
    spec = KINDS[double.platform](**{**double.settings, **settings})
    with pytest.raises(WorkerStartError) as raised:
        list(DPFlowDataLoader([*range(16)], batch_size=2, num_workers=2, platform=spec))  # type: ignore[arg-type]
    assert str(raised.value).startswith(f"no worker can be had of platform {double.platform!r}: dpf-")
    return str(raised.value)


FC_KEY = "the credentials are from the environment (ALIBABA_CLOUD_ACCESS_KEY_ID)"
AWS_CHAIN = "AWS's own chain: AWS_* variables, ~/.aws, SSO, or the role of this host or container"


@pytest.mark.parametrize(
    ("platform", "env", "settings", "given", "advice"),
    [
        (
            "fc",
            {"ALIBABA_CLOUD_ACCESS_KEY_SECRET": "wrong"},
            {},
            "400 SignatureDoesNotMatch",
            f"{FC_KEY}: give others there",
        ),
        (
            "fc",
            {"ALIBABA_CLOUD_ACCESS_KEY_ID": "AKnobodys"},
            {},
            "404 InvalidAccessKeyId.NotFound",
            f"{FC_KEY}: give others there",
        ),
        (
            "fc",
            {},
            {"function": "nobodys"},
            "function 'nobodys' does not exist",
            "`dpflow deploy fc --image IMAGE`",
        ),
        (
            "lambda",
            {"AWS_SECRET_ACCESS_KEY": "wrong"},
            {},
            "403 InvalidSignatureException",
            f"(credentials are those of {AWS_CHAIN}; `aws sts get-caller-identity` says whose they are): give others",
        ),
        (
            "lambda",
            {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_SESSION_TOKEN": ""},
            {},
            "Unable to locate credentials",
            f"(credentials are looked for in {AWS_CHAIN}): give some there",
        ),
        ("lambda", {}, {"function": "nobodys"}, "function:nobodys", "create it with `dpflow deploy lambda`"),
        (
            "kubernetes",
            {},
            {"namespace": "others"},
            'User "me" cannot create resource "pods" in API group "" in the namespace "others"',
            "give that right, by a role in this namespace, to the user of the kubeconfig",
        ),
        (
            "kubernetes",
            {},
            {"service_account": "nobodys"},
            'serviceaccount "nobodys" not found',
            "create that account, or give another service_account",
        ),
    ],
)
def test_what_waiting_cannot_mend_is_raised_with_what_to_do(
    platform: str,
    env: Mapping[str, str],
    settings: Mapping[str, str],
    given: str,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with found(platform) as double:
        text = told(double, monkeypatch, env, **settings)
        assert not double.live()
    assert given in text
    assert advice in text


def test_a_token_and_a_namespace_that_kubernetes_does_not_know_are_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with found("kubernetes") as double:
        monkeypatch.setattr(double.server, "is_cluster_wide", True)
        text = told(double, monkeypatch, namespace="nobodys")
        assert '404 namespaces "nobodys" not found; create that namespace, or give another one' in text
        monkeypatch.setattr(double.server, "token", "another")
        assert "401 Unauthorized; give the user of the kubeconfig" in told(double, monkeypatch)


def test_a_role_that_may_start_pods_and_give_them_no_launch_spec_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with found("kubernetes") as double:
        monkeypatch.setattr(double.server, "rules", double.server.rules[:1])
        assert 'cannot create resource "secrets"' in told(double, monkeypatch)
        wait(lambda: not double.live(), what="no pod without a launch spec")


#: In a process of its own, since the vendor's chain reads the environment when it is imported.
PROGRAM = """
import json, sys
from torch_dpflow import DPFlowDataLoader
from torch_dpflow.errors import WorkerStartError
from torch_dpflow.remote import FunctionCompute
from torch_dpflow.remote.fleet import worker_states

worker_states.RENEW_S = 0.1
spec = FunctionCompute(**json.loads(sys.argv[1]))
try:
    list(DPFlowDataLoader([*range(16)], batch_size=2, num_workers=2, platform=spec))
except WorkerStartError as error:
    print(error)
"""


def test_credentials_that_are_nowhere_are_told_in_one_line_without_the_vendors_tracebacks(
    tmp_path: Path,
) -> None:
    env: Any = {
        "HOME": str(tmp_path),
        "ALIBABA_CLOUD_ACCESS_KEY_ID": "",
        "ALIBABA_CLOUD_ACCESS_KEY_SECRET": "",
        # A role's, from a place where nobody answers; not of a machine, which another test host might have.
        "ALIBABA_CLOUD_ECS_METADATA_DISABLED": "true",
        "ALIBABA_CLOUD_CREDENTIALS_URI": "http://127.0.0.1:9/",
    }
    with found("fc") as double, interpreter(PROGRAM, json.dumps(double.settings), env=env) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert "no credentials were found in the vendor's chain" in out
    assert "set ALIBABA_CLOUD_ACCESS_KEY_ID and ALIBABA_CLOUD_ACCESS_KEY_SECRET" in out
    experimental, line = err.splitlines()
    assert "experimental" in experimental
    assert line.startswith("0 of 2 workers run on platform 'fc', limited by credentials: dpf-")

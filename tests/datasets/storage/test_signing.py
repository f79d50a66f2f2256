"""Our signatures are those that the vendors' own clients make, for any name of an object."""

from __future__ import annotations

from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.later import Later
from torch_dpflow.datasets.storage.credentials import Credentials
from torch_dpflow.datasets.storage.object_stores import encode_path, sign_oss_v1, sign_oss_v4, sign_s3

oss2, auth, awsrequest, credentials_of = map(
    Later, ("oss2", "botocore.auth", "botocore.awsrequest", "botocore.credentials")
)
NOW = datetime(2024, 3, 1, 12, 30, 59, tzinfo=timezone.utc)
KEYS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=40)
CREDENTIALS = st.builds(Credentials, st.just("id"), st.text("abcXYZ09/+", min_size=1), st.sampled_from([None, "tok"]))


class Frozen(datetime):
    """The vendors' clients read the clock themselves."""

    @classmethod
    def utcnow(cls) -> datetime:
        return NOW.replace(tzinfo=None)

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return NOW if tz is not None else NOW.replace(tzinfo=None)


@pytest.fixture(autouse=True, scope="module")
def frozen_clocks() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oss2.auth.datetime", Frozen)
        patch.setattr("oss2.utils.http_date", lambda: "Fri, 01 Mar 2024 12:30:59 GMT")
        patch.setattr("botocore.auth.get_current_datetime", lambda remove_tzinfo=True: Frozen.utcnow())
        yield


@given(key=KEYS, credentials=CREDENTIALS)
def test_s3(key: str, credentials: Credentials) -> None:
    path = encode_path(f"/bucket/{key}")
    ours = sign_s3("127.0.0.1:9000", path, "eu-west-1", credentials, NOW)
    theirs = awsrequest.AWSRequest("GET", f"http://127.0.0.1:9000{path}")
    theirs.context["signing"] = {"disableDoubleEncoding": True}
    signer = auth.S3SigV4Auth(
        credentials_of.Credentials(credentials.key_id, credentials.secret, credentials.token),
        "s3",
        "eu-west-1",
    )
    signer.add_auth(theirs)
    assert ours["authorization"] == theirs.headers["Authorization"]
    assert ours == {name.lower(): theirs.headers[name] for name in theirs.headers}


@given(key=KEYS, credentials=CREDENTIALS)
def test_oss_v1(key: str, credentials: Credentials) -> None:
    assert sign_oss_v1("bucket", key, credentials, NOW) == signed_by_oss2("ProviderAuth", key, credentials)


@given(key=KEYS, credentials=CREDENTIALS)
def test_oss_v4(key: str, credentials: Credentials) -> None:
    ours = sign_oss_v4("bucket", key, "cn-hangzhou", credentials, NOW)
    assert ours == signed_by_oss2("ProviderAuthV4", key, credentials)


def signed_by_oss2(version: str, key: str, credentials: Credentials) -> dict[str, str]:
    provider = oss2.credentials.StaticCredentialsProvider(credentials.key_id, credentials.secret, credentials.token)
    request = SimpleNamespace(
        method="GET", headers={}, params={}, region="cn-hangzhou", cloudbox_id=None, product="oss"
    )
    getattr(oss2, version)(provider)._sign_request(request, "bucket", key)
    return request.headers

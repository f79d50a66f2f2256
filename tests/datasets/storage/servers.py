"""What tests and servers of object storages agree on."""

from __future__ import annotations

from typing import Any

from tests.later import Later

boto3 = Later("boto3")
BUCKET = "data"
S3_KEYS = {"key": "test-key-id", "secret": "test-secret"}


def s3_client(endpoint: str) -> Any:
    """The vendor's client, to put objects."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=S3_KEYS["key"],
        aws_secret_access_key=S3_KEYS["secret"],
    )

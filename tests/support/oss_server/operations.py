"""What the server does on a request: the operations that oss2 and ossfs use."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from email.utils import format_datetime, parsedate_to_datetime
from urllib.parse import quote, unquote
from xml.etree import ElementTree

from tests.support.oss_server.buckets import Buckets, Listing, StoredObject
from tests.support.oss_server.messages import Markup, OSSError, Reply, Request, element, xml_reply

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_LONGEST_PAGE = 1000
_BINARY = "application/octet-stream"


def perform(request: Request, buckets: Buckets) -> Reply:
    """Do what `request` asks for and answer. Raises OSSError."""
    _check_digest(request)
    if not request.bucket:
        return _list_buckets(buckets)
    operations = _OBJECT_OPERATIONS if request.key else _BUCKET_OPERATIONS
    operation = operations.get(request.method)
    if operation is None:
        raise OSSError(405, "MethodNotAllowed", "The specified method is not allowed against this resource.")
    return operation(request, buckets)


def _check_digest(request: Request) -> None:
    given = request.headers.get("content-md5")
    digest = hashlib.md5(request.body, usedforsecurity=False).digest()
    if given is not None and given != base64.b64encode(digest).decode():
        raise OSSError(400, "InvalidDigest", "The Content-MD5 you specified was invalid.")


def _list_buckets(buckets: Buckets) -> Reply:
    entries = [
        element(
            "Bucket",
            element("Name", name),
            element("Location", "oss-local"),
            element("CreationDate", _iso(buckets.created)),
            element("ExtranetEndpoint", "localhost"),
            element("IntranetEndpoint", "localhost"),
            element("StorageClass", "Standard"),
        )
        for name in buckets.names()
    ]
    owner = element("Owner", element("ID", "1"), element("DisplayName", "1"))
    return xml_reply(element("ListAllMyBucketsResult", owner, element("Buckets", *entries)))


def _get_bucket(request: Request, buckets: Buckets) -> Reply:
    if "bucketInfo" in request.params:
        return _describe_bucket(request, buckets)
    params = request.params
    newer = params.get("list-type") == "2"
    after = (params.get("continuation-token") or params.get("start-after")) if newer else params.get("marker")
    listing = buckets.page(
        request.bucket,
        prefix=params.get("prefix", ""),
        delimiter=params.get("delimiter", ""),
        after=after or "",
        limit=min(int(params.get("max-keys") or 100), _LONGEST_PAGE),
    )
    encode = quote if params.get("encoding-type") == "url" else str
    return xml_reply(element("ListBucketResult", *_listed(request, listing, encode, newer=newer)))


def _listed(request: Request, listing: Listing, encode: Callable[[str], str], *, newer: bool) -> list[Markup]:
    parts = [
        element("Name", request.bucket),
        element("IsTruncated", "true" if listing.next_marker is not None else "false"),
    ]
    if encode is quote:
        parts.append(element("EncodingType", "url"))
    if listing.next_marker is not None:
        name = "NextContinuationToken" if newer else "NextMarker"
        parts.append(element(name, encode(listing.next_marker)))
    for key, stored in listing.objects:
        parts.append(
            element(
                "Contents",
                element("Key", encode(key)),
                element("LastModified", _iso(stored.modified)),
                element("ETag", stored.etag),
                element("Type", stored.kind),
                element("Size", str(len(stored.data))),
                element("StorageClass", "Standard"),
            )
        )
    parts += [element("CommonPrefixes", element("Prefix", encode(prefix))) for prefix in listing.prefixes]
    return parts


def _describe_bucket(request: Request, buckets: Buckets) -> Reply:
    buckets.check(request.bucket)
    bucket = element(
        "Bucket",
        element("Name", request.bucket),
        element("CreationDate", _iso(buckets.created)),
        element("StorageClass", "Standard"),
        element("ExtranetEndpoint", "localhost"),
        element("IntranetEndpoint", "localhost"),
        element("Location", "oss-local"),
        element("Owner", element("DisplayName", "1"), element("ID", "1")),
        element("AccessControlList", element("Grant", "private")),
    )
    return xml_reply(element("BucketInfo", bucket))


def _put_bucket(request: Request, buckets: Buckets) -> Reply:
    buckets.create(request.bucket)
    return Reply()


def _delete_bucket(request: Request, buckets: Buckets) -> Reply:
    buckets.remove(request.bucket)
    return Reply(status=204)


def _delete_many(request: Request, buckets: Buckets) -> Reply:
    if "delete" not in request.params:
        raise OSSError(400, "InvalidArgument", "A bucket takes POST for ?delete only.")
    root = ElementTree.fromstring(request.body)
    encoded = root.findtext("EncodingType") == "url"
    keys = [unquote(key.text or "") if encoded else key.text or "" for key in root.findall("Object/Key")]
    for key in keys:
        buckets.delete(request.bucket, key)
    return xml_reply(element("DeleteResult", *(element("Deleted", element("Key", key)) for key in keys)))


def _get_object(request: Request, buckets: Buckets) -> Reply:
    stored = buckets.get(request.bucket, request.key)
    _check_unmodified(request.headers, stored)
    span = _requested_range(request.headers.get("range"), len(stored.data))
    if span is None:
        return Reply(headers=_object_headers(stored), body=stored.data)
    start, stop = span
    extent = {"Content-Range": f"bytes {start}-{stop - 1}/{len(stored.data)}"}
    return Reply(status=206, headers=_object_headers(stored) | extent, body=stored.data[start:stop])


def _check_unmodified(headers: Mapping[str, str], stored: StoredObject) -> None:
    since = headers.get("if-unmodified-since")
    is_newer = since is not None and stored.modified.replace(microsecond=0) > parsedate_to_datetime(since)
    if is_newer or headers.get("if-match", stored.etag) != stored.etag:
        raise OSSError(412, "PreconditionFailed", "At least one of the preconditions did not hold.")


def _requested_range(header: str | None, size: int) -> tuple[int, int] | None:
    """The half-open range that a Range header asks for; None: all, as for a header that OSS cannot read."""
    match = _RANGE.fullmatch(header or "")
    if match is None or match[0] == "bytes=-":
        return None
    if not match[1]:
        return max(0, size - int(match[2])), size
    start, stop = int(match[1]), int(match[2]) + 1 if match[2] else size
    if start >= size or stop <= start:
        raise OSSError(416, "InvalidRange", "The requested range cannot be satisfied.")
    return start, min(stop, size)


def _head_object(request: Request, buckets: Buckets) -> Reply:
    stored = buckets.get(request.bucket, request.key)
    return Reply(headers=_object_headers(stored), length=len(stored.data))


def _put_object(request: Request, buckets: Buckets) -> Reply:
    params, headers = request.params, request.headers
    if "uploadId" in params:
        buckets.add_part(params["uploadId"], int(params["partNumber"]), request.body)
        return Reply(headers={"ETag": StoredObject(data=request.body, content_type=_BINARY).etag})
    source = headers.get("x-oss-copy-source")
    if source is not None:
        bucket, _, key = unquote(source).removeprefix("/").partition("/")
        stored = buckets.get(bucket, key)
    else:
        stored = StoredObject(data=request.body, content_type=headers.get("content-type", _BINARY))
    overwrite = headers.get("x-oss-forbid-overwrite") != "true"
    buckets.put(request.bucket, request.key, stored, overwrite=overwrite)
    if source is None:
        return Reply(headers={"ETag": stored.etag})
    copied = element("CopyObjectResult", element("LastModified", _iso(stored.modified)), element("ETag", stored.etag))
    return xml_reply(copied)


def _delete_object(request: Request, buckets: Buckets) -> Reply:
    if "uploadId" in request.params:
        buckets.abort_upload(request.params["uploadId"])
    else:
        buckets.delete(request.bucket, request.key)
    return Reply(status=204)


def _post_object(request: Request, buckets: Buckets) -> Reply:
    params = request.params
    names = (element("Bucket", request.bucket), element("Key", request.key))
    if "append" in params:
        kind = request.headers.get("content-type", _BINARY)
        end = buckets.append(request.bucket, request.key, int(params["position"]), request.body, kind)
        etag = buckets.get(request.bucket, request.key).etag
        return Reply(headers={"x-oss-next-append-position": str(end), "ETag": etag})
    if "uploads" in params:
        upload = buckets.begin_upload(request.bucket)
        return xml_reply(element("InitiateMultipartUploadResult", *names, element("UploadId", upload)))
    if "uploadId" in params:
        root = ElementTree.fromstring(request.body)
        numbers = [int(number.text or 0) for number in root.findall("Part/PartNumber")]
        stored = buckets.complete_upload(request.bucket, request.key, params["uploadId"], numbers)
        done = xml_reply(element("CompleteMultipartUploadResult", *names, element("ETag", stored.etag)))
        return Reply(headers={**done.headers, "ETag": stored.etag}, body=done.body)
    raise OSSError(400, "InvalidArgument", "An object takes POST for append, uploads and uploadId only.")


def _object_headers(stored: StoredObject) -> dict[str, str]:
    return {
        "Content-Type": stored.content_type,
        "Last-Modified": format_datetime(stored.modified, usegmt=True),
        "ETag": stored.etag,
        "Accept-Ranges": "bytes",
        "x-oss-object-type": stored.kind,
        "x-oss-storage-class": "Standard",
    }


def _iso(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z")


_Operation = Callable[[Request, Buckets], Reply]
_BUCKET_OPERATIONS: dict[str, _Operation] = {
    "GET": _get_bucket,
    "PUT": _put_bucket,
    "POST": _delete_many,
    "DELETE": _delete_bucket,
}
_OBJECT_OPERATIONS: dict[str, _Operation] = {
    "GET": _get_object,
    "HEAD": _head_object,
    "PUT": _put_object,
    "POST": _post_object,
    "DELETE": _delete_object,
}

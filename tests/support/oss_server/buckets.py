"""What the server keeps, in memory: buckets, objects, uploads in parts."""

from __future__ import annotations

import hashlib
import threading
import uuid
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property

from tests.support.oss_server.messages import OSSError


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """One object: its bytes, and what OSS tells of them."""

    data: bytes
    content_type: str
    kind: str = "Normal"
    modified: datetime = field(default_factory=lambda: datetime.now(timezone.utc))

    @cached_property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data, usedforsecurity=False).hexdigest().upper()}"'


@dataclass(frozen=True, kw_only=True)
class Listing:
    """One page of a bucket's keys."""

    objects: list[tuple[str, StoredObject]]
    prefixes: list[str]
    #: where the next page goes on; None: this is the last
    next_marker: str | None


class Buckets:
    """Thread-safe: every method is one step. Raises OSSError where OSS would answer with an error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[str, dict[str, StoredObject]] = {}
        self._uploads: dict[str, dict[int, bytes]] = {}
        self.created = datetime.now(timezone.utc)

    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._buckets)

    def create(self, bucket: str) -> None:
        with self._lock:
            self._buckets.setdefault(bucket, {})

    def remove(self, bucket: str) -> None:
        with self._lock:
            if self._objects(bucket):
                raise OSSError(409, "BucketNotEmpty", "The bucket has objects. Please delete them first.")
            del self._buckets[bucket]

    def check(self, bucket: str) -> None:
        with self._lock:
            self._objects(bucket)

    def put(self, bucket: str, key: str, stored: StoredObject, *, overwrite: bool = True) -> None:
        with self._lock:
            objects = self._objects(bucket)
            if key in objects and not overwrite:
                raise OSSError(409, "FileAlreadyExists", "The object you specified already exists.")
            objects[key] = stored

    def get(self, bucket: str, key: str) -> StoredObject:
        with self._lock:
            try:
                return self._objects(bucket)[key]
            except KeyError:
                raise OSSError(404, "NoSuchKey", "The specified key does not exist.") from None

    def delete(self, bucket: str, key: str) -> None:
        with self._lock:
            self._objects(bucket).pop(key, None)

    def append(self, bucket: str, key: str, position: int, data: bytes, content_type: str) -> int:
        """Append at `position`, which must be the object's end; the new end."""
        with self._lock:
            objects = self._objects(bucket)
            there = objects[key].data if key in objects else b""
            if len(there) != position:
                end = str(len(there))
                text = f"Position is not equal to {end}."
                raise OSSError(409, "PositionNotEqualToLength", text, x_oss_next_append_position=end)
            objects[key] = StoredObject(data=there + data, content_type=content_type, kind="Appendable")
            return len(there) + len(data)

    def page(self, bucket: str, *, prefix: str, delimiter: str, after: str, limit: int) -> Listing:
        """Keys past `after` in order, those with `delimiter` behind the prefix rolled up into prefixes."""
        with self._lock:
            objects = dict(self._objects(bucket))
        found: list[tuple[str, StoredObject]] = []
        prefixes: list[str] = []
        last = after
        for key in sorted(key for key in objects if key.startswith(prefix) and key > after):
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            rolled = key[: cut + len(delimiter)] if cut >= 0 else None
            if rolled is not None and (rolled in prefixes or rolled <= after):
                last = key
                continue
            if len(found) + len(prefixes) == limit:
                return Listing(objects=found, prefixes=prefixes, next_marker=last)
            last = key
            if rolled is None:
                found.append((key, objects[key]))
            else:
                prefixes.append(rolled)
        return Listing(objects=found, prefixes=prefixes, next_marker=None)

    def begin_upload(self, bucket: str) -> str:
        with self._lock:
            self._objects(bucket)
            upload = uuid.uuid4().hex.upper()
            self._uploads[upload] = {}
            return upload

    def add_part(self, upload: str, number: int, data: bytes) -> None:
        with self._lock:
            self._parts(upload)[number] = data

    def abort_upload(self, upload: str) -> None:
        with self._lock:
            self._parts(upload)
            del self._uploads[upload]

    def complete_upload(self, bucket: str, key: str, upload: str, numbers: list[int]) -> StoredObject:
        with self._lock:
            parts = self._parts(upload)
            if not set(numbers) <= set(parts):
                raise OSSError(400, "InvalidPart", "One or more of the specified parts could not be found.")
            data = b"".join(parts[number] for number in numbers)
            stored = StoredObject(data=data, content_type="application/octet-stream", kind="Multipart")
            self._objects(bucket)[key] = stored
            del self._uploads[upload]
            return stored

    def _objects(self, bucket: str) -> dict[str, StoredObject]:
        try:
            return self._buckets[bucket]
        except KeyError:
            raise OSSError(404, "NoSuchBucket", "The specified bucket does not exist.") from None

    def _parts(self, upload: str) -> dict[int, bytes]:
        try:
            return self._uploads[upload]
        except KeyError:
            raise OSSError(404, "NoSuchUpload", "The specified upload does not exist.") from None

"""States of objects, by which a reader notices that one was written again.

A state is one line of text, compared for equality:

===================  ===================================================================================
object               state
===================  ===================================================================================
local file           times of the last change of content and of attributes, ns, and number of the inode
S3, OSS, web server  its strong ETag, else its weak ETag, its time of change as an HTTP date, or both
any other            the same if fsspec reports them, else one of `_FIELDS`, as in "mtime=1700000000.0"
===================  ===================================================================================
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from email.utils import formatdate, parsedate_to_datetime
from typing import Any, NamedTuple

_TAG = '"[!#-~]*"'
_DATE = "[A-Z][a-z]{2}, [0-9]{2} [A-Z][a-z]{2} [0-9]{4} [0-9]{2}:[0-9]{2}:[0-9]{2} GMT"
#: The states of HTTP: tag and date.
#: ETags that all objects of a server have.
_EMPTY = frozenset({"", '""', 'W/""'})
_OF_HTTP = re.compile(f"({_TAG}|W/{_TAG})? ?({_DATE})?")
_LOCAL = "[0-9]+ [0-9]+ [0-9]+"
STATE_PATTERN = f"^({_TAG}|W/{_TAG}|W/{_TAG} {_DATE}|{_DATE}|{_LOCAL}|[A-Za-z_]+=[ -~]{{1,200}})$"
#: Fields of fsspec's file systems that change with each write, the best one first. FTP and the HuggingFace Hub have
#: some too, but list a directory for them.
_FIELDS = ("CRC", "generation", "updated", "modificationTime", "mtime", "created")
#: Age of a time of change, seconds, that allows for clocks that differ.
_SETTLED_S = 60.0


class ObjectState(NamedTuple):
    """What a storage reports about an object."""

    #: bytes; None if it is not reported
    size: int | None
    #: see `states`; None if nothing is reported that changes with each write
    state: str | None


def state_of_file(found: os.stat_result) -> str:
    """Return the state of a local file. Its inode counts as 0 on FUSE, which may renumber a file at each `stat`."""
    inode = found.st_ino if _has_lasting_inodes(found.st_dev) else 0
    return f"{found.st_mtime_ns} {found.st_ctime_ns} {inode}"


def is_state_of_file(state: str, found: os.stat_result) -> bool:
    """Return whether a local file still has this state."""
    written, changed, inode = _numbers(state)
    return written == found.st_mtime_ns and changed == found.st_ctime_ns and inode in (found.st_ino, 0)


@functools.lru_cache(maxsize=4096)
def _numbers(state: str) -> tuple[int, int, int]:
    """Return the numbers in the state of a local file. Cached, as all reads of a file compare the same state."""
    if not is_local(state):
        return -1, -1, -1
    written, changed, inode = map(int, state.split())
    return written, changed, inode


@functools.lru_cache(maxsize=1024)
def _has_lasting_inodes(device: int) -> bool:
    with suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        number = f"{os.major(device)}:{os.minor(device)}"
        for line in mounts:
            mount, _, kind = line.partition(" - ")
            if mount.split()[2] == number:
                return not kind.startswith("fuse")
    return True


def state_of_entry(entry: Mapping[str, Any]) -> str | None:
    """Return the state of an object from a listing of fsspec; None if it reports none."""
    tag = entry.get("ETag") or entry.get("etag")
    changed = entry.get("LastModified") or entry.get("last_modified") or entry.get("Last-Modified")
    if isinstance(changed, datetime):
        changed = changed.timestamp()
    if isinstance(changed, int | float):
        changed = formatdate(changed, usegmt=True)
    found = _of_http(tag if isinstance(tag, str) else None, changed if isinstance(changed, str) else None)
    if found is not None:
        return found
    name = next((name for name in _FIELDS if entry.get(name) is not None), None)
    return None if name is None else f"{name}={_text(entry[name])}"


def is_state_of_entry(state: str, entry: Mapping[str, Any]) -> bool:
    """Return whether an object still has this state by a listing, which may have more fields than the first one."""
    name, equals, value = state.partition("=")
    if equals and name in _FIELDS:
        return _text(entry.get(name)) == value
    tag, date = _parts(state)
    without = {name: field for name, field in entry.items() if name.lower() != "etag"}
    return state == state_of_entry(entry) or (tag == "" and date != "" and state == state_of_entry(without))


def _text(value: Any) -> str:
    """Return a field as text. A time may be a number in a listing, and a datetime elsewhere."""
    return str(value.timestamp() if isinstance(value, datetime) else value)


def state_of_fields(fields: Mapping[str, str]) -> str | None:
    """Return the state of an object from the headers of a response, whose names are in lower case."""
    return _of_http(fields.get("etag"), fields.get("last-modified"))


def is_state_of_fields(state: str, fields: Mapping[str, str]) -> bool:
    """Return whether a response is from an object of this state."""
    found = fields.get("etag")
    if found == state:
        return True
    tag, date = _parts(state)
    return (
        bool(tag or date)
        and (not tag or tag == (None if found is None else _quoted(found)))
        and (not date or date == _date(fields.get("last-modified")))
    )


@functools.lru_cache(maxsize=4096)
def conditions(state: str) -> dict[str, str]:
    """Return the headers of a request that only an object of this state answers. A weak ETag would match none."""
    tag, date = _parts(state)
    return {
        **({"if-match": tag} if tag[:1] == '"' else {}),
        **({"if-unmodified-since": date} if date else {}),
    }


def is_local(state: str) -> bool:
    """Return whether a state is one of a local file."""
    return re.fullmatch(_LOCAL, state) is not None


def is_tag(state: str) -> bool:
    """Return whether a state is a strong ETag, which no other object of this URL and size has, on any server."""
    return _parts(state)[0][:1] == '"'


def is_settled(state: str) -> bool:
    """Return whether every later state of the object will be a different text.

    A time of change has a resolution of a second, so an object that is written twice within a second keeps it.
    """
    date = _parts(state)[1]
    return is_tag(state) or (bool(date) and time.time() - parsedate_to_datetime(date).timestamp() > _SETTLED_S)


def _of_http(tag: str | None, date: str | None) -> str | None:
    tag = "" if tag is None or tag in _EMPTY else _quoted(tag)
    date = _date(date)
    if re.fullmatch(_TAG, tag):
        return tag
    weak = tag if re.fullmatch(f"W/{_TAG}", tag) else ""
    return f"{weak} {date}".strip() or None


def _date(text: str | None) -> str:
    """Return a time of change as an HTTP date; "" if it is none. Two obsolete forms are allowed (RFC 9110, 5.6.7)."""
    if text is None or re.fullmatch(_DATE, text):
        return text or ""
    try:
        found = parsedate_to_datetime(text)
        return formatdate((found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp(), usegmt=True)
    except (ValueError, OverflowError):
        return ""


def _parts(state: str) -> tuple[str, str]:
    """Return ETag and date of a state; "" for what it does not have."""
    match = _OF_HTTP.fullmatch(state)
    return ("", "") if match is None else (match[1] or "", match[2] or "")


def _quoted(tag: str) -> str:
    """Return an ETag in quotes, which some servers leave out."""
    return tag if tag.startswith("W/") else '"' + tag.strip('"') + '"'

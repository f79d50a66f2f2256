"""Digests of an object and of its parts, as a tree, with short texts for messages."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

from torch_dpflow.ipc.messages.content_parts import RANDOM_STATE
from torch_dpflow.remote.shipping.values import ATOMS, repeated

_MAX_TEXT = 60
#: The first name of a path.
_NAME = re.compile(r"\.\(\w+\)|[.\[(][^.\[(]*")
#: What separates the names of a path.
_NAMES = re.compile(r"[.\[(]")
#: Variables whose values are not shown, and addresses that can contain a password or a signature.
_SECRET = re.compile(r"key|token|secret|passw|pwd|cred|auth|signature", re.IGNORECASE)
_LOGIN = re.compile(r"://.*[@?]")


class PartNode:
    """Node of one object in the tree: its digest, and the nodes of its parts by their suffixes, such as `.lr`."""

    __slots__ = ("digest", "is_known", "optional", "own", "parts", "text")

    def __init__(
        self, own: bytes, text: str = "", parts: Mapping[str, PartNode] | None = None, *, optional: bool = False
    ) -> None:
        #: Digest without the parts.
        self.own = own
        self.text = text
        self.parts = parts
        self.optional = optional
        #: Whether another object can have this digest; set for whole values only.
        self.is_known = True
        self.digest = own if not parts else joined(own, parts)


def joined(own: bytes, parts: Mapping[str, PartNode]) -> bytes:
    """Return the digest of a part: `own` with its inner parts, except optional parts, which are compared separately."""
    counted = [(name, part.digest) for name, part in parts.items() if not part.optional]
    if not counted:
        return own
    return digest_of(own, *(one for name, digest in sorted(counted) for one in (name.encode(errors="replace"), digest)))


def whole(part: PartNode) -> bytes:
    """Return the digest of a part with all its inner parts, including optional parts."""
    inside = {name: PartNode(whole(one)) for name, one in (part.parts or {}).items()}
    return joined(part.own, inside) if inside else part.digest


def digest_of(*pieces: bytes | memoryview) -> bytes:
    """Return the digest (8 bytes) of pieces of bytes. It depends on where one piece ends and the next begins."""
    found = hashlib.sha256()
    for piece in pieces:
        found.update(len(piece).to_bytes(8, "little"))
        found.update(piece)
    return found.digest()[:8]


def order_of(names: Iterable[str]) -> dict[str, PartNode]:
    """Return {".(order)": part} for the order of attributes, on which code can depend; empty for fewer than two."""
    order = repr([*names]).encode(errors="replace")
    return {".(order)": PartNode(digest_of(order), "order of attributes")} if b"," in order else {}


def with_aliases(parts: dict[str, PartNode], named: Mapping[str, Any]) -> dict[str, PartNode]:
    """Change and return `parts`: if names share a mutable object in `named`, the later parts record the first name."""
    names = [*named]
    for at, first in repeated(named.values()).items():
        part, name = parts[names[at]], names[first]
        text = part.text if part.text == RANDOM_STATE else f"{name} itself"
        same = {"(is)": PartNode(digest_of(name.encode(errors="replace")), name)}
        parts[names[at]] = PartNode(part.own, text, {**(part.parts or {}), **same}, optional=part.optional)
    return parts


def digests_of(objects: Iterable[Any]) -> Generator[Any, PartNode, list[bytes]]:
    found: list[bytes] = []
    for one in objects:
        part = yield one
        found.append(part.digest)
    return found


def parts_of(named: Mapping[str, Any]) -> Generator[Any, PartNode, dict[str, PartNode]]:
    """Yield each object, receive its part by `send`, and return the parts by name."""
    named = dict(sorted(named.items()))
    found: dict[str, PartNode] = {}
    for name, value in named.items():
        found[name] = yield value
    return with_aliases(found, named)


def shown_text(path: str, part: PartNode) -> str:
    """Return a part's text, or "value" if it can contain a secret: others read texts, and state stores keep them."""
    name = _NAMES.split(path)[-1]
    is_value = part.parts is None or part.text[:1] in ("[", "(")
    has_text = "'" in part.text or '"' in part.text
    if part.text == RANDOM_STATE:
        return part.text
    if (is_value and _SECRET.search(name)) or (has_text and _SECRET.search(path)) or _LOGIN.search(part.text):
        return "value"
    return part.text


def text_of(obj: Any) -> str:
    """Return a text for messages: a short value itself, or the number of entries, or the type."""
    kind = type(obj)
    if kind in ATOMS:
        text = repr(obj) if kind is not str or len(obj) <= _MAX_TEXT else "text"
        return text if len(text) <= _MAX_TEXT and text.isprintable() else f"{kind.__name__}"
    try:
        count = len(obj)
    except TypeError:
        return kind.__qualname__[:_MAX_TEXT]
    if count <= 4 and kind in (list, tuple) and all(type(one) in ATOMS and type(one) is not bytes for one in obj):
        text = repr(obj)
        if len(text) <= _MAX_TEXT:
            return text
    return entries(count)


def entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count or 'no'} entries"


#: Objects that cannot be reduced, by id, and a random number for each; kept so that each is equal to itself.
_strange: dict[int, tuple[Any, bytes]] = {}


def unknown(obj: Any) -> PartNode:
    """Return a part for an object that cannot be reduced. It equals no part of another object."""
    if len(_strange) >= 1024:
        _strange.clear()
    _, token = _strange.setdefault(id(obj), (obj, secrets.token_bytes(8)))
    return PartNode(digest_of(b"unknown", token), f"{type(obj).__qualname__[-40:]} that cannot be compared")


def flatten(
    roots: Mapping[str, PartNode], limit: int, is_ignored: Callable[[str], bool], max_path: int
) -> dict[str, PartNode]:
    """Return the tree as one mapping of paths to parts, without ignored parts.

    If the inner parts of a part are listed too, the part has `parts`, and its digest leaves out ignored parts. They are
    not listed if there would be more than `limit` parts, paths of more than `max_path` characters, or two parts of one
    path. The part's digest then includes ignored parts.
    """
    listed: dict[str, PartNode] = {}
    waiting: deque[tuple[str, PartNode]] = deque()
    for path, part in sorted(roots.items()):
        if not is_ignored(path):
            listed[path] = part
            waiting.append((path, part))
    expanded: list[tuple[str, dict[str, PartNode]]] = []
    while waiting:
        path, part = waiting.popleft()
        inner = {f"{path}{name}": one for name, one in (part.parts or {}).items()}
        inside = {name: one for name, one in inner.items() if not is_ignored(name)}
        fits = len(listed) + len(inside) <= limit and not listed.keys() & inside.keys()
        if part.parts is None or not fits or any(len(name) > max_path for name in inside):
            listed[path] = PartNode(part.digest, part.text, optional=part.optional)
            continue
        listed.update(inside)
        expanded.append((path, inside))
        waiting.extend(inside.items())
    for path, inside in reversed(expanded):
        part = listed[path]
        kept = {name[len(path) :]: listed[name] for name in inside}
        listed[path] = PartNode(part.own, part.text, kept, optional=part.optional)
    return listed


def merged(part: PartNode, inside: Mapping[str, PartNode]) -> PartNode:
    """Return `part` with the parts `inside` added, by paths such as `.Crops.resize(size)`.

    A path that has a part already gets one that combines both, by `of_both`.
    """
    parts = dict(part.parts or {})
    below: dict[str, dict[str, PartNode]] = {}
    for path, one in inside.items():
        name = _NAME.match(path)
        first = path if name is None else name[0]
        below.setdefault(first, {})[path[len(first) :]] = one
    for first, of in below.items():
        before, here = parts.get(first), of.pop("", None)
        both = of_both(before, here) if before and here else here or before or PartNode(b"", "code")
        parts[first] = merged(both, of) if of else both
    return PartNode(part.own, part.text, parts, optional=part.optional)


def of_both(one: PartNode, other: PartNode) -> PartNode:
    """Return a part that combines two, so that it differs if either differs. Its text is that of `other`."""
    parts, others = one.parts or {}, other.parts or {}
    both = {name: of_both(parts[name], others[name]) for name in parts.keys() & others.keys()}
    own, optional = digest_of(one.own, other.own), one.optional and other.optional
    return PartNode(own, other.text, {**parts, **others, **both}, optional=optional)

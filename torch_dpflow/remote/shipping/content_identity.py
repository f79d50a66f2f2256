"""Identity of a flow's content: everything that its workers are sent, in parts that have names."""

from __future__ import annotations

import functools
import hashlib
import io
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import PurePath
from typing import Any

from torch_dpflow.ipc.messages.content_parts import (
    MAX_PARTS,
    MAX_PATH,
    MAX_SHOWN,
    SCRIPT_PART,
    PartDigest,
    above_of,
    is_ignored,
)
from torch_dpflow.options import Code
from torch_dpflow.remote.shipping.canonical import Walk
from torch_dpflow.remote.shipping.code_bundle import CodeBundle, bundle_of
from torch_dpflow.remote.shipping.content_pack import ScriptPickler, script_by_value
from torch_dpflow.remote.shipping.own_modules import OwnCode, SetVariable, merged, own_code, set_variables
from torch_dpflow.remote.shipping.part_tree import PartNode, digest_of, flatten
from torch_dpflow.remote.shipping.values import Bulk

_THIS = __name__.partition(".")[0]


@dataclass(frozen=True)
class ContentIdentity:
    """What workers are sent, for comparison with what another job sends, and what the pickler needs to send it."""

    parts: dict[str, PartDigest]
    #: Patterns of parts that do not count.
    ignore: tuple[str, ...]
    #: The user's own modules; None if there are none, or if they were not looked for.
    bundle: CodeBundle | None = field(default=None, repr=False)
    #: Names of the attributes of `argparse.Namespace` that are sent; None: all.
    sent_arguments: frozenset[str] | None = None
    #: Variables of own modules that the script has set: module, name and value.
    variables: tuple[tuple[str, str, Any], ...] = ()
    #: Names of the parts that files and installed packages have.
    from_files: frozenset[str] = frozenset()

    def sent_from_process(self) -> dict[str, PartDigest]:
        """Return the parts that the process holds, without the parts of files and installed packages."""
        return {
            path: part
            for path, part in self.parts.items()
            if path not in self.from_files and not any(above in self.from_files for above in above_of(path))
        }


def identify(
    roots: Mapping[str, Any],
    *,
    ignore: Sequence[str] | None = None,
    code: Code = "auto",
    like: ContentIdentity | None = None,
) -> ContentIdentity:
    """Return the identity of what workers are sent.

    Takes about as long as pickling it, and at first the time to parse own modules.

    Args:
        roots: what is sent, by name.
        ignore: patterns of parts that do not count. Of `argparse.Namespace`, attributes whose names no code has are
            neither compared nor sent, unless the list is empty; None: no patterns.
        code: which own modules are sent, as of `LoaderOptions`.
        like: an earlier identity, of which files and installed packages are not looked at again.

    Raises OptionError if own modules are too large.
    """
    with script_by_value(), _keys_left_out():
        return _identify(roots, ignore, code, like)


def _identify(
    roots: Mapping[str, Any], ignore: Sequence[str] | None, code: Code, like: ContentIdentity | None
) -> ContentIdentity:
    bulk = Bulk()
    patterns = tuple(map(_canonical, ignore or ()))
    if like is not None:
        walk = _walk(roots, bulk, like.sent_arguments)
        return replace(like, parts=_listed(walk.roots, patterns))
    walk = _walk(roots, bulk, None)
    bundle = None
    if code is not None:
        names = walk.names - {script_name()}  # a word in code is not the script
        bundle = bundle_of(walk.modules, names, () if code == "auto" else code)
    own = own_code(bundle.data) if bundle else OwnCode({}, frozenset(), frozenset(), {})
    sent: frozenset[str] | None = None
    if walk.has_arguments and (ignore is None or len(ignore)) and code is not None and not walk.lends_arguments:
        sent = frozenset(walk.names) | own.names
        walk = _walk(roots, bulk, sent)
    found = dict(walk.roots)
    set_here = [one for one in set_variables(own) if not is_ignored(f"{one.module}.{one.name}", patterns)]
    for name, part in own.parts.items():
        live = _live(walk, [one for one in set_here if one.module == name])
        found[name] = merged(part, live) if live else part
    packages = _distributions(walk.modules, walk.names, own)
    return ContentIdentity(
        _listed({**found, **packages}, patterns),
        patterns,
        bundle,
        sent,
        tuple((one.module, one.name, one.value) for one in set_here if one.is_plain),
        frozenset((*own.parts, *packages)),
    )


def _listed(roots: Mapping[str, PartNode], patterns: Sequence[str]) -> dict[str, PartDigest]:
    listed = flatten(_nested(roots), MAX_PARTS, lambda path: is_ignored(path, patterns), MAX_PATH)
    return {path: _digest(part) for path, part in listed.items()}


def _walk(roots: Mapping[str, Any], bulk: Bulk, sent: Collection[str] | None) -> Walk:
    walk = Walk(ScriptPickler(io.BytesIO()), sent_arguments=None if sent is None else sent.__contains__, bulk=bulk)
    for name, obj in roots.items():
        walk.add(name, obj)
    walk.run()
    return walk


def _keys_left_out() -> AbstractContextManager[None]:
    """Leave keys of storages out: they differ between jobs that read the same. Not imported, there are none."""
    module = sys.modules.get("torch_dpflow.datasets.storage.credentials")
    return nullcontext() if module is None else module.leave_out_keys()


def _live(walk: Walk, variables: Iterable[SetVariable]) -> dict[str, PartNode]:
    """Return the parts of variables that were set. Variables that cannot be compared are neither sent nor counted."""
    found: dict[str, PartNode] = {}
    for one in variables:
        part = walk.digest_apart(one.value)
        if part is not None:
            found[one.name] = part
    return found


def _digest(part: PartNode) -> PartDigest:
    own = part.own.hex() if part.parts is not None else ""
    return PartDigest(part.digest.hex(), own, part.text[:MAX_SHOWN], part.optional)


def _nested(roots: Mapping[str, PartNode]) -> dict[str, PartNode]:
    """Put parts such as `mydata.Crops.resize` under `mydata.Crops`; join a module's parts if there are too many."""
    outer: dict[str, PartNode] = {}
    for path, part in sorted(roots.items(), reverse=True):
        above = next((one for one in _above(path) if one in roots and one != SCRIPT_PART), None)
        present = outer.get(path)
        if present is not None:  # some of its parts came before
            part = PartNode(part.own, part.text, _union(part.parts or {}, present.parts or {}), optional=part.optional)
        if above is None:
            outer[path] = part
            continue
        outer.pop(path, None)
        held = outer.get(above) or PartNode(b"")
        outer[above] = PartNode(b"", "", {**(held.parts or {}), path[len(above) :]: part})
    if len(outer) <= MAX_PARTS // 2:
        return outer
    joined: dict[str, dict[str, PartNode]] = {}
    for path, part in outer.items():
        first, _, rest = path.partition(".")
        joined.setdefault(first, {})[f".{rest}" if rest else ""] = part
    return {
        path: inside[""] if [*inside] == [""] else PartNode(digest_of(b"module"), "code", inside)
        for path, inside in joined.items()
    }


def _union(one: Mapping[str, PartNode], other: Mapping[str, PartNode]) -> dict[str, PartNode]:
    """Return all parts of two; of two with one name, both count."""
    both = {
        name: PartNode(digest_of(one[name].digest, other[name].digest), one[name].text) for name in one.keys() & other
    }
    return {**one, **other, **both}


def _above(path: str) -> Iterable[str]:
    return (path[:at] for at in range(len(path) - 1, 0, -1) if path[at] == ".")


def _distributions(modules: Iterable[str], names: Iterable[str], code: OwnCode) -> dict[str, PartNode]:
    """Return the versions of the installed packages that code names."""
    owners = _owners()
    tops = {module.partition(".")[0] for module in modules} | code.imports | owners.keys() & set(names)
    tops -= {*code.parts, _THIS, SCRIPT_PART, *sys.stdlib_module_names}
    found = {one for top in tops for one in owners.get(top, ())}
    versions = {name: metadata.version(name) for name in sorted(found)}
    return {
        f"package:{name}": PartNode(digest_of(name.encode(), version.encode()), version)
        for name, version in versions.items()
    }


@functools.lru_cache(maxsize=1)
def _owners() -> Mapping[str, Sequence[str]]:
    """Return the distributions of each installed top-level module."""
    return {top: sorted(set(owners)) for top, owners in metadata.packages_distributions().items()}


def script_name() -> str:
    """Return the name of the script, as its file has it."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return PurePath(file).stem if isinstance(file, str) else SCRIPT_PART


def _canonical(pattern: str) -> str:
    """Return a pattern with the script's module in place of its name."""
    script = f"{script_name()}."
    return f"{SCRIPT_PART}.{pattern[len(script) :]}" if pattern.startswith(script) else pattern


def fingerprint(obj: Any) -> str:
    """Return a digest of an object with the code that it refers to, 32 hexadecimal digits.

    Equal in every process that defines the same; an object that cannot be compared is equal to itself only.
    """
    parts = identify({"object": obj}, ignore=()).parts
    pieces = (f"{path} {part.digest} {part.optional}".encode(errors="replace") for path, part in sorted(parts.items()))
    return hashlib.sha256(b"\0".join(pieces)).hexdigest()[:32]

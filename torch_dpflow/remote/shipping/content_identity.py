"""Identity of a flow's content: digests, by named parts, of everything that is sent to its workers."""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, TypeAlias

from torch_dpflow.ipc.messages.content_parts import (
    MAX_PARTS,
    MAX_PATH,
    MAX_SHOWN,
    SCRIPT_PART,
    PartDigest,
    is_ignored,
)
from torch_dpflow.options import Code
from torch_dpflow.remote.shipping.canonical import Walk
from torch_dpflow.remote.shipping.code_bundle import CodeBundle, OwnFiles
from torch_dpflow.remote.shipping.compatibility import distributions_of_modules, version_of
from torch_dpflow.remote.shipping.content_pack import ScriptPickler, keys_left_out, script_by_value
from torch_dpflow.remote.shipping.own_members import Settled
from torch_dpflow.remote.shipping.own_source import OwnCode, own_code
from torch_dpflow.remote.shipping.own_state import OwnState, own_state, set_members
from torch_dpflow.remote.shipping.part_tree import PartNode, digest_of, flatten, merged, of_both, shown_text
from torch_dpflow.remote.shipping.values import Bulk
from torch_dpflow.workers.script_settings import current_directory

_THIS = __name__.partition(".")[0]
DIRECTORY = "current directory"
#: Maximum characters of the current directory that are shown: its last ones.
_MAX_DIRECTORY = 70
Members: TypeAlias = dict[str, dict[str, tuple[PartNode, Any]]]


@dataclass(frozen=True)
class ContentIdentity:
    """Identity of the content that a job sends, to be compared with other jobs', and what pickling it needs."""

    parts: dict[str, PartDigest]
    #: Patterns of parts that do not count.
    ignore: tuple[str, ...]
    #: The user's own modules; None if there are none, or if they are not sent.
    bundle: CodeBundle | None = field(default=None, repr=False)
    #: Names of the attributes of `argparse.Namespace` that are sent; None: all.
    sent_arguments: frozenset[str] | None = None
    #: State of own modules that workers are sent in addition to the files.
    state: OwnState = field(default_factory=OwnState, repr=False)
    #: Definitions in own modules' files; names of own modules that the content can import; parts of installed packages.
    own: OwnCode = field(default=OwnCode({}, {}), repr=False)
    reached: frozenset[str] = frozenset()
    packages: Mapping[str, PartNode] = field(default_factory=dict, repr=False)
    #: By module, functions that equal its file's definitions, so that the next comparison can skip them.
    settled: dict[str, Settled] = field(default_factory=dict, repr=False)


def identify(
    roots: Mapping[str, Any],
    *,
    ignore: Sequence[str] | None = None,
    code: Code = "auto",
    like: ContentIdentity | None = None,
) -> ContentIdentity:
    """Return the identity of the objects `roots`, which a job sends to its workers.

    This takes about the time of pickling the content; the first call also parses the user's own modules.

    Args:
        roots: the objects to send, by name.
        ignore: patterns of the paths of parts to leave out; None: no patterns. Unless it is an empty list, attributes
            of an `argparse.Namespace` that the code can be shown not to read are left out too, and not sent.
        code: which of the user's own modules are sent, as in `LoaderOptions`.
        like: an earlier identity of this job; everything except `parts` is taken from it.

    Raises OptionError if the user's own modules are too large, among others.
    """
    with script_by_value(), keys_left_out():
        return _identify(roots, ignore, code, like)


def _identify(
    roots: Mapping[str, Any], ignore: Sequence[str] | None, code: Code, like: ContentIdentity | None
) -> ContentIdentity:
    bulk = Bulk()
    patterns = tuple(map(_canonical, ignore or ()))
    if like is not None:
        walk = _walk(roots, bulk, like.sent_arguments)
        members = set_members(walk, like.own, like.reached, like.settled)
        parts = _listed(walk, like.own, like.reached, members, like.packages, patterns)
        if DIRECTORY in like.parts:  # where the workers of the first epoch are
            parts[DIRECTORY] = like.parts[DIRECTORY]
        return replace(like, parts=parts)
    walk = _walk(roots, bulk, None)
    settled: dict[str, Settled] = {}
    bundle, own, reached, members = _own_modules(walk, code, settled)
    sent: frozenset[str] | None = None
    if walk.has_arguments and (ignore is None or len(ignore)) and code is not None and not walk.lends_arguments:
        sent = frozenset(walk.names).union(*(own.sources[name].names for name in reached))
        walk = _walk(roots, bulk, sent)
        members = set_members(walk, own, reached, settled)
    packages = _distributions(walk, own, reached, sent=() if bundle is None else own.sources)
    return ContentIdentity(
        _listed(walk, own, reached, members, packages, patterns) | _directory(walk, own, reached, patterns),
        patterns,
        bundle,
        sent,
        own_state(members, own.sources, frozenset(own.sources) - reached, patterns),
        own,
        reached,
        packages,
        settled,
    )


def own_content(roots: Mapping[str, Any], code: Code) -> tuple[bytes, OwnState]:
    """Return (archive of own modules, state to set after their import) for the workers of a private loader.

    The archive is empty if no modules are sent. roots, code, errors: as in `identify`.
    """
    with script_by_value():
        walk = _walk(roots, Bulk(), None)
        settled: dict[str, Settled] = {}
        bundle, own, _, _ = _own_modules(walk, code, settled)
        members = set_members(walk, own, frozenset(own.sources), settled)
        state = own_state(members, own.sources, frozenset(), None)
    return b"" if bundle is None else bundle.data, state


def _own_modules(
    walk: Walk, code: Code, settled: dict[str, Settled]
) -> tuple[CodeBundle | None, OwnCode, frozenset[str], Members]:
    """Return (archive of own modules, their parsed files, names that workers can import, members that differ)."""
    paths = () if code == "auto" or code is None else code
    files = OwnFiles(paths, is_sent=code is not None)
    while True:
        before = len(walk.modules) + len(walk.names)
        names = walk.names - {script_name()}  # a word in code is not the script
        files.add(walk.modules, names)
        bundle = files.bundle()
        own = OwnCode({}, {}) if bundle is None else own_code(bundle.data)
        if code is None:  # workers have the files, of any version
            bundle, own = None, OwnCode({}, own.sources)
        reached = frozenset(own.sources) if paths else own.reached(walk.modules, names)
        members = set_members(walk, own, reached, settled)
        if len(walk.modules) + len(walk.names) == before:  # else their values refer to other modules
            return bundle, own, reached, members


def _listed(
    walk: Walk,
    own: OwnCode,
    reached: frozenset[str],
    members: Members,
    packages: Mapping[str, PartNode],
    patterns: Sequence[str],
) -> dict[str, PartDigest]:
    files = {name: part for name, part in own.parts.items() if name in reached or name not in own.sources}
    set_here = {name: {path: part for path, (part, _) in of.items()} for name, of in members.items() if of}
    files |= {name: merged(files.get(name) or PartNode(b"", "code"), parts) for name, parts in set_here.items()}
    roots = _nested({**walk.roots, **files, **packages})
    # One is for the current directory.
    listed = flatten(roots, MAX_PARTS - 1, lambda path: is_ignored(path, patterns), MAX_PATH)
    return {path: _digest(path, part) for path, part in listed.items()}


def _walk(roots: Mapping[str, Any], bulk: Bulk, sent: Collection[str] | None) -> Walk:
    walk = Walk(ScriptPickler(io.BytesIO()), sent_arguments=None if sent is None else sent.__contains__, bulk=bulk)
    for name, obj in roots.items():
        walk.add(name, obj)
    walk.run()
    return walk


def _directory(walk: Walk, own: OwnCode, reached: frozenset[str], patterns: Sequence[str]) -> dict[str, PartDigest]:
    """Return the part for the current directory, if the content has a relative path of an existing file."""
    for text in sorted(walk.names.union(*(own.sources[name].names for name in reached))):
        if "/" in text or "." in text:  # names of variables are among them
            walk.paths.look(text)
    here = current_directory()
    if not walk.paths.found or is_ignored(DIRECTORY, patterns):
        return {}
    return {
        DIRECTORY: _digest(DIRECTORY, PartNode(digest_of(here.encode(errors="replace")), ascii(here[-_MAX_DIRECTORY:])))
    }


def _digest(path: str, part: PartNode) -> PartDigest:
    own = part.own.hex() if part.parts is not None else ""
    return PartDigest(part.digest.hex(), own, shown_text(path, part)[:MAX_SHOWN], part.optional)


def _nested(roots: Mapping[str, PartNode]) -> dict[str, PartNode]:
    """Put parts such as `mydata.Crops.resize` under `mydata.Crops`; join a module's parts if there are too many."""
    outer: dict[str, PartNode] = {}
    for path, part in sorted(roots.items(), reverse=True):
        above = next((one for one in _above(path) if one in roots and one != SCRIPT_PART), None)
        present = outer.get(path)
        if present is not None:  # some of its parts came before
            part = PartNode(part.own, part.text, of_both(present, part).parts, optional=part.optional)
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


def _above(path: str) -> Iterable[str]:
    return (path[:at] for at in range(len(path) - 1, 0, -1) if path[at] == ".")


def _distributions(walk: Walk, own: OwnCode, reached: Iterable[str], sent: Iterable[str]) -> dict[str, PartNode]:
    """Return the versions of installed packages that code names, as parts. sent: modules that are sent as files."""
    owners = distributions_of_modules()
    imported = {name.partition(".")[0] for module in reached for name in own.sources[module].imports}
    tops = {module.partition(".")[0] for module in walk.modules} | imported | owners.keys() & walk.names
    tops -= {*sent, _THIS, SCRIPT_PART, *sys.stdlib_module_names}
    found = {one for top in tops for one in owners.get(top, ())}
    versions = {name: version_of(name) or "" for name in sorted(found)}
    return {
        f"package:{name}": PartNode(digest_of(name.encode(), version.encode()), version)
        for name, version in versions.items()
    }


def script_name() -> str:
    file = getattr(sys.modules["__main__"], "__file__", None)
    return PurePath(file).stem if isinstance(file, str) else SCRIPT_PART


def _canonical(pattern: str) -> str:
    """Return a pattern with the script's module in place of its name."""
    script = f"{script_name()}."
    return f"{SCRIPT_PART}.{pattern[len(script) :]}" if pattern.startswith(script) else pattern


def fingerprint(obj: Any) -> str:
    """Return a digest of an object and of the code to which it refers, as 32 hexadecimal digits.

    It is the same for equal objects in all processes with equal code, package versions and current directory. An
    object that cannot be compared equals only itself.
    """
    parts = identify({"object": obj}, ignore=()).parts
    pieces = (f"{path} {part.digest} {part.optional}".encode(errors="replace") for path, part in sorted(parts.items()))
    return hashlib.sha256(b"\0".join(pieces)).hexdigest()[:32]

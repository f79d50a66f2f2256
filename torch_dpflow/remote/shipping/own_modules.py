"""What the user's own modules contribute to what workers run: their code by name, and variables set since their import.

Workers import the files. So code is digested from the files, and a variable counts by its value only if the file gives
it a literal, and the process has another value: the script has set it.
"""

from __future__ import annotations

import ast
import functools
import sys
import types
import zipfile
from abc import ABCMeta
from collections.abc import Iterator, Mapping
from io import BytesIO
from itertools import chain
from typing import Any, NamedTuple

from torch_dpflow.remote.shipping.code_digest import code_digest
from torch_dpflow.remote.shipping.part_tree import PartNode, digest_of, text_of
from torch_dpflow.remote.shipping.reducers import NO_VARIABLES
from torch_dpflow.remote.shipping.values import ATOMS

#: Stands for a variable whose value its file computes.
_COMPUTED = object()
#: Parts of a class that are no variables.
_CODE = (
    types.FunctionType,
    type,
    property,
    staticmethod,
    classmethod,
    functools.cached_property,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.ModuleType,
)
#: Most elements of a container that is compared with a literal, and sent.
_MAX_SENT = 10_000


class OwnCode(NamedTuple):
    """Own modules, as their files define them."""

    #: By module.
    parts: dict[str, PartNode]
    #: Names and texts in the code.
    names: frozenset[str]
    #: Top-level modules that it imports.
    imports: frozenset[str]
    #: Values of variables, by module and by dotted name in it; `_COMPUTED` for values that are no literals.
    values: dict[str, dict[str, Any]]


class SetVariable(NamedTuple):
    """A variable of an own module that the script's process has set."""

    module: str
    #: Dotted, for an attribute of a class.
    name: str
    value: Any
    #: Whether workers get it: it consists of plain values.
    is_plain: bool


def own_code(archive: bytes) -> OwnCode:
    """Return what the modules in the archive of a bundle define."""
    parts: dict[str, PartNode] = {}
    values: dict[str, dict[str, Any]] = {}
    names: set[str] = set()
    imports: set[str] = set()
    with zipfile.ZipFile(BytesIO(archive)) as files:
        for place in files.namelist():
            if not place.endswith(".py"):
                parts[place] = PartNode(digest_of(files.read(place)), "file")
                continue
            module = place.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
            found = _parsed(files.read(place))
            parts[module], values[module] = found.part, found.values
            names |= found.names
            imports |= found.imports
    return OwnCode(parts, frozenset(names), frozenset(imports), values)


def set_variables(code: OwnCode) -> Iterator[SetVariable]:
    """Yield the variables of loaded own modules that differ from the literals in their files."""
    for module, values in sorted(code.values.items()):
        loaded = sys.modules.get(module)
        if loaded is None:
            continue
        for name, value in _variables(loaded):
            literal = values.get(name, values.get("*"))
            if literal is _COMPUTED or _is_equal(value, literal):
                continue
            yield SetVariable(module, name, value, _is_plain(value))


def set_variable(module: types.ModuleType, name: str, value: Any) -> None:
    """Set a variable of a module; a container is filled in place, as other modules may refer to it."""
    holder: Any = module
    *outer, last = name.split(".")
    for one in outer:
        holder = getattr(holder, one)
    present = vars(holder).get(last)
    if type(present) is type(value) and isinstance(present, dict | set):
        present.clear()
        present.update(value)
    elif type(present) is list and type(value) is list:
        present[:] = value
    else:
        setattr(holder, last, value)


def _variables(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in sorted(vars(module).items()):
        if type(value) in (type, ABCMeta) and (value.__module__, value.__qualname__) == (module.__name__, name):
            for inner, attribute in sorted(vars(value).items()):
                if not inner.startswith(("__", "_abc_")) and not isinstance(attribute, _CODE):
                    yield f"{name}.{inner}", attribute
        elif name not in NO_VARIABLES and not isinstance(value, _CODE):
            yield name, value


def _is_plain(value: Any) -> bool:
    if type(value) in ATOMS:
        return True
    if type(value) not in (tuple, list, dict, set, frozenset) or len(value) > _MAX_SENT:
        return False
    inside = [*value, *value.values()] if isinstance(value, dict) else [*value]
    return all(
        type(one) in ATOMS or (type(one) is tuple and all(type(item) in ATOMS for item in one)) for one in inside
    )


def _is_equal(value: Any, literal: Any) -> bool:
    """Return whether a value is the literal; 1 is not 1.0."""
    if type(value) is not type(literal):
        return False
    if type(value) in ATOMS:
        return repr(value) == repr(literal)
    return _is_plain(value) and len(value) == len(literal) and _shape(value) == _shape(literal)


def _shape(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return repr(value)


class _Parsed(NamedTuple):
    """As of `OwnCode`, of one module."""

    part: PartNode
    names: frozenset[str]
    imports: frozenset[str]
    values: dict[str, Any]


@functools.lru_cache(maxsize=4096)
def _parsed(source: bytes) -> _Parsed:
    names: set[str] = set()
    values: dict[str, Any] = {}
    try:
        tree = _without_lines(ast.parse(source))
    except (SyntaxError, ValueError):
        return _Parsed(PartNode(digest_of(source), "code"), frozenset(), frozenset(), values)
    part = _body(tree.body, names, values, "")
    return _Parsed(part, frozenset(names), frozenset(_imported(tree)), values)


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name.partition(".")[0] for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _without_lines(tree: ast.Module) -> ast.Module:
    """Take docstrings and line numbers out of code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.stmt | ast.excepthandler | ast.arg | ast.keyword | ast.alias | ast.pattern):
            node.lineno = node.end_lineno = 1
            node.col_offset = node.end_col_offset = 0
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and body:
            first = body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                node.body = body[1:] or [ast.Pass(lineno=1, end_lineno=1, col_offset=0, end_col_offset=0)]
    return tree


def _body(statements: list[ast.stmt], names: set[str], values: dict[str, Any], prefix: str) -> PartNode:
    """Return the part of a module's or a class's body: definitions and variables by name, the rest in its order."""
    parts: dict[str, PartNode] = {}
    imports, order = list[bytes](), list[bytes]()
    for one in chain.from_iterable(map(_split, statements)):
        if isinstance(one, ast.Import | ast.ImportFrom):
            imports.append(_statement(one, names))
            values |= {prefix + (each.asname or each.name.partition(".")[0]): _COMPUTED for each in one.names}
            continue
        defined, value = _defined(one)
        if isinstance(one, ast.ClassDef):
            inner = _body(one.body, names, values, f"{prefix}{one.name}.")
            empty = ast.ClassDef(
                **{**vars(one), "body": [ast.Pass(lineno=1, end_lineno=1, col_offset=0, end_col_offset=0)]}
            )
            part = PartNode(digest_of(_statement(empty, names), inner.own), "class", inner.parts)
        else:
            part = PartNode(_statement(one, names), _text(value))
        if not isinstance(one, ast.FunctionDef) or one.decorator_list:
            order.append(repr(defined).encode() if defined else part.digest)
        for name in defined:
            if not isinstance(one, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                place = prefix + _mangled(name, prefix)
                values[place] = _literal(value) if place not in values else _COMPUTED
            before = parts.get(f".{name}")
            parts[f".{name}"] = part if before is None else PartNode(digest_of(before.digest, part.digest), part.text)
        if not defined:
            for node in ast.walk(one):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    values[prefix + node.id] = _COMPUTED
    return PartNode(digest_of(*sorted(imports), b"", *order), "code", parts)


def _split(statement: ast.stmt) -> list[ast.stmt]:
    """Split `a, b = 1, 2` into two statements."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, value = statement.targets[0], statement.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            pairs = [*zip(target.elts, value.elts, strict=True)]
            if all(isinstance(one, ast.Name) and _is_constant(each) for one, each in pairs):
                return [ast.copy_location(ast.Assign([one], each), statement) for one, each in pairs]
    return [statement]


def _is_constant(value: ast.expr) -> bool:
    return _literal(value) is not _COMPUTED


def _mangled(name: str, prefix: str) -> str:
    """Return a name as the class has it."""
    if not prefix or not name.startswith("__") or name.endswith("__"):
        return name
    return f"_{prefix.split('.')[-2].lstrip('_')}{name}"


def _defined(statement: ast.stmt) -> tuple[list[str], ast.expr | None]:
    """Return the names that a statement defines, and the value of a variable; none for other statements."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [statement.name], None
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    names = [one.id for one in targets if isinstance(one, ast.Name)]
    if not targets or len(names) != len(targets):
        return [], None
    value: ast.expr | None = getattr(statement, "value", None)
    return names, value


def _literal(value: ast.expr | None) -> Any:
    try:
        return ast.literal_eval(value) if value is not None else _COMPUTED
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _COMPUTED


def _text(value: ast.expr | None) -> str:
    literal = _literal(value)
    return "code" if literal is _COMPUTED else text_of(literal)


def _statement(statement: ast.stmt, names: set[str]) -> bytes:
    """Return the digest of one statement."""
    try:
        code = compile(ast.Module([statement], []), "", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):  # it only works at its place
        names |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute)}
        return digest_of(ast.dump(statement).encode(errors="replace"))
    return code_digest(code, names)


def merged(source: PartNode, live: Mapping[str, PartNode]) -> PartNode:
    """Return a module's part with the values of variables that were set."""
    parts = dict(source.parts or {})
    inner: dict[str, dict[str, PartNode]] = {}
    for name, part in live.items():
        first, _, rest = name.partition(".")
        if rest:
            inner.setdefault(f".{first}", {})[rest] = part
        else:
            before = parts.get(f".{name}")
            own = part.own if before is None else digest_of(before.digest, part.own)
            parts[f".{name}"] = PartNode(own, part.text, part.parts)
    for name, attributes in inner.items():
        parts[name] = merged(parts.get(name, PartNode(b"", "class")), attributes)
    return PartNode(source.own, source.text, parts)

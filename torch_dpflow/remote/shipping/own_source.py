"""Definitions in the files of the user's own modules, read without importing them."""

from __future__ import annotations

import ast
import copy
import functools
import types
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain
from typing import Any, NamedTuple

from torch_dpflow.remote.shipping.code_digest import source_digest
from torch_dpflow.remote.shipping.modules import imports_of, resolve
from torch_dpflow.remote.shipping.part_tree import PartNode, digest_of, text_of

#: Marker for a value that the file computes, in place of a literal.
COMPUTED = object()
#: Names by which code imports modules whose names it computes.
_IMPORTERS = frozenset(["import_module", "__import__", "pkgutil"])
_PASS = ast.Pass(lineno=1, end_lineno=1, col_offset=0, end_col_offset=0)


@dataclass
class OwnSource:
    """Definitions in one module's file, by paths such as `.Crops.resize` and, for a default, `.read(size)`."""

    part: PartNode = field(default_factory=lambda: PartNode(b"", "code"))
    #: Names and texts in the code.
    names: set[str] = field(default_factory=set)
    #: Dotted names of the modules that it imports.
    imports: frozenset[str] = frozenset()
    #: Values of variables and of defaults; `COMPUTED` if they are not literals.
    literals: dict[str, Any] = field(default_factory=dict)
    #: By variable, the module and the name that it is imported from; the name is empty if it is the module itself.
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    #: Modules of which all names are imported.
    stars: list[str] = field(default_factory=list)
    #: Bases of classes, as dotted names; None: expressions.
    bases: dict[str, list[str | None]] = field(default_factory=dict)
    #: Kind of a function: the name of its decorator, such as "property", "function" without one, empty for several.
    kinds: dict[str, str] = field(default_factory=dict)
    #: Digests of the code of functions, in the order of their definitions.
    codes: dict[str, list[bytes]] = field(default_factory=dict)
    #: Docstrings of functions, classes and, by an empty path, of the module.
    docs: dict[str, str] = field(default_factory=dict)
    #: Annotations of functions, classes and the module.
    annotations: dict[str, dict[str, Annotation]] = field(default_factory=dict)
    #: Names in the order in which classes and the module define them.
    order: dict[str, list[str]] = field(default_factory=dict)


class Annotation(NamedTuple):
    """Annotation in the source text of a file."""

    #: Its expression, printed by `ast.dump`.
    text: str
    #: Its compiled expression; None if evaluating the expression can do more than read names.
    code: types.CodeType | None

    def makes(self, value: Any, module: Mapping[str, Any], inner: Mapping[str, Any]) -> bool:
        """Return whether the annotation provably evaluates to `value`. module, inner: variables of module and class."""
        if type(value) is str and _dump_of(value) == self.text:  # as in `from __future__ import annotations`
            return True
        try:
            made = COMPUTED if self.code is None else eval(self.code, dict(module), dict(inner))
            return made is value or (type(made) is type(value) and bool(made == value))
        except Exception:  # code of the user's own runs
            return False


#: What an annotation consists of that only reads names.
_READING = (
    ast.Name | ast.Attribute | ast.Constant | ast.Subscript | ast.Tuple | ast.List | ast.BinOp | ast.BitOr | ast.Load
)


def _annotation(expression: ast.expr) -> Annotation:
    is_reading = all(isinstance(node, _READING) for node in ast.walk(expression))
    code = compile(ast.Expression(expression), "", "eval", dont_inherit=True) if is_reading else None
    return Annotation(ast.dump(expression), code)


@functools.lru_cache(maxsize=4096)
def _dump_of(text: str) -> str:
    try:
        return ast.dump(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        return ""


class OwnCode(NamedTuple):
    """Definitions of all own modules."""

    #: By module, and by path for other files.
    parts: Mapping[str, PartNode]
    sources: Mapping[str, OwnSource]

    def reached(self, modules: Iterable[str], names: Iterable[str]) -> frozenset[str]:
        """Return the own modules that code can import, directly or not, if it contains `names` and uses `modules`."""
        used = set(names)
        waiting = [*modules, *(one for one in self.sources if used.issuperset(one.split(".")))]
        found: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name in self.sources and name not in found:
                found.add(name)
                used |= self.sources[name].names
                waiting += self.sources[name].imports
            waiting += [name.rpartition(".")[0]] if "." in name else []
            if not waiting:  # modules that are named by texts
                waiting += self.sources.keys() & used - found
        return frozenset(found if used.isdisjoint(_IMPORTERS) else self.sources)


def own_code(archive: bytes) -> OwnCode:
    """Return the definitions of the modules in a bundle's archive."""
    parts: dict[str, PartNode] = {}
    sources: dict[str, OwnSource] = {}
    with zipfile.ZipFile(BytesIO(archive)) as files:
        for place in files.namelist():
            content = files.read(place)
            if not place.endswith(".py"):
                parts[place] = PartNode(digest_of(content), "file")
                continue
            module = place.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
            package = place.rpartition("/")[0].replace("/", ".")
            sources[module] = parsed(content, package)
            parts[module] = sources[module].part
    return OwnCode(parts, sources)


@functools.lru_cache(maxsize=4096)
def parsed(content: bytes, package: str) -> OwnSource:
    """Return the definitions in a module's source, as far as it can be parsed. package: base of relative imports."""
    found = OwnSource(imports=frozenset(imports_of(content, package)))
    try:
        tree = _without_lines(ast.parse(content))
        found.docs = {"": vars(tree)["docstring"]} if "docstring" in vars(tree) else {}
        found.part = _SourceReader(found, package).body(tree.body, "")
        _add_codes(compile(content, "", "exec", dont_inherit=True), "", found)
    except (SyntaxError, ValueError, RecursionError):
        found.part = PartNode(digest_of(content), "code")
    return found


def _add_codes(code: types.CodeType, prefix: str, found: OwnSource) -> None:
    for one in code.co_consts:
        if isinstance(one, types.CodeType) and not one.co_name.startswith("<"):
            path = f"{prefix}.{_mangled(one.co_name, prefix)}"
            if one.co_flags & 0x2:  # new locals: a function
                found.codes.setdefault(path, []).append(source_digest(one, set()))
            else:
                _add_codes(one, path, found)


def _without_lines(tree: ast.Module) -> ast.Module:
    """Return a module's syntax tree without docstrings and line numbers."""
    waiting: list[Any] = [tree]
    while waiting:  # in half of the time of `ast.walk`
        node = waiting.pop()
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, ast.AST):
                waiting.append(value)
            elif type(value) is list:
                waiting += [one for one in value if isinstance(one, ast.AST)]
        if node._attributes:
            node.lineno = node.end_lineno = 1
            node.col_offset = node.end_col_offset = 0
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and body:
            first = body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                node.body = body[1:] or [_PASS]
                vars(node)["docstring"] = first.value.value
    return tree


class _SourceReader:
    """Reader of the body of a module and of its classes."""

    def __init__(self, found: OwnSource, package: str) -> None:
        self._found = found
        self._package = package

    def body(self, statements: list[ast.stmt], prefix: str) -> PartNode:
        """Return the part node of a body: definitions and variables by name, all other statements in their order."""
        found, parts = self._found, dict[str, PartNode]()
        imports, order, defined = list[bytes](), list[bytes](), list[str]()
        for one in chain.from_iterable(map(_split, statements)):
            if isinstance(one, ast.Import | ast.ImportFrom):
                imports.append(self._statement(one))
                defined += self._import(one, prefix)
                continue
            names, value = _defined(one)
            if "docstring" in vars(one):
                found.docs[f"{prefix}.{_mangled(names[0], prefix)}"] = vars(one)["docstring"]
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.simple:
                found.annotations.setdefault(prefix, {})[_mangled(one.target.id, prefix)] = _annotation(one.annotation)
            if isinstance(one, ast.ClassDef):
                inner = self.body(one.body, f"{prefix}.{one.name}")
                header = copy.copy(one)
                header.body = [_PASS]
                part = PartNode(digest_of(self._statement(header), inner.own), "class", inner.parts)
                found.bases[f"{prefix}.{one.name}"] = [*map(_dotted, one.bases)]
            else:
                literal = _literal(value)
                part = PartNode(self._statement(one), "code" if literal is COMPUTED else text_of(literal))
                found.literals |= {f"{prefix}.{_mangled(name, prefix)}": literal for name in names}
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                self._function(one, f"{prefix}.{_mangled(one.name, prefix)}")
            if not isinstance(one, ast.FunctionDef) or one.decorator_list:
                order.append(repr(names).encode() if names else part.digest)
            defined += names
            for name in names:
                before = parts.get(f".{name}")
                parts[f".{name}"] = part if before is None else PartNode(digest_of(before.digest, part.digest), "code")
        found.order[prefix] = [*dict.fromkeys(_mangled(name, prefix) for name in defined)]
        parts[".(order)"] = PartNode(digest_of(repr(defined).encode()), "order of definitions")
        return PartNode(digest_of(*sorted(imports), b"", *order), "code", parts)

    def _import(self, statement: ast.Import | ast.ImportFrom, prefix: str) -> list[str]:
        names = []
        for one in statement.names:
            if isinstance(statement, ast.Import):
                name = one.asname or one.name.partition(".")[0]
                origin = (one.name if one.asname else name, "")
            else:
                name = one.asname or one.name
                origin = (resolve("." * statement.level + (statement.module or ""), self._package), one.name)
            if name == "*":
                self._found.stars.append(origin[0])
            else:
                self._found.imported[f"{prefix}.{name}"] = origin
            names.append(name)
        return sorted(names)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, path: str) -> None:
        del self._found.literals[path]
        decorators = [_dotted(one) or "?" for one in node.decorator_list]
        kind = decorators[0].rpartition(".")[2] if decorators else "function"
        self._found.kinds[path] = {"setter": "property", "deleter": "property", "getter": "property"}.get(kind, kind)
        if len(decorators) > 1:
            self._found.kinds[path] = ""
        given, every = node.args, [*node.args.posonlyargs, *node.args.args]
        named = [(one.arg, one.annotation) for one in (*every, *given.kwonlyargs, given.vararg, given.kwarg) if one]
        annotated = {name: _annotation(one) for name, one in (*named, ("return", node.returns)) if one is not None}
        self._found.annotations[path] = annotated
        pairs = [*zip(every[len(every) - len(given.defaults) :], given.defaults, strict=True)]
        pairs += [(one, value) for one, value in zip(given.kwonlyargs, given.kw_defaults, strict=True) if value]
        self._found.literals |= {f"{path}({one.arg})": _literal(value) for one, value in pairs}

    def _statement(self, statement: ast.stmt) -> bytes:
        try:
            code = compile(ast.Module([statement], []), "", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError):  # it only works at its place
            self._found.names |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            self._found.names |= {node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute)}
            return digest_of(ast.dump(statement).encode(errors="replace"))
        return source_digest(code, self._found.names)


def _dotted(expression: ast.expr) -> str | None:
    if isinstance(expression, ast.Attribute):
        outer = _dotted(expression.value)
        return outer and f"{outer}.{expression.attr}"
    return expression.id if isinstance(expression, ast.Name) else None


def _split(statement: ast.stmt) -> Iterable[ast.stmt]:
    """Split `a, b = 1, 2` into two statements."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, value = statement.targets[0], statement.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            pairs = [*zip(target.elts, value.elts, strict=True)]
            if all(isinstance(one, ast.Name) and _literal(each) is not COMPUTED for one, each in pairs):
                return [ast.copy_location(ast.Assign([one], each), statement) for one, each in pairs]
    return [statement]


def _mangled(name: str, prefix: str) -> str:
    """Return a name after the name mangling of its class."""
    if not prefix or not name.startswith("__") or name.endswith("__"):
        return name
    return f"_{prefix.rpartition('.')[2].lstrip('_')}{name}"


def _defined(statement: ast.stmt) -> tuple[list[str], ast.expr | None]:
    """Return (names that a statement defines, expression of the value); no names if it defines nothing."""
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
        return ast.literal_eval(value) if value is not None else COMPUTED
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return COMPUTED

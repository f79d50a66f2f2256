"""The source of the package, parsed once: its names, its imports, what it uses of torch, and its texts."""

from __future__ import annotations

import ast
import builtins
import gc
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pages import ROOT
from tools.code_figures import cycles, imports, modules
from torch_dpflow._core.torch_private import ITERATOR_ATTRIBUTES, LOADER_ATTRIBUTES

PACKAGE = ROOT / "torch_dpflow"
#: The one module that uses private names of torch.
FENCE = PACKAGE / "_core" / "torch_private.py"
#: Private names of other packages that the package uses: attributes that no class of ours has, and not torch's.
OF_OTHERS = {
    "_strip_protocol": "fsspec",
    "_get_kwargs_from_urls": "fsspec",
    "_get_dirs": "fsspec",
    "_whichmodule": "cloudpickle",
    "_make_typevar": "cloudpickle",
    "_dynamic_function_reduce": "cloudpickle",
    "_get_dump": "abc",
    "_getframe": "sys",
    "_move_to_device": "ray",
    "_wait_for_batch": "ray",
    "_forkserver": "multiprocessing",
    "_forkserver_pid": "multiprocessing",
    "_preload_modules": "multiprocessing",
    "_config": "multiprocessing",
    "_exit": "os",
    "_asdict": "collections",
    "_slotnames": "copyreg",
    "_reconstructor": "copyreg",
    "_reduce_ex": "copyreg",
    "_HEAPTYPE": "copyreg",
    "_combined_loader": "lightning",
    "_dataloader": "lightning",
}
#: Words that the project does not use for programs, or that readers stumble over.
AVOIDED = re.compile(
    r"\b(whoever|nobody|somebody|(is|are) told|has come|knocks?|strangers?|parcels?|anew|patience)\b"
    r"|\b(in any case|says so|another number of|for ever|with as many (ranks|workers)(?! as))\b|\bsome (?=[0-9])"
    r"|\bas ever\b(?! \w+ed\b)|\b(MOST|LEAST)_[A-Z]"
    r"|\bof (its|their|his|your|our) own(?=\s*[.,;:)]|$)|\bfor people\b|\b(once|times) an epoch\b|\blikewise\b"
    r"|\b[Aa]s of\b|\bfrom (?!now|then|here)[\w*`]{1,20} on(?=[.,;])"
    # What a thing is of, without the thing; a step without its name.
    r"|#: [Oo]f (?!these\b)|\n\s+[\w, ]+: of |\b([Uu]nless that was|what is) done\b"
    # A clause where a noun says which value or which errors; a causative in place of an imperative.
    r"|\btimes? of change\b|\b(an)?other \w+ than\b|\b(of|in|with) another (type|kind|class|format|shape|length|size)\b"
    r"|\b[Rr]eturn what\b|\b[Rr]aises as `|^[Hh]ave (?!been\b)"
)
#: The beginning of a docstring that should be a noun phrase, of a class or module, and is what that does or has to do.
ROLELESS = re.compile(
    r"(Allocate|Announce|Answer|Build|Check|Compute|Convert|Count|Decide|Decode|Describe|Encode|Evict|Follow|Import|"
    r"Keep|Listen|Load|Look|Make|Map|Measure|Plan|Push|Read|Request|Send|Show|Start|Store|Test|Write)s (?!of |for |to )"
    r"|(Append|Assign|Deliver|Discard|Drop|Fail|Instruct|Kill|Make|Query|Read|Reject|Remove|Start) (?!of )[a-z]"
)
#: Names of other libraries, of variables of the environment, and of examples.
ELSEWHERE = re.compile(
    r"DPFLOW_\w+|a/0001.*|mydata.*|ps|R|x\.conj|save_to_disk|sched_setattr|authkey|key_filename|AsyncTask|Batcher|"
    r"Feature|Function|Loader|PinMemory|Prefetcher|RandomResizedCrop|(torch|functools|pickletools)\..*"
)
#: A string without its prefix, or a comment. `tokenize` takes seconds for all modules.
STRING_OR_COMMENT = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*', re.DOTALL
)


#: The nodes of a module's tree, by their types.
Nodes = dict[type[ast.AST], list[Any]]


def nodes_of(program: str) -> Nodes:
    """Return the nodes of a program, without those that have no fields, such as operators."""
    found: Nodes = defaultdict(list)
    nodes: list[ast.AST] = [ast.parse(program)]
    for node in nodes:
        found[type(node)].append(node)
        for value in vars(node).values():
            if type(value) is list:
                nodes.extend(one for one in value if isinstance(one, ast.AST))
            elif isinstance(value, ast.AST) and value._fields:
                nodes.append(value)
    return found


def of(nodes: Nodes, *types: type[ast.AST]) -> Iterator[Any]:
    return (node for kind in types for node in nodes.get(kind, ()))


@pytest.fixture(scope="module")
def source() -> Iterator[dict[Path, Nodes]]:
    """Every module of the package."""
    gc.disable()  # a million objects, all of which stay
    found = {path: nodes_of(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    gc.freeze()
    gc.enable()
    yield found
    gc.unfreeze()


def test_no_two_classes_of_the_package_have_one_name(source: dict[Path, Nodes]) -> None:
    """A search for it leads to one place."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, nodes in source.items():
        for node in of(nodes, ast.ClassDef):
            places[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert len(places) > 400
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_module_imports_itself_through_others_not_even_for_types(source: dict[Path, Nodes]) -> None:
    known = modules(ROOT)
    named = {name: imports(of(source[path], ast.Import, ast.ImportFrom), known) for name, path in known.items()}
    assert cycles({name: others - {name} for name, others in named.items()}) == []


@pytest.mark.parametrize(
    "program",
    [
        "from torch._utils import ExceptionWrapper",
        "from torch.utils.data import Dataset, _DatasetKind",
        "import torch.utils.data._utils",
        "import torch as t\nt._C._set_worker_signal_handlers()",
        "import torch.distributed as dist\ndist.distributed_c10d._get_default_store()",
        "from torch.utils import data\ndata._utils.collate.collate([])",
    ],
)
def test_the_search_finds_a_private_name(program: str) -> None:
    assert _private_names(nodes_of(program))


def test_no_other_module_touches_a_private_name_of_torch(source: dict[Path, Nodes]) -> None:
    found = {
        str(path.relative_to(PACKAGE)): names
        for path, nodes in source.items()
        if path != FENCE and (names := _private_names(nodes))
    }
    assert found == {}


def test_every_private_attribute_that_is_not_ours_is_one_that_is_checked(source: dict[Path, Nodes]) -> None:
    """What our classes inherit of torch's, or use of its objects, and nothing that was forgotten in the list."""
    used: defaultdict[str, list[str]] = defaultdict(list)
    ours: set[str] = set()
    for path, nodes in source.items():
        if path == FENCE:
            continue
        for node in of(nodes, ast.Attribute):
            if _is_private(node.attr):
                if isinstance(node.ctx, ast.Store):
                    ours.add(node.attr)
                else:
                    used[node.attr].append(f"{path.name}:{node.lineno}")
        ours |= _defined(nodes)
    strange = {name: where for name, where in used.items() if name not in ours}
    assert OF_OTHERS.keys() <= strange.keys()
    assert strange.keys() - OF_OTHERS.keys() <= {*ITERATOR_ATTRIBUTES, *LOADER_ATTRIBUTES}, strange


def _defined(nodes: Nodes) -> set[str]:
    names = {node.name for node in of(nodes, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)}
    names |= {node.id for node in of(nodes, ast.Name) if isinstance(node.ctx, ast.Store)}
    # __slots__, and what setattr is given
    return names | {node.value for node in of(nodes, ast.Constant) if isinstance(node.value, str)}


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not (part.startswith("__") and part.endswith("__")) for part in name.split("."))


def _private_names(nodes: Nodes) -> list[str]:
    """What it imports of torch's private names, and what it reaches from torch's modules."""
    found: list[str] = []
    torchs: set[str] = set()
    for node in of(nodes, ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.asname or alias.name.split(".")[0]) for alias in node.names]
        elif not node.level:
            names = [(f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names]
        else:
            continue
        of_torch = [(name, local) for name, local in names if name.split(".")[0] == "torch"]
        torchs.update(local for _, local in of_torch)
        found += [name for name, _ in of_torch if _is_private(name)]
    private = (node for node in of(nodes, ast.Attribute) if _is_private(node.attr))
    return found + [ast.unparse(node) for node in private if _begins_with(node) in torchs]


def _begins_with(node: Any) -> str:
    """Return the name that an expression such as `torch.f()._x[0]` begins with; empty if it begins with another."""
    while not isinstance(node, ast.Name):
        node = getattr(node, "func", None) or getattr(node, "value", None)
        if not isinstance(node, ast.AST):
            return ""
    return node.id


def written(path: Path, nodes: Nodes) -> tuple[list[tuple[int, str]], set[str]]:
    """Return the docstrings and comments of a module with their lines, and the names that its code has."""
    source, code = path.read_text("utf-8"), []
    texts = [
        (node.body[0].lineno, text)
        for node in of(nodes, ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if (text := ast.get_docstring(node, clean=False)) is not None
    ]
    docstrings = {line for line, _ in texts}
    line, at = 1, 0
    for found in STRING_OR_COMMENT.finditer(source):
        line += source.count("\n", at, found.start())
        code.append(source[at : found.start()])
        if found[0].startswith("#"):
            texts.append((line, found[0]))
        elif line not in docstrings:
            code.append(found[0])
        line, at = line + found[0].count("\n"), found.end()
    code.append(source[at:])
    names = {*path.with_suffix("").parts, *path.parts, *re.findall(r"\w+", " ".join(code))}
    return texts, names


def test_docstrings_and_comments_name_what_exists_in_plain_words(source: dict[Path, Nodes]) -> None:
    read = {path: written(path, nodes) for path, nodes in source.items()}
    known = {*dir(builtins)}.union(*(names for _, names in read.values()))
    others = [path for name in ("tests", "docs", "tools", "benchmarks") for path in (ROOT / name).rglob("*")]
    known.update(part for path in others for part in (*path.parts, path.stem))
    gone, avoided = [], []
    for path, (texts, _) in read.items():
        place = str(path.relative_to(ROOT))
        for line, text in texts:
            names = re.findall(r"(?<!`)`([A-Za-z_][\w./]*)(?:\(\))?`(?!`)", text)
            unknown = [name for name in names if not {*filter(None, re.split(r"[./]", name))} <= known]
            gone += [(place, line, name) for name in unknown if not ELSEWHERE.fullmatch(name)]
            avoided += [(place, line, found[0]) for found in AVOIDED.finditer(text)]
    assert not gone
    assert not avoided


def test_the_docstring_of_a_class_or_module_begins_with_a_noun(source: dict[Path, Nodes]) -> None:
    found = [
        (path.name, text)
        for path, nodes in source.items()
        for node in of(nodes, ast.Module, ast.ClassDef)
        if (text := ast.get_docstring(node)) and ROLELESS.match(text)
    ]
    assert found == []
    texts = ["Reads records.", "Kill this worker.", "Reads of ranges."]
    assert [bool(ROLELESS.match(text)) for text in texts] == [True, True, False]


def test_a_name_that_is_gone_and_a_word_that_is_avoided_are_found() -> None:
    text = "Have it return what it got. Raises as `f`. "
    text += "Whoever calls `nothing.like_this` is told anew, some 10 times in any case."
    text += " As of `X`: once an epoch, likewise from 9 on, in a thread of its own."
    text += " Of another type, by a time of change."
    text += " #: Of a worker, unless that was done.\n    name: of it."
    found = ["have ", "return what", "raises as `", "whoever", "is told", "anew", "some ", "in any case"]
    found += [
        "as of",
        "once an epoch",
        "likewise",
        "from 9 on",
        "of its own",
        "of another type",
        "time of change",
        "#: of ",
        "unless that was done",
    ]
    found += ["\n    name: of "]
    assert [one[0] for one in AVOIDED.finditer(text.lower())] == found


def test_names_in_texts_of_code_exist(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""Not `Docstring`."""\nkind = f"Example of {kind} and " "Another"\n')
    texts, names = written(module, nodes_of(module.read_text()))
    assert texts == [(1, "Not `Docstring`.")]
    assert {"Example", "Another", "kind"} <= names
    assert "Docstring" not in names

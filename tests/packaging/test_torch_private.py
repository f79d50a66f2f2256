"""One module holds what the package uses of torch's private names, and says what is missing of them."""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from tests.new_process import run_interpreter
from torch_dpflow._core.torch_private import ITERATOR_ATTRIBUTES, LOADER_ATTRIBUTES, TESTED

PACKAGE = Path(__file__).resolve().parents[2] / "torch_dpflow"
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
#: Where a name is, and whether it is a module's own name or a member of what stands there.
MISSING = [
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter"),
    ("torch._utils", "ExceptionWrapper"),
    ("torch._C", "_set_worker_signal_handlers"),
    ("torch.utils.data._utils.worker", "_generate_state"),
    ("torch.utils.data._utils.worker", "_worker_info"),
    ("torch.utils.data._utils.pin_memory", "pin_memory"),
    ("torch.utils.data.dataloader._BaseDataLoaderIter", "_reset"),
    ("torch.utils.data.dataloader.DataLoader", "_index_sampler"),
    ("torch.utils.data.dataloader._DatasetKind", "create_fetcher"),
    ("torch.TypedStorage", "_untyped_storage"),
    ("torch.distributed.distributed_c10d", "_get_default_store"),
    ("torch._C._nn", "_upsample_bilinear2d_aa"),
]
#: Takes away one name after the other, and prints what comes of it.
WITHOUT = """
import importlib, json, pkgutil, sys
import torch, torch.distributed
from torch_dpflow.errors import UnsupportedTorchError

told = []
for place, name in json.loads(sys.argv[1]):
    thing = pkgutil.resolve_name(place)
    sys.modules.pop("torch_dpflow._core.torch_private", None)
    if name == "_untyped_storage":  # an attribute of instances
        kept, thing.__init__ = thing.__init__, lambda self, **_: None
    else:
        kept = thing.__dict__[name]
        delattr(thing, name)
    try:
        importlib.import_module("torch_dpflow._core.torch_private").default_store()
        told.append("nothing is missing")
    except Exception as error:
        told.append([type(error).__name__, isinstance(error, ImportError), str(error)])
    setattr(thing, "__init__" if name == "_untyped_storage" else name, kept)
print(json.dumps(told), flush=True)
# As a user meets it: nothing of the package is there yet, and nobody catches the error.
for name in [name for name in sys.modules if name.startswith("torch_dpflow")]:
    del sys.modules[name]
del torch.utils.data._utils.worker._generate_state
from torch_dpflow import DPFlowDataLoader
"""


def test_what_is_missing_is_named_with_the_torch_that_lacks_it_where_the_loader_is_imported() -> None:
    done = run_interpreter(WITHOUT, json.dumps(MISSING), fresh=True)
    for (place, name), (kind, is_import_error, text) in zip(MISSING, json.loads(done.stdout), strict=True):
        assert (kind, is_import_error) == ("UnsupportedTorchError", True), (place, name, text)
        assert name in text
        assert text.startswith(f"torch {torch.__version__} lacks")
        assert "install one of" in text
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        f"torch_dpflow.errors.UnsupportedTorchError: torch {torch.__version__} lacks a name that torch_dpflow needs"
    )


def test_the_torch_that_is_said_to_be_tested_is_the_one_that_is() -> None:
    bounds, pins = (FENCE.parents[2] / name for name in ("setup.cfg", "constraints.txt"))
    assert f"\n    torch >= {TESTED[0]}\n" in bounds.read_text()
    assert f"\ntorch=={TESTED[1]}." in pins.read_text()


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
    assert _private_names(ast.parse(program))


def test_no_other_module_touches_a_private_name_of_torch() -> None:
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in PACKAGE.rglob("*.py")
        if path != FENCE and (names := _private_names(ast.parse(path.read_text())))
    }
    assert found == {}


def test_every_private_attribute_that_is_not_ours_is_one_that_is_checked() -> None:
    """What our classes inherit of torch's, or use of its objects, and nothing that was forgotten in the list."""
    used: defaultdict[str, list[str]] = defaultdict(list)
    ours: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if path == FENCE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and _is_private(node.attr):
                if isinstance(node.ctx, ast.Store):
                    ours.add(node.attr)
                else:
                    used[node.attr].append(f"{path.name}:{node.lineno}")
            else:
                ours |= _defined(node)
    strange = {name: where for name, where in used.items() if name not in ours}
    assert OF_OTHERS.keys() <= strange.keys()
    assert strange.keys() - OF_OTHERS.keys() <= {*ITERATOR_ATTRIBUTES, *LOADER_ATTRIBUTES}, strange


def _defined(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return {node.id}
    if isinstance(node, ast.Constant) and isinstance(node.value, str):  # __slots__, and what setattr is given
        return {node.value}
    return set()


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not (part.startswith("__") and part.endswith("__")) for part in name.split("."))


def _private_names(tree: ast.Module) -> list[str]:
    """What it imports of torch's private names, and what it reaches from torch's modules."""
    found: list[str] = []
    torchs: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.asname or alias.name.split(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [(f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names]
        else:
            continue
        of_torch = [(name, local) for name, local in names if name.split(".")[0] == "torch"]
        torchs.update(local for _, local in of_torch)
        found += [name for name, _ in of_torch if _is_private(name)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            root = ast.unparse(node).split(".")[0]
            if root in torchs:
                found.append(ast.unparse(node))
    return found

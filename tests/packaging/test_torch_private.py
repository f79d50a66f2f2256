"""One module holds what the package uses of torch's private names, and says what is missing of them."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.new_process import run_interpreter
from torch_dpflow._core.torch_private import TESTED

PACKAGE = Path(__file__).resolve().parents[2] / "torch_dpflow"
FENCE = PACKAGE / "_core" / "torch_private.py"
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
    done = run_interpreter(WITHOUT, json.dumps(MISSING))
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

"""Runs one script of each of `identity_pairs`, prints what its dataset sends, and loads samples in a worker's place."""

from __future__ import annotations

import base64
import contextlib
import gc
import importlib
import io
import json
import linecache
import multiprocessing
import os
import sys
import tempfile
import types
from typing import Any

from tests.remote.shipping.aliased_pairs import ALIASED
from tests.remote.shipping.changed_module_pairs import CHANGED, UNREAD
from tests.remote.shipping.hostile_pairs import HOSTILE
from tests.remote.shipping.identity_pairs import DIFFER, Pair
from tests.remote.shipping.named_pairs import NAMED
from tests.remote.shipping.same_pairs import SAME

#: How many groups of pairs are run one after the other: a test waits for one of them.
GROUPS = 8

PRELUDE = """
import abc, argparse, collections, copy, dataclasses, enum, functools, json, logging, os, pathlib, pickle, random, sys
import datetime, decimal, fractions, importlib, operator, re, threading, typing, types, warnings, weakref
import numpy as np
import torch
from torch.utils.data import Dataset
"""


def group(number: int) -> list[Pair]:
    pairs = [*DIFFER, *CHANGED, *HOSTILE, *ALIASED, *NAMED, *UNREAD, *SAME]
    size = -(-len(pairs) // GROUPS)
    return pairs[number * size : (number + 1) * size]


def described(pair: Pair, dataset: Any) -> dict[str, Any]:
    """Return the parts of what a dataset sends, its samples here, and what workers get of pairs with files."""
    from torch_dpflow.cluster.shard.sample_source import SampleAssignment, TwoStageDataset
    from torch_dpflow.remote.shipping.content_identity import identify
    from torch_dpflow.remote.shipping.content_pack import pack

    identity = identify({"dataset": dataset})
    found: dict[str, Any] = {
        "parts": {path: [part.digest, part.own, part.text, part.optional] for path, part in identity.parts.items()}
    }
    if pair.is_run:
        assignment = SampleAssignment(dataset=TwoStageDataset(dataset), worker_init_fn=None, own_state=identity.state)
        found["packed"] = base64.b64encode(assignment.pack(identity.sent_arguments)).decode()
        found["code"] = base64.b64encode(identity.bundle.data if identity.bundle else b"").decode()
        found["samples"] = samples_of(dataset)
    elif not pair.name.startswith(("chain", "list in a list")):  # pickle recurses
        pack(dataset, sent_arguments=identity.sent_arguments)  # what is compared can be sent
    return found


def samples_of(dataset: Any) -> list[str]:
    """Return the first samples as texts, or the error that reading them raises."""
    try:
        return [repr(dataset[index]) for index in (0, 1)]
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def run_pair(pair: Pair, side: int, name: str) -> dict[str, Any]:
    """Run one script of a pair in this process, and return what its dataset sends."""
    text = (pair.one, pair.other)[side]
    before = set(sys.modules)
    with tempfile.TemporaryDirectory(prefix=f"side-{side}-") as folder:
        for place, content in pair.files.items():
            path = os.path.join(folder, place)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as file:
                file.write(content.replace("@@", text))
        os.chdir(folder)
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        module = types.ModuleType(name)
        module.__file__ = os.path.join(folder, "train.py")
        sys.modules["__main__"] = sys.modules[name] = module
        try:
            exec(compile(PRELUDE + pair.script.replace("@@", text), module.__file__, "exec"), vars(module))
            found = described(pair, module.dataset)
        finally:
            os.chdir("/")
            sys.path.remove(folder)
            linecache.clearcache()
            for new in set(sys.modules) - before:
                if (
                    {f"{new.partition('.')[0]}.py", f"{new.partition('.')[0]}/__init__.py"} & {*pair.files}
                    or "pkg" in new
                    or new == "b_put"
                ):
                    del sys.modules[new]
    return found


def load(case: dict[str, str]) -> list[str]:
    """Return the first samples, as a worker of a flow loads them."""
    from torch_dpflow.cluster.shard.sample_source import SampleSource
    from torch_dpflow.remote.shipping.code_bundle import install_bundle

    before, paths, finders = set(sys.modules), [*sys.path], [*sys.meta_path]
    sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    with tempfile.TemporaryDirectory() as folder:
        if case["code"]:
            install_bundle(base64.b64decode(case["code"]), folder)
        source = SampleSource(io.BytesIO(base64.b64decode(case["packed"])), 0, 1)
        try:
            return samples_of(source._dataset) if source._broken is None else [source._broken.exc_msg]
        finally:
            sys.path[:], sys.meta_path[:] = paths, finders
            for new in set(sys.modules) - before:
                if getattr(sys.modules[new], "__file__", None) is None or folder in str(sys.modules[new].__file__):
                    del sys.modules[new]


def main() -> None:
    """Arguments: 0 or 1, the script of each pair; and the name of its module. "worker": load the cases of a file.

    Side 0 runs in a forked process, side 1 in a spawned one, with another order of imports and of pairs.
    """
    if sys.argv[1] == "worker":
        importlib.import_module("torch_dpflow.cluster.shard.sample_source")
        gc.freeze()  # see `run_side`
        with open(sys.argv[2]) as file:
            found: dict[str, Any] = {name: load(case) for name, case in json.load(file).items()}
        json.dump(found, sys.__stdout__)
        return
    side, name = int(sys.argv[1]), sys.argv[2]
    process = multiprocessing.get_context(("fork", "spawn")[side]).Process(target=run_side, args=(side, name))
    process.start()
    process.join()
    sys.exit(process.exitcode)


def run_side(side: int, name: str) -> None:
    """Run one script of each pair in this process; print what the datasets of each group send, a line for each."""
    for number in range(GROUPS):
        pairs = group(number)
        if side:
            importlib.import_module("json.tool")
            importlib.import_module("torch")
            pairs = pairs[::-1]
        found = {}
        for pair in pairs:
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    found[pair.name] = run_pair(pair, side, name)
            except Exception as error:
                raise RuntimeError(f"the pair {pair.name!r}") from error
            if (number, len(found)) == (0, 1):  # or each collection would visit all that is imported
                gc.freeze()
        print(json.dumps(found), file=sys.__stdout__, flush=True)

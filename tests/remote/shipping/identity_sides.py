"""Runs one script of each of `identity_pairs` in this process, and prints the parts of what its dataset sends."""

from __future__ import annotations

import importlib
import json
import linecache
import os
import sys
import tempfile
import types

from tests.remote.shipping.identity_pairs import DIFFER, SAME, Pair

PRELUDE = """
import abc, argparse, collections, copy, dataclasses, enum, functools, json, logging, os, pathlib, pickle, random, sys
import numpy as np
import torch
from torch.utils.data import Dataset
"""


def parts_of(pair: Pair, side: int, name: str) -> dict[str, list[object]]:
    """Run one script of a pair in this process, and return the parts of what its dataset sends."""
    from torch_dpflow.remote.shipping.content_identity import identify
    from torch_dpflow.remote.shipping.content_pack import pack

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
            identity = identify({"dataset": module.dataset})
            if not pair.name.startswith(("chain", "list in a list")):  # pickle recurses
                pack(module.dataset, sent_arguments=identity.sent_arguments)  # what is compared can be sent
        finally:
            os.chdir("/")
            sys.path.remove(folder)
            linecache.clearcache()
            for new in set(sys.modules) - before:
                if str(getattr(sys.modules[new], "__file__", "") or "").startswith(folder) or "pkg" in new:
                    del sys.modules[new]
    return {path: [part.digest, part.own, part.text, part.optional] for path, part in identity.parts.items()}


def main() -> None:
    """Arguments: 0 or 1, the script of each pair; and the name of its module."""
    side, name = int(sys.argv[1]), sys.argv[2]
    if side:  # another order of imports
        importlib.import_module("json.tool")
        importlib.import_module("xml.dom.minidom")
    pairs = [*DIFFER, *SAME]
    found = {pair.name: parts_of(pair, side, name) for pair in (pairs[::-1] if side else pairs)}
    json.dump(found, sys.__stdout__)

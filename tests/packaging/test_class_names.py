"""One name is one class: a search for it leads to one place."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import torch_dpflow


def test_no_two_classes_of_the_package_have_one_name() -> None:
    package = Path(torch_dpflow.__file__).parent
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(package)}:{node.lineno}")
    assert len(places) > 400
    assert {name: found for name, found in places.items() if len(found) > 1} == {}

"""docs/dataset-store.md and docs/schemas say what the code does."""

from __future__ import annotations

import json
from pathlib import Path

from tests.new_process import run_interpreter
from torch_dpflow.datasets import json_schemas

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_schemas_in_the_documentation_are_those_of_the_code() -> None:
    on_paper = {path.stem: json.loads(path.read_text()) for path in (DOCS / "schemas").glob("*.json")}
    assert on_paper == json_schemas(), "write them anew: python tools/write_schemas.py"


def test_the_example_of_an_importer_runs() -> None:
    code = (DOCS / "dataset-store.md").read_text().partition("```python\n")[2].partition("```")[0]
    run = run_interpreter(code)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "10\n{'n': 3}\n0 is the first whose object is missing\n"

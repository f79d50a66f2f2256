"""docs/schemas is what the code reads and writes."""

from __future__ import annotations

import json
from pathlib import Path

from torch_dpflow.datasets import json_schemas

SCHEMAS = Path(__file__).resolve().parents[2] / "docs/schemas"


def test_the_schemas_in_the_documentation_are_those_of_the_code() -> None:
    on_paper = {path.stem: json.loads(path.read_text()) for path in SCHEMAS.glob("*.json")}
    assert on_paper == json_schemas(), "write them anew: python tools/write_schemas.py"

"""docs/dataset-store.md and docs/schemas say what the code does."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema

from tests.datasets.samples_source import Numbered, publish
from tests.new_process import run_interpreter
from torch_dpflow.datasets import DatasetStore, Draft, json_schemas
from torch_dpflow.datasets.importers.iterable import IterableImporter

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_schemas_in_the_documentation_are_those_of_the_code() -> None:
    on_paper = {path.stem: json.loads(path.read_text()) for path in (DOCS / "schemas").glob("*.json")}
    assert on_paper == json_schemas(), "write them anew: python tools/write_schemas.py"


def test_every_file_of_a_store_has_a_schema_and_keeps_to_it(local_store: DatasetStore) -> None:
    publish(local_store, Numbered(10))
    publish(local_store, Numbered(5, first=10), version="v2", parent="v1", shard_size=None)
    Draft(local_store, "core/unfinished", "v1").add("train", IterableImporter(Numbered(9)), shard_size=4)
    schemas = json_schemas()
    kinds = set()
    for path in Path(local_store.url.removeprefix("file://")).rglob("*.json"):
        data = json.loads(path.read_text())
        kinds.add(data["kind"])
        jsonschema.validate(data, schemas[data["kind"]], cls=jsonschema.Draft202012Validator)
    assert kinds == schemas.keys()


def test_the_example_of_an_importer_runs() -> None:
    code = (DOCS / "dataset-store.md").read_text().partition("```python\n")[2].partition("```")[0]
    run = run_interpreter(code)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "10\n{'n': 3}\n0 is the first whose object is missing\n"

"""Write the JSON schemas of a dataset store's files into docs/schemas.

python tools/write_schemas.py
"""

import json
from pathlib import Path

from torch_dpflow.datasets import json_schemas

FOLDER = Path(__file__).resolve().parent.parent / "docs/schemas"

for kind, schema in json_schemas().items():
    (FOLDER / f"{kind}.json").write_text(json.dumps(schema, indent=2) + "\n", encoding="utf-8")

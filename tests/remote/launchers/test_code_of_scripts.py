"""A script with packages of its own reads through workers that know nothing of it, or is told why it cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.new_process import ROOT

FILES = {
    "project/e2e_shop/__init__.py": "",
    "project/e2e_shop/data.py": """
from torch_dpflow.datasets.storage import ObjectReader
from . import items
import e2e_helpers
class Rows:
    def __init__(self):
        self.item = items.Item(e2e_helpers.TEN)
        self.reader = ObjectReader({"key": "id", "secret": "se-cr-et", "endpoint": "http://127.0.0.1:9"})
    def __len__(self):
        return 8
""",
    "project/e2e_shop/items.py": "class Item:\n    def __init__(self, value):\n        self.value = value\n",
    "project/e2e_shop/late.py": "def double(value):\n    return 2 * value\n",
    "project/e2e_helpers.py": "TEN = 10\n",
    "project/e2e_late.py": "HUNDRED = 100\n",
    "project/e2e_hungry.py": "import e2e_installed\nclass Hungry(list):\n    pass\n",
    "head/site-packages/e2e_installed.py": "",
    "head/site-packages/e2e_thing-1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: e2e-thing\nVersion: 1.2\n",
    "head/site-packages/e2e_thing-1.2.dist-info/top_level.txt": "e2e_installed\n",
    "old/numpy-1.26.4.dist-info/METADATA": "Metadata-Version: 2.1\nName: numpy\nVersion: 1.26.4\n",
    "snake/sitecustomize.py": "import platform\nplatform.python_version = lambda: '3.9.1'\n",
    "elsewhere/nothing.txt": "",
    "project/train.py": '''
import dataclasses, sys
from torch_dpflow import DPFlowDataLoader, LoaderOptions
from torch_dpflow.errors import AccessDeniedError, WorkerStartError
from torch_dpflow.remote.launchers.processes import Processes
import e2e_hungry
from e2e_shop.data import Rows
from e2e_shop.items import Item

class Box:
    def __init__(self, value):
        self.value = value

@dataclasses.dataclass
class Batch:
    boxes: list

class Wrong(Exception):
    """A sample is."""

class Data(Rows):
    def __getitem__(self, index):
        from e2e_shop.late import double
        import e2e_late, e2e_shop
        if index == 4:
            raise Wrong("4 is four")
        if index == 6:
            self.reader.read("s3://bucket/object")
        return Box(double(index) + e2e_late.HUNDRED + self.item.value), self.item, e2e_shop.__file__

def collate(samples):
    return Batch(samples)

class Counting(Processes):
    starts = 0
    def open(self):
        platform = super().open()
        start = platform.start
        def counted(name, launch_spec):
            Counting.starts += 1
            start(name, launch_spec)
        platform.start = counted
        return platform

def read(folder, dataset, platform, **options):
    return iter(DPFlowDataLoader(
        dataset, batch_size=2, num_workers=1, collate_fn=collate, platform=platform, options=LoaderOptions(**options)
    ))

def raised(batches, error):
    try:
        next(batches)
    except error as caught:
        return str(caught)
    raise AssertionError("no error")

def loads(here):
    import e2e_late
    e2e_late.HUNDRED = 200
    batches = read(here, Data(), Processes(python=sys.executable, env={"HOME": here}))
    for number in (0, 1):
        batch = next(batches)
        assert type(batch) is Batch, batch
        for offset, (box, item, file) in enumerate(batch.boxes):
            assert (type(box), box.value) == (Box, 2 * (2 * number + offset) + 210)
            assert (type(item), item.value) == (Item, 10)
            assert "/project/" not in file, file
    assert "4 is four" in raised(batches, Wrong)
    text = raised(batches, AccessDeniedError)
    assert "storage_options ['key', 'secret'] of the training process were not sent" in text, text
    assert "se-cr-et" not in text

def refused(here, dataset, *texts, path="", **options):
    """Yields when workers are being started, and again when they were refused."""
    platform = Counting(python=sys.executable, env={"PYTHONPATH": f"{here}/{path}:{sys.argv[2]}"})
    batches = read(here, dataset, platform, **options)
    yield
    error = raised(batches, WorkerStartError)
    for text in texts:
        assert text in error, error
    assert Counting.starts <= 3, Counting.starts
    yield

if __name__ == "__main__":
    case, _, here = sys.argv[1:]
    if case == "loads":
        old = refused(here, [1, 2], "it has numpy 1.26.4 and this process", "pip install 'numpy==", path="old")
        next(old)
        loads(here)
        next(old)
    elif case == "python":
        told = "it has Python 3.9.1 and this process", "Run workers with Python 3."
        list(refused(here, [1, 2], *told, path="snake"))
    elif case == "not sent":
        list(refused(here, Data(), "e2e_shop", f"LoaderOptions(code=['{here}/project/e2e_shop'])", code=None))
    elif case == "not installed":
        list(refused(here, e2e_hungry.Hungry([1]), "e2e_installed", "pip install 'e2e-thing==1.2'"))
''',
}


SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in ("python", "not sent", "not installed")]


@pytest.mark.parametrize("case", ["loads", *SLOW])
def test_a_script_with_packages_of_its_own(case: str, tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, tmp_path / "project/train.py", case, str(ROOT), tmp_path],
        cwd=tmp_path / "elsewhere",
        env={
            "PYTHONPATH": f"{ROOT}:{tmp_path}/head/site-packages",
            "AWS_EC2_METADATA_DISABLED": "true",
            "HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr

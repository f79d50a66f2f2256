"""The user's own modules reach a process that has none of them, whole and safely."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.errors import (
    DPFlowError,
    LifetimeError,
    MessageError,
    OptionError,
    OptionTypeError,
    UsageError,
)
from torch_dpflow.options import LoaderOptions
from torch_dpflow.remote.shipping import code_bundle
from torch_dpflow.remote.shipping.code_bundle import install_bundle
from torch_dpflow.remote.shipping.content_identity import own_content

PROJECT = {
    "shop/__init__.py": "",
    "shop/data.py": """
from . import items
import bundle_helpers as h, json
class Data:
    def __init__(self): self.item = items.Item(h.ONE)
    def __len__(self): return 3
    def __getitem__(self, index):
        from .late import double
        import bundle_late
        from bundle_space.part import mod
        return double(index) + bundle_late.TEN + mod.HUNDRED + self.item.value
""",
    "shop/items.py": "class Item:\n    def __init__(self, value): self.value = value\n",
    "shop/late.py": "def double(value): return 2 * value\n",
    "shop/notes.txt": "not sent",
    "shop/.git/config.py": "not sent",
    "shop/__pycache__/data.cpython-311.pyc": "not sent",
    "bundle_helpers.py": "import bundle_second\nONE = bundle_second.ONE\n",
    "bundle_second.py": "ONE = 1\n",
    "bundle_late.py": "TEN = 10\n",
    "bundle_space/part/mod.py": "from ..other.mod import HUNDRED\n",
    "bundle_space/other/mod.py": "HUNDRED = 100\n",
    "bundle_space/apart/mod.py": "not sent",
    "bundle_unused.py": "not sent",
}
SENT = sorted(name for name, text in PROJECT.items() if text != "not sent")


def write(root: Path, files: dict[str, str] = PROJECT) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The root of a project that can be imported."""
    before = set(sys.modules)
    root = write(tmp_path / "project")
    monkeypatch.syspath_prepend(root)
    yield root
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in (
            "shop",
            "bundle_helpers",
            "bundle_second",
            "bundle_late",
            "bundle_space",
        ):
            del sys.modules[name]


def shop_data() -> Any:
    from shop.data import Data  # type: ignore[import-not-found]

    return Data()


def made(obj: Any, code: Any = "auto") -> bytes:
    return own_content({"dataset": obj}, code)[0]


def names(archive: bytes) -> list[str]:
    return zipfile.ZipFile(io.BytesIO(archive)).namelist()


READ = """
import pickle, sys
from torch_dpflow.remote.shipping.code_bundle import install_bundle
from pathlib import Path
install_bundle(Path(sys.argv[1]).read_bytes(), sys.argv[2])
data = pickle.loads(Path(sys.argv[3]).read_bytes())
print([data[index] for index in range(len(data))], sys.modules["shop.data"].__file__.startswith(sys.argv[2]))
"""


def test_another_interpreter_loads_a_dataset_of_the_users_packages(project: Path, tmp_path: Path) -> None:
    data = shop_data()
    archive = made(data)
    assert names(archive) == SENT
    (tmp_path / "bundle").write_bytes(archive)
    (tmp_path / "pickle").write_bytes(pickle.dumps(data))
    (tmp_path / "elsewhere").mkdir()
    done = subprocess.run(
        [sys.executable, "-I", "-c", READ, *(tmp_path / name for name in ("bundle", "code", "pickle"))],
        cwd=tmp_path / "elsewhere",
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[111, 113, 115] True\n"), done.stderr


def test_equal_code_makes_equal_bundles_wherever_and_whenever_it_lies(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = shop_data()
    first = made(data)
    for path in project.rglob("*.py"):
        os.utime(path, (1e9, 1e9))
    assert made(data) == first
    shutil.copytree(project, tmp_path / "copy")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "copy"), *(one for one in sys.path if one != str(project))])
    for name in [name for name in sys.modules if name.partition(".")[0] in ("shop", "bundle_helpers", "bundle_second")]:
        del sys.modules[name]
    assert made(shop_data()) == first


def test_installed_modules_and_this_package_are_not_sent(project: Path) -> None:
    import numpy as np
    import torch

    from torch_dpflow import ALSDCache

    assert made([np.arange(2), torch.ones(1), Path("x"), ALSDCache]) == b""
    assert made(shop_data(), None) == b""


def test_code_that_travels_by_value_takes_along_what_it_imports_when_it_is_called(project: Path) -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec("def load(index):\n    import bundle_late\n    return bundle_late.TEN", scope)
    assert names(made(scope["load"])) == ["bundle_late.py"]


def test_paths_are_added_where_they_can_be_imported_or_found(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path,
        {
            "src/apart_lib/__init__.py": "import bundle_late",
            "src/apart_lib/table.json": "{}",
            "src/apart_lib/.hidden": "",
            "config.yaml": "a: 1",
        },
    )
    monkeypatch.chdir(tmp_path)
    bundle = made(1, ["src/apart_lib", "config.yaml", "project/shop/notes.txt"])
    assert names(bundle) == [
        "apart_lib/__init__.py",
        "apart_lib/table.json",
        "bundle_late.py",
        "config.yaml",
        "shop/notes.txt",
    ]
    (tmp_path / "src/apart_lib/again").symlink_to(tmp_path / "src/apart_lib")
    assert made(1, ["src/apart_lib"])  # and comes to an end


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (["nowhere/at_all"], OptionError, r"code=\['nowhere/at_all'\]: there is no 'nowhere/at_all' in /"),
        ("everything", OptionError, "give 'auto', None, or a list of paths"),
        ([1], OptionTypeError, "1 is not a path"),
    ],
)
def test_code_that_cannot_be_meant(code: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        made(1, LoaderOptions(code=code).code)


def test_too_much_code_says_what_is_large_and_what_to_do(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "shop/vocabulary.py").write_text("#" * (17 << 20))
    with pytest.raises(
        OptionError, match=r"shop 17\.8 MB.* largest: shop/vocabulary.py 17\.8 MB.*LoaderOptions\(code=None\)"
    ):
        made(shop_data())
    (project / "shop/vocabulary.py").unlink()
    monkeypatch.setattr(code_bundle, "MAX_FILES", 3)
    with pytest.raises(OptionError, match=r"in 4 files"):
        made(shop_data())
    monkeypatch.setattr(code_bundle, "_MAX_ENTRIES", 3)
    with pytest.raises(OptionError, match="keep data out of packages"):
        made(shop_data())


NAMES = st.lists(
    st.sampled_from(["..", ".", "", "a", "b.py", "/etc", "c\\d", "\0", "\n", "ä" * 300]),
    min_size=1,
    max_size=4,
).map("/".join)
ENTRIES = st.tuples(
    NAMES,
    st.binary(max_size=20),
    st.sampled_from([stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR, stat.S_IFCHR, 0]),
    st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]),
)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@given(
    entries=st.lists(ENTRIES, max_size=4),
    damage=st.none() | st.tuples(st.integers(0, 400), st.integers(0, 255)),
)
def test_hostile_archives(entries: list[Any], damage: tuple[int, int] | None) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content, kind, method in entries:
            info = zipfile.ZipInfo("x")
            info.filename = name
            info.create_system, info.external_attr, info.compress_type = 3, (kind | 0o644) << 16, method
            archive.writestr(info, content)
    data = bytearray(out.getvalue())
    if damage is not None and damage[0] < len(data):
        data[damage[0]] = damage[1]
    path = list(sys.path)
    with tempfile.TemporaryDirectory() as folder:
        inside = Path(folder, "in")
        try:
            target = install_bundle(bytes(data), inside)
        except MessageError:
            assert not inside.exists()
        else:
            for found in target.rglob("*"):
                assert stat.S_IFMT(found.lstat().st_mode) in (stat.S_IFREG, stat.S_IFDIR)
            assert stat.S_IMODE(target.stat().st_mode) == 0o700
            assert os.listdir(inside) == [target.name]
        finally:
            sys.path[:] = path
        assert os.listdir(folder) in ([], ["in"])


@pytest.mark.parametrize("sizes", [(17 << 20,), (1,) * 5001], ids=["large", "many"])
def test_more_than_is_ever_sent_is_refused_before_anything_is_written(sizes: tuple[int, ...], tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for number, size in enumerate(sizes):
            archive.writestr(f"m{number}.py", bytes(size))
    with pytest.raises(MessageError, match="are allowed"):
        install_bundle(out.getvalue(), tmp_path / "in")
    assert not (tmp_path / "in").exists()


def test_a_bundle_is_installed_once_and_privately(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    data = made("x", [str(project / "bundle_late.py")])
    target = install_bundle(data, tmp_path / "in")
    assert install_bundle(data, tmp_path / "in") == target
    assert sys.path.count(str(target)) == 1
    assert sys.path[0] == str(target)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UsageError, match="of mode 0700"):
        install_bundle(data, tmp_path / "open")


def test_a_module_that_is_loaded_already_cannot_be_replaced(project: Path, tmp_path: Path) -> None:
    archive = made(shop_data())
    with pytest.raises(LifetimeError, match=r"'bundle_helpers' .* has imported .*/bundle_helpers.py by that") as caught:
        install_bundle(archive, tmp_path / "in")
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), DPFlowError)


def test_data_whose_name_begins_as_a_loaded_module_is_installed(tmp_path: Path) -> None:
    root = write(tmp_path / "data", {"logging.yaml": "a: 1", "random.csv": "1", "numbers.txt": "", "json/a.csv": ""})
    (tmp_path / "in").mkdir(mode=0o700)
    at = install_bundle(made(None, [str(path) for path in root.iterdir()]), tmp_path / "in")
    try:
        assert [path.name for path in sorted(at.rglob("*.*"))] == [
            "a.csv",
            "logging.yaml",
            "numbers.txt",
            "random.csv",
        ]
    finally:
        sys.path.remove(str(at))


@pytest.mark.parametrize("name", ["logging.py", "json/__init__.py"])
def test_a_module_in_place_of_one_that_workers_have_imported_is_refused_here(tmp_path: Path, name: str) -> None:
    root = write(tmp_path / "code", {name: ""})
    top = name.partition("/")[0].partition(".")[0]
    with pytest.raises(OptionError, match=rf"{name} cannot be sent as module '{top}'.*imported .*; rename it"):
        made(None, [str(root / name.partition("/")[0])])

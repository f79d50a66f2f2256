"""What cannot load what is sent is refused with the remedy, before anything is unpickled."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.remote.shipping.compatibility import (
    distributions_of_modules,
    missing_modules,
    missing_text,
    required_modules,
    unfit,
    versions_here,
    warnings_of,
)

HERE = {
    "python": "3.11.7",
    "torch_dpflow": "0.2.1",
    "torch": "2.13.0+cpu",
    "numpy": "2.1.0",
    "cloudpickle": "3.1.0",
    "torchvision": "0.28.0",
    "pillow": "11.0.0",
}


def test_this_process_fits_itself() -> None:
    here = versions_here()
    assert here.keys() >= {"python", "torch_dpflow", "torch", "numpy", "cloudpickle"}
    assert unfit(here, here) == ""
    assert warnings_of(here, here) == []


@pytest.mark.parametrize(
    ("name", "version", "text"),
    [
        (
            "python",
            "3.12.1",
            "it has Python 3.12.1 and this process Python 3.11.7; .* Run workers with Python 3.11,",
        ),
        (
            "torch_dpflow",
            "0.1.0",
            "it has torch_dpflow 0.1.0 and .* 0.2.1; .* pip install 'torch_dpflow==0.2.1'",
        ),
        ("numpy", "1.26.4", "it has numpy 1.26.4 and .* 2.1.0; .* pip install 'numpy==2.1.0' "),
        ("numpy", "", "it has no numpy and this process numpy 2.1.0"),
        ("cloudpickle", "2.2.1", "pip install 'cloudpickle==3.1.0'"),
        ("torch", "2.3.1", r"it has torch 2.3.1, and 2.6 is the least. .* 'torch==2.13.0' "),
        ("numpy", "\x1b[2J", r"it has numpy '\\x1b\[2J'"),
    ],
)
def test_a_worker_that_cannot_load_it_is_told_what_to_install(name: str, version: str, text: str) -> None:
    assert re.search(text, unfit({**HERE, name: version}, HERE))


def test_a_worker_that_can_load_it_is_taken_and_differences_are_told_of() -> None:
    worker = {**HERE, "python": "3.11.2", "torch_dpflow": "0.2.9", "numpy": "2.3.0", "torch": "2.13.0+cu130"}
    assert unfit(worker, HERE) == ""
    assert warnings_of(worker, HERE) == [
        "workers have numpy 2.3.0 and this process numpy 2.1.0: samples may differ in their last bits"
    ]
    assert warnings_of({"python": "3.11.7"}, HERE) == []


VERSIONS = st.dictionaries(st.sampled_from(list(HERE)), st.sampled_from(list(HERE.values())) | st.text(max_size=60))


@given(worker=VERSIONS, here=VERSIONS)
def test_whatever_a_worker_says_gets_a_short_printable_answer(
    worker: Mapping[str, str], here: Mapping[str, str]
) -> None:
    text = unfit(worker, HERE) + "".join(warnings_of(worker, here))
    assert text.isprintable()
    assert len(text) < 1500


def test_modules_that_are_missing_are_named_with_where_they_come_from() -> None:
    pickled = pickle.dumps([np.arange(2), Path("x"), required_modules])
    required = required_modules(pickled)
    assert {name.partition(".")[0] for name in required} == {"numpy", "torch_dpflow"}
    assert missing_modules(required) == []
    assert missing_modules(["nowhere_at_all.data", "numpy.nothing", "os.path", "concurrent.futures.thread"]) == [
        "nowhere_at_all.data",
        "numpy.nothing",
    ]
    text = missing_text(["numpy.random", "nowhere_at_all.data", "tests.new_process"])
    assert f"pip install 'numpy=={np.__version__}'" in text
    assert "install there what has nowhere_at_all" in text


def test_modules_are_found_in_distributions_with_and_without_a_list_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, files, tops in [
        ("fit-listed", ["fit_other.py"], "fit_listed\n"),
        ("fit-module", ["fit_module.py", "fit_module.libs/lib.so", "../../bin/fit"], ""),
        ("fit-package", ["fit_package/__init__.py", "fit_shared/one.py"], ""),
        ("fit-another", ["fit_shared/other.py", "fit_notes/read.txt"], ""),
        ("fit-extension", [f"fit_extension{EXTENSION_SUFFIXES[0]}"], ""),
    ]:
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).touch()
        if tops:
            (info / "top_level.txt").write_text(tops)
    monkeypatch.syspath_prepend(tmp_path)
    found = distributions_of_modules.__wrapped__()
    assert {top: names for top, names in found.items() if top.startswith("fit_")} == {
        "fit_listed": ["fit-listed"],
        "fit_module": ["fit-module"],
        "fit_package": ["fit-package"],
        "fit_shared": ["fit-another", "fit-package"],
        "fit_extension": ["fit-extension"],
    }
    assert found["numpy"] == ["numpy"]


def test_a_module_of_the_users_that_was_not_sent_is_named_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fit_own.py").write_text("import cv9_is_nowhere")
    (tmp_path / "fit_pack").mkdir()
    (tmp_path / "fit_pack/__init__.py").write_text("import cv9_is_nowhere")
    monkeypatch.syspath_prepend(tmp_path)
    assert missing_modules(["fit_own"]) == []
    assert "fit_own" not in sys.modules  # it was looked for, not imported
    assert missing_modules(["fit_pack.made_later"]) == ["cv9_is_nowhere"]
    both = f"'{tmp_path}/fit_own.py', '{tmp_path}/fit_pack'"
    assert missing_text(["fit_own", "fit_pack.made_later"]).endswith(
        f"send what is yours with LoaderOptions(code=[{both}])"
    )

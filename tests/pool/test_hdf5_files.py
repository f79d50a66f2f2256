"""HDF5 files: rows that are in the file are read, and no fill value is taken for one."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torch_dpflow.errors import OptionError
from torch_dpflow.pool import open_array
from torch_dpflow.pool.array_files import ArrayReader


@pytest.fixture
def composed(tmp_path: Path) -> Path:
    """An HDF5 file with datasets whose rows are in other datasets and files."""
    h5py = pytest.importorskip("h5py", reason="the extra hdf5 is not installed")
    rows = np.arange(20).reshape(10, 2)
    with h5py.File(tmp_path / "there.h5", "w") as file:
        file["x"] = rows
        file["group/x"] = rows
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"] = rows
        file["link"] = h5py.SoftLink("/x")
        file["far"] = h5py.SoftLink("/links/there.h5")
        file["empty"] = h5py.Empty("f4")
        for name in ("there.h5", "gone.h5"):
            file[f"links/{name}"] = h5py.ExternalLink(name, "x")
            file[f"groups/{name}"] = h5py.ExternalLink(name, "group")
        sources = {
            "whole": (".", "x", rows.shape, np.s_[:]),
            "half": (".", "x", rows.shape, np.s_[5:]),
            "there": (str(tmp_path / "there.h5"), "x", rows.shape, np.s_[:]),
            "beside": ("there.h5", "x", rows.shape, np.s_[:]),
            "gone": ("gone.h5", "x", rows.shape, np.s_[:]),
            "missing": (".", "nothing", rows.shape, np.s_[:]),
            "beyond": (".", "x", (30, 2), np.s_[5:15]),
            "larger": (".", "x", (30, 2), np.s_[:]),
            "nested": (".", "virtual/whole", rows.shape, np.s_[:]),
            "far": (".", "virtual/gone", rows.shape, np.s_[:]),
        }
        for name, (where, dataset, shape, chosen) in sources.items():
            source = h5py.VirtualSource(where, dataset, shape)[chosen]
            layout = h5py.VirtualLayout(source.shape, rows.dtype)
            layout[:] = source
            file.create_virtual_dataset(f"virtual/{name}", layout, fillvalue=-1)
        file.create_dataset("stored", (10, 2), "i8", external=[(str(tmp_path / "raw"), 0, 160)])[:] = rows
    return tmp_path / "rows.h5"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("link", range(20)),
        ("virtual/whole", range(20)),
        ("virtual/half", range(10, 20)),
        ("virtual/nested", range(20)),
    ],
)
def test_virtual_rows_of_the_same_hdf5_file_are_read(composed: Path, path: str, expected: range) -> None:
    source = open_array(composed, path=path)
    with closing(ArrayReader(source)) as reader:
        (found,) = reader.read_rows([(0, source.shape[0])])
    assert not isinstance(found, Exception)
    assert np.frombuffer(found, source.dtype).tolist() == [*expected]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("virtual/there", r"rows in another file, '.*there\.h5'; give that file, or copy the rows"),
        ("virtual/beside", "rows in another file, 'there.h5'"),
        ("virtual/gone", "rows in another file, 'gone.h5'"),
        ("virtual/far", "rows in another file, 'gone.h5'"),
        ("virtual/missing", "its source 'nothing' is missing or too small"),
        ("virtual/beyond", "its source 'x' is missing or too small"),
        ("virtual/larger", "its source 'x' is missing or too small"),
        ("links/there.h5", "rows in another file, 'there.h5'"),
        ("links/gone.h5", "rows in another file, 'gone.h5'"),
        ("far", "rows in another file, '.*there.h5'"),
        ("./groups/there.h5/x", "rows in another file, 'there.h5'"),
        ("/groups/gone.h5/x", "rows in another file, 'gone.h5'"),
        ("stored", "rows in another file, '.*raw'"),
        ("empty", "is empty; give a dataset with records"),
        ("x/more", "is no dataset; give path="),
    ],
)
def test_rows_that_are_not_in_the_hdf5_file_are_no_fill_values(
    composed: Path, monkeypatch: pytest.MonkeyPatch, path: str, says: str
) -> None:
    monkeypatch.chdir(composed.parent)  # HDF5 looks there for other files
    with pytest.raises(OptionError, match=says):
        open_array(composed, path=path)


def _map_blocks(h5py: Any, file: Any, *names: str) -> None:
    """A virtual dataset "d" with blocks of two rows, in turn from each source, without a limit."""
    unlimited = h5py.h5s.UNLIMITED
    plan, space = h5py.h5p.create(h5py.h5p.DATASET_CREATE), h5py.h5s.create_simple((12, 2), (unlimited, 2))
    plan.set_fill_value(np.array(-7, "i8"))
    for number, name in enumerate(names):
        rows, source = space.copy(), file[name].id.get_space()
        rows.select_hyperslab((2 * number, 0), (unlimited, 1), (2 * len(names), 1), (2, 2))
        source.select_hyperslab((0, 0), (1, 1), None, (unlimited, 2))
        plan.set_virtual(rows, b".", name.encode(), source)
    h5py.h5d.create(file.id, b"d", h5py.h5t.NATIVE_INT64, space, plan)


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("equal", None),
        ("unequal", 7),
        ("blocks", 7),
        ("short", 2),
        ("hole", 3),
        ("half", 0),
        ("overlap", 4),
        ("alone", None),
    ],
)
def test_virtual_rows_without_a_source_are_no_fill_values(tmp_path: Path, kind: str, row: int | None) -> None:
    h5py = pytest.importorskip("h5py", reason="the extra hdf5 is not installed")
    unlimited, shape = h5py.h5s.UNLIMITED, (None, 2)
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        for name, count in (("a", 6), ("b", 3), ("c", 6)):
            file.create_dataset(name, data=np.arange(2 * count).reshape(count, 2), maxshape=shape)
        a, b, c = (h5py.VirtualSource(file[name]) for name in "abc")
        is_limited = kind in ("short", "hole", "half", "overlap")
        layout = h5py.VirtualLayout((6 if is_limited else 12, 2), "i8", maxshape=None if is_limited else shape)
        if kind in ("equal", "unequal"):
            for first, source in enumerate((a, c if kind == "equal" else b)):
                layout[first:unlimited:2] = source[0:unlimited]
        elif kind == "alone":
            layout[0:unlimited] = a[0:unlimited]
        elif kind == "short":
            layout[0:2] = a[0:2]
        elif kind == "hole":
            layout[0:3], layout[4:6] = a[0:3], a[4:6]
        elif kind == "half":
            layout[:, 0] = a[:, 0]
        else:
            layout[0:4], layout[1:3] = a[0:4], c[1:3]
        if kind == "blocks":
            _map_blocks(h5py, file, "a", "b")
        else:
            file.create_virtual_dataset("d", layout, fillvalue=-7)
    if row is None:
        source = open_array(tmp_path / "rows.h5", path="d")
        with closing(ArrayReader(source)) as reader:
            (found,) = reader.read_rows([(0, source.shape[0])])
        assert isinstance(found, bytes)
        assert -7 not in np.frombuffer(found, source.dtype)
    else:
        with pytest.raises(OptionError, match=f"has no source for row {row} of /d"):
            open_array(tmp_path / "rows.h5", path="d")


@pytest.mark.parametrize("block", [512, 1024, 8192, 16384, 65536, 1 << 20])
def test_hdf5_files_may_begin_with_a_user_block(tmp_path: Path, block: int) -> None:
    """As MATLAB's, of version 7.3."""
    h5py = pytest.importorskip("h5py", reason="the extra hdf5 is not installed")
    with h5py.File(tmp_path / "rows.mat", "w", userblock_size=block) as file:
        file["x"] = np.arange(6).reshape(3, 2)
        file["none"] = np.zeros(2, "u8")
        file["none"].attrs["MATLAB_empty"] = np.uint8(1)
    with (tmp_path / "rows.mat").open("r+b") as file:
        file.write(b"MATLAB 7.3 MAT-file")
    source = open_array(tmp_path / "rows.mat", path="x")
    with closing(ArrayReader(source)) as reader:
        assert reader.read_rows([(1, 3)]) == [np.arange(2, 6).tobytes()]
    with pytest.raises(OptionError, match="is empty"):
        open_array(tmp_path / "rows.mat", path="none")

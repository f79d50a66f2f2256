"""HDF5 files: rows that are in the file are read, and no fill value is taken for one."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

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
        for name, where in (("whole", "."), ("there", "there.h5"), ("gone", "gone.h5")):
            layout = h5py.VirtualLayout(rows.shape, rows.dtype)
            layout[:] = h5py.VirtualSource(where, "x", rows.shape)
            file.create_virtual_dataset(f"virtual/{name}", layout, fillvalue=-1)
        file.create_dataset("stored", (10, 2), "i8", external=[(str(tmp_path / "raw"), 0, 160)])[:] = rows
    return tmp_path / "rows.h5"


def test_a_link_within_the_hdf5_file_is_read(composed: Path) -> None:
    source = open_array(composed, path="link")
    with closing(ArrayReader(source)) as reader:
        (found,) = reader.read_rows([(0, source.shape[0])])
    assert not isinstance(found, Exception)
    assert np.frombuffer(found, source.dtype).tolist() == [*range(20)]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        *(
            (f"virtual/{name}", "is a virtual dataset, whose rows may be missing")
            for name in ("whole", "there", "gone")
        ),
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

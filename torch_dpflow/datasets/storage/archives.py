"""Members of tar and zip archives, by plain names, whatever the spelling in the archive."""

from __future__ import annotations

import posixpath
from typing import Any

from fsspec.archive import AbstractArchiveFileSystem
from fsspec.implementations.tar import TarFileSystem
from fsspec.implementations.zip import ZipFileSystem

from torch_dpflow.errors import StorageError

#: Endings of compressed tar archives that fsspec does not infer, and fsspec's name of the compression.
_COMPRESSIONS = {
    **dict.fromkeys((".tgz", ".taz"), "gzip"),
    **dict.fromkeys((".tbz", ".tbz2", ".tb2"), "bz2"),
    **dict.fromkeys((".txz", ".tlz"), "xz"),
    ".tzst": "zstd",
}
#: ZipInfo.create_system of archives whose names may have backslashes between their parts.
_DOS = 0
#: The most bytes from a tar archive's end mark through the first block of an archive that `cat` wrote after it.
_AFTER_END = 10240 + 512


def tar_options(archive: str) -> dict[str, str]:
    """fsspec's options for the tar archive at this URL: its compression, if fsspec does not infer it."""
    compression = _COMPRESSIONS.get(posixpath.splitext(archive)[1].lower())
    return {} if compression is None else {"compression": compression}


def use_plain_names(file_system: Any, url: str) -> None:
    """Have an archive's members named as they are extracted: "./a//b" and "/a/b" are "a/b". Others stay as they are.

    fsspec takes names literally, so listings would lack members, and reads would find none.

    Raises StorageError: a member's name has "..", or another archive follows the end of this one.
    """
    if not isinstance(file_system, AbstractArchiveFileSystem):
        return
    if isinstance(file_system, TarFileSystem):
        _rename_in_tar(file_system, url)
    elif isinstance(file_system, ZipFileSystem):
        _rename_in_zip(file_system, url)
    else:
        file_system._get_dirs()
        for name in file_system.dir_cache:
            if name.rstrip("/") not in ("", _plain(name, url)):
                raise StorageError(
                    f"{url} has a member of the name {name!r}; write the archive anew, without '.' and '//'"
                )


def _rename_in_tar(file_system: Any, url: str) -> None:
    if any(file_system.fo.read(_AFTER_END)):
        raise StorageError(
            f"{url}: another archive follows the end of this one, as after cat; unpack it with tar --ignore-zeros, and "
            "pack the files anew"
        )
    tar = file_system.tar
    for member in tar.getmembers():
        member.name = _plain(member.name, url)
        if member.islnk():
            member.linkname = _plain(member.linkname, url)
    tar.members = [member for member in tar.members if member.name]
    file_system._index()


def _rename_in_zip(file_system: Any, url: str) -> None:
    archive = file_system.zip
    for member in archive.filelist:
        name = member.filename
        if member.create_system == _DOS:
            name = name.replace("\\", "/")
        member.filename = _plain(name, url) + ("/" if name.endswith("/") else "")
    archive.filelist = [member for member in archive.filelist if member.filename != "/"]
    archive.NameToInfo = {member.filename: member for member in archive.filelist}


def _plain(name: str, url: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise StorageError(
            f"{url} has a member of the name {name!r}, which leads out of it; write the archive anew"
        )
    return "/".join(parts)

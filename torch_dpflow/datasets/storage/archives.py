"""Corrections and checks of fsspec's archives: no member is lost silently, and names are as in extracted files."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from typing import Any

from fsspec.archive import AbstractArchiveFileSystem
from fsspec.implementations.tar import TarFileSystem
from fsspec.implementations.zip import ZipFileSystem

from torch_dpflow.datasets.storage.base import state_of_file
from torch_dpflow.errors import StorageError

#: Bytes of a block of a tar archive.
_BLOCK = 512
#: Bytes read at a time after a tar archive's end mark.
_PIECE = 1 << 20
#: tarfile's type of a file that began in another volume.
_CONTINUED = b"M"
_LOCAL_HEADER = b"PK\3\4"
#: The type of members that are neither files nor directories.
_OTHER = "other"


def prepare_archive(file_system: Any, url: str) -> None:
    """Give members of a tar or zip archive the names of their extracted files: "./a//b" and "/a/b" become "a/b".

    fsspec takes names literally, so listings would lack files, and reads would find none. In archives that libarchive
    reads, such names are an error. Other file systems stay unchanged.

    Raises StorageError: the archive is cut, damaged, or joined with another archive; or it has a link, or a name that
    leads out of the archive, or, in a zip archive, a name with a backslash.
    """
    if not isinstance(file_system, AbstractArchiveFileSystem):
        return
    if isinstance(file_system, TarFileSystem):
        _check_end_of_tar(file_system, url)
        _rename_in_tar(file_system, url)
    elif isinstance(file_system, ZipFileSystem):
        _rename_in_zip(file_system, url)
    else:
        file_system._get_dirs()
        for name in file_system.dir_cache:
            if name.rstrip("/") not in ("", _plain(name, url)):
                raise StorageError(
                    f"{url} has a member of the name {name!r}; write the archive again, without '.' and '//'"
                )


def state_of_archive(file_system: Any) -> str | None:
    """Return the state of the local file of an archive; None for an archive elsewhere, and for other file systems."""
    with suppress(AttributeError, OSError):
        return state_of_file(os.fstat(file_system.fo.fileno()))
    return None


def check_member(file_system: Any, path: str, url: str) -> None:
    """Raise StorageError if `path` in a tar archive is a pipe or a device. `url` names it in the error."""
    if not isinstance(file_system, TarFileSystem):
        return
    entry = file_system.index.get(re.sub("/+", "/", path))
    if entry is not None and entry[0]["type"] == _OTHER:
        raise StorageError(f"{url}: this is a pipe or a device; pack a regular file")


def _check_end_of_tar(file_system: Any, url: str) -> None:
    """Raise StorageError unless the end mark, a block of zeros, follows the last member, and only zeros follow it.

    `tarfile` ends at a damaged header, at the end of the file and at a first block of zeros alike.
    """
    end, file = file_system.tar.offset, file_system.fo
    file.seek(end)
    mark = file.read(_BLOCK)
    if len(mark) < _BLOCK:
        raise StorageError(
            f"{url} has no end mark after byte {end}: it was cut, or written without one; restore it, or unpack it and "
            "pack the files again"
        )
    if any(mark):
        raise StorageError(f"{url} has a damaged header at byte {end}; restore the archive from a copy")
    while piece := file.read(_PIECE):
        if piece.count(0) < len(piece):
            raise StorageError(
                f"{url}: another archive follows the end of this one, as after cat; unpack it with tar --ignore-zeros, "
                "and pack the files again"
            )


def _rename_in_tar(file_system: Any, url: str) -> None:
    tar = file_system.tar
    for member in tar.getmembers():
        if member.type == _CONTINUED:
            raise StorageError(
                f"{url} begins within the file {member.name!r}; unpack all volumes, and pack them as one"
            )
        if member.issym() or member.islnk():
            raise StorageError(
                f"{url} has a link {member.name!r}; pack the files instead, as by tar --dereference --hard-dereference"
            )
        member.name = _plain(member.name, url)
    tar.members = [member for member in tar.members if member.name]
    file_system._index()
    for member in tar.members:
        if member.isdev():
            file_system.index[member.name][0]["type"] = _OTHER


def _rename_in_zip(file_system: Any, url: str) -> None:
    archive = file_system.zip
    archive.fp.seek(0)
    is_first = min((member.header_offset for member in archive.filelist), default=0) == 0
    if not is_first and archive.fp.read(len(_LOCAL_HEADER)) == _LOCAL_HEADER:
        raise StorageError(f"{url}: another archive precedes this one, as after cat; unpack both, and pack them as one")
    for member in archive.filelist:
        name = member.filename
        if "\\" in name:
            raise StorageError(
                f"{url} has a member of the name {name!r}, whose backslash divides it on Windows alone; write "
                "the archive again, with '/' between parts"
            )
        if stat.S_ISLNK(member.external_attr >> 16):
            raise StorageError(f"{url} has a link {name!r}; pack the files instead, as by zip without --symlinks")
        member.filename = _plain(name, url) + ("/" if name.endswith("/") else "")
    archive.filelist = [member for member in archive.filelist if member.filename != "/"]
    archive.NameToInfo = {member.filename: member for member in archive.filelist}


def _plain(name: str, url: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise StorageError(f"{url} has a member of the name {name!r}, which leads out of it; write the archive again")
    return "/".join(parts)

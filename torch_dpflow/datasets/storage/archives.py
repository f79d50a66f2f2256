"""Archives: members under the names by which they are extracted, links followed, and no member lost unseen."""

from __future__ import annotations

import posixpath
import re
import stat
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from fsspec.archive import AbstractArchiveFileSystem
from fsspec.implementations.tar import TarFileSystem
from fsspec.implementations.zip import ZipFileSystem

from torch_dpflow.errors import StorageError

#: Bytes of a block of a tar archive.
_BLOCK = 512
#: Bytes read at a time after a tar archive's end mark.
_PIECE = 1 << 20
#: Links that are followed for one name, as in Linux.
_MAX_LINKS = 40
#: Maximum names that links to directories add to an archive.
_MAX_ADDED = 1 << 20
#: ZipInfo.create_system of archives whose names may have backslashes between their parts: FAT, HPFS, NTFS, VFAT.
_DOS = frozenset({0, 6, 10, 14})
#: tarfile's type of a file that began in another volume.
_CONTINUED = b"M"
_LOCAL_HEADER = b"PK\3\4"
#: The type of members that are no file, directory or link to one.
_OTHER = "other"


def prepare_archive(file_system: Any, url: str) -> None:
    """Rename the files of an archive as they are extracted: "./a//b" and "/a/b" become "a/b"; follow a tar's links.

    fsspec takes names literally, so listings would lack files, and reads would find none. Nothing is done for other
    file systems.

    Raises StorageError: the archive is cut or damaged, or another one follows its end; a name or a link leads out of
    it, or cannot be read as it would be extracted.
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
                    f"{url} has a member of the name {name!r}; write the archive anew, without '.' and '//'"
                )


def check_member(file_system: Any, path: str, url: str) -> None:
    """Raise StorageError if `path` in a tar archive is a pipe, a device, or a link that leads nowhere."""
    if not isinstance(file_system, TarFileSystem):
        return
    entry = file_system.index.get(re.sub("/+", "/", path))
    if entry is not None and entry[0]["type"] == _OTHER:
        raise StorageError(f"{url}: this is a pipe, a device, or a link that leads nowhere; pack a regular file")


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
            "pack the files anew"
        )
    if any(mark):
        raise StorageError(f"{url} has a damaged header at byte {end}; restore the archive from a copy")
    while piece := file.read(_PIECE):
        if piece.count(0) < len(piece):
            raise StorageError(
                f"{url}: another archive follows the end of this one, as after cat; unpack it with tar --ignore-zeros, "
                "and pack the files anew"
            )


def _rename_in_tar(file_system: Any, url: str) -> None:
    tar = file_system.tar
    for member in tar.getmembers():
        if member.type == _CONTINUED:
            raise StorageError(
                f"{url} begins within the file {member.name!r}; unpack all volumes, and pack them as one"
            )
        member.name = _plain(member.name, url)
        if member.islnk():
            member.linkname = _plain(member.linkname, url)
    tar.members = [member for member in tar.members if member.name]
    file_system._index()
    _follow_links(file_system.index, {member.name: member for member in tar.members}, url)


def _follow_links(index: dict[str, Any], members: dict[str, Any], url: str) -> None:
    """Correct fsspec's index of a tar archive: each link is what it leads to, and pipes and devices are no files.

    `index` has (description, offset, name of the member with the bytes) by name.
    """
    tree = _Tree({name: one.linkname for name, one in members.items() if one.issym()}, index, url)
    for name, member in members.items():
        if member.isdev() or (member.islnk() and member.linkname not in members):
            index[name][0]["type"] = _OTHER
    if not tree.links:
        return
    for name in members:
        tree.check_place(name)
    folders = {}
    for name in tree.links:
        real, is_directory = tree.target(name)
        if is_directory:
            folders[name] = real
            index[name][0].update(type="directory", size=0)
        elif real in index and real not in tree.links:
            index[name] = ({**index[real][0], "name": name}, *index[real][1:])
        else:
            index[name][0].update(type=_OTHER, size=0)
    added: dict[str, Any] = {}
    for name, real in folders.items():
        if real in _above(name):
            continue
        for shown, found in tree.below(real, name):
            if len(added) >= _MAX_ADDED:
                raise StorageError(f"{url} has links that add more than {_MAX_ADDED:,} names; pack the files instead")
            added[shown] = ({**index[found][0], "name": shown}, *index[found][1:])
    index.update(added)


class _Tree:
    """The directories of a tar archive, with its symbolic links. Raises StorageError for a link that leads out."""

    def __init__(self, links: dict[str, str], names: Any, url: str) -> None:
        #: targets by name
        self.links = links
        self._url = url
        #: names in each directory
        self._children: dict[str, set[str]] = defaultdict(set)
        for name in names if links else ():
            if names[name][0]["type"] == "directory":
                self._children[name]
            while name:
                above, _, last = name.rpartition("/")
                if last in self._children[above]:
                    break
                self._children[above].add(last)
                name = above

    def check_place(self, name: str) -> None:
        """Raise StorageError for a member below a link, which would be extracted elsewhere than its name says."""
        above = posixpath.dirname(name)
        while above:
            if above in self.links:
                raise StorageError(f"{self._url} has a member {name!r} below the link {above!r}; pack the files anew")
            above = posixpath.dirname(above)

    def target(self, name: str) -> tuple[str, bool]:
        """Return the name that a link leads to ("" if nowhere, or to the root), and whether it is a directory."""
        done: list[str] = []
        parts, followed = name.split("/")[::-1], 0
        while parts:
            part = parts.pop()
            if part in ("", "."):
                continue
            if part == "..":
                if not done:
                    raise self._leads_out(name)
                done.pop()
                continue
            done.append(part)
            target = self.links.get("/".join(done))
            if target is not None:
                followed += 1
                if followed > _MAX_LINKS:
                    return "", False
                if target.startswith("/"):
                    raise self._leads_out(name)
                done.pop()
                parts += target.split("/")[::-1]
        real = "/".join(done)
        return real, real in self._children

    def below(self, real: str, shown: str) -> Iterator[tuple[str, str]]:
        """Yield each file below a directory: its name below `shown`, and its own name.

        Links to a directory that contains them are not followed.
        """
        pending = [(real, shown, frozenset({real, *_above(shown)}))]
        while pending:
            folder, place, above = pending.pop()
            for child in self._children[folder]:
                name = f"{folder}/{child}" if folder else child
                found, is_directory = self.target(name) if name in self.links else (name, name in self._children)
                if not is_directory:
                    yield f"{place}/{child}", name
                elif found not in above:
                    pending.append((found, f"{place}/{child}", above | {found}))

    def _leads_out(self, name: str) -> StorageError:
        return StorageError(
            f"{self._url} has a link {name!r} to {self.links[name]!r}, which leads out of it; pack the files instead, "
            "as by tar --dereference"
        )


def _above(name: str) -> Iterator[str]:
    """Yield the directories that contain `name`."""
    while name := posixpath.dirname(name):
        yield name


def _rename_in_zip(file_system: Any, url: str) -> None:
    archive = file_system.zip
    archive.fp.seek(0)
    is_first = min((member.header_offset for member in archive.filelist), default=0) == 0
    if not is_first and archive.fp.read(len(_LOCAL_HEADER)) == _LOCAL_HEADER:
        raise StorageError(f"{url}: another archive precedes this one, as after cat; unpack both, and pack them as one")
    for member in archive.filelist:
        name = member.filename
        if member.create_system in _DOS:
            name = name.replace("\\", "/")
        elif "\\" in name:
            raise StorageError(
                f"{url} has a member of the name {name!r}, whose backslash divides it on Windows alone; write "
                "the archive anew, with '/' between parts"
            )
        if stat.S_ISLNK(member.external_attr >> 16):
            raise StorageError(f"{url} has a link {name!r}; pack the files instead, as by zip without --symlinks")
        member.filename = _plain(name, url) + ("/" if name.endswith("/") else "")
    archive.filelist = [member for member in archive.filelist if member.filename != "/"]
    archive.NameToInfo = {member.filename: member for member in archive.filelist}


def _plain(name: str, url: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise StorageError(f"{url} has a member of the name {name!r}, which leads out of it; write the archive anew")
    return "/".join(parts)

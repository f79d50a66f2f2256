"""Archives of the user's own modules that a pickle needs, sent to workers. Equal files give equal archives.

They contain files and not pickled code. So classes keep one identity and are pickled by name, and relative and late
imports work.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import io
import os
import shutil
import stat
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch_dpflow.errors import LifetimeError, MessageError, OptionError, UsageError
from torch_dpflow.remote.shipping.modules import (
    OwnModule,
    imports_of,
    is_importable,
    is_namespace,
    is_own_path,
    own_module,
    own_names,
)

#: Maximum total bytes and number of files in a bundle, and maximum bytes of its archive.
MAX_BYTES, MAX_FILES, MAX_ARCHIVE_BYTES = 16 << 20, 5_000, 24 << 20
#: Maximum length of a file's name in it, and of a part between slashes, in bytes.
_MAX_NAME, _MAX_PART = 512, 255
#: Maximum entries of directories that are scanned.
_MAX_ENTRIES = 200_000
_TIME = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class CodeBundle:
    """Archive of the user's own modules."""

    #: SHA-256 of `data`, hexadecimal; the same wherever the files are.
    digest: str
    #: A zip archive, not compressed.
    data: bytes = field(repr=False)


class OwnFiles:
    """Collection of the user's own files that workers need, by their paths in a bundle. Each file is read once.

    Args:
        paths: files and directories to add, with the modules that they import.
        is_sent: whether the files will be sent. If not, no limits apply.

    `add` and `bundle` raise OptionError, for example if files are too large or have the name of an imported library.
    """

    def __init__(self, paths: Sequence[str] = (), *, is_sent: bool = True) -> None:
        self._is_sent = is_sent
        self._files: dict[str, bytes] = {}
        #: The latest bundle, and of how many files.
        self._bundle: tuple[int, CodeBundle | None] = (0, None)
        self._sizes: Counter[str] = Counter()
        self._entries = 0
        #: Names that were requested, and whether a top-level one is a namespace.
        self._requested: set[str] = set()
        self._namespaces: dict[str, bool] = {}
        #: Paths that are not added yet: modules that are found by their names come first.
        self._paths = [*paths]

    def add(self, modules: Iterable[str], names: Iterable[str]) -> None:
        """Add the user's own modules among `modules` and `names` (found in code), their imports, and `paths`."""
        for name in sorted({*modules} | own_names(names)):
            self._need(name)
        while self._paths:
            self._add_path(os.path.abspath(self._paths.pop(0)))

    def _need(self, name: str) -> None:
        """Add the user's own package or module of `name`, and its imports; do nothing for an installed one."""
        wanted = [name]
        while wanted:
            name = wanted.pop()
            top = name.partition(".")[0]
            if top not in self._namespaces:
                self._namespaces[top] = is_namespace(top)
            key = name if self._namespaces[top] else top
            if key not in self._requested:
                self._requested.add(key)
                module = own_module(name)
                wanted.extend(() if module is None else self._add_module(module))

    def _add_path(self, path: str) -> None:
        """Add a file, or a directory without hidden files, and the modules that its modules import."""
        place = _place_of(path)
        found = list(self._below(path, place, all_files=True)) if os.path.isdir(path) else [(place, path)]
        for name in self._add_files(found):
            self._need(name)

    def bundle(self) -> CodeBundle | None:
        if self._bundle[0] != len(self._files):  # files are added, and never changed
            self._bundle = len(self._files), self._packed()
        return self._bundle[1]

    def _packed(self) -> CodeBundle:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
            for place, content in sorted(self._files.items()):
                info = zipfile.ZipInfo(place, _TIME)
                info.create_system, info.external_attr = 3, (stat.S_IFREG | 0o600) << 16
                archive.writestr(info, content)
        data = out.getvalue()
        try:
            if self._is_sent:
                _checked(data)
        except ValueError as error:
            raise OptionError(f"the code that workers need cannot be sent: {error}") from error
        return CodeBundle(hashlib.sha256(data).hexdigest(), data)

    def _add_module(self, module: OwnModule) -> list[str]:
        place = module.name.replace(".", "/")
        if not module.is_package:
            (path,) = module.paths
            return self._add_files([(f"{place.rpartition('/')[0]}/{os.path.basename(path)}".lstrip("/"), path)])
        return self._add_files([one for path in module.paths for one in self._below(path, place, all_files=False)])

    def _add_files(self, found: Sequence[tuple[str, str]]) -> list[str]:
        """Add (place, path) pairs of files; return the names that they import."""
        new = [(place, path) for place, path in found if place not in self._files]
        for place, path in new:
            self._sizes[place] = os.stat(path).st_size
            if self._is_sent and (top := _module_of(place)):
                _check_not_installed(top, path)
        self._check()
        imported: list[str] = []
        for place, path in new:
            if place not in self._files:  # else an earlier directory of its package has it
                content = self._files[place] = _content_of(path)
                self._sizes[place] = len(content)
                if path.endswith(".py"):
                    imported.extend(imports_of(content, os.path.dirname(place).replace("/", ".")))
        self._check()
        return imported

    def _check(self) -> None:
        total = self._sizes.total()
        if not self._is_sent or (total <= MAX_BYTES and len(self._sizes) <= MAX_FILES):
            return
        tops: Counter[str] = Counter()
        for place, size in self._sizes.items():
            tops[place.partition("/")[0]] += size
        parts = ", ".join(f"{top} {size / 1e6:,.1f} MB" for top, size in tops.most_common(5))
        largest = ", ".join(f"{place} {size / 1e6:,.1f} MB" for place, size in self._sizes.most_common(3))
        raise OptionError(
            f"the code that workers need takes {total / 1e6:,.1f} MB in {len(self._sizes):,} files ({parts}; the "
            f"largest: {largest}); {MAX_BYTES / 1e6:,.1f} MB in {MAX_FILES:,} files are allowed. Keep data out "
            "of packages, or install them where the workers run and give LoaderOptions(code=None): nothing is sent then"
        )

    def _below(self, folder: str, place: str, *, all_files: bool) -> Iterator[tuple[str, str]]:
        """Yield (place, path) of all files in and below a directory."""
        seen: set[str] = set()
        waiting = [(folder, place)]
        while waiting:
            folder, place = waiting.pop()
            real = os.path.realpath(folder)
            if real in seen:  # a link that leads back
                continue
            seen.add(real)
            with os.scandir(folder) as entries:
                for entry in entries:
                    self._count(folder)
                    inside = f"{place}/{entry.name}".lstrip("/")
                    if entry.is_dir():
                        if _is_wanted_folder(entry.name, all_files=all_files):
                            waiting.append((entry.path, inside))
                    elif entry.is_file() and _is_wanted_file(entry.name, all_files=all_files):
                        yield inside, entry.path

    def _count(self, folder: str) -> None:
        self._entries += 1
        if self._is_sent and self._entries > _MAX_ENTRIES:
            raise OptionError(
                f"the code that workers need lies among more than {_MAX_ENTRIES:,} files, such as those in {folder}; "
                "keep data out of packages, or install them where the workers run and give LoaderOptions(code=None)"
            )


def _is_wanted_folder(name: str, *, all_files: bool) -> bool:
    return name != "__pycache__" and (not name.startswith(".") if all_files else name.isidentifier())


def _is_wanted_file(name: str, *, all_files: bool) -> bool:
    return not name.startswith(".") and not name.endswith(".pyc") if all_files else is_importable(name)


def _content_of(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES + 1)  # it may have grown since its size was taken
    except OSError as error:
        raise OptionError(
            f"{path}, which workers need, cannot be read: {error.strerror}; make it readable, or give "
            "LoaderOptions(code=None)"
        ) from error


def _place_of(path: str) -> str:
    """Return a path's place in a bundle: for a module as it is imported, else relative to its entry of sys.path."""
    inner = path if os.path.isdir(path) else os.path.dirname(path)
    root = inner
    while os.path.exists(os.path.join(root, "__init__.py")):
        root = os.path.dirname(root)
    if root == inner:
        above = [os.path.abspath(folder or os.getcwd()) for folder in sys.path]
        above = [one for one in above if is_own_path(one) and os.path.commonpath([one, path]) == one]
        root = max(above, key=len, default=os.path.dirname(path))
    place = os.path.relpath(path, root)
    return "" if place == "." else place


def install_bundle(data: bytes, directory: str | Path) -> Path:
    """Unpack a bundle into a new directory inside `directory`, put the new one first on sys.path, and return its path.

    Nothing is unpacked before the whole bundle was checked. A bundle that was unpacked before is used again.

    Raises:
        MessageError: `data` is not a bundle, or exceeds the limits of bundles.
        LifetimeError: this process has imported another module with the name of a top-level module in the bundle.
        UsageError: `directory` belongs to another user, or other users can write into it.
    """
    directory = Path(directory)
    try:
        contents = _checked(data)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise MessageError(f"no bundle of code: {error}") from error
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(directory)
    target = directory / f"code-{hashlib.sha256(data).hexdigest()[:32]}"
    _check_not_loaded({top for place in contents if (top := _module_of(place))}, target)
    if not target.exists():
        _unpack(contents, directory, target)
    _check_private(target)
    if str(target) not in sys.path:
        sys.path.insert(0, str(target))
    importlib.invalidate_caches()
    return target


def top_level_names(data: bytes) -> tuple[str, ...]:
    """Return the names of a bundle's top-level modules, packages and folders; empty for empty data."""
    if not data:
        return ()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return tuple(sorted({place.partition("/")[0].partition(".")[0] for place in archive.namelist()}))


def _checked(data: bytes) -> dict[str, bytes]:
    """Check an archive, and return its files by their paths. Raises ValueError, or errors of zipfile."""
    if len(data) > MAX_ARCHIVE_BYTES:
        raise ValueError(f"{len(data):,} bytes; at most {MAX_ARCHIVE_BYTES:,} are allowed")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        size = sum(entry.file_size for entry in entries)
        if len(entries) > MAX_FILES or size > MAX_BYTES:
            raise ValueError(f"{len(entries):,} files of {size:,} bytes; {MAX_FILES:,} of {MAX_BYTES:,} are allowed")
        places = [entry.filename for entry in entries]
        folders = {str(parent) for place in places for parent in Path(place).parents}
        if len(set(places)) != len(places) or folders.intersection(places):
            raise ValueError("two files have one name")
        for entry in entries:
            _check_entry(entry)
        return {entry.filename: archive.read(entry) for entry in entries}


def _check_entry(entry: zipfile.ZipInfo) -> None:
    name = entry.filename
    parts = name.split("/")
    longest = max(len(part.encode()) for part in parts)
    if len(name.encode()) > _MAX_NAME or longest > _MAX_PART or not name.isprintable():
        raise ValueError(f"{name[:100]!r} is too long for a file's name, or not printable")
    if "\\" in name or {"", ".", ".."}.intersection(parts):
        raise ValueError(f"{name[:100]!r} is no name of a file below its directory")
    if stat.S_IFMT(entry.external_attr >> 16) not in (0, stat.S_IFREG):
        raise ValueError(f"{name!r} is no regular file")
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        raise ValueError(f"{name!r} is compressed")


def _check_private(directory: Path) -> None:
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise UsageError(
            f"{directory} is no directory of this user's that others cannot write into; code that is to be run "
            "must not lie there: give another one, of mode 0700"
        )


def _module_of(place: str) -> str:
    """Return the name of the module that a top-level file makes importable; empty for data, and inside a package."""
    top, _, inner = place.partition("/")
    is_module = is_importable(top) if not inner else inner.startswith("__init__.") and is_importable(inner)
    return top.partition(".")[0] if is_module else ""


def _check_not_installed(top: str, path: str) -> None:
    """Raise OptionError for a file with the name of a module that workers import before, such as logging."""
    file = getattr(sys.modules.get(top), "__file__", None)
    if isinstance(file, str) and not is_own_path(file):
        raise OptionError(
            f"{path} cannot be sent as module {top!r}: this process has imported {file} by that name, and so do "
            "workers; rename it, or leave it out of LoaderOptions(code=)"
        )


def _check_not_loaded(tops: set[str], target: Path) -> None:
    for top in sorted(tops):
        file = getattr(sys.modules.get(top), "__file__", None)
        if file is not None and not Path(file).is_relative_to(target):
            raise LifetimeError(
                f"the user's module {top!r} cannot be used in this process, which has imported {file} by that name; "
                "rename the user's, or start a new process"
            )


def _unpack(contents: dict[str, bytes], directory: Path, target: Path) -> None:
    """Write files to a temporary directory, and rename it to `target`, so that all files appear at once."""
    beside = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=directory))
    try:
        for place, content in contents.items():
            path = beside / place
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_bytes(content)
        os.rename(beside, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # else another process was faster
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)

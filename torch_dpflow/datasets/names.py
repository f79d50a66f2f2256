"""Names of datasets: `namespace/name:version:variant`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch_dpflow.errors import OptionError, OptionTypeError

#: One half of an id. No dots, so that no id can be the path of a file of the store or lead out of it.
NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}"
#: A version or a variant.
LABEL = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}"

#: The lookahead is for Python, whose `$` also matches before a newline at the end.
END = r"$(?!\n)"
ID_PATTERN = f"^{NAME}/{NAME}{END}"
LABEL_PATTERN = f"^{LABEL}{END}"

_REFERENCE = re.compile(f"(?P<id>{NAME}/{NAME})(:(?P<version>{LABEL})(:(?P<variant>{LABEL}))?)?")


@dataclass(frozen=True)
class DatasetRef:
    """Names a dataset, or a version of it, or a variant of a version, as in `core/mscoco:v1:train2017`.

    Raises:
        OptionError: a part has characters that are not allowed; a variant is named without a version.
        OptionTypeError: a part is no string.
    """

    id: str
    version: str | None = None
    variant: str | None = None

    def __post_init__(self) -> None:
        parts = (self.id, self.version, self.variant)
        if not isinstance(self.id, str) or not all(isinstance(part, str | None) for part in parts[1:]):
            raise OptionTypeError(f"the parts of a dataset's name are strings, not {parts!r}")
        if self.variant is not None and self.version is None:
            raise OptionError(f"variant={self.variant!r} of {self.id!r} needs a version beside it")
        found = _REFERENCE.fullmatch(str(self))
        if found is None or found.group("id", "version", "variant") != parts:
            given = (
                repr(str(self))
                if found is None
                else ", ".join(repr(part) for part in parts if part is not None)
            )
            raise OptionError(
                f"{given} is no name of a dataset; give namespace/name, namespace/name:version or "
                "namespace/name:version:variant, of letters, digits, '_' and '-' (versions and variants also "
                "'.' and '+'), each beginning with a letter or a digit"
            )

    @classmethod
    def parse(cls, text: str) -> DatasetRef:
        """Undo `str()`. Raises OptionError, or OptionTypeError when `text` is no string."""
        if not isinstance(text, str):
            raise OptionTypeError(
                f"a dataset is named by a string such as 'core/x:v1:train', not by {text!r}"
            )
        identity, *labels = text.split(":")
        if len(labels) > 2:
            raise OptionError(
                f"{text!r} has {len(labels) + 1} parts; give at most namespace/name:version:variant"
            )
        return cls(identity, *labels)

    def __str__(self) -> str:
        return ":".join(part for part in (self.id, self.version, self.variant) if part is not None)


def version_order(version: str) -> tuple[tuple[int, int | str], ...]:
    """A sorting key that puts v2 before v10: runs of digits compare as numbers."""
    parts = re.split(r"(\d+)", version)
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in parts if part)


def next_version(version: str) -> str:
    """The next version's name: the last run of digits incremented (v9 → v10), or `.2` appended."""
    found = re.search(r"\d+(?=\D*$)", version)
    if found is None:
        return f"{version}.2"
    return f"{version[: found.start()]}{int(found.group()) + 1}{version[found.end() :]}"

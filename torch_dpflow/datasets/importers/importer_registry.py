"""Importers by name; a module is imported only when it is used."""

from __future__ import annotations

import importlib
import inspect
import os
import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from torch_dpflow.datasets.importers.base import Importer
from torch_dpflow.errors import OptionError

_PACKAGE = "torch_dpflow.datasets.importers"

#: name → (module, class)
IMPORTERS = {
    "coco": ("coco", "CocoImporter"),
    "imagefolder": ("image_folder", "ImageFolderImporter"),
    "iterable": ("iterable", "IterableImporter"),
    "listing": ("listing", "ListingImporter"),
    "speech": ("speech", "SpeechImporter"),
}


def importer_class(name: str) -> Any:
    """The class of an importer. Raises OptionError for an unknown name."""
    if name not in IMPORTERS:
        raise OptionError(f"there is no importer {name!r}; there are {sorted(IMPORTERS)}")
    module, attribute = IMPORTERS[name]
    return getattr(importlib.import_module(f"{_PACKAGE}.{module}"), attribute)


def make_importer(
    name: str,
    source: str | os.PathLike[str],
    settings: Mapping[str, str],
    options: Mapping[str, Any] | None = None,
) -> Importer:
    """An importer from arguments as text, for command lines and configuration files.

    Args:
        name: one of `IMPORTERS`.
        source: its first argument.
        settings: its other arguments by name; the parts of a list are separated by commas.
        options: fsspec's options for the source.

    Raises:
        OptionError: no such importer or setting, or a value of a wrong type.
    """
    kind = importer_class(name)
    allowed = settings_of(name)
    unknown = settings.keys() - allowed.keys()
    if unknown:
        raise OptionError(f"{name} has no setting {sorted(unknown)}; it has {sorted(allowed)}")
    required = {setting for setting, parameter in allowed.items() if parameter.default is parameter.empty}
    if not required <= settings.keys():
        raise OptionError(f"{name} needs the setting {sorted(required - settings.keys())}")
    hints = typing.get_type_hints(kind.__init__)
    values = {setting: _converted(setting, text, hints[setting]) for setting, text in settings.items()}
    importer: Importer = getattr(kind, "from_text", kind)(source, options=options, **values)
    return importer


def settings_of(name: str) -> dict[str, inspect.Parameter]:
    """The arguments of an importer that `make_importer` accepts as settings."""
    parameters = inspect.signature(importer_class(name).__init__).parameters
    return {
        setting: parameter
        for setting, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and setting not in {"options", "info"}
    }


def _converted(setting: str, text: str, hint: Any) -> Any:
    if "PathLike" in str(hint):
        return text
    many = "Sequence" in str(hint)
    try:
        return msgspec.convert(text.split(",") if many else text, list[str] if many else hint, strict=False)
    except msgspec.ValidationError as error:
        raise OptionError(f"{setting}={text!r} is not what it should be: {error}") from error

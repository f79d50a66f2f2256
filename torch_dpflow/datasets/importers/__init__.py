"""Importers, which read a source sample by sample. The module of each is imported only when it is used."""

from __future__ import annotations

import importlib
import inspect
import os
import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from torch_dpflow._core.decoding import converted
from torch_dpflow.datasets.importers.base import Importer, Item
from torch_dpflow.errors import OptionError

__all__ = ["IMPORTERS", "Importer", "Item", "importer_class", "make_importer"]

#: Module and class of each importer, by its name.
IMPORTERS = {
    "coco": ("coco", "CocoImporter"),
    "imagefolder": ("folders", "ImageFolderImporter"),
    "iterable": ("iterable", "IterableImporter"),
    "listing": ("listing", "ListingImporter"),
    "litdata": ("packed", "LitDataImporter"),
    "mds": ("packed", "MDSImporter"),
    "speech": ("folders", "SpeechImporter"),
    "tfrecord": ("tfrecord", "TFRecordImporter"),
    "webdataset": ("webdataset", "WebDatasetImporter"),
}


def importer_class(name: str) -> Any:
    """Return the class of an importer. Raises OptionError for an unknown name."""
    if name not in IMPORTERS:
        raise OptionError(f"there is no importer {name!r}; there are {sorted(IMPORTERS)}")
    module, attribute = IMPORTERS[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)


def make_importer(
    name: str,
    source: str | os.PathLike[str],
    settings: Mapping[str, str],
    options: Mapping[str, Any] | None = None,
) -> Importer:
    """Make an importer from arguments given as text, for command lines and configuration files.

    Args:
        name: one of `IMPORTERS`.
        source: the first argument of the importer.
        settings: its other arguments by name; the parts of a list are separated by commas.
        options: fsspec's options for the source.

    Raises:
        OptionError: among others, no such importer or setting, a missing setting, or a value of the wrong type.
    """
    kind = importer_class(name)
    parameters = inspect.signature(kind.__init__).parameters
    allowed = {
        setting: parameter
        for setting, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and setting not in {"options", "info"}
    }
    unknown = settings.keys() - allowed.keys()
    if unknown:
        raise OptionError(f"importer {name} has no setting {sorted(unknown)}; it has {sorted(allowed)}")
    required = {setting for setting, parameter in allowed.items() if parameter.default is parameter.empty}
    if not required <= settings.keys():
        raise OptionError(f"importer {name} needs the setting {sorted(required - settings.keys())}")
    hints = typing.get_type_hints(kind.__init__)
    values = {setting: _converted(setting, text, hints[setting]) for setting, text in settings.items()}
    importer: Importer = getattr(kind, "from_text", kind)(source, options=options, **values)
    return importer


def _converted(setting: str, text: str, hint: Any) -> Any:
    if "PathLike" in str(hint):
        return text
    is_list = "Sequence" in str(hint)
    try:
        return converted(text.split(",") if is_list else text, list[str] if is_list else hint, strict=False)
    except msgspec.ValidationError as error:
        raise OptionError(f"{setting}={text!r} has the wrong type: {error}") from error

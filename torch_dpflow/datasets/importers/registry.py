"""Importers by name; one is imported only when it is used."""

from __future__ import annotations

import importlib
from typing import Any

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
    """The class of an importer. Raises OptionError for a name that there is not."""
    if name not in IMPORTERS:
        raise OptionError(f"there is no importer {name!r}; there are {sorted(IMPORTERS)}")
    module, attribute = IMPORTERS[name]
    return getattr(importlib.import_module(f"{_PACKAGE}.{module}"), attribute)

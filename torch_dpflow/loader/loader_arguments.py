"""Arguments that torch's loader accepts and then fails on in an epoch; refused by the constructor here."""

from __future__ import annotations

import operator
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from torch_dpflow._core.checks import check_path
from torch_dpflow.errors import OptionTypeError
from torch_dpflow.options import LoaderOptions


def check_types(loader: Any, address: object) -> None:
    """Raise OptionTypeError or OptionError for an argument that no iteration could use."""
    try:
        operator.index(loader.num_workers)
    except TypeError:
        raise _wrong("num_workers", loader.num_workers, "an int >= 0") from None
    if loader.generator is not None and not isinstance(loader.generator, torch.Generator):
        raise _wrong("generator", loader.generator, "a torch.Generator or None")
    for name in ("collate_fn", "worker_init_fn"):
        function = getattr(loader, name)
        if function is not None and not callable(function):
            raise _wrong(name, function, "a callable or None")
    if address is None:
        return
    if not isinstance(address, str):
        raise _wrong("address", address, "'auto', an address, a connection file's path as text, or None")
    check_path("address", address)


def check_options_type(options: object) -> None:
    """Raise OptionTypeError for options of another type than LoaderOptions."""
    if options is None or isinstance(options, LoaderOptions):
        return
    hint = "; what a job asks of its flow is given as job=" if type(options).__name__ == "JobOptions" else ""
    raise _wrong("options", options, f"a torch_dpflow.LoaderOptions or None{hint}")


def has_processes(context: Any) -> bool:
    """Whether workers that a multiprocessing context starts are processes; None is torch's own context.

    Some, such as MONAI's for `use_thread_workers=True`, start threads that look like them to torch's iterator.
    """
    return context is None or (isinstance(context.Process, type) and issubclass(context.Process, BaseProcess))


def name_of(context: Any) -> str:
    """A multiprocessing context as users give it, for messages."""
    kind = type(context)
    is_pythons = kind.__module__.startswith("multiprocessing.")  # others' begin threads, or what they like
    return repr((context.get_start_method(allow_none=True) if is_pythons else "") or kind.__name__)


def _wrong(name: str, value: object, allowed: str) -> OptionTypeError:
    return OptionTypeError(f"{name}={value!r} is of type {type(value).__name__}; give {allowed}")

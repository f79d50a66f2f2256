"""Checks of the arguments of `DPFlowDataLoader`, done in its constructor."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DistributedSampler

from torch_dpflow._core.checks import check_path, check_type, working, wrong_type
from torch_dpflow._core.ranks import Ranks, named_ranks, nested_samplers
from torch_dpflow._core.torch_private import DatasetKind
from torch_dpflow.errors import OptionError
from torch_dpflow.options import LoaderOptions

if TYPE_CHECKING:
    from torch_dpflow.remote.launchers.contract import PlatformSpec

#: The fields of `LoaderOptions` that apply to remote workers only.
_REMOTE_OPTIONS = ("listen", "min_workers", "code")
#: The fields of `LoaderOptions` that apply to a loader of a flow.
_FLOW_OPTIONS = ("code", "watch")
#: Maximum number of digits of a flow's version.
MAX_VERSION_DIGITS = 9
_FLOW = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._/-]{0,99})(:v(?P<version>[1-9][0-9]*))?")


def check_types(loader: Any, address: Any) -> None:
    """Raise OptionTypeError or OptionError for wrong arguments that torch's constructor accepts."""
    try:
        operator.index(loader.num_workers)
    except TypeError:
        raise wrong_type("num_workers", loader.num_workers, "an int >= 0") from None
    check_type("generator", loader.generator, (torch.Generator, NoneType), "a torch.Generator or None")
    for name in ("collate_fn", "worker_init_fn"):
        check_type(name, getattr(loader, name), (Callable, NoneType), "a callable or None")
    if address is not None:
        check_type("address", address, str, "'auto', an address, a connection file's path as text, or None")
        check_path("address", address)


def check_options_type(options: object) -> None:
    """Raise OptionTypeError for options that are not LoaderOptions."""
    hint = "; JobOptions are given as job=" if type(options).__name__ == "JobOptions" else ""
    check_type("options", options, (LoaderOptions, NoneType), f"a torch_dpflow.LoaderOptions or None{hint}")


def has_processes(context: Any) -> bool:
    """Return whether a multiprocessing context starts processes; None is torch's own context.

    Some contexts, such as MONAI's for `use_thread_workers=True`, start threads instead.
    """
    return context is None or (isinstance(context.Process, type) and issubclass(context.Process, BaseProcess))


def name_of(context: Any) -> str:
    kind = type(context)
    is_pythons = kind.__module__.startswith("multiprocessing.")  # only these have a start method
    return repr((context.get_start_method(allow_none=True) if is_pythons else "") or kind.__name__)


# -- ranks ------------------------------------------------------------------------------------------------


def undivided(sampler: Any, dataset: Any) -> Any:
    """Unwrap a DistributedSampler whose inner sampler already divides among the same ranks; return the inner sampler.

    Frameworks add such a wrapper to samplers of other classes. Without one, `sampler` is returned unchanged.
    """
    if not isinstance(sampler, DistributedSampler):
        return sampler
    outer, *within = [part for part, _ in _divide(nested_samplers(sampler, dataset=dataset))] or [sampler]
    return next((part for part in within if named_ranks(part) == named_ranks(outer)), sampler)


def check_divided_once(loader: Any) -> None:
    """Raise OptionError if a sampler or dataset of torch or accelerate divides among ranks what was divided before."""
    samplers = nested_samplers(loader.sampler, loader.batch_sampler, dataset=loader.dataset)
    for parts in ([*samplers], [loader.dataset, working(loader.dataset, "dataset")]):
        found = _divide(parts)
        if not any(isinstance(part, DistributedSampler) or _is_of_accelerate(part) for part, _ in found[:-1]):
            continue
        (outer, ranks), (inner, own) = found[0], found[-1]
        raise OptionError(
            f"{type(outer).__name__} divides among {ranks.num_replicas} ranks what {type(inner).__name__} has divided "
            f"among {own.num_replicas}: a part of the samples would be read. Divide once: make the inner one with "
            "num_replicas=1 and rank=0, or keep the framework from dividing, as Lightning's "
            "Trainer(use_distributed_sampler=False) does"
        )


def _divide(parts: Iterable[Any]) -> list[tuple[Any, Ranks]]:
    """Return the samplers or datasets that divide among several ranks, each with its `Ranks`."""
    return [(part, ranks) for part in parts if (ranks := named_ranks(part)) is not None and ranks.num_replicas > 1]


def _is_of_accelerate(part: Any) -> bool:
    return working(part, "num_processes") is not None and working(part, "process_index") is not None


# -- platform= -------------------------------------------------------------------------------------------


def check_options(options: LoaderOptions, flow: str | None = None) -> None:
    """Raise OptionError for options that a loader without `platform` would ignore. flow: the loader's flow, if any."""
    usual = LoaderOptions()
    given = {name: f"{name}={value!r}" for name, value in vars(options).items() if value != getattr(usual, name)}
    remote = [text for name, text in given.items() if name in _REMOTE_OPTIONS]
    private = [text for name, text in given.items() if name not in _FLOW_OPTIONS]
    if flow is None and remote:
        raise OptionError(
            f"{', '.join(remote)} without a platform: these options apply to remote workers; give platform='ray' or "
            "'processes', or leave them out"
        )
    if flow is not None and private:
        raise OptionError(
            f"{', '.join(private)} with flow={flow!r}: the cluster's workers load the samples, so these options would "
            f"be ignored, and only {' and '.join(_FLOW_OPTIONS)} apply; leave them out, or give job=JobOptions(...), "
            "which has task_timeout_s for a flow"
        )


def check_platform_arguments(loader: Any) -> None:
    """Check the argument `platform` and the arguments that depend on it.

    Raises:
        OptionError, OptionTypeError: the platform does not exist, or an argument cannot be combined with it.
        MissingExtraError: the platform's library is not installed.
    """
    from torch_dpflow.remote.launchers.registry import resolve

    options, workers = loader.options or LoaderOptions(), loader.num_workers
    platform, given = resolve(loader.platform), f"platform={loader.platform!r}"
    if loader.flow is not None:
        raise OptionError(
            f"{given} with flow={loader.flow!r}: the workers of a flow run where its cluster starts them; leave out "
            "one of the two"
        )
    if workers < 1:
        raise OptionError(f"{given} with num_workers={workers}: give the number of workers to start")
    if options.min_workers > workers:
        raise OptionError(f"min_workers={options.min_workers} with num_workers={workers}: give at most {workers}")
    if loader.multiprocessing_context is not None:
        raise OptionError(
            f"{given} with multiprocessing_context={name_of(loader.multiprocessing_context)}: a context applies to "
            "workers of this host; leave it out"
        )
    platform.check_workers(workers)
    platform.check_installed()
    listen_address(platform, options)


def listen_address(platform: PlatformSpec, options: LoaderOptions) -> str:
    """Return the address to listen at, from `options` or the setting `network.listen`; empty if the platform chooses.

    Raises OptionError if `PlatformSpec.check_listen` refuses the address, or a setting is invalid.
    """
    from torch_dpflow.remote.launchers.registry import network

    listen, place = options.listen or "", ""
    if not listen:
        settings, place = network()
        listen = settings.listen
    if listen:
        try:
            platform.check_listen(listen)
        except OptionError as error:
            raise OptionError(f"{place}: network.{error}" if place else str(error)) from error
    return listen


# -- flow= -----------------------------------------------------------------------------------------------


def check_shareable(loader: Any) -> None:
    """Raise OptionError if the loader's `flow` is not a valid name, or its dataset is iterable."""
    flow_version(loader.flow)
    if loader._dataset_kind == DatasetKind.Iterable:
        raise OptionError(
            "flow= is for map-style datasets, whose samples have numbers; leave it out for an IterableDataset"
        )


def flow_version(flow: str) -> tuple[str, int]:
    """Return (name, version) from "name", whose version is 1, or "name:v3". Raises OptionError for anything else."""
    parts = _FLOW.fullmatch(flow) if isinstance(flow, str) else None
    if parts is None:
        raise OptionError(
            f"flow={flow!r}: give a name of 1 to 100 of the characters A-Z a-z 0-9 . _ / -, a letter or "
            "digit first, and after it ':v' and a number where the dataset has changed, as in 'imagenet/train:v2'"
        )
    digits = parts["version"] or "1"
    if len(digits) > MAX_VERSION_DIGITS:
        raise OptionError(
            f"flow={flow!r}: its version has {len(digits)} digits, at most {MAX_VERSION_DIGITS} are allowed; count "
            "versions from 1"
        )
    return parts["name"], int(digits)

"""Makes the workers of a loader with `platform=`; imports nothing of that until there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from torch_dpflow.errors import OptionError
from torch_dpflow.ipc.memory.headroom import machine_total
from torch_dpflow.loader.loader_arguments import name_of
from torch_dpflow.loader.private_shard import PrivateShard
from torch_dpflow.loader.worker_processes import WorkerProcesses
from torch_dpflow.options import LoaderOptions
from torch_dpflow.workers.batches import SHARED_FRACTION, LoadSpec
from torch_dpflow.workers.fork_server import local_platform

if TYPE_CHECKING:
    from torch_dpflow.remote.fleet.remote_workers import RemoteWorkers
    from torch_dpflow.remote.launchers.contract import PlatformSpec


#: The options of `LoaderOptions` that only workers elsewhere have.
_OPTIONS = ("listen", "min_workers", "code", "local_workers")


def check_options(options: LoaderOptions) -> None:
    """Raise OptionError for options that a loader without a platform would ignore."""
    usual = LoaderOptions()
    given = [
        f"{name}={getattr(options, name)!r}"
        for name in _OPTIONS
        if getattr(options, name) != getattr(usual, name)
    ]
    if given:
        raise OptionError(
            f"{', '.join(given)} without a platform: they are for workers elsewhere; give platform='ray' or "
            "'processes', or leave them out"
        )


def check_platform(loader: Any) -> None:
    """Raise OptionError or OptionTypeError for a platform that is none, or with arguments that go with no platform.

    Also MissingExtraError, if its library is not installed, and what `PlatformSpec.check_listen` raises.
    """
    from torch_dpflow.remote.launchers.registry import resolve

    options = loader.options or LoaderOptions()
    platform = resolve(loader.platform)
    if loader.flow is not None:
        raise OptionError(
            f"platform={loader.platform!r} with flow={loader.flow!r}: the cluster of a flow decides where its workers "
            "are; leave out one of the two"
        )
    if loader.num_workers < 1:
        raise OptionError(
            f"platform={loader.platform!r} with num_workers={loader.num_workers}: say how many workers it is to run"
        )
    if options.min_workers > loader.num_workers:
        raise OptionError(
            f"min_workers={options.min_workers} with num_workers={loader.num_workers}: there are never so many; give "
            f"at most {loader.num_workers}"
        )
    if options.local_workers > loader.num_workers:
        raise OptionError(
            f"local_workers={options.local_workers} with num_workers={loader.num_workers}, which counts them too; give "
            f"at most {loader.num_workers}"
        )
    if loader.multiprocessing_context is not None and not options.local_workers:
        raise OptionError(
            f"platform={loader.platform!r} with multiprocessing_context={name_of(loader.multiprocessing_context)}: "
            "that is for workers of this host; leave it out, or say how many there are by "
            "LoaderOptions(local_workers=...)"
        )
    platform.check_workers(loader.num_workers - options.local_workers)
    platform.check_installed()
    _listen_at(platform, options)


def _listen_at(platform: PlatformSpec, options: LoaderOptions) -> str:
    """Where to listen, by options or else by settings; empty: the platform says. Raises as `check_listen`."""
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


def workers_of(
    loader: Any, options: LoaderOptions, spec: LoadSpec
) -> tuple[Callable[..., PrivateShard], Any]:
    """The workers of a loader with a platform, and what makes the shard that they need.

    Raises as `RemoteWorkers` and `WorkerProcesses`.
    """
    from torch_dpflow.loader.loader_limit import LoaderLimit
    from torch_dpflow.loader.mixed_workers import MixedWorkers
    from torch_dpflow.loader.remote_shard import RemoteShard

    if options.local_workers == spec.num_workers:
        return PrivateShard, _local_workers(loader, options, spec)
    remote = _remote_workers(loader, options, spec)
    shard = partial(RemoteShard, limit=LoaderLimit(loader._runtime.meter, remote, spec.num_workers))
    if not options.local_workers:
        return shard, remote
    try:
        return shard, MixedWorkers(_local_workers(loader, options, spec), remote)
    except BaseException:
        remote.listener.close()
        remote.close()
        raise


def _local_workers(loader: Any, options: LoaderOptions, spec: LoadSpec) -> WorkerProcesses:
    if spec.shared_memory is None:
        spec = replace(spec, shared_memory=machine_total() // SHARED_FRACTION // options.local_workers)
    platform = local_platform(loader.multiprocessing_context or torch.multiprocessing)
    return WorkerProcesses(platform, spec, options.local_workers)


def _remote_workers(loader: Any, options: LoaderOptions, spec: LoadSpec) -> RemoteWorkers:
    from torch_dpflow.remote.fleet.remote_workers import RemoteWorkers
    from torch_dpflow.remote.fleet.worker_record import RemoteContent
    from torch_dpflow.remote.launchers.registry import resolve
    from torch_dpflow.remote.shipping.code_bundle import make_bundle
    from torch_dpflow.remote.shipping.content_pack import pack_load_spec

    platform = resolve(loader.platform)
    sends = platform.sends_code or options.code != "auto"
    packed = pack_load_spec(spec)
    bundle = make_bundle(packed, options.code if sends else None)
    content = RemoteContent(packed, b"" if bundle is None else bundle.data)
    workers = RemoteWorkers(
        platform,
        content,
        spec.num_workers - options.local_workers,
        first=options.local_workers,
        listen_at=_listen_at(platform, options),
        least=max(0, options.min_workers - options.local_workers),
    )
    loader._runtime.meter.add_fleet(workers.time)
    return workers

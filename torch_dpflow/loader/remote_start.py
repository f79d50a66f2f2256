"""Makes the workers of a loader with `platform=`; imports nothing of that until there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_dpflow.errors import OptionError
from torch_dpflow.loader.loader_arguments import name_of
from torch_dpflow.options import LoaderOptions

if TYPE_CHECKING:
    from torch_dpflow.loader.remote_shard import RemoteShard
    from torch_dpflow.loader.remote_workers import RemoteWorkers
    from torch_dpflow.platforms.members import PlatformSpec
    from torch_dpflow.remote.worker.batches import LoadSpec


#: The options of `LoaderOptions` that only workers elsewhere have.
_OPTIONS = ("listen", "min_workers", "code")


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
    from torch_dpflow.platforms.registry import resolve

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
    if loader.multiprocessing_context is not None:
        raise OptionError(
            f"platform={loader.platform!r} with multiprocessing_context={name_of(loader.multiprocessing_context)}: "
            "that is for workers of this host; leave it out"
        )
    platform.check_installed()
    _listen_at(platform, options)


def _listen_at(platform: PlatformSpec, options: LoaderOptions) -> str:
    """Where to listen, by options or else by settings; empty: the platform says. Raises as `check_listen`."""
    from torch_dpflow.platforms.registry import network

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


def remote_workers(
    loader: Any, options: LoaderOptions, spec: LoadSpec
) -> tuple[type[RemoteShard], RemoteWorkers]:
    """The workers of a loader on its platform, and the kind of shard that they need. Raises as `RemoteWorkers`."""
    from torch_dpflow.loader.remote_content import RemoteContent
    from torch_dpflow.loader.remote_shard import RemoteShard
    from torch_dpflow.loader.remote_workers import RemoteWorkers
    from torch_dpflow.platforms.registry import resolve

    platform = resolve(loader.platform)
    sends = platform.sends_code or options.code != "auto"
    content = RemoteContent(spec, options.code if sends else None)
    return RemoteShard, RemoteWorkers(
        platform,
        content,
        spec.num_workers,
        listen_at=_listen_at(platform, options),
        least=options.min_workers,
    )

"""Makes the workers of a loader with `platform=`; imports nothing of that until there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_dpflow.errors import OptionError
from torch_dpflow.options import LoaderOptions

if TYPE_CHECKING:
    from torch_dpflow.loader.remote_shard import RemoteShard
    from torch_dpflow.loader.remote_workers import RemoteWorkers
    from torch_dpflow.remote.worker.batches import LoadSpec


def check_platform(loader: Any) -> None:
    """Raise OptionError or OptionTypeError for a platform that is none, or with arguments that go with no platform."""
    from torch_dpflow.platforms.registry import resolve
    from torch_dpflow.remote.process.code_bundle import check_code

    options = loader.options or LoaderOptions()
    platform = resolve(loader.platform)
    check_code(options.code)
    if options.listen is not None:
        platform.check_listen(options.listen)
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
            f"platform={loader.platform!r} with multiprocessing_context={loader.multiprocessing_context!r}: that is "
            "for workers of this host; leave it out"
        )


def remote_workers(
    loader: Any, options: LoaderOptions, spec: LoadSpec
) -> tuple[type[RemoteShard], RemoteWorkers]:
    """The workers of a loader on its platform, and the kind of shard that they need. Raises as `RemoteWorkers`."""
    from torch_dpflow.loader.remote_content import RemoteContent
    from torch_dpflow.loader.remote_shard import RemoteShard
    from torch_dpflow.loader.remote_workers import RemoteWorkers
    from torch_dpflow.platforms.registry import network, resolve

    platform = resolve(loader.platform)
    sends = platform.sends_code or options.code != "auto"
    content = RemoteContent(spec, options.code if sends else None)
    return RemoteShard, RemoteWorkers(
        platform,
        content,
        spec.num_workers,
        listen_at=options.listen or network().listen,
        least=options.min_workers,
    )

"""torch_dpflow: a drop-in replacement for torch.utils.data.DataLoader on elastic workers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch_dpflow._version import __version__

if TYPE_CHECKING:
    from torch_dpflow.caches import ALSDCache
    from torch_dpflow.datasets import DatasetStore
    from torch_dpflow.errors import DPFlowError
    from torch_dpflow.flows import DataLoadFlow
    from torch_dpflow.loader.loader import DPFlowDataLoader
    from torch_dpflow.metrics import LoaderStats
    from torch_dpflow.options import LoaderOptions
    from torch_dpflow.remote.job.options import JobOptions
    from torch_dpflow.samplers import DynaGCSSampler

__all__ = [
    "ALSDCache",
    "DPFlowDataLoader",
    "DPFlowError",
    "DataLoadFlow",
    "DatasetStore",
    "DynaGCSSampler",
    "JobOptions",
    "LoaderOptions",
    "LoaderStats",
    "__version__",
]

# Imported when they are first asked for: a command line that only prints should not wait for torch.
_HOMES = {
    "ALSDCache": "caches",
    "DPFlowDataLoader": "loader",
    "DPFlowError": "errors",
    "DataLoadFlow": "flows",
    "DatasetStore": "datasets",
    "DynaGCSSampler": "samplers",
    "JobOptions": "remote.job.options",
    "LoaderOptions": "options",
    "LoaderStats": "metrics",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

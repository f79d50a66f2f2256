"""torch_dpflow: a drop-in replacement for torch.utils.data.DataLoader on elastic workers."""

from torch_dpflow._version import __version__
from torch_dpflow.caches import ALSDCache
from torch_dpflow.errors import DPFlowError
from torch_dpflow.loader import DPFlowDataLoader
from torch_dpflow.metrics import LoaderStats
from torch_dpflow.options import LoaderOptions
from torch_dpflow.remote.job_options import JobOptions
from torch_dpflow.samplers import DynaGCSSampler

__all__ = [
    "ALSDCache",
    "DPFlowDataLoader",
    "DPFlowError",
    "DynaGCSSampler",
    "JobOptions",
    "LoaderOptions",
    "LoaderStats",
    "__version__",
]

"""Where processes run: `base` and `members` have the contracts, each other module an implementation."""

from typing import TYPE_CHECKING

from torch_dpflow.lazy import lazy_names

if TYPE_CHECKING:
    from torch_dpflow.platforms.aws_lambda import Lambda
    from torch_dpflow.platforms.fc import FunctionCompute
    from torch_dpflow.platforms.kubernetes import Kubernetes
    from torch_dpflow.platforms.processes import Processes
    from torch_dpflow.platforms.ray import Ray

__all__ = ["FunctionCompute", "Kubernetes", "Lambda", "Processes", "Ray"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "aws_lambda": ["Lambda"],
        "fc": ["FunctionCompute"],
        "kubernetes": ["Kubernetes"],
        "processes": ["Processes"],
        "ray": ["Ray"],
    },
)

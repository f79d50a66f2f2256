"""Where processes run: `base` and `members` have the contracts, each other module an implementation."""

from typing import TYPE_CHECKING

from torch_dpflow._core.lazy import lazy_names

if TYPE_CHECKING:
    from torch_dpflow.remote.launchers.aws_lambda import Lambda
    from torch_dpflow.remote.launchers.fc import FunctionCompute
    from torch_dpflow.remote.launchers.kubernetes import Kubernetes
    from torch_dpflow.remote.launchers.processes import Processes
    from torch_dpflow.remote.launchers.ray import Ray

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

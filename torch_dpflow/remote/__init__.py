"""Workers beyond this host: platforms that run them, their program, and the code and data sent to them.

The settings of each platform are a class: `DPFlowDataLoader(dataset, num_workers=4, platform=Ray(address="auto"))`.
"""

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
        "launchers.aws_lambda": ["Lambda"],
        "launchers.fc": ["FunctionCompute"],
        "launchers.kubernetes": ["Kubernetes"],
        "launchers.processes": ["Processes"],
        "launchers.ray": ["Ray"],
    },
)

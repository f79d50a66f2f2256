"""Where processes run: `base` and `members` have the contracts, each other module an implementation."""

from typing import TYPE_CHECKING

from torch_dpflow.lazy import lazy_names

if TYPE_CHECKING:
    from torch_dpflow.platforms.processes import Processes
    from torch_dpflow.platforms.ray import Ray

__all__ = ["Processes", "Ray"]

__getattr__, __dir__ = lazy_names(__name__, {"processes": ["Processes"], "ray": ["Ray"]})

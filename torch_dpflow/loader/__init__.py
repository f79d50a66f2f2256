"""`DPFlowDataLoader`, its iterators and their parts."""

from torch_dpflow.loader.loader import DPFlowDataLoader

__all__ = ["DPFlowDataLoader"]

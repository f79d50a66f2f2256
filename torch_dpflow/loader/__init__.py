"""`DPFlowDataLoader`, and what its iterations are made of."""

from torch_dpflow.loader.loader import DPFlowDataLoader

__all__ = ["DPFlowDataLoader"]

"""A local server that speaks the protocol of Alibaba Cloud OSS: a test double of a cloud API."""

from torch_dpflow.testing.oss_server.buckets import StoredObject
from torch_dpflow.testing.oss_server.faults import Fault, FaultPlan
from torch_dpflow.testing.oss_server.messages import Request
from torch_dpflow.testing.oss_server.server import OSSServer

__all__ = ["Fault", "FaultPlan", "OSSServer", "Request", "StoredObject"]

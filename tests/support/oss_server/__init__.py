"""A local server that speaks the protocol of Alibaba Cloud OSS: a test double of a cloud API.

It uses real sockets and injects faults. It has no TLS, no virtual-host addresses, and no throttling but of one
connection; its throughput says nothing of the real service's.
"""

from tests.support.oss_server.buckets import StoredObject
from tests.support.oss_server.faults import Fault, FaultPlan
from tests.support.oss_server.messages import Request
from tests.support.oss_server.server import OSSServer

__all__ = ["Fault", "FaultPlan", "OSSServer", "Request", "StoredObject"]

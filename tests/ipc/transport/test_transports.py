"""Every transport of ours keeps the contract."""

import uuid
from pathlib import Path

from tests.contracts.transports import TransportContract
from torch_dpflow.cluster.security.connection_file import generate_keys
from torch_dpflow.ipc.transport import TransportOptions

_CLUSTER = generate_keys("tcp://127.0.0.1:0")


class TestIpc(TransportContract):
    def new_address(self, tmp_path: Path) -> str:
        return f"ipc://{tmp_path}/{uuid.uuid4().hex[:8]}"


class TestTcp(TransportContract):
    def new_address(self, tmp_path: Path) -> str:
        return "tcp://127.0.0.1:0"


class TestTcpWithCurve(TransportContract):
    listener_options = TransportOptions(keys=_CLUSTER.server_keys())
    connection_options = TransportOptions(keys=_CLUSTER.client_keys())

    def new_address(self, tmp_path: Path) -> str:
        return "tcp://127.0.0.1:0"

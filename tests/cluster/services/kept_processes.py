"""A provisioner in a process of its own, over members that send what they are told to a listener and wait there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from torch_dpflow.cluster.services import provisioner
from torch_dpflow.cluster.services.service import ClusterPlace, ServiceSpec, WorkerPlatform
from torch_dpflow.errors import OptionError
from torch_dpflow.remote.launchers.contract import AdoptingPlatform
from torch_dpflow.remote.launchers.processes import Processes, SubprocessLauncher
from torch_dpflow.remote.launchers.threaded_platform import ThreadedPlatform

#: What a provisioner's settings hold, and no shard's.
SECRET = "sesame-of-the-platform"
MEMBERS = "tests.contracts.processes"


@dataclass(frozen=True, kw_only=True)
class Waiting(Processes):
    """Members that import nothing, so that they start at once."""

    broken: bool = False

    def launcher(self) -> SubprocessLauncher:
        return SubprocessLauncher(MEMBERS)

    def open(self, *, outlived: bool = False) -> AdoptingPlatform:
        if self.broken:
            raise OptionError("the key has no teeth: give another one")
        return ThreadedPlatform(self.launcher(), sweep_s=0.2)


def service_of(folder: str, id: str, incarnation: int = 1, *, workers: int = 4) -> ServiceSpec:
    place = WorkerPlatform(name="processes", max_workers=workers)
    return ServiceSpec(
        id=id,
        role=id.rpartition("/")[2],
        incarnation=incarnation,
        arguments=b"",
        settings=b"",
        address="",
        # A cluster for each folder: provisioners end members of their cluster's name that they do not know.
        place=ClusterPlace(directory=folder, token=sha256(folder.encode()).hexdigest()[:32], worker_platform=place),
    )


def keep(arguments: Sequence[str]) -> None:
    """Run a provisioner. arguments: the folder of sockets, how many workers, when to sweep; `broken` or nothing."""
    folder, workers, sweep_s, *broken = arguments
    provisioner.FIRST_SWEEP_S, provisioner.GRACE_S = float(sweep_s), 0.1
    service = service_of(folder, "provisioner", workers=int(workers))
    object.__setattr__(service, "platform", Waiting(broken=bool(broken)))
    provisioner.run(service)

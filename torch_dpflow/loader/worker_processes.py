"""The worker processes of one loader: started, replaced and ended."""

from __future__ import annotations

from torch_dpflow._core import descriptors
from torch_dpflow._core.processes import PrivateDirectory
from torch_dpflow.errors import NotPicklableError
from torch_dpflow.ipc.transport import listen
from torch_dpflow.workers import batch_worker
from torch_dpflow.workers.batch_worker import WorkerSpec
from torch_dpflow.workers.batches import LoadSpec
from torch_dpflow.workers.deferred_pickle import DeferredPickle
from torch_dpflow.workers.platform import Handle, Platform, ProcessSpec, require_same_host

#: How long a worker that is asked to end at once may take before it is killed, seconds.
TERMINATE_S = 1.0
#: Descriptors that a worker takes here: two pipes, one for its process and one for its connection; and what is needed
#: beside: a directory's lock, sockets, mappings, and a worker's own where it inherits all of these.
WORKER_DESCRIPTORS, OWN_DESCRIPTORS = 4, descriptors.SPARE + 16


def require_descriptors(workers: int) -> None:
    """Raise DescriptorLimitError if this process may not have as many files open as a loader's workers take."""
    descriptors.require(workers * WORKER_DESCRIPTORS + OWN_DESCRIPTORS, f"a loader with {workers} workers")


class WorkerProcesses:
    """The latest process under each worker's number.

    The training thread starts and releases them; the shard's thread may call `ended`, `refusal` and `kill`.

    Args:
        platform: runs the processes; closed with this.
        spec: what all of them load.
        workers: how many.

    Raises:
        OptionError: the platform's processes cannot reach this one.
        DescriptorLimitError: this process may not have as many files open as the workers take.
    """

    def __init__(self, platform: Platform, spec: LoadSpec, workers: int) -> None:
        require_same_host(platform, "a loader")
        require_descriptors(workers)
        self._platform = platform
        self._load_spec = DeferredPickle(spec)
        #: For the socket and exit reports.
        self.directory = PrivateDirectory()
        #: Where they connect.
        self.listener = listen(f"ipc://{self.directory.path}/shard")
        self.listener.watch(platform.wakeup_fd)
        #: By the names under which they are launched.
        self._numbers = {f"worker-{worker}": worker for worker in range(workers)}
        self._handles: dict[int, Handle] = {}
        self._incarnations = [0] * workers

    def __len__(self) -> int:
        return len(self._incarnations)

    @property
    def local(self) -> WorkerProcesses:
        """All of them."""
        return self

    @property
    def handles(self) -> list[Handle]:
        """The processes, by worker."""
        return [handle for _, handle in sorted(self._handles.items())]

    def start_all(self) -> None:
        """Start every worker. Raises as `start`."""
        for worker in range(len(self)):
            self.start(worker)

    def start(self, worker: int) -> None:
        """Start a process for this worker.

        Raises:
            NotPicklableError: what it loads cannot be sent to it.
            LaunchError, DescriptorLimitError: see `Platform.launch`.
        """
        spec = WorkerSpec(
            worker=worker,
            incarnation=self._incarnations[worker],
            address=self.listener.address,
            directory=self.directory.path,
        )
        process = ProcessSpec(
            name=f"worker-{worker}",
            incarnation=spec.incarnation,
            target=batch_worker.main,
            arguments=(self._load_spec, spec),
            report_file=batch_worker.exit_report_path(spec),
            directory=self.directory.path,
        )
        try:
            self._handles[worker] = self._platform.launch(process)
        except NotPicklableError as error:
            raise NotPicklableError(
                f"the dataset, collate_fn or worker_init_fn cannot be sent: {error}. Define it at the top of a module "
                "(no lambda, no local class), leave out open files and locks, or pass multiprocessing_context='fork'"
            ) from error

    def replace(self, worker: int, dead: Handle) -> str:
        """Start another process in place of one that died, unless that was done; returns how it ended.

        Raises:
            DescriptorLimitError: this process has too many files open; it can be called again.
        """
        end = "has ended"
        handle = self._handles.get(worker)
        if handle is None or handle is dead:
            end = self.reap(worker)
            self._incarnations[worker] += 1
            descriptors.require(WORKER_DESCRIPTORS + OWN_DESCRIPTORS, f"another process for worker {worker}")
            self.start(worker)
        return end

    def reap(self, worker: int) -> str:
        """Release the process of a worker that died; returns how it ended."""
        handle = self._handles.get(worker)
        if handle is None:  # an earlier call was interrupted
            return "has ended"
        end = handle.describe()
        del self._handles[worker]
        return str(end)

    def ended(self) -> list[tuple[int, Handle]]:
        """Workers whose processes have ended since the last call, with these; also processes that were replaced."""
        return [(self._numbers[handle.name], handle) for handle in self._platform.take_ended()]

    def refusal(self, worker: int, incarnation: int) -> str:
        """Why a process is not the latest one of its worker; empty if it is."""
        if worker >= len(self):
            return f"there are {len(self)} workers"
        latest = self._incarnations[worker]
        return "" if incarnation == latest else f"incarnation {latest} is the one that counts"

    def kill(self, worker: int, why: str) -> None:
        """Kill a worker's process; the reason is logged with its replacement."""
        handle = self._handles.get(worker)
        if handle is not None:
            handle.kill(why)

    def close(self) -> None:
        """End all processes."""
        self._platform.close(grace_s=TERMINATE_S)
        for handle in [*self._handles.values()]:  # another thread may close as well
            handle.describe()  # also those whose end nobody has taken
        self._handles.clear()
        self.directory.remove()

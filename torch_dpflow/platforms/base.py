"""The contract of a platform: where worker processes run."""

from typing import Protocol

from torch_dpflow.remote.worker import Post


class WorkerHandle(Protocol):
    """One worker process, as the process that started it sees it."""

    #: Becomes readable when the worker has ended.
    ended: int

    def has_ended(self) -> bool:
        """Whether it has; does not wait. Any thread may ask."""

    def obituary(self) -> str:
        """How it ended, for people: its exit code or signal and its last words."""

    def kill(self, why: str) -> None:
        """End it at once, for a reason that its obituary is to name; does not wait. Any thread may call."""

    def terminate(self) -> None:
        """Ask it to end now; does not wait."""

    def end(self, *, grace_s: float) -> None:
        """Wait so long for it to end by itself, then kill it. What it held is given back. May be called twice."""


class Platform(Protocol):
    """Starts workers."""

    def start(self, post: Post) -> WorkerHandle:
        """Start the worker for this post.

        Raises:
            NotPicklableError: what it is to load cannot be sent to a new process.
        """

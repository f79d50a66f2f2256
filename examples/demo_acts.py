"""The acts of the demonstration: what each side does, in a process that `play` forks.

A side trains a small network on random crops of generated JPEGs, with torch's loader or with ours. A fork costs
milliseconds, where a new interpreter would import torch and torchvision for seconds.
"""

import contextlib
import hashlib
import multiprocessing
import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from examples.search import build_model
from examples.train_classifier import build_dataset, seed_everything
from torch_dpflow import DPFlowDataLoader, LoaderOptions

IMAGE_SIZE, BATCH_SIZE, WORKERS = 64, 16, 2
#: The side whose loader is torch's; the other one's is ours.
TORCH, OURS = "torch", "torch_dpflow"
#: After so many batches a worker is killed.
KILLED_AT = 10
#: Ranks before and after, and how many batches of how many images each of the first has read.
RANKS, RANKS_AFTER, RANK_BATCHES, RANK_BATCH_SIZE = 4, 2, 4, 10
FLOW = "demo/images"
#: How long the sides of an act that is interrupted may take to remove their files, seconds.
CLEAN_UP_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Played:
    """What a side came to."""

    images: int = 0
    loss: float = 0.0
    #: Of all batches, in their order.
    digest: str = ""
    #: Instead of the rest of the epoch.
    error: str = ""
    batches: int = 0
    #: Images that were read more often than once, and never.
    repeated: int = 0
    lost: int = 0
    #: From the beginning of the first job to the end of the last, seconds; and processor time of all processes.
    seconds: float = 0.0
    cpu_s: float = 0.0

    @property
    def rate(self) -> float:
        """Images a second."""
        return self.images / max(self.seconds, 1e-9)

    @property
    def cpu_ms(self) -> float:
        """Processor time of an image, milliseconds."""
        return 1e3 * self.cpu_s / max(self.images, 1)


Side = Callable[[], Played]


def loader_of(side: str, dataset: Dataset[Any], *, seed: int = 0, **given: Any) -> Any:
    """Make a side's loader: the one line that a user changes."""
    kind: Any = DataLoader if side == TORCH else DPFlowDataLoader
    generator = torch.Generator().manual_seed(seed)
    return kind(dataset, batch_size=BATCH_SIZE, shuffle=True, num_workers=WORKERS, generator=generator, **given)


def train(loader: Iterable[Any], epochs: int, look: Callable[[int], None] = lambda batches: None) -> Played:
    """Train from scratch. `look` is called after each batch, with how many there were."""
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.03, momentum=0.9)
    digest, images, batches, loss = hashlib.sha256(), 0, 0, torch.tensor(0.0)
    error = ""
    try:
        for _ in range(epochs):
            for batch, labels in loader:
                digest.update(batch.numpy())
                loss = nn.functional.cross_entropy(model(batch), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                images, batches = images + len(labels), batches + 1
                look(batches)
    except (RuntimeError, OSError, EOFError) as ended:  # torch raises one or the other, by what the worker held
        error = f"{type(ended).__name__}: {ended}".splitlines()[0]
    return Played(images=images, loss=loss.item(), digest=digest.hexdigest()[:8], batches=batches, error=error)


def swap(side: str, data: Path, epochs: int) -> Played:
    """The same arguments for both loaders; ours draws augmentation as torch's workers do."""
    exactly: dict[str, Any] = {} if side == TORCH else {"options": LoaderOptions(seeding="worker")}
    return train(loader_of(side, build_dataset(data, "train", IMAGE_SIZE), **exactly), epochs)


def decode(side: str, data: Path, epochs: int) -> Played:
    """Torch's loader with Pillow; ours with torch_dpflow.vision."""
    return train(loader_of(side, build_dataset(data, "train", IMAGE_SIZE, vision=side == OURS)), epochs)


def trial(side: str, data: Path, epochs: int, number: int, address: str) -> Played:
    """One of several jobs at once; ours share a flow."""
    shared: dict[str, Any] = {} if side == TORCH else {"flow": FLOW, "address": address}
    return train(loader_of(side, build_dataset(data, "train", IMAGE_SIZE), seed=number, **shared), epochs)


def start(data: Path, address: str) -> Played:
    """Have the flow of the trials start: read one image of it."""
    dataset = build_dataset(data, "train", IMAGE_SIZE)
    loader: Any = DPFlowDataLoader(dataset, num_workers=WORKERS, prefetch_factor=1, flow=FLOW, address=address)
    return Played(images=len(next(iter(loader))[1]))


def killed(side: str, data: Path, kill: bool) -> Played:
    """One epoch, in the middle of which a worker gets SIGKILL."""

    def look(batches: int) -> None:
        if kill and batches == KILLED_AT:
            os.kill(children_of(os.getpid())[0], signal.SIGKILL)

    # Without a time-out torch's loader can wait for ever for a lock that the killed worker held.
    limit: dict[str, Any] = {"timeout": 30} if side == TORCH else {}
    return train(loader_of(side, build_dataset(data, "train", IMAGE_SIZE), **limit), 1, look)


class Numbered(Dataset[tuple[Any, int]]):
    """Images with their numbers."""

    def __init__(self, images: Any) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.images[index][0], index


def resized(side: str, data: Path) -> Played:
    """Four ranks are interrupted in their epoch, and two go on; here one after the other."""
    images = Numbered(build_dataset(data, "train", IMAGE_SIZE, vision=side == OURS))
    kind: Any = DataLoader if side == TORCH else DPFlowDataLoader
    seen: Counter[int] = Counter()

    def loader_of_rank(ranks: int, rank: int, batch_size: int) -> Any:
        sampler: DistributedSampler[Any] = DistributedSampler(images, num_replicas=ranks, rank=rank, seed=3)
        return kind(images, batch_size=batch_size, sampler=sampler, num_workers=1)

    states = []
    for rank in range(RANKS):
        loader = loader_of_rank(RANKS, rank, RANK_BATCH_SIZE)
        for _, (_, numbers) in zip(range(RANK_BATCHES), loader, strict=False):
            seen.update(numbers.tolist())
        states.append(loader.state_dict() if side == OURS else None)
    for rank in range(RANKS_AFTER):
        loader = loader_of_rank(RANKS_AFTER, rank, BATCH_SIZE)
        if side == OURS:
            loader.load_state_dict(states)
        for _, numbers in loader:
            seen.update(numbers.tolist())
    return Played(
        images=seen.total(),
        repeated=sum(count - 1 for count in seen.values()),
        lost=len(images) - len(seen),
    )


def play(sides: Sequence[Side], *, around: Sequence[int] = ()) -> Played:
    """Fork a process for each side, and let them begin together.

    Returns the first one's outcome, with the images and the time of all.

    around: processes that work for them, with all that these start.
    """
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe() for _ in sides]
    processes = [fork.Process(target=_act, args=(there, side)) for (_, there), side in zip(pipes, sides, strict=True)]
    for process in processes:
        process.start()
    try:
        for here, there in pipes:
            there.close()
            _receive(here)
        trees = [os.getpid(), *around]
        begun, cpu_before = time.monotonic(), sum(map(tree_cpu_s, trees))
        for here, _ in pipes:
            here.send("go")
        outcomes = [_receive(here) for here, _ in pipes]
        seconds, cpu_s = time.monotonic() - begun, sum(map(tree_cpu_s, trees)) - cpu_before
        for here, _ in pipes:
            here.send("end")
    except BaseException:
        for process in processes:
            os.kill(process.pid or 0, signal.SIGUSR1)
        for process in processes:
            process.join(CLEAN_UP_S)
        raise
    finally:
        for (here, there), process in zip(pipes, processes, strict=True):
            here.close()
            there.close()
            process.join(5)
            process.kill()  # torch's loader can wait for ever for a lock that the killed worker held
            process.join()
    images = sum(outcome.images for outcome in outcomes)
    return Played(**{**vars(outcomes[0]), "images": images, "seconds": seconds, "cpu_s": cpu_s})


def _receive(here: Connection) -> Any:
    with contextlib.suppress(EOFError):
        if (received := here.recv()) is not None:
            return received
    raise SystemExit("a side of the demonstration has failed: see above")


def _act(there: Connection, side: Side) -> None:
    # Control-C reaches this process and the one that forked it, which interrupts this one once: its files are removed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.default_int_handler)
    torch.set_num_threads(1)
    seed_everything(0)
    with contextlib.suppress(KeyboardInterrupt):
        there.send("ready")
        there.recv()
        try:
            there.send(side())
        except Exception:
            # Workers that go on hold this end of the pipe too: closing it would not be noticed.
            traceback.print_exc()
            there.send(None)
        there.recv()  # its processor time is read before it ends


def partials(function: Callable[..., Played], *given: Any) -> dict[str, Side]:
    """Both sides of an act."""
    return {side: partial(function, side, *given) for side in (TORCH, OURS)}


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def tree_cpu_s(pid: int) -> float:
    """Return the processor time of a process, all that it has started and all that has ended below it, seconds."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(map(tree_cpu_s, children_of(pid)))
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # it ended meanwhile: its parent has its time

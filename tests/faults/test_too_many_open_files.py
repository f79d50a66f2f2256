"""A training process without descriptors: an error that names the limit; no worker is blamed, nobody waits for ever."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loader_cases import Samples
from tests.new_process import in_fork
from tests.worker_cases import kill, worker_pids
from torch_dpflow._core import descriptors
from torch_dpflow.errors import DescriptorLimitError


@contextmanager
def limited(left: int) -> Iterator[None]:
    """With so many descriptors left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    listed = {int(number) for number in os.listdir("/proc/self/fd")}
    numbers = {number for number in listed if os.path.exists(f"/proc/self/fd/{number}")}  # the listing's own has gone
    limit = max(limit for limit in range(soft) if limit - sum(number < limit for number in numbers) == left)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def growing(count: int) -> Samples:
    """Samples that take more and more memory, so that segments are mapped throughout."""
    return Samples([torch.full((30_000 * (1 + i),), float(i)) for i in range(count)])


def read_with(left: int, loader_class: Any) -> tuple[list[int], list[str], int]:
    """Read while there are so few left, and on to the end when there are more."""
    loader = loader_class(growing(16), batch_size=None, num_workers=1, prefetch_factor=1)
    iterator = iter(loader)
    seen, errors = [int(next(iterator)[0])], []
    with limited(left):
        while not errors:
            try:
                seen.append(int(next(iterator)[0]))
            except DescriptorLimitError as error:
                errors.append(str(error))
            except StopIteration:  # one descriptor is enough as long as no two segments are mapped at once
                return seen, errors, loader.stats().restarts
    while True:  # what was on its way while there were so few may fail too
        try:
            seen.append(int(next(iterator)[0]))
        except DescriptorLimitError as error:
            errors.append(str(error))
        except StopIteration:
            return seen, errors, loader.stats().restarts


@pytest.mark.parametrize("left", [0, 1])
def test_a_batch_that_cannot_be_mapped_raises_and_its_worker_lives(OurLoader: Any, left: int) -> None:
    seen, errors, restarts = in_fork(read_with, left, OurLoader)
    assert errors or left
    assert all("ulimit -n" in error for error in errors)
    assert restarts == 0
    assert seen == sorted(set(seen))
    assert len(seen) + len(errors) == 16  # each that is lost has its error


def start_without(loader_class: Any) -> str:
    with limited(21):
        try:
            iter(loader_class(growing(4), batch_size=None, num_workers=3))
        except DescriptorLimitError as error:
            return str(error)
    return ""


def test_too_many_workers_for_the_limit_are_not_started(OurLoader: Any) -> None:
    text = in_fork(start_without, OurLoader)
    assert "3 workers needs 44 more" in text
    assert "ulimit -n" in text


def replace_without(loader_class: Any) -> tuple[list[int], str]:
    iterator = iter(loader_class(growing(12), batch_size=None, num_workers=1))
    seen, text = [int(next(iterator)[0])], ""
    with limited(6):
        kill(worker_pids()[0])
        try:
            seen.extend(int(tensor[0]) for tensor in iterator)
        except DescriptorLimitError as error:
            text = str(error)
    return seen + [int(tensor[0]) for tensor in iterator], text


def test_a_worker_that_cannot_be_replaced_is_told_of_and_the_loader_can_go_on(OurLoader: Any) -> None:
    seen, text = in_fork(replace_without, OurLoader)
    assert seen == list(range(12))
    assert "worker 0" in text
    assert "ulimit -n" in text


class Cycle:
    """Holds a descriptor until it is collected."""

    def __init__(self) -> None:
        self.itself = self
        self.file = os.fdopen(os.open(os.devnull, os.O_RDONLY))


def start_with_garbage(loader_class: Any) -> list[int]:
    import gc
    import warnings

    warnings.simplefilter("ignore", ResourceWarning)
    gc.disable()
    for _ in range(100):
        Cycle()
    with limited(6):
        return [int(tensor[0]) for tensor in loader_class(growing(4), batch_size=None, num_workers=1)]


def test_descriptors_that_only_garbage_holds_are_given_back(OurLoader: Any) -> None:
    assert in_fork(start_with_garbage, OurLoader) == list(range(4))


def count_available() -> tuple[int | None, bool, bool]:
    highest = max(int(number) for number in os.listdir("/proc/self/fd"))
    while os.open(os.devnull, os.O_RDONLY) <= highest:  # no gaps, as in a process whose limit was never lowered
        pass
    with limited(10):
        return descriptors.available(), descriptors.has_spare(10), descriptors.has_spare(11)


def test_what_is_left_is_counted() -> None:
    assert in_fork(count_available) == (10, True, False)


def table_after_reading(loader_class: Any) -> tuple[int, int]:
    assert len([*loader_class(growing(4), batch_size=None, num_workers=1)]) == 4
    status = Path("/proc/self/status").read_text()
    return int(status.split("FDSize:")[1].split()[0]), descriptors.soft_limit()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_descriptors_are_not_counted_without_proc() -> None:
    """Some sandboxes have no /proc, and a loader starts there too."""
    code = (
        "from torch_dpflow._core import descriptors as d; d.require(1000, 'x'); print(d.available(), d.has_spare(16))"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$0" -c "$1"', sys.executable, code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert (done.stdout, done.returncode) == ("None True\n", 0), done.stderr


def test_the_table_of_the_kernel_does_not_grow_to_the_limit(OurLoader: Any) -> None:
    length, limit = in_fork(table_after_reading, OurLoader)
    assert length < limit


def test_the_error_pickles() -> None:
    error = descriptors.exhausted("nothing works")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert isinstance(error, RuntimeError)  # torch's kind
    assert isinstance(error, OSError)

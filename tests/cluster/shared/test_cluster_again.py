"""A cluster that starts again where one was, and knows nothing of what that one knew."""

from __future__ import annotations

import stat
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cluster.client.failing_service import FailingService
from tests.shared_cluster import TestCluster, free_port, open_job, wait
from tests.shared_datasets import Numbers
from tests.worker_cases import has_ended
from torch_dpflow.cluster.client.open_job import JobOptions, Replica
from torch_dpflow.cluster.messages.coordinator import Scale
from torch_dpflow.cluster.security.connection_file import (
    find_cluster,
    generate_keys,
    read_connection_file,
    write_connection_file,
)
from torch_dpflow.errors import OptionError

SECRET = "wJalrXUtnFEMI-bPxRfiCYEXAMPLEKEY"
OPTIONS = JobOptions(ready=1, requested=2)


def keys(batches: object) -> list[int]:
    return [int(key) for _, labels in batches for key in labels]  # type: ignore[attr-defined]


def test_a_job_registers_again_with_a_cluster_at_the_same_address_and_keys(tmp_path: Path, flow: str) -> None:
    write_connection_file(tmp_path / "keys", generate_keys(""))
    where = {"listen": f"tcp://127.0.0.1:{free_port()}", "keys": tmp_path / "keys"}
    first = TestCluster.start(tmp_path, **where)  # type: ignore[arg-type]
    try:
        known = find_cluster(first.address)
        with open_job(flow, Numbers(400), address=first.address, batch_size=4, options=OPTIONS) as job:
            batches = job.traverse(0)
            seen = keys(islice(batches, 3))
            first.stop()
            first = TestCluster.start(tmp_path, **where)  # type: ignore[arg-type]
            assert find_cluster(first.address) == known
            assert sorted(seen + keys(batches)) == list(range(400))
            assert sorted(keys(job.traverse(1))) == list(range(400))
    finally:
        first.stop()


def test_a_rank_reads_on_in_a_new_cluster_while_the_other_rank_has_read_its_part(tmp_path: Path, flow: str) -> None:
    cluster = TestCluster.start(tmp_path)
    try:
        with ExitStack() as stack:
            jobs = [
                stack.enter_context(
                    open_job(
                        flow,
                        Numbers(400),
                        address=cluster.address,
                        batch_size=4,
                        replica=Replica(rank=rank, num_replicas=2),
                        options=JobOptions(name="job", ready=1, requested=2),
                    )
                )
                for rank in range(2)
            ]
            slow, fast = (job.traverse(0) for job in jobs)
            seen = keys(fast) + keys(islice(slow, 3))
            cluster.stop()
            cluster = TestCluster.start(tmp_path)
            assert sorted(seen + keys(slow)) == list(range(400))
    finally:
        cluster.stop()


@pytest.mark.parametrize("part", ["{}:v1/router", "coordinator"])
def test_a_job_of_a_lower_version_reads_on_when_a_service_dies_and_can_come_back(
    cluster: TestCluster, flow: str, part: str
) -> None:
    given: dict[str, Any] = {"address": cluster.address, "batch_size": 4, "options": OPTIONS}
    with open_job(flow, Numbers(8), version=2, **given) as higher:
        with open_job(flow, Numbers(400), **given) as job:
            batches = job.traverse(0)
            seen = keys(islice(batches, 3))
            with cluster.coordinator() as coordinator:
                for version in (1, 2):  # answered once the state is written, unlike a registration
                    coordinator.call("scale", Scale(f"{flow}:v{version}", 1, 2))
            killed = cluster.kill(part.format(flow))
            wait(lambda: has_ended(killed), what=f"the end of {part}")
            wait(lambda: jobs_of(cluster, flow) == [1, 1], what="both jobs at the coordinator")
            seen += keys(islice(batches, 3))
            state = job.state()
            assert sorted(seen + keys(batches)) == list(range(400))
        with open_job(flow, Numbers(400), **given) as again:
            assert sorted(seen + keys(again.traverse(0, done=state))) == list(range(400))
        assert sorted(keys(higher.traverse(0))) == list(range(8))


def jobs_of(cluster: TestCluster, flow: str) -> list[int]:
    """How many jobs read each version of a flow, the lowest version first."""
    views = [view for view in cluster.flows().values() if view.spec.name == flow]
    return [view.jobs for view in sorted(views, key=lambda view: view.spec.version)]


@pytest.mark.parametrize("before", ["no file", "nobody", "no router"])
def test_a_job_that_begins_while_its_cluster_is_replaced_reads_from_the_new_one(
    cluster: TestCluster,
    tmp_path: Path,
    flow: str,
    before: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The file is away, names a cluster that has ended, or one that ends between registration and join."""
    for module in ("outage_log", "flow_registration"):
        monkeypatch.setattr(f"torch_dpflow.cluster.client.{module}.SILENCE_S", 0.05)
    monkeypatch.setattr("torch_dpflow.cluster.client.router_link.CALL_S", 1.0)
    path = tmp_path / "connection"
    former = read_connection_file(cluster.address)
    if before != "no file":
        write_connection_file(path, msgspec.structs.replace(former, address=f"ipc://{tmp_path}/former"))

    def read() -> list[int]:
        with open_job(flow, Numbers(40), address=str(path), batch_size=4, options=OPTIONS) as job:
            return keys(job.traverse(0))

    with ExitStack() as stack:
        calls: Counter[str] = Counter()
        if before == "no router":
            service = stack.enter_context(closing(FailingService(f"ipc://{tmp_path}/former")))
            service.silent.add("access")
            calls = service.calls
        reading = stack.enter_context(ThreadPoolExecutor(1)).submit(read)
        wait(lambda: calls["access"] or _says_that_it_waits(caplog.text), what="a job that waits")
        write_connection_file(path, former)
        assert sorted(reading.result()) == list(range(40))


def _says_that_it_waits(log: str) -> bool:
    return "has waited for" in log or "no answer from its services" in log


def test_a_connection_file_that_does_not_come_is_named_when_the_patience_ends(tmp_path: Path) -> None:
    options = JobOptions(reconnect_timeout_s=0.2)
    with pytest.raises(OptionError, match=r"none'.*Start one by `dpflow up`.*\(waited 0.2 s\)"):
        open_job("f", Numbers(4), address=str(tmp_path / "none"), options=options)


class WithKey(Numbers):
    """A dataset that holds the key of its storage."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.storage_options = {"secret": SECRET}


def files_with_key(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in content_of(path)]


def content_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # such as the state's journal, which each write makes and removes
        return b""


@pytest.mark.slow
def test_what_a_dataset_holds_is_not_kept_with_the_state(tmp_path_factory: pytest.TempPathFactory, flow: str) -> None:
    # A short name: the cluster makes its directory in there, unless a socket's path would be too long.
    tmp_path = tmp_path_factory.mktemp("k")
    for directory in ("run", "kept"):
        (tmp_path / directory).mkdir()
    # What the second one knows of the state is not enough to read: the job brings it again.
    for _ in range(2):
        cluster = TestCluster.start(tmp_path / "run", state=f"{tmp_path}/kept/state")
        try:
            with open_job(flow, WithKey(40), address=cluster.address, batch_size=4, options=OPTIONS) as job:
                assert sorted(keys(job.traverse(0))) == list(range(40))
            (path, *others) = files_with_key(tmp_path)
            assert all(private(path, tmp_path / "run") for path in (path, *others))
        finally:
            cluster.stop()
        assert not files_with_key(tmp_path)


def private(path: Path, folder: Path) -> bool:
    """Whether it lies in a directory below `folder` that only its owner may enter."""
    directory = folder / path.relative_to(folder).parts[0]
    return stat.S_IMODE(directory.stat().st_mode) == 0o700

"""What every test runs under: no leaks, a temporary directory of its own, a choice of loader class."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import util
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from hypothesis import HealthCheck, settings

from tests import huge_pages, missing_parts, process_settings
from tests.holdings import Holdings
from tests.new_process import preload_spawned, spawn_preloaded
from tests.shared_cluster import TestCluster, wait
from tests.support import hosts
from tests.time_outs import EndsOfWorkers, TimeOuts

#: How long a test's threads, processes and files may take to go after its end; seconds.
GRACE_S = 60.0
#: What waits for other processes for most of its time, and
WAITING = (
    "tests/cluster/shared/",
    "tests/remote/launchers/",
    "tests/chaos/",
    "tests/flows/",
    "tests/hosts/",
    "tests/cluster/client/",
    "tests/core/test_time_outs.py",
)
#: what computes meanwhile: first what forks workers of the test process, while that is small.
COMPUTING = (
    "tests/contracts/",
    "tests/faults/",
    "tests/packaging/",
    "tests/integration/",
    "tests/examples/",
    "tests/remote/shipping/",
    "tests/datasets/",
    "tests/caches/",
    "tests/samplers/",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--loader",
        choices=("dpflow", "torch"),
        default="dpflow",
        help="the class that the contract tests of the loader are run against",
    )
    parser.addoption(
        "--disturbed-s",
        type=float,
        default=300.0,
        help="for how long the tests of chaos disturb a loader on other hosts or on Ray, seconds",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell without job control starts what runs in the background with SIGINT ignored, and so do all its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Several test processes share the processors, where torch's threads would spin while they wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    # How long a machine takes says nothing of the code: hypothesis would fail tests for it while others work.
    untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    # The same examples each time, but for `make test-slow`: else a run could fail for what another change has done.
    settings.register_profile("untimed", untimed, derandomize=config.option.markexpr != "slow")
    settings.load_profile("untimed")
    # Other test processes work in /tmp too; in a directory of our own, whatever is left over is ours.
    shared = os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    own = tempfile.mkdtemp(prefix="t-", dir=shared)
    os.environ["TMPDIR"] = tempfile.tempdir = own
    os.environ["DPFLOW_INDEX_DIR"] = tempfile.mkdtemp(prefix="index-")
    starts_workers = config.option.dist != "no" and not hasattr(config, "workerinput")
    config.pluginmanager.register(EndsOfWorkers() if starts_workers else TimeOuts(config))
    preload_spawned()
    # Until the tests are collected: what is made until then stays.
    gc.disable()
    # After multiprocessing has removed its directory inside, at priority -100.
    util.Finalize(None, shutil.rmtree, args=(own,), kwargs={"ignore_errors": True}, exitpriority=-200)


def pytest_report_header(config: pytest.Config) -> list[str]:
    if hasattr(config, "workerinput"):
        return []
    return ["skipped here:", *(f"  {line}" for line in missing_parts.skipped())]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin what waits and what computes together, where `--no-loadscope-reorder` leaves it at that.

    The rest is of short files. Each file is run whole by one process: begun at the end, a long one would be waited for
    by all others.
    """
    files = list(dict.fromkeys(item.nodeid.partition("::")[0] for item in items))
    place = dict.fromkeys(files, 1.0)
    for folders in (WAITING, COMPUTING):
        lane = [file for folder in folders for file in files if file.startswith(folder)]
        place |= {file: number / len(lane) for number, file in enumerate(lane)}
    items.sort(key=lambda item: place[item.nodeid.partition("::")[0]])


def pytest_collection_finish(session: pytest.Session) -> None:
    _keep()
    gc.enable()
    huge_pages.collapse()
    _send_without_copy()
    _propagate()
    session.stash[_SETTINGS] = process_settings.settings()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[object]:
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            _keep()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """A file leaves the process's settings as it found them, whatever its tests and its fixtures set meanwhile."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        changed = process_settings.changed(item.session.stash[_SETTINGS])
        item.session.stash[_SETTINGS] = process_settings.settings()
        assert not changed, "settings left to the next file:\n  " + "\n  ".join(changed)
    return result


_SETTINGS = pytest.StashKey[dict[str, Any]]()


def _keep() -> None:
    """Take what is there between two files out of the collector's sight: it stays until the end, as modules do.

    Workers that are forked share it, and collections pass it by.
    """
    gc.collect()
    gc.freeze()


def _send_without_copy() -> None:
    """Have pyzmq start the thread that frees messages sent without a copy. It stays, and is no test's leak."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://messages")
        other.connect("inproc://messages")
        one.send(bytes(1 << 20), copy=False)
        other.recv()


def _propagate() -> None:
    """Have torch's loggers send their records to the root's handlers: pytest adds its own to all that do not.

    There are 40 of them, and it adds and removes a handler six times a test.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.partition(".")[0] == "torch":
            logger.propagate = True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("hosts") and (why := hosts.missing()):
        pytest.skip(_NO_HOSTS + why)


_NO_HOSTS = "no hosts: "


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    reasons = [text.partition(_NO_HOSTS)[2].removesuffix("')") for text in skipped if _NO_HOSTS in text]
    if reasons:
        terminalreporter.write_line(
            f"NOT RUN: {len(reasons)} tests of workers on other hosts: {reasons[0]}", yellow=True
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[_PASSED] = report.passed
    return report


_PASSED = pytest.StashKey[bool]()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that passes leaves no thread, descriptor, process, shared memory or temporary file behind."""
    before = Holdings.now()
    yield
    if not request.node.stash.get(_PASSED, False):
        return  # the traceback of a failed test keeps its loaders alive
    _check_released(before)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws depends neither on the tests before it nor on chance."""
    random.seed(0)
    np.random.seed(0)
    # `torch.manual_seed` formats a traceback for each kind of accelerator that is not in use: a millisecond.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(scope="module")
def no_leaks_of_module() -> Iterator[None]:
    """For a module whose tests share what they hold, in place of the check after each: `no_leaks` asks for this one."""
    before = Holdings.now()
    yield
    _check_released(before)


def _check_released(before: Holdings) -> None:
    leaked = Holdings.now().beyond(before)
    deadline = time.monotonic() + GRACE_S
    while leaked and time.monotonic() < deadline:
        gc.collect()
        multiprocessing.active_children()  # reaps those that have ended
        threading.Event().wait(0.02)
        leaked = Holdings.now().beyond(before)
    assert not leaked, "left behind by the test:\n  " + "\n  ".join(leaked)


@pytest.fixture(scope="session")
def Loader(request: pytest.FixtureRequest) -> type[Any]:
    """The class under test: ours, or torch's with `--loader torch`."""
    if request.config.getoption("--loader") == "torch":
        from torch.utils.data import DataLoader

        return DataLoader
    from torch_dpflow import DPFlowDataLoader

    return DPFlowDataLoader


@pytest.fixture(scope="session")
def OurLoader(request: pytest.FixtureRequest) -> type[Any]:
    """Our class, where a test is about what torch's loader does not do."""
    if request.config.getoption("--loader") == "torch":
        pytest.skip("torch's loader does not promise this")
    from torch_dpflow import DPFlowDataLoader

    return DPFlowDataLoader


@pytest.fixture(scope="session")
def common_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestCluster]:
    """A cluster on this machine, for tests that end none of its own processes: flows of others live in it too."""
    started = TestCluster.start(tmp_path_factory.mktemp("c"))
    yield started
    started.stop()


@pytest.fixture
def preloaded_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of `platform="processes"` have imported torch: a second of the processor less for each."""
    monkeypatch.setattr(os, "posix_spawn", spawn_preloaded)


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Wait until a condition holds; fail when it does not within the deadline."""
    return wait

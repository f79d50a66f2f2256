"""The pages with all settings and all metrics name those of the code, and no others."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from tests.pages import DOCS, ROOT
from torch_dpflow.cluster.monitoring.metrics_server import _Collector
from torch_dpflow.remote.launchers import registry

SETTINGS, METRICS = (DOCS / "reference" / f"{name}.md" for name in ("settings", "metrics"))
#: Variables that the package sets for the processes that it starts.
INTERNAL = {"DPFLOW_LAUNCH_SPEC", "DPFLOW_WORKER_NAME"}


def test_the_page_names_each_variable_that_the_package_reads() -> None:
    sources = "\n".join(path.read_text("utf-8") for path in (ROOT / "torch_dpflow").rglob("*.py"))
    read = set(re.findall(r"\"(DPFLOW_[A-Z_]+[A-Z])\"", sources)) - INTERNAL
    rows = re.findall(r"^\| (`DPFLOW.*?) \|", SETTINGS.read_text("utf-8"), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(DPFLOW_[A-Z_]+)`", row)} == read


def test_the_page_names_each_key_of_each_table() -> None:
    rows = re.findall(r"^\| `\[([\w.]+)\]` \| (.*) \|$", SETTINGS.read_text("utf-8"), re.MULTILINE)
    given = {table: set(re.findall(r"`(\w+)`", keys)) for table, keys in rows}
    assert given == {table: {one.name for one in fields(kind())} for table, kind in registry._KINDS.items()}


def test_the_page_names_each_metric_with_its_kind() -> None:
    pytest.importorskip("prometheus_client")
    rows = re.findall(r"^\| `(\w+)` \| (gauge|counter|histogram) \|", METRICS.read_text("utf-8"), re.MULTILINE)
    families = list(_Collector(lambda: ([], [])).collect())
    assert {f"dpflow_{name}": kind for name, kind in rows} == {one.name: one.type for one in families}

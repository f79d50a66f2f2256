"""What `import torch_dpflow` offers, what it brings along, and what refuses to be imported by another name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest

import torch_dpflow
from torch_dpflow.cli.main import root

ROOT = Path(__file__).resolve().parents[2]
HALVES = ("caches", "remote", "samplers")
#: What the package imports for itself.
ITS_OWN_IMPORTS = {"TYPE_CHECKING", "lazy_names"}
#: None of these may be imported by users who did not ask for it.
UNASKED = (
    "torchvision",
    "torchdata",
    "lightning",
    "PIL",
    "simplejpeg",
    "ray",
    "alibabacloud_eci20180808",
    "alibabacloud_fc20230330",
    "darabonba",
    "boto3",
    "kubernetes",
    "botocore",
    "oss2",
    "ossfs",
    "s3fs",
    "redis",
    "pyarrow",
    "prometheus_client",
    "click",
    "rich",
    "pytest",
    "hypothesis",
    "torch_dpflow.cli",
    "torch_dpflow.vision",
)
#: What only shared flows, services and stored datasets need, or a loader once it is iterated.
LATER = (
    "zmq",
    "fsspec",
    "cloudpickle",
    "snappy",
    "psutil",
    "torch_dpflow.caches",
    "torch_dpflow.datasets",
    "torch_dpflow.flows",
    "torch_dpflow.loader.flow_iterator",
    "torch_dpflow.cluster.client",
    "torch_dpflow.cluster.client.open_job",
    "torch_dpflow.cluster.messages.bodies",
    "torch_dpflow.cluster.client.epoch_reader",
    "torch_dpflow.samplers",
)
#: Names are imported when they are first asked for, so all are.
PROGRAM = f"""
import json, sys, torch_dpflow
for name in torch_dpflow.__all__:
    getattr(torch_dpflow, name)
print(json.dumps([module for module in {UNASKED!r} if module in sys.modules]))
"""


def test_all_is_sorted_and_names_what_is_there() -> None:
    offered = {
        name
        for name in dir(torch_dpflow)
        if not name.startswith("_") and not isinstance(getattr(torch_dpflow, name), ModuleType)
    }
    assert torch_dpflow.__all__ == sorted(torch_dpflow.__all__)
    assert set(torch_dpflow.__all__) - {"__version__"} == offered - ITS_OWN_IMPORTS
    for name in torch_dpflow.__all__:
        value = getattr(torch_dpflow, name)
        if name != "__version__":
            assert value.__name__ == name
            assert value.__module__.startswith("torch_dpflow.")


def test_a_name_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(AttributeError, match=r"DPFlowLoader.*DPFlowDataLoader"):
        torch_dpflow.DPFlowLoader


@pytest.mark.parametrize("half", HALVES)
def test_the_halves_name_what_is_there(half: str) -> None:
    module = __import__(f"torch_dpflow.{half}", fromlist=["*"])
    for name in getattr(module, "__all__", []):
        assert hasattr(module, name)


def test_the_loader_s_import_brings_what_a_private_loader_needs_and_that_of_all_names_what_users_need() -> None:
    program = (
        "import json, sys\nfrom torch_dpflow import DPFlowDataLoader, LoaderOptions\n"
        f"later = [m for m in {LATER!r} if m in sys.modules]\nfrom torch_dpflow import *\n"
        f"print(json.dumps([later, [m for m in {UNASKED!r} if m in sys.modules]]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], []]


@pytest.mark.parametrize("half", HALVES)
def test_a_half_refuses_to_be_imported_from_the_root(half: str) -> None:
    """The links beside the package are for people; a second copy of a class would unpickle nowhere."""
    assert (ROOT / half).is_symlink()
    done = subprocess.run(
        [sys.executable, "-c", f"import {half}"], cwd=ROOT, capture_output=True, text=True, timeout=250
    )
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError:")
    assert f"import 'torch_dpflow.{half}' instead" in last


def test_each_command_and_each_option_has_a_help_text() -> None:
    missing = []

    def look(path: str, command: click.Command) -> None:
        options = (option for option in command.params if isinstance(option, click.Option) and not option.hidden)
        missing.extend(f"{path} {option.opts[0]}" for option in options if not option.help)
        if not command.help:
            missing.append(path)
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                inner = command.get_command(context, name)
                assert inner is not None
                look(f"{path} {name}", inner)

    look("dpflow", root)
    assert not missing

"""The house: no cycle among imports, no module outside a contract, no torch where nobody needs it."""

from __future__ import annotations

import configparser
from pathlib import Path

import grimp
import pytest

from tests.new_process import run_interpreter

ROOT = Path(__file__).parents[2]
#: Who keeps values, asks users' code or is torch's sampler, among those that decide which samples are read and kept.
SHELLS = {
    "caches": {"dataset", "store"},
    "samplers": {"budget", "epoch_sampler", "mixture", "sampler"},
}


#: Rooms that hold rooms, and the package itself: a contract has to name all that lies in them.
HOUSES = {"torch_dpflow", "torch_dpflow.cluster", "torch_dpflow.ipc", "torch_dpflow.remote"}
#: Clients of others' services, and the one module, or package, that imports each.
CLIENTS = {
    "zmq": "ipc.transport.zeromq",
    "ray": "remote.launchers.ray_cluster",
    "starlette": "cluster.monitoring.page_server",
    "uvicorn": "cluster.monitoring.page_server",
    "boto3": "remote.launchers.aws_client",
    "kubernetes": "remote.launchers.kubernetes_pods",
    "alibabacloud_credentials": "remote.launchers.alibaba_client",
    "alibabacloud_tea_openapi": "remote.launchers.alibaba_client",
    "darabonba": "remote.launchers.alibaba_client",
    "alibabacloud_eci20180808": "remote.launchers.eci",
    "alibabacloud_fc20230330": "remote.launchers.fc",
}


@pytest.fixture(scope="module")
def outside() -> grimp.ImportGraph:
    return grimp.build_graph(
        "torch_dpflow", include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None
    )


def house_rules() -> configparser.ConfigParser:
    contracts = configparser.ConfigParser()
    assert contracts.read(ROOT / ".importlinter")
    return contracts


def test_every_room_has_its_place_among_the_layers() -> None:
    contracts = house_rules()
    layers = [contracts[name] for name in contracts.sections() if contracts[name].get("type") == "layers"]
    assert all(contract.getboolean("exhaustive") for contract in layers)
    assert {house for contract in layers for house in contract["containers"].split()} == HOUSES


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_of_others_services_is_imported_by_one_module(client: str, outside: grimp.ImportGraph) -> None:
    home = f"torch_dpflow.{CLIENTS[client]}"
    importers = outside.find_modules_that_directly_import(client)
    assert importers
    assert {one for one in importers if one != home and not one.startswith(f"{home}.")} == set()


@pytest.mark.parametrize("package", SHELLS)
def test_every_sampler_and_cache_policy_is_held_to_being_pure(package: str) -> None:
    pure = house_rules()["importlinter:contract:pure"]
    assert f"torch_dpflow.{package}" in pure["source_modules"].split()
    ignored = [line.split(" -> ") for line in pure["ignore_imports"].strip().splitlines()]
    shells = {module.rpartition(".")[2] for module, goal in ignored if goal == "**" and f".{package}." in module}
    assert shells == SHELLS[package]


#: Modules of processes that start fast and stay small: without torch, and the first ones without what takes most of the
#: memory and the time of an import besides.
SMALL = (
    "cli.main",
    "cli.cluster",
    "cli.up",
    "cluster.services.node",
    "cluster.services.local_cluster",
    "cluster.services.coordinator_process",
    "cluster.services.provisioner",
    "cluster.services.node_fleet",
    "cluster.services.page",
)
WITHOUT_TORCH = (
    "cli.dataset",
    "cli.pool",
    "cluster.services.router",
    "cluster.cache.sample_cache",
    "workers.scheduler",
    "remote.worker.program",
)


def test_torch_is_imported_by_none_of_them() -> None:
    imports = [
        f"import torch_dpflow.{module}; {{*{large}}} & {{*sys.modules}} and sys.exit({module!r})"
        for modules, large in ((SMALL, ["torch", "numpy", "asyncio"]), (WITHOUT_TORCH, ["torch"]))
        for module in modules
    ]
    done = run_interpreter("\n".join(["import sys", *imports]), fresh=True)
    assert (done.returncode, done.stderr) == (0, "")

"""The house: no cycle among imports, no module outside a contract, no torch where nobody needs it."""

from __future__ import annotations

import configparser
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
#: Who keeps values, asks users' code or is torch's sampler, among those that decide which samples are read and kept.
SHELLS = {
    "caches": {"lookahead_poller", "dataset", "sizing", "store"},
    "samplers": {"sampler_arguments", "sampler"},
}


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    return grimp.build_graph("torch_dpflow", exclude_type_checking_imports=True, cache_dir=None)


def house_rules() -> configparser.ConfigParser:
    contracts = configparser.ConfigParser()
    assert contracts.read(ROOT / ".importlinter")
    return contracts


def exhaustive_containers() -> set[str]:
    contracts = house_rules()
    found: set[str] = set()
    for name in contracts.sections():
        contract = contracts[name]
        if contract.get("type") == "layers":
            assert contract.getboolean("exhaustive"), f"{name} is not exhaustive"
            found.update(contract["containers"].split())
    return found


def test_no_module_imports_itself_through_others(imports: grimp.ImportGraph) -> None:
    graph = {module: imports.find_modules_directly_imported_by(module) for module in imports.modules}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_every_module_lies_in_a_package_whose_contract_names_all_modules(imports: grimp.ImportGraph) -> None:
    packages = {module.rpartition(".")[0] for module in imports.modules} - {""}
    siblings = {package for package in packages if len(imports.find_children(package)) > 1}
    assert siblings <= exhaustive_containers()


@pytest.mark.parametrize("package", SHELLS)
def test_every_sampler_and_cache_policy_is_held_to_being_pure(
    package: str, imports: grimp.ImportGraph
) -> None:
    pure = set(house_rules()["importlinter:contract:pure"]["source_modules"].split())
    modules = imports.find_children(f"torch_dpflow.{package}")
    assert modules - pure == {f"torch_dpflow.{package}.{shell}" for shell in SHELLS[package]}


@pytest.mark.parametrize(
    "module",
    [
        "cli.main",
        "cli.cluster",
        "cli.cluster_flow",
        "cli.dataset",
        "cli.pool",
        "cluster.services.node",
        "cluster.services.local_cluster",
        "cluster.services.coordinator_process",
        "cluster.services.router",
        "cluster.cache.pool",
        "workers.scheduler",
        "remote.worker.member",
    ],
)
def test_torch_is_not_imported_by(module: str) -> None:
    program = f"import sys, torch_dpflow.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0

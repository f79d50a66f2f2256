"""`dpflow check`, `workers` and `sweep`: commands for the platforms that run workers."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from torch_dpflow._core.decoding import converted
from torch_dpflow.cli.cluster_views import address_option, ask_views, connect, print_costs, print_remote_workers
from torch_dpflow.cli.common import json_option, to_json
from torch_dpflow.cluster.messages.coordinator import FlowView
from torch_dpflow.errors import OptionError, PlatformError
from torch_dpflow.ipc.messages.remote_worker import RemoteWorkerView
from torch_dpflow.remote.launchers.contract import cluster_of, prefix_of
from torch_dpflow.remote.launchers.registry import resolve

if TYPE_CHECKING:
    from torch_dpflow.remote.launchers.contract import Finding, Launcher, Ref

_CLUSTER = re.compile("[0-9a-f]{8}", re.ASCII)


@click.command()
@click.argument("platform")
@click.option("--listen", help="Address to which the worker connects: tcp://ADDRESS:PORT, as LoaderOptions(listen=).")
@json_option
def check(platform: str, listen: str | None, as_json: bool) -> None:
    """Check PLATFORM, such as "ray", with one worker: reachability, versions, capacity, round trip, bandwidth.

    The exit status is 0 if every check passes, otherwise 1.
    """
    from torch_dpflow.loader.platform_check import check_platform

    findings: list[Finding] = []
    for finding in check_platform(platform, listen=listen):
        findings.append(finding)
        if not as_json:
            click.echo(f"{'ok   ' if finding.good else 'WRONG'} {finding.text}")
    good = all(finding.good for finding in findings)
    if as_json:
        texts = [{"good": finding.good, "text": finding.text} for finding in findings]
        click.echo(to_json({"good": good, "findings": texts}))
    sys.exit(0 if good else 1)


@click.command()
@click.argument("platform", required=False)
@address_option
@json_option
def workers(platform: str | None, address: str, as_json: bool) -> None:
    """List all workers on PLATFORM; without PLATFORM, those on the platform of a cluster, and the costs of flows."""
    if platform is None:
        _list_cluster_workers(address, as_json=as_json)
        return
    if address != "auto":
        raise OptionError(
            f"PLATFORM {platform!r} with --address, which is for the workers of a cluster; give one of them"
        )
    with closing(resolve(platform).launcher()) as launcher:
        found = _remote_workers(launcher)
    if as_json:
        click.echo(to_json({"platform": platform, "workers": list(found)}))
        return
    for name in found:
        click.echo(name)
    _count(platform, found)


@click.command()
@click.argument("platform")
@click.option("--cluster", help="Cluster of the workers: the 8 digits after dpf- in their names.")
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="End the workers of all clusters and loaders, also of running ones.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be ended, and end nothing.")
@json_option
def sweep(platform: str, cluster: str | None, everything: bool, dry_run: bool, as_json: bool) -> None:
    """End workers that killed processes have left on PLATFORM.

    The platform does not show which workers were left, so this ends all workers of the cluster or loader that --cluster
    names. Without --cluster or --all, workers are only listed.
    """
    if cluster is not None and everything:
        raise OptionError("--cluster and --all exclude each other: give one of them")
    if cluster is not None and not _CLUSTER.fullmatch(cluster):
        raise OptionError(f"--cluster {cluster!r:.80}: give 8 hexadecimal digits, as `dpflow workers {platform}` shows")
    with closing(resolve(platform).launcher()) as launcher:
        found = _remote_workers(launcher, cluster)
        if dry_run or (cluster is None and not everything):
            if as_json:
                click.echo(to_json({"found": list(found), "ended": [], "failed": {}}))
            else:
                for name in found:
                    click.echo(f"would end {name}")
                _count(platform, found)
            if found and not dry_run:
                raise OptionError("nothing was ended: give --cluster, as above, or --all")
            return
        failures = {name: error for name, ref in found.items() if (error := _stop(launcher, name, ref))}
    ended = [name for name in found if name not in failures]
    if as_json:
        failed = {name: str(error) for name, error in failures.items()}
        click.echo(to_json({"found": list(found), "ended": ended, "failed": failed}))
    else:
        click.echo(f"{len(ended)} ended")
    for error in failures.values():
        raise error


def _remote_workers(launcher: Launcher, cluster: str | None = None) -> dict[str, Ref]:
    """Return the workers on a platform, of one cluster or of all.

    Raises OptionError if the platform cannot list them.
    """
    if not launcher.limits.can_list:
        raise OptionError(
            "this platform cannot list workers: `dpflow workers` without it lists those of a cluster; workers that a "
            "killed process has left end by themselves after half a minute"
        )
    found = launcher.list("dpf-" if cluster is None else prefix_of(cluster))
    return {name: found[name] for name in sorted(found) if cluster_of(name)}


def _count(platform: str, names: Iterable[str]) -> None:
    """Print the number of workers of each cluster."""
    counts = Counter(filter(None, map(cluster_of, names)))
    for cluster, count in sorted(counts.items()):
        click.echo(f"{count} of cluster {cluster}", err=True)
    if not counts:
        click.echo(f"no workers on {platform}", err=True)


def _stop(launcher: Launcher, name: str, ref: Ref) -> PlatformError | None:
    try:
        launcher.stop(name, ref)
    except PlatformError as error:
        return error
    return None


def _list_cluster_workers(address: str, *, as_json: bool) -> None:
    with connect(address) as coordinator:
        flows, processes = ask_views(coordinator)
    remote = {
        view.id: converted(view.status["remote_workers"], list[RemoteWorkerView])
        for view in processes
        if "remote_workers" in view.status
    }
    provisioner = next((view.status for view in processes if view.role == "provisioner"), {})
    running = [flow for flow in flows if flow.workers_s is not None and flow.part is not None]
    if as_json:
        facts = {"workers": remote, "flows": [_cost_of(flow) for flow in running]}
        click.echo(to_json({**facts, "refusal": provisioner.get("refusal", "")}))
        return
    if provisioner.get("refusal"):
        click.echo(f"platform {provisioner['platform']} refuses workers: {provisioner['refusal']}", err=True)
    if remote:
        print_remote_workers(remote)
    if running:
        print_costs(running)
    if remote:
        return
    if any(view.role == "worker" for view in processes):
        click.echo("its workers are processes of its hosts: see `dpflow status`")
    else:
        click.echo("it has no workers now")


def _cost_of(flow: FlowView) -> dict[str, Any]:
    """Return a flow's worker-seconds and cost as JSON values."""
    taken, part = flow.workers_s, flow.part
    assert taken is not None
    assert part is not None
    cost = taken.total / 3600 * taken.price_per_hour if taken.price_per_hour else None
    return {
        "flow": flow.spec.instance,
        "desired": part.workers,
        "limited_by": flow.limited_by,
        "worker_seconds": taken.total,
        "jobs": taken.by_job,
        "cost": cost,
    }

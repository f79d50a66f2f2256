"""Four trials of a search on the same images: a shared flow with remote workers, or local workers for each trial.

    python -m benchmarks.search [--json] [--rounds 5] [--link-mbit 1000] [--quick]

The question of the thesis's figure 5-10: what do remote workers take off the training host? The trials, each a
process, read with two local workers each (private loaders), or all of them from one flow whose eight workers are in
namespaces of their own, behind one link of 1 Gbit/s. The workers of both sides and the trials share this machine's
processors, so samples/s tell what sharing saves and not what more machines would bring; the processor time of the
training host, that of all processes outside the namespaces, is the figure that answers. It takes root: see
`tests.support.hosts`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cluster import cpu_s, wait_for_workers
from benchmarks.loader import IMAGES, SPECIFICATION, warm_page_cache
from benchmarks.report import Comparison, Metric, add_arguments, alternate, publish
from benchmarks.sharing import ClusterSource, NoSource, Run, Scenario, Source, Told
from examples.cluster import started
from examples.natural_images import generate
from tests.support.hosts import Host, Hosts, member_python, missing

TRIALS, LOCAL_WORKERS, REMOTE_WORKERS = 4, 2, 8
LOCAL, REMOTE = "4 private loaders, 2 local workers each", "shared flow, 8 remote workers"
METRICS = (
    Metric(name="samples_per_s", label="samples/s, all trials", spec=",.0f"),
    Metric(name="host_cpu_ms_per_sample", label="CPU ms/sample, host", higher_is_better=False, spec=".2f"),
    Metric(name="cpu_ms_per_sample", label="with workers", higher_is_better=False, spec=".2f"),
    Metric(name="stall_share", label="stall share, mean", higher_is_better=False, spec=".0%"),
    Metric(name="decodes_per_sample", label="decodes/sample", higher_is_better=False, spec=".3f"),
)


#: Said below the table, since the first column does not tell.
SHARED = (
    "The workers elsewhere share this machine's processors with the trials: samples/s are no more than these allow, "
    "and tell what sharing saves. With machines of their own, the host's processor time and its link are the limits."
)


class RemoteSource(ClusterSource):
    """A cluster whose workers are on another host."""

    def __init__(self, address: str, host: Host) -> None:
        super().__init__(address)
        self._host = host

    def elsewhere_s(self) -> float:
        return sum(cpu_s(pid) for pid in self._host.pids())


@dataclass(frozen=True, kw_only=True)
class Search(Run):
    """One run of one side."""

    #: What the link between the training host and the workers lets through each way, bits a second.
    link_bits: float
    #: What limited the trials, as these say at their ends; of all runs.
    limits: Counter[str] = field(default_factory=Counter)

    @property
    def kind(self) -> str:
        return "private" if self.side == LOCAL else "dpflow"

    @property
    def workers(self) -> int:
        return LOCAL_WORKERS if self.side == LOCAL else REMOTE_WORKERS

    @contextmanager
    def _source(self) -> Iterator[Source]:
        if self.side == LOCAL:
            yield NoSource()
            return
        with tempfile.TemporaryDirectory(prefix="torch_dpflow-") as folder, Hosts(1) as hosts:
            hosts[0].limit(self.link_bits)
            python = member_python(hosts[0], Path(folder))
            os.environ["DPFLOW_PLATFORM_PROCESSES_PYTHON"] = str(python)  # what is started from here has it
            listen = f"tcp://{hosts.address}:0"
            with started(platform="processes", worker_listen=listen) as address:
                yield RemoteSource(address, hosts[0])

    def _await_workers(self, source: Source) -> None:
        if self.side == REMOTE:
            wait_for_workers(source.address, REMOTE_WORKERS)

    def _note(self, told: Told) -> None:
        self.limits.update(one["limited_by"] or "-" for one in told)


def compare(arguments: argparse.Namespace) -> Comparison:
    """Both sides in turn."""
    quick, limits = arguments.quick, {side: Counter[str]() for side in (LOCAL, REMOTE)}
    given = {"samples": 256 if quick else arguments.samples, "epochs": 1 if quick else arguments.epochs}
    link_bits = arguments.link_mbit * 1e6
    sides = {
        side: Search(
            side=side,
            scenario=Scenario(jobs=TRIALS),
            cache=0.0,
            link_bits=link_bits,
            limits=limits[side],
            **given,
        )
        for side in (LOCAL, REMOTE)
    }
    return alternate(
        "search",
        f"{TRIALS} trials, {arguments.link_mbit:g} Mbit/s",
        {side: run.measure for side, run in sides.items()},
        rounds=1 if quick else arguments.rounds,
        parameters={**given, "link_bits": link_bits, "limited_by": limits},
    )


def limits_of(comparison: Comparison) -> str:
    """What limited the trials of each side, as text."""
    counted = comparison.parameters["limited_by"]
    assert isinstance(counted, dict)
    lines = (f"{side}: {', '.join(f'{name} {n}' for name, n in names.items())}" for side, names in counted.items())
    return "limited by, as the trials say at their ends (-: not known, as with local workers): " + "; ".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--samples", type=int, default=1024, help="of an epoch (default: %(default)s)")
    add("--epochs", type=int, default=2, help="of each trial, measured (default: %(default)s)")
    add("--link-mbit", type=float, default=1000.0, help="of the link, Mbit/s (default: %(default)g)")
    add_arguments(parser)
    arguments = parser.parse_args()
    if why := missing():
        parser.error(f"remote workers are in namespaces of their own: {why}")
    generate(IMAGES, SPECIFICATION)
    warm_page_cache(IMAGES)
    comparison = compare(arguments)
    publish([comparison], METRICS, arguments)
    if not arguments.json:
        print(limits_of(comparison))
        print(SHARED)


if __name__ == "__main__":
    main()

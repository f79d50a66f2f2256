"""Which samples are lost and repeated if an epoch goes on with another number of ranks, as counted.

    python -m benchmarks.resize [--json] [--side NAME+...] [--quick]

Eight ranks, then three, five and one read one epoch, each rank in a process of its own. Each number of ranks saves the
state of all ranks, and the next one loads them as the side's documentation says, described in benchmarks/README.md.
Sides whose package is missing are left out: datasets, grain, mosaicml-streaming.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.utils.data import Dataset, DistributedSampler

from benchmarks.exactly_once import Visits, count
from benchmarks.report import facts
from torch_dpflow import DPFlowDataLoader, DynaGCSSampler

#: Ranks, batch size of each, and batches that each reads; the last rank reads to the end.
PHASES = ((8, 4, 20), (3, 8, 25), (5, 4, 20), (1, 8, 10**6))
SAMPLES = 2400
SEED = 5


class Numbers(Dataset[int]):
    """Item `i` is `i`."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


#: Reads a rank's batches: (rank, ranks, batch size, states of the ranks before or None), to batches and a function that
#: returns the state.
Reader = Callable[[int, int, int, "list[Any] | None"], "tuple[Iterator[Any], Callable[[], Any]]"]


def ours(sampler_class: Any) -> Reader:
    """Our loader: any rank's state is enough."""

    def read(rank: int, ranks: int, batch_size: int, states: list[Any] | None) -> Any:
        sampler = sampler_class(Numbers(), num_replicas=ranks, rank=rank, seed=SEED)
        loader: Any = DPFlowDataLoader(Numbers(), batch_size=batch_size, sampler=sampler)
        if states is not None:
            loader.load_state_dict(states[0])
        return iter(loader), loader.state_dict

    return read


def stateful(rank: int, ranks: int, batch_size: int, states: list[Any] | None) -> Any:
    """torchdata's loader: each rank loads the state of its number, ranks beyond them from the first on."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    sampler: Any = DistributedSampler(Numbers(), num_replicas=ranks, rank=rank, seed=SEED)
    loader: Any = StatefulDataLoader(Numbers(), batch_size=batch_size, sampler=sampler)
    if states is not None:
        loader.load_state_dict(states[rank % len(states)])
    return iter(loader), loader.state_dict


def huggingface(rank: int, ranks: int, batch_size: int, states: list[Any] | None) -> Any:
    """`split_dataset_by_node` of a shuffled iterable dataset in torchdata's loader."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    datasets: Any = importlib.import_module("datasets")
    split: Any = importlib.import_module("datasets.distributed").split_dataset_by_node
    whole = datasets.Dataset.from_dict({"row": list(range(SAMPLES))}).to_iterable_dataset(num_shards=120)
    part = split(whole.shuffle(seed=SEED, buffer_size=100), rank=rank, world_size=ranks)
    loader: Any = StatefulDataLoader(part, batch_size=batch_size)
    if states is not None:
        loader.load_state_dict(states[rank % len(states)])
    return (batch["row"] for batch in loader), loader.state_dict


def grain_slices(rank: int, ranks: int, batch_size: int, states: list[Any] | None) -> Any:
    """Grain, sharded by a slice: each process has the state of its own iterator."""
    grain: Any = importlib.import_module("grain.python")
    dataset: Any = grain.MapDataset.source(range(SAMPLES)).shuffle(seed=SEED)[rank::ranks].batch(batch_size)
    iterator = iter(dataset.to_iter_dataset())
    if states is not None:
        iterator.set_state(states[rank % len(states)])
    return iterator, iterator.get_state


def grain_elastic(rank: int, ranks: int, batch_size: int, states: list[Any] | None) -> Any:
    """Grain's experimental ElasticIterator: any process's state is enough."""
    grain: Any = importlib.import_module("grain.python")
    elastic: Any = importlib.import_module("grain.experimental").ElasticIterator
    shards = grain.ShardOptions(shard_index=rank, shard_count=ranks)
    dataset: Any = grain.MapDataset.source(range(SAMPLES)).shuffle(seed=SEED)
    iterator: Any = iter(elastic(dataset, batch_size * ranks, shards))
    if states is not None:
        iterator.set_state(states[0])
    return iterator, iterator.get_state


def streaming(rank: int, ranks: int, batch_size: int, states: list[Any] | None) -> Any:
    """Mosaic Streaming with its own loader: any rank's state is enough."""
    mosaic: Any = importlib.import_module("streaming")
    dataset = mosaic.StreamingDataset(
        local=os.environ["DPFLOW_MDS"], shuffle=True, shuffle_seed=SEED, batch_size=batch_size, num_canonical_nodes=120
    )
    loader = mosaic.StreamingDataLoader(dataset, batch_size=batch_size)
    if states is not None:
        loader.load_state_dict(states[0])
    return (batch["row"] for batch in loader), loader.state_dict


#: By name: the reader, and the package that it needs.
SIDES: dict[str, tuple[Reader, str]] = {
    "dpflow, DistributedSampler": (ours(DistributedSampler), "torch_dpflow"),
    "dpflow, DynaGCSSampler": (ours(DynaGCSSampler), "torch_dpflow"),
    "StatefulDataLoader, DistributedSampler": (stateful, "torchdata"),
    "HuggingFace, split_dataset_by_node": (huggingface, "datasets"),
    "Grain, slices": (grain_slices, "grain"),
    "Grain, ElasticIterator": (grain_elastic, "grain"),
    "Mosaic Streaming": (streaming, "streaming"),
}


def write_mds(folder: str) -> None:
    """Write the samples for Mosaic Streaming."""
    mosaic: Any = importlib.import_module("streaming")
    with mosaic.MDSWriter(out=folder, columns={"row": "int"}, size_limit=1000) as writer:
        for row in range(SAMPLES):
            writer.write({"row": row})


def _rank(pipe: Any, reader: Reader, place: tuple[int, int, int, int], states: list[Any] | None, port: int) -> None:
    rank, ranks, batch_size, steps = place
    local = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in {"RANK": rank, "WORLD_SIZE": ranks, **local}.items()})
    torch.set_num_threads(1)
    try:
        batches, state = reader(rank, ranks, batch_size, states)
        read = [int(index) for _, batch in zip(range(steps), batches) for index in batch]
        pipe.send((read, state(), None))
    except Exception as error:
        pipe.send(([], None, f"{type(error).__name__}: {error}"))
    pipe.recv()  # others may need this rank until they have ended
    os._exit(0)


def read_epoch(reader: Reader, phases: Sequence[tuple[int, int, int]]) -> tuple[list[int], str]:
    """Return what all ranks have read, and why a state was refused; empty if none was."""
    fork, seen, states = multiprocessing.get_context("fork"), list[int](), None
    for ranks, batch_size, steps in phases:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pipes, children = [], []
        for rank in range(ranks):
            here, there = fork.Pipe()
            child = fork.Process(target=_rank, args=(there, reader, (rank, ranks, batch_size, steps), states, port))
            child.start()
            there.close()
            pipes.append(here)
            children.append(child)
        answers = [pipe.recv() for pipe in pipes]
        for pipe, child in zip(pipes, children):
            pipe.send(None)
            child.join()
        if errors := [error for _, _, error in answers if error is not None]:
            return seen, errors[0]
        seen += [index for read, _, _ in answers for index in read]
        states = [state for _, state, _ in answers]
    return seen, ""


def measure(name: str, phases: Sequence[tuple[int, int, int]] = PHASES) -> tuple[Visits, str]:
    """Read the epoch with a side."""
    reader, _ = SIDES[name]
    if reader is not streaming:
        seen, refused = read_epoch(reader, phases)
        return count(seen, SAMPLES), refused
    with tempfile.TemporaryDirectory() as folder:
        write_mds(folder)
        os.environ["DPFLOW_MDS"] = folder
        seen, refused = read_epoch(reader, phases)
        return count(seen, SAMPLES), refused


def row(name: str, visits: Visits, refused: str) -> str:
    """Return a line of the table in Markdown."""
    return f"| {name} | {visits.lost:,} | {visits.repeated:,} | {refused.splitlines()[0][:80] if refused else ''} |"


def chosen(text: str) -> list[str]:
    names = text.split("+")
    for name in names:
        if name not in SIDES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SIDES)}")
    return names


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resize", description=str(__doc__).splitlines()[0])
    parser.add_argument("--side", type=chosen, default=list(SIDES), help="+ between several (default: all)")
    parser.add_argument("--quick", action="store_true", help="ours only, to see that it runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    arguments = parser.parse_args(given)
    names = list(SIDES)[:2] if arguments.quick else arguments.side
    here = [name for name in names if importlib.util.find_spec(SIDES[name][1]) is not None]
    results = {name: measure(name) for name in here}
    if not arguments.json:
        print("| side | lost | repeated | refused |\n| --- | --- | --- | --- |")
    for name, (visits, refused) in results.items():
        line = {"side": name, **asdict(visits), "refused": refused, "machine": facts()}
        print(json.dumps(line) if arguments.json else row(name, visits, refused))
    for name in names:
        if name not in here:
            print(f"{name}: left out, as {SIDES[name][1]} is not installed")


if __name__ == "__main__":
    main()

"""How exactly a mixture keeps its proportion, and what batches by a budget waste.

    python -m benchmarks.mixture [--part windows|budget] [--json] [--rounds 3] [--quick]

Windows: four datasets with weights 17, 9, 5 and 2. Over all windows of 100, 1,000 and 10,000 consecutive samples, by
how many samples the most deviating dataset differs from its share: the worst window, and the mean. Beside ours stand
HuggingFace's `interleave_datasets` and Mosaic's StreamingDataset with two of its `batching_method`s.

Budget: lognormal lengths, as of speech. Beside ours stands lhotse's DynamicBucketingSampler. Padding is the share of
the batches that no sample fills. Imbalance is the share of a step that its ranks wait on average, if a batch takes as
long as it is large; steps that not all ranks have count as waiting too. Fill is the mean cost of a batch, as a share of
the budget.

These are counts, so other work on the machine does not change them. A round is a seed. Libraries that are not installed
are left out.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Comparison, Metric, add_arguments, publish
from torch_dpflow import BudgetBatchSampler, MixtureSampler

WEIGHTS = (17, 9, 5, 2)
SHARES = tuple(weight / sum(WEIGHTS) for weight in WEIGHTS)
WINDOWS = (100, 1_000, 10_000)
SOURCE_SAMPLES = 20_000
DRAWN = 30_000
LENGTHS = 20_000
BUDGET_S = 200.0
RANKS = 8
BUCKETS = 30

WINDOW_METRICS = (
    Metric(name="worst", label="worst window, samples", higher_is_better=False),
    Metric(name="mean", label="mean window, samples", higher_is_better=False),
)
BUDGET_METRICS = (
    Metric(name="padding", label="padding", higher_is_better=False, spec=".2%"),
    Metric(name="imbalance", label="imbalance", higher_is_better=False, spec=".2%"),
    Metric(name="fill", label="fill", spec=".2%"),
    Metric(name="batches", label="batches", higher_is_better=False, spec=",.0f"),
)

#: Returns the source of each sample that is drawn: (seed, samples).
Draw = Callable[[int, int], Sequence[int]]


def ours(seed: int, samples: int) -> Sequence[int]:
    """The sources of our sampler's first samples."""
    sampler = MixtureSampler([SOURCE_SAMPLES] * len(WEIGHTS), WEIGHTS, samples=samples, seed=seed)
    return [position // SOURCE_SAMPLES for position in sampler]


def huggingface(seed: int, samples: int) -> Sequence[int]:
    """Return the sources that interleave_datasets draws with probabilities."""
    from datasets import Dataset, interleave_datasets

    sources = [Dataset.from_dict({"source": [number] * SOURCE_SAMPLES}) for number in range(len(WEIGHTS))]
    mixed = interleave_datasets(sources, [*SHARES], seed=seed, stopping_strategy="all_exhausted")
    return list(mixed.select(range(samples))["source"])


def mosaic(directory: Path, method: str) -> Draw:
    """Return a function that draws as StreamingDataset with one stream a source, in batches of 100 samples."""

    def draw(seed: int, samples: int) -> Sequence[int]:
        from streaming import MDSWriter, Stream, StreamingDataset

        streams = []
        for number, share in enumerate(SHARES):
            local = directory / str(number)
            if not local.exists():
                with MDSWriter(out=str(local), columns={"source": "int"}) as writer:
                    for _ in range(SOURCE_SAMPLES):
                        writer.write({"source": number})
            streams.append(Stream(local=str(local), proportion=share))
        dataset = StreamingDataset(
            streams=streams,
            epoch_size=samples,
            batch_size=100,
            batching_method=method,
            shuffle=True,
            shuffle_seed=seed,
            num_canonical_nodes=1,
        )
        return [int(sample["source"]) for sample in islice(dataset, samples)]

    return draw


def deviations(sources: Sequence[int], window: int) -> dict[str, float]:
    """By how much the most deviating source differs from its share, over all windows."""
    drawn = np.asarray(sources)
    worst = np.zeros(len(drawn) - window + 1)
    for number, share in enumerate(SHARES):
        passed = np.concatenate([[0], np.cumsum(drawn == number)])
        worst = np.maximum(worst, abs(passed[window:] - passed[:-window] - window * share))
    return {"worst": float(worst.max()), "mean": float(worst.mean())}


def compare_windows(rounds: int, samples: int) -> Iterator[Comparison]:
    """One comparison for each window."""
    with tempfile.TemporaryDirectory() as directory:
        sides: dict[str, Draw] = {"dpflow": ours}
        if find_spec("datasets"):
            sides["HuggingFace interleave_datasets"] = huggingface
        if find_spec("streaming"):
            for method in ("random", "stratified"):
                sides[f"Mosaic Streaming, {method}"] = mosaic(Path(directory), method)
        drawn = {name: [draw(seed, samples) for seed in range(rounds)] for name, draw in sides.items()}
    for window in (one for one in WINDOWS if one < samples):
        found = {name: [deviations(sources, window) for sources in each] for name, each in drawn.items()}
        yield Comparison(
            benchmark="mixture", workload=f"windows of {window:,}", rounds=found, parameters={"weights": WEIGHTS}
        )


#: Returns the batches of each rank, each as the lengths of its samples: (lengths, seed).
Batches = Callable[[NDArray[np.float64], int], list[list[NDArray[np.float64]]]]


def our_batches(spread: float) -> Batches:
    """Return a function that makes the batches of our sampler for each rank."""

    def batches(lengths: NDArray[np.float64], seed: int) -> list[list[NDArray[np.float64]]]:
        return [
            [
                lengths[batch]
                for batch in BudgetBatchSampler(
                    lengths, BUDGET_S, spread=spread, num_replicas=RANKS, rank=rank, seed=seed
                )
            ]
            for rank in range(RANKS)
        ]

    return batches


def lhotse_batches(lengths: NDArray[np.float64], seed: int) -> list[list[NDArray[np.float64]]]:
    """Return the batches of lhotse's DynamicBucketingSampler."""
    from lhotse import CutSet
    from lhotse.dataset import DynamicBucketingSampler
    from lhotse.testing.dummies import dummy_cut

    cuts = CutSet.from_cuts(dummy_cut(number, duration=float(length)) for number, length in enumerate(lengths))
    return [
        [
            np.array([cut.duration for cut in batch])
            for batch in DynamicBucketingSampler(
                cuts,
                max_duration=BUDGET_S,
                num_buckets=BUCKETS,
                shuffle=True,
                seed=seed,
                world_size=RANKS,
                rank=rank,
                drop_last=False,
            )
        ]
        for rank in range(RANKS)
    ]


def waste(ranks: Sequence[Sequence[NDArray[np.float64]]]) -> dict[str, float]:
    """Padding, imbalance and fill of the ranks' batches."""
    cost = np.array(
        [[0.0 if batch is None else len(batch) * batch.max() for batch in step] for step in zip_longest(*ranks)]
    )
    samples = sum(float(batch.sum()) for rank in ranks for batch in rank)
    return {
        "padding": 1 - samples / cost.sum(),
        "imbalance": 1 - cost.sum() / (cost.max(axis=1).sum() * len(ranks)),
        "fill": float(cost[cost > 0].mean()) / BUDGET_S,
        "batches": float((cost > 0).sum()),
    }


def compare_budget(rounds: int, samples: int) -> Comparison:
    """Ours, by two spreads, and lhotse's on the same lengths."""
    lengths = np.random.default_rng(0).lognormal(2.0, 0.6, samples).clip(0.5, 35.0).round(3)
    sides: dict[str, Batches] = {"dpflow": our_batches(0.1), "dpflow, spread=0.03": our_batches(0.03)}
    if find_spec("lhotse"):
        sides[f"lhotse, {BUCKETS} buckets"] = lhotse_batches
    found = {name: [waste(batches(lengths, seed)) for seed in range(rounds)] for name, batches in sides.items()}
    parameters: dict[str, Any] = {"samples": samples, "budget_s": BUDGET_S, "ranks": RANKS}
    return Comparison(benchmark="mixture", workload=f"{samples:,} lengths", rounds=found, parameters=parameters)


def main() -> None:
    """Print the comparisons of the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("windows", "budget"), help="one of the two (default: both)")
    add_arguments(parser, rounds=3)
    arguments = parser.parse_args()
    shrink = 10 if arguments.quick else 1
    if arguments.part != "budget":
        publish(compare_windows(arguments.rounds, DRAWN // shrink), WINDOW_METRICS, arguments)
    if arguments.part != "windows":
        publish([compare_budget(arguments.rounds, LENGTHS // shrink)], BUDGET_METRICS, arguments)


if __name__ == "__main__":
    main()

"""Every sampler's epochs are uniform, and the test that says so can fail."""

import numpy as np
import pytest

from benchmarks.simulation.uniformity import Counts
from benchmarks.simulation.uniformity_study import SCENARIO_NAMES, judge

UNIFORM = ("independent", "coordl", "joader", "shared-log")
CONTROL = "dynagcs-letter"
PARTIAL = ("core", "windows")
#: As many as show that the control is not uniform; the long tests run a hundred times as many.
EPOCHS = 120


def count(orders: np.ndarray) -> Counts:
    counts = Counts(np.arange(orders.shape[1]))
    for order in orders:
        counts.add(order)
    return counts


def test_true_permutations_pass() -> None:
    rng = np.random.default_rng(1)
    verdict = count(np.array([rng.permutation(40) for _ in range(2000)])).verdict()
    assert verdict.failing_positions == verdict.failing_items == 0
    assert verdict.position_ratio == pytest.approx(1, abs=0.1)


def test_a_shuffle_buffer_fails_everywhere() -> None:
    rng = np.random.default_rng(1)
    orders = np.array([np.argsort(np.arange(40) + rng.uniform(0, 20, 40)) for _ in range(2000)])
    verdict = count(orders).verdict()
    assert verdict.failing_positions == verdict.failing_items == 1


def test_neighbours_that_come_together_are_found_where_each_place_is_uniform() -> None:
    rng = np.random.default_rng(1)
    true = count(np.array([rng.permutation(40) for _ in range(500)])).verdict()
    turned = count(np.array([np.roll(np.arange(40), rng.integers(40)) for _ in range(500)])).verdict()
    assert abs(true.pair_z) < 5
    assert turned.failing_positions == turned.failing_items == 0
    assert turned.pair_z > 100


def test_a_class_that_comes_early_shows_in_its_tenths() -> None:
    rng = np.random.default_rng(1)
    counts = Counts(np.arange(40), np.repeat([0, 1], 20))
    for _ in range(500):
        counts.add(np.concatenate([rng.permutation(20), 20 + rng.permutation(20)]))
    low, high = counts.verdict().share_range
    assert (low, high) == (0, 2)


def test_an_epoch_that_is_no_permutation_is_refused() -> None:
    counts = Counts(np.array([3, 5, 9]))
    counts.add(np.array([9, 3, 5]))
    for order in ([9, 3, 3], [9, 3], [9, 3, 4]):
        with pytest.raises(ValueError, match="no permutation"):
            counts.add(np.array(order))


#: All samplers where the control fails, and one in each scenario beside those; the long tests have all pairs.
PAIRS = [
    (sampler, scenario)
    for number, scenario in enumerate(SCENARIO_NAMES)
    for sampler in (UNIFORM if scenario in PARTIAL else (UNIFORM[number - 3],))
]


@pytest.mark.parametrize(("sampler", "scenario"), PAIRS)
def test_uniform_over_a_hundred_epochs(sampler: str, scenario: str) -> None:
    judgement = judge(sampler, scenario, epochs=EPOCHS, samples=100)
    # A perfect sampler is rejected somewhere in one run of twenty, and each cell is eight runs.
    assert judgement.failing_positions <= 0.1
    assert judgement.failing_items <= 0.1
    assert judgement.ratio_range == pytest.approx((1, 1), abs=0.15)
    assert abs(judgement.pair_z) < 5


@pytest.mark.parametrize("scenario", PARTIAL)
def test_the_control_fails(scenario: str) -> None:
    assert judge(CONTROL, scenario, epochs=EPOCHS, samples=100).failing_positions > 0.5


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sampler", UNIFORM)
@pytest.mark.parametrize("scenario", SCENARIO_NAMES)
def test_uniform_over_ten_thousand_epochs(sampler: str, scenario: str) -> None:
    # With equal sets no sampler that is blind to labels can fail, and Joader takes half an hour for it.
    epochs = 2_000 if sampler == "joader" and scenario not in PARTIAL else 10_000
    judgement = judge(sampler, scenario, epochs=epochs)
    assert judgement.failing_positions <= 0.01
    assert judgement.failing_items <= 0.01
    assert judgement.ratio_range == pytest.approx((1, 1), abs=0.02)
    assert abs(judgement.pair_z) < 5
    assert judgement.share_range == pytest.approx((1, 1), abs=0.02)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", PARTIAL)
def test_the_control_fails_over_ten_thousand_epochs(scenario: str) -> None:
    assert judge(CONTROL, scenario, epochs=10_000).failing_positions > 0.5

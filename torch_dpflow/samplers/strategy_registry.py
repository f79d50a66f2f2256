"""Sampling strategies by name."""

from torch_dpflow._core.checks import check_type
from torch_dpflow.errors import OptionError
from torch_dpflow.samplers.dynagcs_tree import DynaGCSGroup
from torch_dpflow.samplers.fixed_order import CoorDLGroup, IndependentGroup
from torch_dpflow.samplers.group import SamplingGroup
from torch_dpflow.samplers.joader import JoaderGroup
from torch_dpflow.samplers.shared_log import SharedLogGroup

#: Every strategy by its name.
STRATEGIES: dict[str, type[SamplingGroup]] = {
    group.strategy: group
    for group in (
        SharedLogGroup,
        DynaGCSGroup,
        JoaderGroup,
        CoorDLGroup,
        IndependentGroup,
    )
}


def sampling_group(strategy: str, size: int, *, capacity: int | None = None, seed: int = 0) -> SamplingGroup:
    """Make an empty sampling group, to be passed to samplers.

    Args:
        strategy: one of `STRATEGIES`.
        size, capacity, seed: see `SamplingGroup`.

    Raises:
        OptionError: no strategy has that name, or a number is out of range.
        OptionTypeError: an argument is of the wrong type.
    """
    return STRATEGIES[check_strategy(strategy)](size, capacity=capacity, seed=seed)


def check_strategy(strategy: str) -> str:
    """Return `strategy` if it is in `STRATEGIES`. Raises OptionError, or OptionTypeError if it is not text."""
    check_type("strategy", strategy, str, f"one of {[*STRATEGIES]}")
    if strategy not in STRATEGIES:
        names = ", ".join(map(repr, STRATEGIES))
        raise OptionError(f"strategy={strategy!r} is unknown; choose one of {names}")
    return strategy

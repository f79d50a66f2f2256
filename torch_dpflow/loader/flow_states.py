"""States of all ranks of a job that reads a shared flow, joined into the state of the whole job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch_dpflow.epoch.state import LoaderState
from torch_dpflow.errors import StateError


def join_flow_states(states: Sequence[LoaderState], rank: int) -> LoaderState:
    """Return the state with which a rank of any number of ranks resumes.

    For states of epochs whose order the flow's router decides: at least one of them has `shared`. States of ranks that
    have read nothing of the epoch count as empty. A rank resumes with the seeds of the state that has its number, or
    else with those of any other state.

    Args:
        states: one of each rank that there was, in any order.
        rank: of this process.

    Raises:
        StateError: the states are not of one epoch, or not of all ranks.
    """
    begun = [state for state in states if not state.fresh]
    routed = begun or [state for state in states if state.shared is not None]
    if not routed:
        raise StateError("the states have no position in a flow; give those of ranks that read one")
    ranks = [_rank_of(state) for state in begun]
    replicas = {count for _, count in ranks}
    if begun and (replicas != {len(states)} or len(set(ranks)) < len(begun)):
        raise StateError(
            f"{len(states)} states are given, of [rank, ranks] {[list(one) for one in sorted(ranks)]}; give one state "
            "of every rank that there was"
        )
    _check_epochs(states, routed)
    own = next((state for state, one in zip(begun, ranks) if one[0] == rank), routed[0])
    if not begun:
        return own
    shared: dict[str, Any] = own.shared or {}
    parts = [state.shared for state in begun]
    joined = {"seed": shared.get("seed"), "epoch": shared.get("epoch"), "replicas": len(states), "ranks": parts}
    return replace(own, shared=joined)


def _rank_of(state: LoaderState) -> tuple[int, int]:
    """Return the rank of a state in mid-epoch and the number of ranks. Raises StateError if it has none."""
    shared = state.shared
    if shared is None:
        raise StateError(
            "one of the states was taken in an epoch whose order the flow's router decided, and another one was not; "
            "give the states that the ranks of one job saved together"
        )
    rank = shared.get("rank", [])
    if rank is None:
        return 0, 1
    if not (isinstance(rank, list | tuple) and len(rank) == 2 and all(type(one) is int for one in rank)):
        raise StateError(
            f"one of the states has no rank of its own ({rank!r:.80}); give states that ranks saved, not joined ones"
        )
    return rank[0], rank[1]


def _check_epochs(states: Sequence[LoaderState], routed: Sequence[LoaderState]) -> None:
    """Raise StateError unless all states are of one epoch. A state before any epoch counts iterations only."""
    for name in ("seed", "epoch"):
        values = {repr((state.shared or {}).get(name)) for state in states if state.shared is not None}
        if len(values) > 1:
            raise StateError(
                f"the states are of several {name}s, {', '.join(sorted(values))}: what a rank read of an epoch that it "
                "has left is not in its state; give states that all ranks saved in the same epoch"
            )
    iterations = {state.epoch for state in states if state.shared is None} - {state.epoch for state in routed}
    if iterations:
        raise StateError(
            f"some states are of iteration {sorted(iterations)}, others of {sorted({one.epoch for one in routed})}; "
            "give states that all ranks saved in the same epoch"
        )

"""Draws the batches of a sampler for a shared flow, as far ahead as torch's loader draws them."""

from __future__ import annotations

from typing import Any

from torch_dpflow.cluster.client.plan_feed import PlanFeed
from torch_dpflow.epoch.progress import EpochProgress
from torch_dpflow.loader.batch_planner import interrupted_draw


class FlowPlanner:
    """Belongs to the training loop's thread. For a sampler whose order may change while its epoch is read.

    torch draws `prefetch_factor * num_workers` batches when an iteration begins and another one before it returns each;
    without workers it draws a batch when that is requested.

    Args:
        progress: of the epoch.
        ahead: batches that are drawn beyond those that were taken.
        batched: whether the sampler gives batches, and not single keys.
    """

    def __init__(self, progress: EpochProgress, *, ahead: int, batched: bool) -> None:
        self._progress = progress
        self._ahead = ahead
        self._batched = batched
        self._drawn = 0
        self._has_ended = False
        self.feed = PlanFeed()
        #: By number, the position in the plan of each batch that was drawn and not delivered.
        self.positions: dict[int, int] = {}
        self.draw_beyond(0)

    def draw_due(self, taken: int) -> None:
        """Draw the batch that is next after so many that were taken, if that was not done."""
        self._draw_to(taken + max(1, self._ahead))

    def draw_beyond(self, taken: int) -> None:
        """Draw ahead of so many that were taken. Raises what the sampler raises."""
        self._draw_to(taken + self._ahead)

    def _draw_to(self, goal: int) -> None:
        plan = self._progress.plan
        while self._drawn < goal and not self._has_ended:
            if plan.is_torn:  # what was drawn before is delivered
                self._end()
                return
            try:
                position, index = plan.peek()
                while self._progress.was_delivered(position):
                    plan.draw()
                    position, index = plan.peek()
            except StopIteration:
                self._end()
                return
            number = self._drawn
            self.positions[number] = position
            self.feed.put(number, self._keys(index))
            # No call until it is noted that the batch was drawn: Control-C comes before that or after it.
            self._drawn, plan.drawn, plan.held = number + 1, position + 1, []

    def check_end(self) -> None:
        """At the end of the epoch, raise WorkerError if an interruption ended it early."""
        if self._progress.plan.is_torn:
            raise interrupted_draw()

    def _end(self) -> None:
        self._has_ended = True
        self.feed.end()

    def _keys(self, index: Any) -> list[Any]:
        if not self._batched:
            return [index]
        try:
            return list(index)
        except KeyboardInterrupt:
            if iter(index) is index:  # what was read of it is lost
                self._progress.plan.is_torn = True
            raise

"""What a cache policy hears of a sampler's plans, and when."""

from dataclasses import replace
from typing import Literal

from torch_dpflow.caches.policy import Policy
from torch_dpflow.lookahead import Lookahead
from torch_dpflow.samplers.group import SamplingGroup

#: all that samplers know, nothing of the next epoch (as in the thesis), or nothing at all
Announce = Literal["next", "epoch", "nothing"]


class Announcer:
    """Tells a policy what changed: a job's order while it is open."""

    def __init__(self, group: SamplingGroup, policy: Policy, announce: Announce) -> None:
        self._group = group
        self._policy = policy
        self._announce = announce
        #: job in an epoch -> what was told last
        self._told: dict[str, Lookahead] = {}

    def epoch_started(self, job: str) -> None:
        self._tell(job, self._known(job))

    def drawn(self, job: str) -> None:
        """`job` was handed samples, which may settle what others read too."""
        for other in [name for name, told in self._told.items() if not told.complete]:
            self._tell(other, self._known(other))

    def left(self, job: str) -> None:
        self._told.pop(job, None)

    def _known(self, job: str) -> Lookahead:
        lookahead = self._group.lookahead(job)
        return lookahead if self._announce == "next" else replace(lookahead, following=None)

    def _tell(self, job: str, lookahead: Lookahead) -> None:
        self._told[job] = lookahead
        if self._announce != "nothing":
            self._policy.hint(job, lookahead)

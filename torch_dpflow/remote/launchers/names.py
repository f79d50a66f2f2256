"""Names of members: DNS labels, so that they serve as the name of a pod, an actor or a task and as a client's token."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch_dpflow.errors import OptionError

_NAME = re.compile(r"dpf-([0-9a-f]{8})-([0-9a-f]{10})-(0|[1-9][0-9]{0,5})-(0|[1-9][0-9]{0,17})", re.ASCII)


@dataclass(frozen=True)
class WorkerName:
    """Names one member for ever; `str` gives the text, `parse` reads it. Not to be reused, so incarnations only rise.

    Args:
        cluster: whose it is: 8 digits, hexadecimal.
        group: its fleet in the cluster: 10 digits, hexadecimal.
        number: its place in the fleet, below a million.
        incarnation: counts the fleet's members.

    Raises:
        OptionError: one of them is something else.
    """

    cluster: str
    group: str
    number: int
    incarnation: int

    def __post_init__(self) -> None:
        _match(str(self))

    def __str__(self) -> str:
        return f"{prefix_of(self.cluster, self.group)}{self.number}-{self.incarnation}"

    @classmethod
    def parse(cls, text: str) -> WorkerName:
        """Read a name. Raises OptionError if it is none."""
        cluster, group, number, incarnation = _match(text).groups()
        return cls(cluster, group, int(number), int(incarnation))

    @staticmethod
    def is_one(text: str) -> bool:
        """Whether a text is a name."""
        return _NAME.fullmatch(text) is not None


def prefix_of(cluster: str, group: str = "") -> str:
    """What the names of all members of a cluster, or of one of its fleets, begin with."""
    return f"dpf-{cluster}-{group}-" if group else f"dpf-{cluster}-"


def _match(text: str) -> re.Match[str]:
    match = _NAME.fullmatch(text)
    if match is None:
        raise OptionError(
            f"{text!r:.120} is no name of a member; give dpf-CLUSTER-GROUP-NUMBER-INCARNATION, where CLUSTER has 8 and "
            "GROUP 10 hexadecimal digits, NUMBER at most 6 digits and INCARNATION at most 18"
        )
    return match

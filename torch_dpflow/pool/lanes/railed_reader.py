"""Reads batches from servers that are reached over several network cards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

from torch_dpflow.pool.lanes.lane_reader import Content, LaneReader
from torch_dpflow.pool.lanes.pool_address import PoolAddress
from torch_dpflow.pool.lanes.rail_knocks import RailKnocks
from torch_dpflow.pool.lanes.rails import ServerRails
from torch_dpflow.pool.lanes.stream_lane import WantedRecord

#: After how long without a byte another rail is tried, seconds: longer than Linux' least retransmission timer.
_RAIL_SILENCE_S = 0.3


class RailedReader:
    """As `LaneReader`, from servers that have rails. What a rail that fails does not bring comes over another one.

    Records are dealt over the rails of a server by their bytes. A server that has one address is waited for as long as
    `LaneReader` waits; one that has more for 0.3 s, as long as there is another way to it. A rail that
    has failed is used again when it answers.

    Args:
        pool, silence_s: as for `LaneReader`.

    Raises OptionError: there are no keys.
    """

    def __init__(self, pool: PoolAddress, silence_s: float) -> None:
        self._patient = LaneReader(pool, silence_s)
        self._hasty = LaneReader(pool, min(silence_s, _RAIL_SILENCE_S), waits=False)
        self._knocks = RailKnocks(pool)
        #: Sets that a server has given up.
        self.gone = self._hasty.gone = self._patient.gone

    def read(
        self,
        identity: bytes,
        owners: Sequence[ServerRails],
        wanted: Sequence[WantedRecord],
        *,
        copy: bool = True,
    ) -> list[Content | None]:
        """Records of one set; None for those that have to be read from storage. Arguments as of `LaneReader.read`."""
        if all(len(one.together) + len(one.spare) == 1 for one in owners):
            return self._patient.read(identity, [one.together[0] for one in owners], wanted, copy=copy)
        rails = {rail for one in {*owners} for rail in (*one.together, *one.spare)}
        failed = {*self._knocks.silent(), *filter(self._hasty.has_failed, rails)}
        found = self._hasty.read(identity, self._deal(owners, wanted, failed), wanted, copy=copy)
        failed = self._hasty.failed
        self._knocks.failed(failed)
        for _ in range(
            2
        ):  # where no rail was quick enough, over all of them, and then over those that answer
            cut = [
                place
                for place, one in enumerate(owners)
                if found[place] is None and not failed.isdisjoint((*one.together, *one.spare))
            ]
            if cut:
                left = [wanted[place] for place in cut]
                rest = self._deal([owners[place] for place in cut], left, failed)
                for place, content in zip(cut, self._patient.read(identity, rest, left, copy=copy)):
                    found[place] = content
                failed = self._patient.failed
        return found

    def close(self) -> None:
        """Close all lanes; they are opened again where they are needed."""
        self._hasty.close()
        self._patient.close()
        self._knocks.close()

    def _deal(
        self, owners: Sequence[ServerRails], wanted: Sequence[WantedRecord], failed: Set[str]
    ) -> list[str]:
        """An address for each record: of the rails that work, the one with the fewest bytes in this batch.

        failed: rails that do not work.
        """
        dealt = Counter[str]()
        chosen = list[str]()
        for owner, one in zip(owners, wanted):
            working, spare = (
                [rail for rail in rails if rail not in failed] for rails in (owner.together, owner.spare)
            )
            chosen.append(min(working or spare[:1] or owner.together, key=dealt.__getitem__))
            dealt[chosen[-1]] += one.length or 1
        return chosen

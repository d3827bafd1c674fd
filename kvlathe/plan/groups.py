"""Group: lanes whose tokens live alike, in a hot tier where they arrive and in the cold
ones that they go on to.

A group has no number of another: which page lists there are follows from all groups
(index.py), so none can point to what does not exist.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.formats import Tier
from kvlathe.plan.json_fields import OneOf
from kvlathe.plan.lives import KEEP, LIVES, Life

MEND = "mend the method that made this plan"


@dataclass(frozen=True, slots=True)
class Group:
    """``lanes``: indices into ``CompressionPlan.lanes``. ``hot``: the number format of
    new tokens. ``cold``: those of full pages, as many as the life takes.

    Raises KvlatheError for what its life cannot have.
    """

    lanes: tuple[int, ...]
    hot: Tier
    cold: tuple[Tier, ...] = ()
    life: Annotated[Life, OneOf(LIVES)] = KEEP

    def __post_init__(self) -> None:
        count = len(self.cold)
        if count not in self.life.cold_tiers:
            raise self._refusal(
                f"a group that lives by {self.life.kind} has {count} cold tiers",
                f"it takes {' or '.join(map(str, self.life.cold_tiers))}",
            )
        if self.hot.is_coded:
            raise self._refusal(
                f"a group takes new tokens in {self.hot}",
                "hot tokens are 16 or 32 bit",
            )
        if len({*self.lanes}) != len(self.lanes):
            raise self._refusal(
                "a group holds a lane twice", "a lane has one place in a page"
            )
        chooses = self.life.drops and self.life.by_saliency
        for tier in self.cold:
            if chooses and (tier.k.along_tokens or tier.v.along_tokens):
                raise self._refusal(
                    f"a group drops tokens of {tier}",
                    "groups along the tokens cannot lose any: group along the rank",
                )

    def _refusal(self, fact: str, reason: str) -> KvlatheError:
        return KvlatheError(fact, reason, MEND)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The hot one, then the cold ones."""
        return (self.hot, *self.cold)

    def moved(self, by: int) -> Group:
        """The group where lanes are counted from lane ``by`` on."""
        return dataclasses.replace(self, lanes=tuple(lane - by for lane in self.lanes))

    @property
    def seals(self) -> bool:
        """Whether its full pages become cold as they are."""
        return bool(self.cold) and self.life.seals

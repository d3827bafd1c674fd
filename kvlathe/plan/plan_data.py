"""PlanData: the fields of a plan, data alone. plan.py checks it and has its file form,
index.py has all that follows from it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.json_fields import OneOf
from kvlathe.plan.stages import Stage
from kvlathe.plan.token_score import SCORES, TokenScore

SCHEMA_VERSION = 3
Fields = dict[str, Any]
"""A dataclass as JSON has it: values by the names of its fields."""


@dataclass(frozen=True)
class PlanData:
    """``lanes`` are sorted by (layer, head), one for each KV head of the model. Each one
    that is not removed is in one of the ``groups``, which say where its tokens are.

    ``compression`` and ``notes`` are for people and reports only: no code branches on
    them. ``page_tokens`` P and ``prefill_chunk`` (a multiple of P) fix when pages seal.
    ``score``: what ranks the tokens, where a life chooses among them; a prompt
    then stays hot until it, or a slice of it, ends and is ranked.
    ``stages``: the layers that a prompt passes one after the other, losing tokens in
    between; empty: one graph. A group's lanes are of one stage, so that it has one length.
    """

    model: ModelShape
    lanes: tuple[Lane, ...]
    groups: tuple[Group, ...]
    page_tokens: int = 64
    prefill_chunk: int = 512
    seed: int = 0
    score: Annotated[TokenScore, OneOf(SCORES)] | None = None
    stages: tuple[Stage, ...] = ()
    compression: str = "none"
    notes: Fields = dataclasses.field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    @property
    def is_part(self) -> bool:
        """Whether it is what one rank keeps, which may be nothing of a group."""
        return False

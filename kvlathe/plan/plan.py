"""CompressionPlan: what every head keeps, in which number formats, and how its tokens
live.

Methods write a plan; fold, layout, graph, engines and runtime read it, and none of them
knows which method wrote it. Data and its file form: what follows from it is in
``plan.index`` (index.py). This module imports the standard library alone, so that every
part may read a plan.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

from kvlathe.base.errors import KvlatheError
from kvlathe.plan import json_fields
from kvlathe.plan.check import check
from kvlathe.plan.index import PlanIndex
from kvlathe.plan.plan_data import SCHEMA_VERSION, PlanData
from kvlathe.plan.stages import Stage

WARNINGS = ("ranks", "rope", "reach", "uncentred")
"""Names of the notes that warn: no rank was lowered, RoPE differs from transformers,
sequences may be longer than those that forms were chosen on, and nothing is centred.
A build logs them; the report and ``kvlathe inspect`` show them."""

SEARCHED = "searched"
"""Name of the note that says what a build searched for, and what it found."""


@dataclass(frozen=True)
class CompressionPlan(PlanData):
    """Everything downstream needs to know (PlanData has the fields). Raises KvlatheError
    for a plan that breaks a rule of check.py."""

    def __post_init__(self) -> None:
        check(self)

    @cached_property
    def index(self) -> PlanIndex:
        """All that is derived from the plan."""
        return PlanIndex(self)

    def part(self, stage: int) -> CompressionPlan:
        """The plan of one stage alone: its layers, lanes and groups, counted from 0.
        Pages are laid out as in the whole plan, so its graph reads and fills the same
        ones."""
        if not self.stages:
            return self
        layers = self.index.layers_of(stage)
        first = self.model.lanes_before(layers[0])
        end = self.model.lanes_before(layers[-1] + 1)
        lanes = [
            dataclasses.replace(lane, layer=lane.layer - layers[0])
            for lane in self.lanes[first:end]
        ]
        groups = [
            group.moved(first)
            for group in self.groups
            if self.lanes[group.lanes[0]].layer in layers
        ]
        return dataclasses.replace(
            self,
            model=self.model.part(layers),
            lanes=tuple(lanes),
            groups=tuple(groups),
            stages=(Stage(0),),
        )

    # -- file form ---------------------------------------------------------------------
    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> CompressionPlan:
        """Raises KvlatheError for another schema version or a malformed plan."""
        try:
            raw = json_fields.parse(text)
        except ValueError as error:
            raise _malformed(error) from error
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        if version != SCHEMA_VERSION:
            raise KvlatheError(
                f"the plan has schema version {version}",
                f"this kvlathe reads version {SCHEMA_VERSION}",
                "build the engine again",
            )
        try:
            return json_fields.read(cls, raw, "plan")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise _malformed(error) from error

    @property
    def digest(self) -> str:
        """SHA-256 over everything that changes results (not over notes)."""
        raw = dataclasses.asdict(self)
        raw.pop("notes")
        return hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()


def graph_files(plan: CompressionPlan) -> tuple[str, ...]:
    """Names of the ONNX files, one for each graph."""
    if not plan.stages:
        return ("model.onnx",)
    return tuple(f"model.g{stage}.onnx" for stage in range(len(plan.stages)))


def _malformed(error: Exception) -> KvlatheError:
    return KvlatheError(
        "the plan cannot be read",
        f"it is malformed ({error})",
        "build the engine again",
    )


@dataclass(frozen=True)
class ShardPlan(CompressionPlan):
    """The whole plan, in which the lanes of other shards are removed.

    So lanes, groups and buckets have the numbers that they have everywhere.
    ``model.query_heads`` counts as many query heads for each KV head as this shard has
    for any: others are filled up with heads of zeros. ``strides``: bytes of a page of
    each bucket, at least. They are those of the shard with most, so that one page table
    is right for all shards.
    """

    shard: int = 0
    num_shards: int = 1
    strides: tuple[int, ...] = ()

    @property
    def is_part(self) -> bool:
        return True

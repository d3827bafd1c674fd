"""Plans with stages, of lathe-5m, and what every session that runs them is held
against: the graphs of their stages on the CPU."""

from __future__ import annotations

import atexit
import dataclasses
import shutil
import tempfile
from collections.abc import Sequence as Items
from functools import cache
from pathlib import Path

from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import fold
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.onnx.model import export_onnx
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.lives import Budget
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.stages import Stage
from kvlathe.plan.token_score import ObservationWindow
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.scheduling.prompt import Staged
from kvlathe.runtime.sessions.host.onnx import OrtSession
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.support.runtime_cases import LIMITS, MODEL, model_shape, plan_for, text

SHAPE = model_shape()
LANES = SHAPE.kv_heads
EIGHT = ObservationWindow(last=8, accumulated=False)
THREE = (Stage(0), Stage(1, 192), Stage(3, 128))
"""A prompt of 300 tokens loses 108 rows after a layer, and 64 after two more."""


def lanes_of(stages: Items[Stage]) -> list[tuple[int, ...]]:
    """The lanes of each stage."""
    firsts = [stage.first_layer for stage in stages]
    ends = [*firsts[1:], SHAPE.layers]
    return [
        tuple(range(first * LANES, end * LANES))
        for first, end in zip(firsts, ends, strict=True)
    ]


def budgeted_stages(cold: Tier | None = None) -> CompressionPlan:
    """Even and odd heads of each stage keep budgets of their own, hot or sealed."""
    hot = Tier(16, 16)
    groups = [
        Group(part, hot, () if cold is None else (cold,), life)
        for lanes in lanes_of(THREE)
        for part, life in (
            (lanes[::2], Budget(128, recent=16)),
            (lanes[1::2], Budget(192)),
        )
    ]
    whole = plan_for(SHAPE, (Group(tuple(range(SHAPE.layers * LANES)), hot),))
    return dataclasses.replace(
        whole,
        groups=tuple(groups),
        stages=THREE,
        score=EIGHT,
        prefill_chunk=128,
    )


PLANS = {
    "budget": budgeted_stages(),
    "sealed budget": budgeted_stages(Tier(8, 8, "rank", "rank")),
}


@cache
def folder_of(plan_text: str) -> Path:
    """The shipped small model under a plan, exported."""
    folder = Path(tempfile.mkdtemp(prefix="kvlathe-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    checkpoint, plan = Checkpoint(MODEL), CompressionPlan.from_json(plan_text)
    export_onnx(checkpoint.spec, plan, fold(checkpoint, plan, Basis()), folder)
    return folder


def engine(
    plan: CompressionPlan, kind: type[OrtSession] = OrtSession, tokens: int = 6000
) -> LLM:
    """The graphs on the CPU."""
    size = 4 * tokens * SHAPE.layers * SHAPE.kv_heads * 2 * SHAPE.head_dim + (
        1 << 22
    )  # a prompt is whole until it ends
    session = kind(folder_of(plan.to_json()), plan, LIMITS, size, threads=1)
    return LLM(session, plan, LIMITS, Tokenizer(MODEL), size)


def rows_that_stay(llm: LLM, ids: Items[int]) -> list[Items[int]]:
    """Their places in a prompt, pass by pass."""
    sequence = llm.sequence(list(ids), SamplingParams(max_new_tokens=1))
    llm.engine.scheduler.add(sequence)
    found: list[Items[int]] = []
    while not sequence.finish_reason:
        path = sequence.path
        if isinstance(path, Staged) and not path.computed:
            found.append(path.places(0, path.count))
        llm.engine.step()
    return found


def the_same_rows_stay(ours: LLM, theirs: LLM) -> None:
    """But where two are equally salient to 16 bit."""
    ids = text(300)
    found, expected = (rows_that_stay(llm, ids) for llm in (ours, theirs))
    assert [len(rows) for rows in found] == [300, 192, 128]
    for mine, other in zip(found, expected, strict=True):
        assert len(set(mine) & set(other)) >= 0.98 * len(other)
        assert list(mine) == sorted(mine)
        assert list(mine[-8:]) == list(range(292, 300))


def neighbours_change_nothing(single: LLM, together: LLM, most: int = 16) -> None:
    """Each request arrives while others are at some stage or decoding, and gets the
    answer that it gets alone."""
    params = SamplingParams(max_new_tokens=most, temperature=0.0, ignore_eos=True)
    sizes = ((300, 0), (50, 900), (330, 300), (140, 40))
    prompts = [list(text(n, start)) for n, start in sizes]
    alone = [single.generate([prompt], params)[0].token_ids for prompt in prompts]
    sequences = [together.sequence(list(prompt), params) for prompt in prompts]
    for i, sequence in enumerate(sequences):
        together.engine.scheduler.add(sequence)
        for _ in range(i + 1):
            together.engine.step()
    while not all(sequence.finish_reason for sequence in sequences):
        together.engine.step()
    assert [sequence.answer for sequence in sequences] == alone
    assert together.pool.bytes_in_use == 0

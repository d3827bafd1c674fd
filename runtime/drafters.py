"""Drafters by name: they guess the next tokens of an engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from kvlathe.base import devices
from kvlathe.base.errors import KvlatheError
from kvlathe.plan.engine_folder import open_engine
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan, ShardPlan
from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.drafting.draft_model import DraftModel
from kvlathe.runtime.drafting.lookup import PromptLookup
from kvlathe.runtime.loading import Wanted, load_session
from kvlathe.runtime.scheduling.engine import Engine
from kvlathe.runtime.scheduling.parts.speculation import Drafter
from kvlathe.runtime.scheduling.scheduler import Scheduler
from kvlathe.runtime.text.tokenizer import Tokenizer

NGRAM = "ngram"
"""Prompt look-up, as vLLM calls it."""

THREADS = 1
"""Threads of a draft engine. Threads of two engines would wait for work beside each
other, and take each other's time."""


def check_speculation(plan: CompressionPlan) -> None:
    """Raises KvlatheError where guesses that are wrong would leave something behind."""
    if plan.index.ranked:
        fact = "its plan ranks tokens, and wrong guesses would rank among them"
        remedy = (
            "leave --speculative out, or build with a compression that ranks no tokens"
        )
    elif any(plan.model.states):
        fact = "its layers keep states, and a wrong guess would stay in them"
        remedy = "leave --speculative out"
    elif isinstance(plan, ShardPlan):
        fact = "it is spread over several GPUs"
        remedy = "leave --speculative out, or run it on one GPU"
    else:
        return
    raise KvlatheError("this engine cannot speculate", fact, remedy)


def drafter(name: str | Path, engine: Engine, tokenizer: Tokenizer) -> Drafter:
    """Make the drafter ``name`` for an engine. Raises KvlatheError where the engine
    cannot have one."""
    check_speculation(engine.pool.plan)
    if name == NGRAM:
        return PromptLookup()
    if "samples" in engine.session.capabilities:
        raise KvlatheError(
            f"{name} cannot guess for this engine",
            "draft engines run on the CPU alone, and it runs on a GPU",
            f"use {NGRAM}",
        )
    size = engine.pool.plan.model.vocab_size
    most = engine.scheduler.limits.max_batch_size
    return DraftModel(draft_engine(Path(name), tokenizer, size, most))


def draft_engine(
    folder: Path, tokenizer: Tokenizer, vocab_size: int, sequences: int
) -> Engine:
    """An engine that guesses for one with ``tokenizer`` and logits of ``vocab_size``
    tokens, for up to ``sequences`` at once. Raises KvlatheError where its tokens are
    others: models of one family may be padded to other sizes."""
    opened = open_engine(folder, deep=True)
    check_speculation(opened.plan)
    same_words = Tokenizer(folder).backend.get_vocab() == tokenizer.backend.get_vocab()
    if not same_words or opened.plan.model.vocab_size != vocab_size:
        raise KvlatheError(
            f"{folder} cannot guess for this engine",
            "it has another vocabulary",
            "build a smaller model of the same family",
        )
    layout = CacheLayout(opened.plan)
    limits = opened.manifest.limits
    count = min(sequences, limits.max_batch_size)
    size = (count + 1) * layout.bytes_for(limits.max_seq_len)
    wanted = Wanted("cpu", 1, devices.GPU_MEMORY_UTILIZATION, size, THREADS)
    found = load_session(opened, opened.manifest, wanted)
    pool = PagePool(layout, found.cache_bytes)
    limits = dataclasses.replace(limits, max_batch_size=count)
    return Engine(found.session, pool, Scheduler(pool, found.session, limits), ())

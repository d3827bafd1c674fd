"""Drafters by name: they guess the next tokens of an engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from kvlathe.base import devices
from kvlathe.base.errors import KvlatheError
from kvlathe.plan.engine_folder import EngineFolder, open_engine
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.memory import states_room
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.drafting.draft_model import DraftModel
from kvlathe.runtime.drafting.guessing_layer import GuessingLayer
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
        raise KvlatheError(
            "this engine cannot speculate",
            "its plan ranks tokens, and wrong guesses would rank among them",
            "leave --speculative out, or build with a compression that ranks no tokens",
        )


def drafter(name: str | Path, engine: Engine, tokenizer: Tokenizer) -> Drafter:
    """Make the drafter ``name`` for an engine. Raises KvlatheError where the engine
    cannot have one."""
    check_speculation(engine.pool.plan)
    if name == NGRAM:
        return PromptLookup()
    opened = open_engine(Path(name), deep=True)
    guessing = draft_engine(opened, tokenizer, engine)
    if not opened.manifest.reads_hidden:
        return DraftModel(guessing)
    _check_hidden(opened, guessing, engine)
    return GuessingLayer(guessing)


def _check_hidden(opened: EngineFolder, guessing: Engine, large: Engine) -> None:
    """Raises KvlatheError where a layer that guesses cannot have what it reads."""
    fact = f"{opened.path} cannot guess for this engine"
    remedy = "build both from the same checkpoint, for the same backend"
    models = opened.plan.model, large.pool.plan.model
    own, theirs = (model.hidden_size for model in models)
    if own != theirs:
        reason = f"it reads hidden states of {own} numbers, and those have {theirs}"
        raise KvlatheError(fact, reason, remedy)
    able = large.session.capabilities
    if "hidden_states" not in able:
        reason = (
            "that engine was built without hidden states, or runs where it has none"
        )
        raise KvlatheError(fact, reason, remedy)
    if ("samples" in able) != ("samples" in guessing.session.capabilities):
        reason = "one of them computes on a GPU, the other on the CPU"
        raise KvlatheError(fact, reason, remedy)


def draft_engine(opened: EngineFolder, tokenizer: Tokenizer, large: Engine) -> Engine:
    """An engine that guesses for the ``large`` one with ``tokenizer``: on a GPU where
    it was built for one. Its cache holds about as many tokens as the large one's. Raises
    KvlatheError where its tokens are others: models of one family may be padded to other
    sizes."""
    folder = opened.path
    check_speculation(opened.plan)
    same_words = Tokenizer(folder).backend.get_vocab() == tokenizer.backend.get_vocab()
    sizes = {one.model.vocab_size for one in (opened.plan, large.pool.plan)}
    if not same_words or len(sizes) > 1:
        raise KvlatheError(
            f"{folder} cannot guess for this engine",
            "it has another vocabulary",
            "build a smaller model of the same family",
        )
    layout = CacheLayout(opened.plan)
    limits = opened.manifest.limits
    count = min(large.scheduler.limits.max_batch_size, limits.max_batch_size)
    longest = limits.max_seq_len
    held = large.pool.arena_bytes // large.pool.layout.bytes_for(longest)
    size = (min(count, held) + 1) * layout.bytes_for(longest)
    size += states_room(layout, limits.max_batch_size)
    device = None if opened.manifest.backend == "cuda" else "cpu"
    wanted = Wanted(device, 1, devices.GPU_MEMORY_UTILIZATION, size, THREADS)
    found = load_session(opened, opened.manifest, wanted)
    pool = PagePool(layout, found.cache_bytes)
    limits = dataclasses.replace(limits, max_batch_size=count)
    engine = Engine(found.session, pool, Scheduler(pool, found.session, limits), ())
    engine.memory = found.memory
    return engine

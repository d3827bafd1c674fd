"""Measure a plan against the uncompressed model, on held-out text and on exercises."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from kvlathe.base import machine
from kvlathe.base.console import human_bytes, log, progress
from kvlathe.export.methods.composition import CacheSettings, Made, compose
from kvlathe.export.methods.compression import UNCOMPRESSED
from kvlathe.export.methods.options import RankOptions
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.memory import free_bytes
from kvlathe.export.model.tensors import stored_shapes
from kvlathe.measuring.layerwise import BothModels, Work
from kvlathe.measuring.losses import Rows, Sums, exercise_sums, text_sums
from kvlathe.measuring.paged import PagedDecoder
from kvlathe.measuring.sequences import LENGTHS, Group, groups, short
from kvlathe.plan.measurement import Measurement, listed
from kvlathe.plan.plan import CompressionPlan
from kvlathe.tasks.held_out import HeldOut

SEALED = "whole sequences, pages read as they are sealed"
PAGED = "the engine's own pages, tokens ranked as it will rank them"
WHOLE_SHARE = 0.3
"""Share of the time in which the uncompressed model reads all sequences, where the plan
goes through pages afterwards."""
MODEL_SHARE = 0.6
"""Share of the memory that the whole model may take."""
MEMORY_SHARE = 0.25
"""Share of the memory that the longest window's activations may take."""


def measure(
    checkpoint: Checkpoint,
    made: Made,
    held_out: HeldOut,
    seconds: float,
    seed: int = 0,
    brief: bool = False,
) -> Measurement | None:
    """The losses of ``made`` (a plan and its basis) in at most about ``seconds``: at
    1,024 and 4,096 tokens and at the longest length that time and memory allow.
    ``brief``: on a single short window, for a plan that removes nothing. None, with a
    warning, for a plan that ranks tokens of a model that does not fit."""
    started = time.monotonic()
    plan = made[0]
    served = checkpoint.spec.max_seq_len
    longest = min(served, max(LENGTHS[0], _fitting(checkpoint)))
    pages = plan.index.ranked or bool(plan.stages)
    if pages and not _whole_fits(checkpoint):
        return None
    wanted = partial(groups, ranked=pages, seed=seed)
    every = short(held_out, longest) if brief else wanted(held_out, longest)
    whole = uncompressed(checkpoint, plan)
    if pages:
        models = BothModels(checkpoint, whole, None)
        sums = _through_pages(models, made, every, seconds)
    else:
        models = BothModels(checkpoint, whole, made)
        works = models.run(every, seconds)
        sums = _added((work, _sums(models, work, None)) for work in works)
    lengths = [group.tokens for group in every]
    left_out = "" if brief else _left_out(lengths, list(sums), served, longest)
    return Measurement(
        tuple(one.loss(tokens) for tokens, one in sums.items()),
        held_out.described,
        PAGED if pages else SEALED,
        left_out,
        time.monotonic() - started,
        is_idle=bool(left_out) and _is_idle(plan, whole[0], max(sums)),
    )


def _is_idle(plan: CompressionPlan, whole: CompressionPlan, tokens: int) -> bool:
    """Whether tokens leave the cache of ``plan``, beside those that the model's own
    windows pass in ``whole``, but none before the last of ``tokens`` is read."""
    own = set(plan.index.lives) - set(whole.index.lives)
    limits = [life.most for life in own if life.drops]
    limits += [stage.tokens for stage in plan.stages[1:]]
    return bool(limits) and tokens <= min(limits) + plan.page_tokens


def _through_pages(
    models: BothModels, made: Made, every: Sequence[Group], seconds: float
) -> dict[int, Sums]:
    """The losses of a plan that ranks tokens, group by group while there is time."""
    deadline = time.monotonic() + seconds
    works = models.run(every, seconds * WHOLE_SHARE)
    longest = max(work.group.tokens for work in works)
    decoder = PagedDecoder(models.checkpoint, made, longest)
    done: list[tuple[Work, Sums]] = []
    rate = 0.0  # seconds a token
    for work in progress(works, "measuring through pages"):
        started = time.monotonic()
        if done and started + rate * work.group.read > deadline:
            continue
        done.append((work, _sums(models, work, decoder)))
        took = time.monotonic() - started
        rate = max(rate, took / work.group.read)
    return _added(done)


def _added(done: Iterable[tuple[Work, Sums]]) -> dict[int, Sums]:
    """Sums by length, shortest first, of lengths that have a text."""
    sums: dict[int, Sums] = {}
    for work, own in done:
        tokens = work.group.tokens
        sums[tokens] = sums.get(tokens, Sums()) + own
    return {tokens: one for tokens, one in sorted(sums.items()) if one.rows}


def uncompressed(checkpoint: Checkpoint, plan: CompressionPlan) -> Made:
    """The plan of the model as it is, cached in the numbers and pages of ``plan``'s
    fresh tokens."""
    spec = checkpoint.spec
    bits: Literal[16, 32] = 32 if plan.index.hot_bits == 32 else 16
    settings = CacheSettings(
        bits, plan.page_tokens, plan.prefill_chunk, layer_windows=spec.windows
    )
    options = RankOptions()
    has_rope = spec.rope is not None
    return compose(UNCOMPRESSED, spec.shape, has_rope, None, options, settings)


def _whole_fits(checkpoint: Checkpoint) -> bool:
    """Whether the whole model fits in float32: only so do tokens pass pages."""
    weights = sum(math.prod(shape) for shape in stored_shapes(checkpoint.spec).values())
    need, memory = 4 * weights, _memory(checkpoint)
    if need <= MODEL_SHARE * memory:
        return True
    log.warning(
        "the plan is not measured: it ranks tokens, so the whole model must be in memory, "
        "which takes %s of %s",
        human_bytes(need),
        human_bytes(memory),
    )
    return False


def _memory(checkpoint: Checkpoint) -> int:
    """Bytes of the checkpoint's device: all of a host, and what may be taken of a
    GPU."""
    if checkpoint.device.type == "cuda":
        return free_bytes(checkpoint.device)
    return machine.memory_bytes()


def _fitting(checkpoint: Checkpoint) -> int:
    """Tokens of a sequence whose activations in a layer take MEMORY_SHARE of memory."""
    spec = checkpoint.spec
    heads = spec.head_dim * (spec.query_heads + 2 * spec.kv_heads)
    numbers = 4 * spec.hidden_size + 3 * spec.family.intermediate_size + 4 * heads
    return int(MEMORY_SHARE * _memory(checkpoint) / (4 * numbers))


def _left_out(
    wanted: Sequence[int], measured: Sequence[int], served: int, longest: int
) -> str:
    """The lengths that were not measured, in words."""
    missing = sorted(set(wanted) - set(measured))
    said = [f"{tokens:,}" for tokens in missing]
    parts = [f"no time for {listed(said)} tokens"] if said else []
    if longest < served:
        parts.append(f"no memory for more than {longest:,} of {served:,} tokens")
    return ", ".join(parts)


# -- sums ------------------------------------------------------------------------------
@torch.inference_mode()
def _sums(models: BothModels, work: Work, decoder: PagedDecoder | None) -> Sums:
    """The sums of a group, all of its passages together. ``decoder``: what computes the
    plan's logits; None: they were computed beside the others."""
    vocabulary = models.checkpoint.spec.vocab_size
    total = Sums()
    for passage, running, near in zip(
        work.group.passages, work.whole, work.near, strict=True
    ):
        device = running.hidden.device
        rows = torch.tensor(passage.rows, device=device)
        targets = torch.tensor(passage.targets, device=device)
        whole = partial(_logits, models, running.hidden, rows)
        if decoder is not None:
            paged = decoder.logits(passage.ids, passage.rows)
            planned: Rows = partial(_block, torch.from_numpy(paged), device)
        else:
            assert running.planned is not None
            planned = partial(_logits, models, running.planned, rows)
        if near is None:
            total += text_sums(whole, planned, targets, vocabulary)
            continue
        assert passage.near is not None
        alone = partial(_logits, models, near.hidden, rows - passage.near)
        total += exercise_sums(whole, alone, planned, targets, vocabulary)
    return total


def _logits(models: BothModels, hidden: Tensor, rows: Tensor, block: slice) -> Tensor:
    return models.head(hidden[rows[block]])


def _block(logits: Tensor, device: torch.device, block: slice) -> Tensor:
    return logits[block].to(device)

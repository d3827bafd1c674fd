"""Measure a plan against the uncompressed model, on held-out text and on exercises."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kvlathe.base import machine
from kvlathe.export.methods.composition import CacheSettings, Made, compose
from kvlathe.export.methods.compression import UNCOMPRESSED
from kvlathe.export.methods.options import RankOptions
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.measuring.layerwise import BothModels, Work
from kvlathe.measuring.losses import Sums, exercise_sums, text_sums
from kvlathe.measuring.sequences import LENGTHS, groups, short
from kvlathe.plan.measurement import Measurement
from kvlathe.tasks.held_out import HeldOut

MEMORY_SHARE = 0.25
"""Share of the memory that the longest window's activations may take."""


def measure(
    checkpoint: Checkpoint,
    made: Made,
    held_out: HeldOut,
    seconds: float,
    seed: int = 0,
    brief: bool = False,
) -> Measurement:
    """The losses of ``made`` (a plan and its basis) in at most about ``seconds``: at
    1,024 and 4,096 tokens and at the longest length that time and memory allow.
    ``brief``: on a single short window, for a plan that removes nothing."""
    started = time.monotonic()
    plan = made[0]
    served = checkpoint.spec.max_seq_len
    longest = min(served, max(LENGTHS[0], _fitting(checkpoint)))
    every = [short(held_out, longest)]
    if not brief:
        every = groups(held_out, longest, plan.index.ranked, seed)
    whole = uncompressed(checkpoint, plan.index.hot_bits)
    models = BothModels(checkpoint, whole, made)
    works = models.run(every, seconds)
    sums: dict[int, Sums] = {}
    for work in works:
        tokens = work.group.tokens
        sums[tokens] = sums.get(tokens, Sums()) + _sums(models, work)
    sums = {tokens: one for tokens, one in sorted(sums.items()) if one.rows}
    lengths = tuple(one.loss(tokens) for tokens, one in sums.items())
    wanted = [group.tokens for group in every]
    left_out = "" if brief else _left_out(wanted, list(sums), served, longest)
    return Measurement(
        lengths,
        held_out.described,
        "whole sequences, pages read as they are sealed",
        left_out,
        time.monotonic() - started,
    )


def uncompressed(checkpoint: Checkpoint, bits: int) -> Made:
    """The plan of the model as it is, cached in ``bits`` bits a number as the plan's
    fresh tokens are."""
    spec = checkpoint.spec
    settings = CacheSettings(32 if bits == 32 else 16, layer_windows=spec.windows)
    options = RankOptions()
    has_rope = spec.rope is not None
    return compose(UNCOMPRESSED, spec.shape, has_rope, None, options, settings)


def _fitting(checkpoint: Checkpoint) -> int:
    """Tokens of a sequence whose activations in a layer take MEMORY_SHARE of memory."""
    spec = checkpoint.spec
    heads = spec.head_dim * (spec.query_heads + 2 * spec.kv_heads)
    numbers = 4 * spec.hidden_size + 3 * spec.family.intermediate_size + 4 * heads
    device = checkpoint.device
    memory = machine.memory_bytes()
    if device.type == "cuda":
        memory = torch.cuda.mem_get_info(device)[0]
    return int(MEMORY_SHARE * memory / (4 * numbers))


def _left_out(
    wanted: Sequence[int], measured: Sequence[int], served: int, longest: int
) -> str:
    """Which lengths were not measured, in words."""
    missing = sorted(set(wanted) - set(measured))
    said = [f"{tokens:,}" for tokens in missing]
    parts = [f"no time for {' and '.join(said)} tokens"] if said else []
    if longest < served:
        parts.append(f"no memory for more than {longest:,} of {served:,} tokens")
    return ", ".join(parts)


# -- sums ------------------------------------------------------------------------------
@torch.inference_mode()
def _sums(models: BothModels, work: Work) -> Sums:
    """What a group says, all of its passages together."""
    vocabulary = models.checkpoint.spec.vocab_size
    total = Sums()
    for passage, running, near in zip(
        work.group.passages, work.whole, work.near, strict=True
    ):
        rows = torch.tensor(passage.rows, device=running.hidden.device)
        targets = torch.tensor(passage.targets, device=running.hidden.device)
        assert running.planned is not None
        whole = partial(_logits, models, running.hidden, rows)
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

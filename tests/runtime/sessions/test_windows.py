"""Laws of windows through the model: transformers with the same mask, any schedule,
neighbours, the length of the window, and the scores of a plan that has no engine."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.search import sealed
from kvlathe.plan.groups import Group
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import Window
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.support.nightly import rest_nightly
from tests.support.runtime_cases import (
    BACKENDS,
    HOT,
    LIMITS,
    MODEL,
    TorchSession,
    at_once,
    forced,
    llm,
    model_shape,
    plan_for,
    plans,
    text,
)

Floats = npt.NDArray[np.float32]
PAGE = 64
WINDOWS = (Window(PAGE, 2 * PAGE), Window.of_tokens(100, PAGE))
"""The windows of the two KV heads, in all layers."""


def plan_of(windows: tuple[Window, ...]) -> CompressionPlan:
    shape = model_shape()
    every = range(shape.layers * shape.kv_heads)
    groups = [Group(tuple(every[i::2]), HOT, life=x) for i, x in enumerate(windows)]
    return plan_for(shape, tuple(groups))


def llm_of(plan: CompressionPlan) -> LLM:
    decoder = decoder_from(Checkpoint(MODEL), plan, Basis())
    size = 100 * max(CacheLayout(plan).page_stride)
    session = TorchSession(decoder, size)
    return LLM(session, plan, LIMITS, Tokenizer(MODEL), size)


@cache
def transformers_logits(tokens: int) -> Floats:
    """Plain attention with a mask of each head's own: position by position, what its
    window shows."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation="eager")
    shape = model_shape()
    seen = torch.zeros(shape.kv_heads, tokens, tokens, dtype=torch.bool)
    for head, window in enumerate(WINDOWS):
        for p in range(tokens):
            first = p - window.exact + 1
            if not window.exact:
                first = (p // PAGE - window.recent // PAGE) * PAGE
            seen[head, p, max(0, first) : p + 1] = True
            seen[head, p, : min(p + 1, window.sink)] = True
    mask = torch.full(seen.shape, torch.finfo(torch.float32).min)
    mask = mask.masked_fill(seen, 0.0).repeat_interleave(shape.group_size, 0)
    with torch.inference_mode():
        out = model.float()(torch.tensor([text(tokens)]), attention_mask=mask[None])
    return out.logits[0].numpy()


@pytest.mark.parametrize("sizes", [(700,), (512, 188), (64, 1, 1, 190, 256, 300)])
def test_windows_are_transformers_with_their_mask(sizes: tuple[int, ...]) -> None:
    (found,) = forced(llm_of(plan_of(WINDOWS)), [text(700)], [(n,) for n in sizes])
    expected = transformers_logits(700)[: len(found)]
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)
    plain = at_once(700)[: len(found)]
    assert np.abs(plain - expected).max() > 0.1


@pytest.mark.parametrize("window", [Window(0, 1 << 20), Window.of_tokens(1 << 20, 64)])
def test_a_window_longer_than_the_sequence_changes_nothing(window: Window) -> None:
    schedule = [(512,), (64,), *[(1,)] * 4]
    (found,) = forced(llm_of(plan_of((window, window))), [text(580)], schedule)
    (plain,) = forced(llm("torch", "one"), [text(580)], schedule)
    np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "backend"),
    rest_nightly(
        itertools.product(["windowed", "sealed windows"], BACKENDS),
        ("windowed", "torch"),
        ("sealed windows", "onnx"),
    ),
)
def test_neither_schedule_nor_neighbours_change_an_answer(
    kind: str, backend: str
) -> None:
    """Chunks of any size on the grid of the plan, alone or side by side, and pages that
    leave in between."""
    engine = llm(backend, kind)
    texts = [text(700), text(530, 900), text(40, 2000)]
    at_once_grid = [(512, 472, 40), (188, 40, 0), (0, 18, 0)]
    pieces = [(100, 512, 1), (412, 1, 1), (60, 17, 38), (128, 0, 0)]
    together = [forced(engine, texts, schedule) for schedule in (at_once_grid, pieces)]
    alone = [forced(engine, [one], [(512,), (188,)])[0] for one in texts]
    rms, most = (1e-4, 1e-3) if kind == "windowed" else (1e-3, 2e-2)
    for one, two, own in zip(*together, alone, strict=True):
        for found in (one, two):
            difference = np.abs(found - own)
            assert np.sqrt((difference**2).mean()) < rms and difference.max() < most
    assert engine.pool.bytes_in_use == 0


def test_a_plan_with_sealed_windows_is_scored_as_its_engine_computes() -> None:
    plan = plans(model_shape())["sealed windows"]
    first, last = plan.groups
    exact = dataclasses.replace(last, life=Window.of_tokens(40, PAGE))
    plan = dataclasses.replace(plan, groups=(first, exact))
    scored = sealed.reading(decoder_from(Checkpoint(MODEL), plan, Basis()))
    found = scored.logits(text(420), range(420)).numpy()
    difference = np.abs(found - llm_of(plan).logits(text(420), range(420)))
    assert np.sqrt((difference**2).mean()) < 5e-3 and difference.max() < 0.5
    wider = decoder_from(Checkpoint(MODEL), plans(model_shape())["coded"], Basis())
    other = sealed.reading(wider).logits(text(420), range(420)).numpy()
    assert np.abs(found - other).max() > 0.1

"""Mixers in steps of the torch session, by plain torch and by Triton's kernels, against
their definition (kvlathe/layers/mixers.py). Without a GPU, Triton's interpreter runs the
kernels, where Triton is installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module, util
from typing import Any, cast

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlathe.layers.mixers import (
    MixerMemory,
    MixerParts,
    Mixing,
    Spans,
    SpreadMemory,
    mix,
)
from kvlathe.layers.recurrence import recur
from kvlathe.runtime.sessions.torch_cuda.states import (
    KernelTokens,
    OneToken,
    SomeTokens,
    StepStates,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
"""An interpreter is slow."""
HIDDEN, BEFORE, BEHIND = 16, 3, 2
SPACE = Mixing("space", 4 * 6 + 2 * 2 * 16, 4, 4, 2, 16, 6)
MIXINGS = {
    "conv": Mixing("conv", 24, 3),
    "delta": Mixing("delta", 2 * 2 * 5 + 4 * 40, 4, 4, 2, 5, 40, strength=2.0),
    "space": replace(SPACE, norm="after", norm_groups=2, least_step=0.01),
    "gate last": replace(SPACE, taps=2, most_step=0.5),
    "no norm": replace(SPACE, norm="none"),
}


def parts_of(mixing: Mixing, draw: Callable[..., Tensor]) -> MixerParts:
    def linear(inputs: int, outputs: int) -> Callable[[Tensor], Tensor]:
        weight = draw(inputs, outputs)
        return lambda x: x @ weight.to(x.dtype)

    taps = draw(mixing.taps, mixing.channels).unbind(0)
    if mixing.kind == "conv":
        wide = linear(HIDDEN, 3 * mixing.channels)
        return MixerParts(wide, linear(mixing.channels, HIDDEN), taps, None)
    is_delta, heads = mixing.kind == "delta", mixing.heads
    return MixerParts(
        linear(HIDDEN, mixing.channels + mixing.inner),
        linear(mixing.inner, HIDDEN),
        taps,
        draw(mixing.channels),
        gates=linear(HIDDEN, 2 * heads if is_delta else heads),
        decay=-draw(heads).abs() * 3,
        step_bias=draw(heads),
        skip=None if is_delta else draw(heads, 1),
        norm=1 + draw(mixing.value_dim if is_delta else mixing.inner),
    )


@cache
def interpret() -> None:
    """Triton's interpreter knows no such products as GPUs have, and takes a loop's end
    from an array of one number, which newer NumPy does not."""
    from kvlathe.runtime.sessions.torch_cuda import state_kernels

    state_kernels.PRECISION = "ieee"
    interpreter: Any = import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patched(tensor: object, scope: Any) -> None:  # noqa: ANN401
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


Memory = Callable[[StepStates, int, Mixing], MixerMemory]


def kernels(step: StepStates, first: int, mixing: Mixing) -> MixerMemory:
    if util.find_spec("triton") is None:
        pytest.skip("no Triton")
    if DEVICE == "cpu":
        interpret()
    return KernelTokens(step, first, mixing)


def torchs(step: StepStates, first: int, mixing: Mixing) -> MixerMemory:
    return (SomeTokens if step.counts else OneToken)(step, first, mixing)


@pytest.mark.parametrize("memory", [torchs, kernels])
@pytest.mark.parametrize("name", MIXINGS)
@settings(max_examples=5, phases=NO_SHRINKING)
@given(
    seed=st.integers(0, 99),
    counts=st.lists(st.sampled_from([1, 1, 2, 3, 64, 65, 150]), min_size=1, max_size=5),
    decode=st.booleans(),
)
def test_any_step_equals_the_definition(
    name: str, memory: Memory, seed: int, counts: list[int], decode: bool
) -> None:
    """Sequences with tokens and without; states in slots, among those of other
    layers, which stay what they are."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.4).to(DEVICE)

    mixing = MIXINGS[name]
    parts = parts_of(mixing, draw)
    if decode:
        counts = [1] * len(counts)
    batch, tokens = len(counts), sum(counts)
    slots = torch.zeros(2, batch, dtype=torch.int32, device=DEVICE)
    slots[0] = torch.randint(0, 3, (batch,), generator=generator)
    slots[1] = torch.randperm(batch, generator=generator) + 4
    states = draw(10, BEFORE + mixing.numbers + BEHIND)
    states[0] = 0
    old = states.clone()
    x = draw(tokens, HIDDEN)
    step = StepStates.of(states, slots, () if decode else counts)
    found = mix(mixing, parts, x, memory(step, BEFORE, mixing))
    ends = torch.tensor([0, *counts], device=DEVICE).cumsum(0)
    offsets = torch.arange(max(counts), device=DEVICE)
    spans = Spans.of(ends, offsets, tokens, batch)
    before = old[slots[0].long(), BEFORE : BEFORE + mixing.numbers]
    twin = SpreadMemory(mixing, spans, before, recur)
    expected = mix(mixing, parts, x, cast("MixerMemory", twin))
    size = float(expected.abs().max())
    torch.testing.assert_close(found, expected, atol=2e-4 * size, rtol=1e-3)
    own = slice(BEFORE, BEFORE + mixing.numbers)
    after = states[slots[1].long(), own]
    torch.testing.assert_close(after, twin.after, atol=2e-4, rtol=1e-3)
    states[slots[1].long(), own] = old[slots[1].long(), own]
    assert torch.equal(states, old)


@pytest.mark.parametrize("memory", [torchs, kernels])
def test_padding_rows_leave_nothing(memory: Memory) -> None:
    """They read zeros, and write to the slot that nobody reads."""
    mixing = MIXINGS["delta"]
    states = torch.randn(6, mixing.numbers, device=DEVICE)
    states[0] = 0
    old = states.clone()
    slots = torch.tensor([[3, 0, 0], [4, 0, 0]], dtype=torch.int32, device=DEVICE)
    step = StepStates.of(states, slots, ())

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE) * 0.4

    x = draw(3, HIDDEN)
    found = mix(mixing, parts_of(mixing, draw), x, memory(step, 0, mixing))
    assert bool(found.isfinite().all())
    changed = (states != old).any(1).tolist()
    assert changed == [False, True, False, False, True, False]

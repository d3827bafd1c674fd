"""A model run a layer at a time: its logits and gradients are those of transformers in
float64, with every block as small as it can be; and its memory is what was foretold."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvlathe.base.errors import KvlatheError
from kvlathe.export.model import memory, plain_attention, sliced_head
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.layered import LayeredModel
from kvlathe.export.model.sliced_head import Slopes
from kvlathe.export.search.readings import text_score

Reference = Callable[[str], tuple[Path, torch.nn.Module]]
TOKENS = 70
ROWS = (3, 17, 40, 41, 68)
NAMES = (
    "llama",
    "llama-biased-d80-mqa",
    "mistral-window",
    "qwen2-g7",
    "phi3-window",
    "gemma2",
    "granite-tied",
    "cohere",
    "qwen3_moe",
    "gpt_oss",
    "gemma4-shared",
    "gemma3n",
)
"""Families whose attention ends in a module o_proj: with windows, caps of scores and
logits, sinks, factors, experts, tied and untied heads, caches that several layers
read, several hidden states of a token."""
EXPERTS = ("qwen3_moe", "gpt_oss")
"""Their reference has no products of experts in float64."""


def whole_gradients(
    model: torch.nn.Module, ids: Tensor, labels: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Logits [T, V], and of each layer the gradients [S, T, Hq d] of log p(labels [S,
    R]) by what its o_proj reads. By autograd through all of the model."""
    outputs: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        outputs.append(inputs[0])

    handles = [
        module.register_forward_pre_hook(keep)
        for name, module in model.named_modules()
        if name.endswith("self_attn.o_proj")
    ]
    logits = model(ids[None]).logits[0]
    for handle in handles:
        handle.remove()
    logs = logits[list(ROWS)].log_softmax(-1)
    by_draw = [
        torch.autograd.grad(
            logs.gather(-1, own[:, None]).sum(), outputs, retain_graph=True
        )
        for own in labels
    ]
    by_layer = zip(*by_draw, strict=True)
    return logits.detach(), [torch.cat(of_layer) for of_layer in by_layer]


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "read-again"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_whole_model_in_float64(
    name: str, kept: bool, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, shared = reference(name)
    exact = copy.deepcopy(shared)
    if name not in EXPERTS:
        exact = exact.double()
    for module in (sliced_head, plain_attention):
        for constant in ("LOGITS_AT_ONCE", "WEIGHTS_AT_ONCE", "SCORES_AT_ONCE"):
            monkeypatch.setattr(module, constant, 700, raising=False)
    checkpoint = Checkpoint(folder)
    words = checkpoint.spec.vocab_size
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(words, (TOKENS,), generator=draw)
    model = LayeredModel(checkpoint, kept)
    chance = torch.rand(2, len(ROWS), generator=draw)
    labels: list[Tensor] = []

    def slopes_of(logits: Tensor, rows: slice) -> Slopes:
        slopes = text_score(logits, chance[:, rows], rows)
        labels.append(slopes.tokens[..., 0])
        return slopes

    pulled = list(model.pulls(ids.tolist(), ROWS, slopes_of))
    assert [one.layer for one in pulled] == list(range(checkpoint.spec.layers))[::-1]
    logits, expected = whole_gradients(exact, ids, torch.cat(labels, 1))
    found = model.logits(ids.tolist(), range(TOKENS))
    torch.testing.assert_close(found.double(), logits.double(), atol=1e-4, rtol=0)
    for one, whole in zip(pulled[::-1], expected, strict=True):
        largest = float(whole.abs().max())
        assert largest > 0
        own = one.pull.flatten(2).double()
        torch.testing.assert_close(own, whole.double(), atol=1e-4 * largest, rtol=1e-3)


def test_a_pass_that_is_remembered_gives_the_same_gradients(
    reference: Reference,
) -> None:
    """Once, and of some of its rows in any order; then it is gone."""
    model = LayeredModel(Checkpoint(reference("llama")[0]))
    ids = list(range(3, 3 + TOKENS))
    chance = torch.rand(2, 3, generator=torch.Generator().manual_seed(0))

    def found() -> list[Tensor]:
        def slopes_of(logits: Tensor, rows: slice) -> Slopes:
            return text_score(logits, chance[:, rows], rows)

        return [one.pull for one in model.pulls(ids, (41, 3, 68), slopes_of)]

    expected = found()
    model.logits(ids, ROWS, remembered=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "_passed", None)
        for own, other in zip(found(), expected, strict=True):
            torch.testing.assert_close(own, other)
        with pytest.raises(TypeError):
            found()
    model.logits(ids, ROWS, remembered=True)
    model.forget(ids)
    assert not model._passes


def test_positions_may_leave_gaps(reference: Reference) -> None:
    """The logits are those of the whole model at these positions; what is remembered of
    other positions is not taken for them."""
    folder, whole = reference("llama")
    model = LayeredModel(Checkpoint(folder))
    ids = list(range(3, 3 + TOKENS))
    positions = [place + 7 * (place // 16) for place in range(TOKENS)]
    model.logits(ids, ROWS, remembered=True)
    found = model.logits(ids, range(TOKENS), positions=positions)
    tokens = torch.tensor([ids])
    with torch.no_grad():
        at_these = whole(tokens, position_ids=torch.tensor([positions])).logits[0]
        in_a_row = whole(tokens).logits[0]
    torch.testing.assert_close(found, at_these.float(), atol=1e-4, rtol=0)
    assert float((at_these - in_a_row).abs().max()) > 1e-2
    model.forget(ids, positions)
    assert len(model._passes) == 1


# -- memory ----------------------------------------------------------------------------
MEASURED = """
import json, resource, sys, torch
from pathlib import Path
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.search import measured, readings, sensitivity
from kvlathe.plan.lives import Window

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

checkpoint = Checkpoint(Path(sys.argv[1]))
tokens = int(sys.argv[2])
need = measured.pricing_need(checkpoint.spec, tokens)
before = peak()
ids = tuple(torch.randint(262144, (tokens,)).tolist())
read = readings.of_text([ids], far=True)
windows = [Window(64, 128)]
model = measured.uncompressed(checkpoint)
found = sensitivity.losses(model, read, lambda *_: [], windows, 64)
print(json.dumps([peak() - before, need.bytes, float(found.windows.min())]))
"""


@pytest.mark.slow
def test_a_large_vocabulary_takes_the_memory_that_was_foretold(tmp_path: Path) -> None:
    """512 rows of 262,144 logits are 0.5 GB, of which the plain way holds several."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=262144,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).half().save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path), "512"],
        capture_output=True,
        text=True,
        check=True,
    )
    peak, foretold, least = json.loads(done.stdout)
    assert least > 0
    assert peak < foretold < 1 << 30


def test_prices_that_do_not_fit_in_memory_are_refused_with_the_remedy(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Checkpoint(reference("llama")[0]).spec
    need = memory.of_prices(spec, 4096, 0, 2, 512)
    monkeypatch.setattr(memory.machine, "free_bytes", lambda: need.bytes)
    need.require(torch.device("cpu"), "do this")
    monkeypatch.setattr(memory.machine, "free_bytes", lambda: need.bytes - 1)
    with pytest.raises(KvlatheError, match="Do this") as refusal:
        need.require(torch.device("cpu"), "do this")
    assert "measuring sensitivity" in refusal.value.fact
    longer = memory.of_prices(spec, 8192, 0, 2, 512)
    assert longer.activations > need.activations and longer.weights == need.weights

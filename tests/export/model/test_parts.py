"""Models that also read images: their text is what transformers computes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.search.measured import uncompressed
from tests.support.checkpoints import make_model
from tests.support.families.seeing import TEXTS, settings_of

TOKENS = 90
Reference = Callable[[str], tuple[Path, torch.nn.Module]]


@pytest.mark.parametrize("prefix", TEXTS)
def test_text_of_a_model_that_reads_images_is_that_of_transformers(
    prefix: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path, prefix, settings_of(prefix))
    ids = torch.randint(5, 97, (TOKENS,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=ids[None]).logits[0]
    assert expected.abs().max() > 1, "the reference says too little to compare with"
    found = uncompressed(Checkpoint(tmp_path)).logits(ids.tolist(), range(TOKENS))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("turned", [False, True])
def test_experts_in_one_stack_are_those_that_lie_apart(
    turned: bool, reference: Reference, tmp_path: Path
) -> None:
    """As folders of Qwen3.5 and of Qwen3-VL with experts have them."""
    folder, _ = reference("qwen3_moe")
    apart = Checkpoint(folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(apart.spec.layers):
        at = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{at}.{e}.{end}_proj.weight") for e in range(6)])
            for end in ("gate", "up", "down")
        )
        stacks = {"gate_up_proj": torch.cat([gate, up], 1), "down_proj": down}
        for end, stack in stacks.items():
            tensors[f"{at}.{end}"] = (stack.mT if turned else stack).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    stacked = Checkpoint(tmp_path)
    assert stacked.weights and {*stacked.weights} == {*apart.weights}
    for name in apart.weights:
        assert torch.equal(stacked.weight(name), apart.weight(name)), name

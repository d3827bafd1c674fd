"""An ordinary checkpoint with rotated heads: transformers reads it, it computes the
same, and what is cached is the same but for a rotation of each head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from kvlathe.base.errors import KvlatheError
from kvlathe.cli.build import build_command
from kvlathe.engines.build import BuildConfig, rotate
from kvlathe.export.folding.rotated import HeadRotations
from kvlathe.export.model.checkpoint import Checkpoint
from tests.support.checkpoints import UNGATED
from tests.support.runtime_cases import MODEL

TOLERANCE = 1e-4
Reference = Callable[[str], tuple[Path, Any]]
SOME = (
    "llama-biased-d80-mqa",
    "qwen2-g7",
    "qwen3",
    "phi4-mini-partial",
    "gpt2",
    "falcon-40b",
    "gpt_neox",
    "cohere2",
    "granite",
)
"""Biases, one KV head and several, fused tensors of every order, [in, out], no RoPE, a
part of it, and layers without it."""


def answered(model: Any, ids: torch.Tensor) -> Any:  # noqa: ANN401
    with torch.no_grad():
        return model(ids, use_cache=True)


def check(name: str, reference: Reference, tmp_path: Path) -> None:
    folder, model = reference(name)
    request = BuildConfig(folder, tmp_path / "rotated", backend="hf", seed=3)
    keys = rotate(request)
    rotated = AutoModelForCausalLM.from_pretrained(request.output_dir).eval()
    spec = Checkpoint(folder).spec
    ids = torch.randint(3, spec.vocab_size, (2, 40), generator=torch.manual_seed(1))
    before, after = answered(model, ids), answered(rotated, ids)
    torch.testing.assert_close(after.logits, before.logits, atol=TOLERANCE, rtol=0)
    rotations = HeadRotations(spec, 3)
    for layer in filter(spec.attends, range(spec.layers)):
        was = before.past_key_values.layers[layer]
        now = after.past_key_values.layers[layer]
        turn = rotations.of_values(layer).float()
        copies = was.values.shape[1] // len(turn)  # Falcon's cache has every query head
        turned = was.values @ turn.repeat_interleave(copies, 0)
        torch.testing.assert_close(now.values, turned, atol=TOLERANCE, rtol=0)
        same = torch.allclose(now.keys, was.keys, atol=TOLERANCE)
        assert same == (layer not in keys)


@pytest.mark.parametrize("name", SOME)
def test_a_rotated_checkpoint_computes_the_same(
    name: str, reference: Reference, tmp_path: Path
) -> None:
    check(name, reference, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", set(UNGATED) - set(SOME))
def test_so_does_one_of_every_other_family(
    name: str, reference: Reference, tmp_path: Path
) -> None:
    check(name, reference, tmp_path)


def test_keys_turn_where_nothing_stands_before_the_scores(
    reference: Reference,
) -> None:
    """The identity on dims that RoPE turns, orthogonal on the others."""
    for name, free in (("gpt2", 1.0), ("gpt_neox", 0.75), ("qwen3", 0), ("llama", 0)):
        spec = Checkpoint(reference(name)[0]).spec
        rotations = HeadRotations(spec, 0)
        turn = rotations.of_keys(0)
        eye = torch.eye(spec.head_dim, dtype=torch.double)
        torch.testing.assert_close(turn @ turn.mT, eye.expand_as(turn))
        moved = (turn != eye).any(-1).any(0)
        assert moved.double().mean().item() == pytest.approx(
            free, abs=0.26 * bool(free)
        )
        assert set(moved.nonzero()[:, 0].tolist()) <= set(rotations.free(0).tolist())


def test_one_channel_no_longer_sets_the_scale_of_a_row() -> None:
    """The rotation is for this: with an outlier channel, the error of one scale a row
    is several times smaller."""
    values = torch.randn(500, 64, generator=torch.manual_seed(0), dtype=torch.double)
    values[:, 7] *= 40
    spec = Checkpoint(MODEL).spec
    turn = HeadRotations(spec, 0).of_values(0)[0]
    assert 3 * error(values @ turn) < error(values)


def error(values: torch.Tensor) -> float:
    """The error of 4 bits with one scale a row, relative."""
    low, high = values.amin(-1, True), values.amax(-1, True)
    step = (high - low) / 15
    coded = ((values - low) / step).round() * step + low
    return float((coded - values).norm() / values.norm())


def test_a_rotated_checkpoint_is_written_beside_its_tokenizer_files(
    tmp_path: Path,
) -> None:
    target = tmp_path / "rotated"
    words = ["--model", str(MODEL), "--output-dir", str(target), "--backend", "hf"]
    done = CliRunner().invoke(build_command, [*words, "--json"])
    assert done.exit_code == 0, done.output
    kept = {path.name for path in MODEL.iterdir() if path.suffix != ".safetensors"}
    assert kept <= {path.name for path in target.iterdir()}
    again = CliRunner().invoke(build_command, words).exception
    assert isinstance(again, KvlatheError) and "exists" in str(again)
    words[3] = str(tmp_path / "other")
    for more in (["--compression-ratio", "0.5"], ["--max-seq-len", "64"]):
        refused = CliRunner().invoke(build_command, [*words, *more]).exception
        assert isinstance(refused, KvlatheError) and "hf" in str(refused)
    assert not (tmp_path / "other").exists()

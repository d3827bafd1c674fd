"""Laws of calibration: it sums what transformers computes, sums add up, files come
back, bad input is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvlathe.base.errors import KvlatheError
from kvlathe.export.calibration.calibrate import (
    TOKENS,
    _starts,
    calibrate,
    calibrate_on,
    random_sequences,
    text_sequences,
)
from kvlathe.export.calibration.stats import ARRAYS, Moments, Stats
from kvlathe.export.model.checkpoint import Checkpoint
from tests.support import stats_cases
from tests.support.checkpoints import make

ROOT = Path(__file__).resolve().parents[3]
LATHE = ROOT / "models" / "lathe-5m"


@pytest.fixture(scope="module")
def lathe() -> Checkpoint:
    return Checkpoint(LATHE)


def seen_by_transformers(
    ids: torch.Tensor, positions: torch.Tensor
) -> list[dict[str, torch.Tensor]]:
    """Per layer, float64: q [Hq, T, d], k and v [H, T, d] after RoPE, p [Hq, T, T], o
    [Hq, T, d], hidden [T, D], w_o.
    """
    model = AutoModelForCausalLM.from_pretrained(
        LATHE, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    layers: list[dict[str, torch.Tensor]] = [{} for _ in model.model.layers]
    for seen, layer in zip(layers, model.model.layers, strict=True):
        attention = layer.self_attn
        attention.q_proj.register_forward_hook(
            lambda _m, _i, out, s=seen: s.update(q=out[0])
        )
        attention.o_proj.register_forward_hook(
            lambda _m, inputs, _o, s=seen: s.update(o=inputs[0][0])
        )
        seen["w_o"] = attention.o_proj.weight.detach().double()
    with torch.inference_mode():
        out = model(
            ids[None],
            position_ids=positions[None],
            use_cache=True,
            output_attentions=True,
            output_hidden_states=True,
        )
        turn = model.model.rotary_emb(out.hidden_states[0], positions[None])
    for i, seen in enumerate(layers):
        cached = out.past_key_values.layers[i]
        k, v = cached.keys[0], cached.values[0]
        q, o = (
            seen[name].unflatten(-1, (-1, k.shape[-1])).transpose(0, 1) for name in "qo"
        )
        q = apply_rotary_pos_emb(q[None], q[None], *turn)[0][0]
        now = {
            "q": q,
            "k": k,
            "v": v,
            "p": out.attentions[i][0],
            "o": o,
            "hidden": out.hidden_states[i][0],
        }
        seen |= {name: x.double() for name, x in now.items()}
    return layers


def test_calibration_is_what_transformers_computes(lathe: Checkpoint) -> None:
    ids = random_sequences(lathe.spec.vocab_size, 48, seed=3, length=48)
    stats = calibrate_on(lathe, ids, seed=5, source={})
    group, (found, empty) = lathe.spec.group_size, stats.halves
    assert (found.tokens, empty.tokens) == (48, 0)
    for layer, seen in enumerate(
        seen_by_transformers(
            ids[0], torch.arange(48) + _starts([48], lathe.spec.max_seq_len, 5)[0]
        )
    ):
        lanes = {
            name: seen[name].unflatten(0, (-1, len(seen[name]) // lathe.spec.kv_heads))
            for name in "qkvo"
        }
        wanted = {2 * name: (x.mT @ x).sum(1) for name, x in lanes.items()}
        wanted |= {name: x.sum((1, 2)) for name, x in lanes.items()}
        wanted |= {f"{name}_max": lanes[name].abs().amax((1, 2)) for name in "kv"}
        sizes = seen["hidden"].square().sum(-1)
        wanted["hidden"] = len(sizes) * sizes.sort().values[(len(sizes) - 1) // 2]
        heads = seen["w_o"].T.unflatten(0, (-1, stats.shape.head_dim))  # [Hq, d, D]
        values = seen["v"].repeat_interleave(group, 0)
        away = (values[:, None] - seen["o"][:, :, None]) @ heads[
            :, None
        ]  # [Hq, query, key, D]
        wanted["spread"] = (
            (seen["p"] * away.square().sum(-1))
            .sum((1, 2))
            .unflatten(0, (-1, group))
            .sum(1)
        )
        for name in ARRAYS:
            np.testing.assert_allclose(
                getattr(found, name)[layer],
                wanted[name].numpy(),
                rtol=2e-3,
                atol=2e-3,
                err_msg=f"{name} {layer}",
            )
        gram = (heads @ heads.mT).unflatten(0, (-1, group)).sum(1)
        np.testing.assert_allclose(
            stats.wo_gram[layer], gram.numpy(), rtol=1e-5, atol=1e-5
        )


def test_moments_of_parts_add_up_to_the_whole(lathe: Checkpoint) -> None:
    ids = random_sequences(lathe.spec.vocab_size, 96, seed=0, length=32)
    whole = calibrate_on(lathe, ids, seed=0, source={})
    merged = whole.half(1).whole + whole.half(0).whole
    assert merged.tokens == whole.tokens == 96
    for name in ARRAYS:
        np.testing.assert_array_equal(
            getattr(merged, name), getattr(whole.whole, name), err_msg=name
        )
    nothing = whole.whole + Moments.zeros(whole.shape)
    assert all(
        (getattr(nothing, name) == getattr(whole.whole, name)).all() for name in ARRAYS
    )


def test_places_are_spread_over_the_served_length_in_either_half() -> None:
    for half in (_starts([64] * 32, 4096, 1)[i::2] for i in range(2)):
        starts = np.array(half) / 4096
        density = [
            ((starts >= low) & (starts < low + 0.25)).mean()
            for low in (0, 0.25, 0.5, 0.75)
        ]
        np.testing.assert_allclose(density, [7 / 16, 5 / 16, 3 / 16, 1 / 16], atol=0.1)
        assert min(half) >= 0 and max(half) + 64 <= 4096


def test_statistics_come_back_from_their_file(tmp_path: Path) -> None:
    stats = stats_cases.stats(0)
    stats.save(tmp_path / "stats.npz")
    again = Stats.load(tmp_path / "stats.npz")
    assert (
        again.digest == stats.digest
        and again.shape == stats.shape
        and again.source == stats.source
    )
    assert stats_cases.stats(1).digest != stats.digest


def test_statistics_that_are_missing_cut_or_not_finite_are_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "stats.npz"
    with pytest.raises(KvlatheError, match="cannot be read"):
        Stats.load(path)
    stats_cases.stats(0).save(path)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(KvlatheError, match="Calibrate again"):
        Stats.load(path)
    sick = stats_cases.stats(0)
    sick.wv_gram[0, 0, 0, 0] = np.nan
    sick.save(path)
    with pytest.raises(KvlatheError, match="wv_gram hold NaN"):
        Stats.load(path)


def test_statistics_of_another_model_are_refused() -> None:
    stats = stats_cases.stats(0)
    stats.require_model(stats.shape, "made up")
    with pytest.raises(KvlatheError, match="another model"):
        stats.require_model(stats.shape, "other weights")


def test_more_tokens_than_memory_holds_are_refused_before_any_is_drawn(
    lathe: Checkpoint,
) -> None:
    with pytest.raises(KvlatheError, match=r"calibrat.* takes .* of memory"):
        calibrate(lathe, tokens=10**12)


def test_a_file_that_calibration_did_not_write_is_no_statistics() -> None:
    with pytest.raises(KvlatheError, match="kvlathe calibrate has not written it"):
        Stats.load(__file__)


def test_positions_that_no_text_was_read_at_are_said() -> None:
    text = dataclasses.replace(
        stats_cases.stats(0), source={"source": "a.jsonl", "max_seq_len": 256}
    )
    assert "first 256 positions, and 4,096" in text.unread_positions(4096)
    assert not text.unread_positions(256)
    random = dataclasses.replace(text, source={"source": "random", "max_seq_len": 256})
    assert not random.unread_positions(4096)


def test_too_little_calibration_is_refused(lathe: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(KvlatheError, match="too few"):
        calibrate(lathe, tokens=TOKENS["random"] - 1)
    text = tmp_path / "short.jsonl"
    text.write_text(json.dumps({"text": "one short document"}) + "\n", "utf-8")
    with pytest.raises(KvlatheError, match="0 usable tokens of the 16384"):
        calibrate(lathe, text)


def test_text_comes_from_every_document_first(lathe: Checkpoint) -> None:
    pieces = text_sequences(
        lathe, ROOT / "data" / "calibration_text.jsonl", TOKENS["text"]
    )
    assert sum(map(len, pieces)) == TOKENS["text"] and all(
        len(piece) <= 2048 for piece in pieces
    )
    assert len({tuple(piece.tolist()) for piece in pieces}) == len(pieces)


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = make(tmp_path, "llama")
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            getattr(model.model.layers[1].self_attn, name).weight.mul_(1e25)
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(KvlatheError, match="NaN or infinity"):
        calibrate_on(checkpoint, random_sequences(97, 64, 0, 32), 0, {})


@pytest.mark.parametrize("name", ["gpt2", "falcon-7b", "qwen3", "phi3-longrope"])
def test_statistics_of_unlike_families_are_positive_definite(
    name: str, tmp_path: Path
) -> None:
    make(tmp_path, name)
    checkpoint = Checkpoint(tmp_path)
    stats = calibrate_on(checkpoint, random_sequences(97, 64, 0, 16), 0, {})
    assert stats.rope == (name != "gpt2") and stats.whole.tokens == 64
    assert (np.linalg.eigvalsh(stats.whole.second("k", True)) > -1e-6).all() and (
        stats.whole.spread >= -1e-6
    ).all()

"""Laws of low bits where keys have large biases, as Qwen2's have: 8 and 4 bits lose what
they lose without them, and the first tokens are not coded."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvlathe.base.errors import KvlatheError
from kvlathe.engines.config import BuildConfig
from kvlathe.engines.order import accept
from kvlathe.export.bases.basis import Basis
from kvlathe.export.calibration.calibrate import calibrate
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.methods.composition import CacheSettings, compose, verify
from kvlathe.export.methods.compression import parse
from kvlathe.export.methods.method import Turn
from kvlathe.export.methods.options import RankOptions
from kvlathe.export.methods.turns import balanced_keys, in_bases, reader_axes
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.search import sealed
from kvlathe.plan.formats import Tier
from kvlathe.plan.lives import SEAL, Age, SealAfter
from kvlathe.plan.plan import CompressionPlan
from tests.support.checkpoints import make_model
from tests.support.families.sizes import sizes

TOKENS, SLOWEST = 256, 4
"""Of a sequence; planes of RoPE whose keys have a bias."""
SHAPE = sizes(128, 4, 2, 32, rope_theta=1e6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("biased")
    make_model(made / "0", "Qwen2", SHAPE)
    for bias in (40, 160):
        _biased(made, float(bias))
    return made


def _biased(made: Path, bias: float) -> None:
    """The same model whose keys have a bias in the planes that RoPE turns least."""
    (made / f"{bias:g}").mkdir()
    for file in (made / "0").iterdir():
        if file.suffix != ".safetensors":
            (made / f"{bias:g}" / file.name).write_bytes(file.read_bytes())
            continue
        tensors = load_file(file)
        for name, value in tensors.items():
            if name.endswith("k_proj.bias"):
                value.view(2, 2, -1)[..., -SLOWEST:] += bias
        save_file(tensors, made / f"{bias:g}" / file.name, {"format": "pt"})


@cache
def divergence(folder: Path, request: str) -> float:
    """KL of the uncompressed model from the compressed one, nats a token."""
    checkpoint = Checkpoint(folder)
    shape = checkpoint.spec.shape
    tokens = torch.randint(97, (TOKENS,), generator=torch.Generator().manual_seed(1))
    logits = []
    for name in ("none", request):
        plan, basis = compose(
            parse(name), shape, True, None, RankOptions(), CacheSettings(32)
        )
        decoder = sealed.reading(decoder_from(checkpoint, plan, basis))
        logits.append(decoder.logits(tokens.tolist(), range(TOKENS)).double())
    whole, coded = (x.log_softmax(-1) for x in logits)
    return float((whole.exp() * (whole - coded)).sum(-1).mean())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bias", [40, 160])
def test_a_bias_of_the_keys_costs_nothing(folder: Path, bias: int, bits: int) -> None:
    """The range of a channel in a page has no bias in it. That of a token has: its
    partitions are the paper's."""
    ours = f"hack:bits={bits}"
    papers = f"hack:bits={bits},arithmetic=int"
    plain = divergence(folder / "0", ours)
    assert divergence(folder / f"{bias}", ours) < 1.5 * plain
    assert divergence(folder / f"{bias}", papers) > 3 * plain


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_first_tokens_stay_as_they_are_where_all_tokens_stay(
    folder: Path, bits: int
) -> None:
    shape = Checkpoint(folder / "0").spec.shape

    def lives(request: str, windowed: bool = True) -> set[object]:
        form = CacheSettings(32, windowed=windowed)
        plan, _ = compose(parse(request), shape, True, None, RankOptions(), form)
        return {group.life for group in plan.groups}

    assert lives(f"hack:bits={bits}") == {SealAfter(64)}
    assert lives(f"hack:bits={bits},sink=128") == {SealAfter(128)}
    assert lives(f"hack:bits={bits},sink=0") == {SEAL}
    assert lives(f"hack:bits={bits},arithmetic=int") == {SEAL}
    assert lives(f"hack:bits={bits}", windowed=False) == {SEAL}
    assert SealAfter not in map(type, lives(f"window+hack:bits={bits}"))


def test_newest_tokens_have_more_bits_where_they_are_asked_for(folder: Path) -> None:
    shape = Checkpoint(folder / "0").spec.shape

    def composed(request: str) -> CompressionPlan:
        asked = parse(request)
        plan, _ = compose(asked, shape, True, None, RankOptions(), CacheSettings(32))
        return plan

    (group,) = composed("hack:bits=2,recent=200").groups
    assert group.life == Age(64, 256)
    assert [(tier.bits_k, tier.bits_v) for tier in group.cold] == [(4, 4), (2, 2)]
    (group,) = composed("hack:bits_k=8,bits_v=2,recent=64,recent_bits=3,sink=0").groups
    assert group.life == Age(0, 64)
    assert [(tier.bits_k, tier.bits_v) for tier in group.cold] == [(8, 3), (8, 2)]
    (group,) = composed("hack:bits=8,recent=256").groups
    assert group.life == SealAfter(64) and len(group.cold) == 1
    with pytest.raises(KvlatheError, match="cannot be composed"):
        composed("window+hack:recent=256")
    with pytest.raises(KvlatheError, match="levels=normal contradicts"):
        composed("hack:bits=2,levels=normal,recent=256,recent_bits=8")


@pytest.mark.parametrize("bits", [16, 32])
def test_oscar_keeps_first_and_newest_tokens_in_16_bits(
    bits: Literal[16, 32], folder: Path
) -> None:
    """64 and 256 of them, as in the paper."""
    stats = calibrate(Checkpoint(folder / "0"), "random", with_entropies=False)

    def composed(request: str) -> CompressionPlan:
        asked, form = parse(request), CacheSettings(bits)
        return compose(asked, stats.shape, True, stats, RankOptions(), form)[0]

    (group,) = composed("oscar").groups
    assert group.life == Age(64, 256)
    young, old = group.cold
    assert young == Tier(16, 16) and (old.bits_k, old.bits_v) == (2, 2)
    (group,) = composed("oscar:recent=0").groups
    assert group.life == SealAfter(64) and group.cold == (old,)
    with pytest.raises(KvlatheError, match="ay recent=0"):
        composed("window+oscar")
    assert composed("window+oscar:recent=0").index.sees_less


def test_newest_tokens_in_more_bits_lose_less(folder: Path) -> None:
    few, more = "hack:bits=2,sink=0", "hack:bits=2,sink=0,recent=64,recent_bits=8"
    assert divergence(folder / "0", more) < 0.8 * divergence(folder / "0", few)


def test_first_tokens_that_are_not_quantized_are_exact(folder: Path) -> None:
    """A sequence that is all first tokens."""
    checkpoint = Checkpoint(folder / "160")
    plan, basis = compose(
        parse("hack:bits=2,sink=128"),
        checkpoint.spec.shape,
        True,
        None,
        RankOptions(),
        CacheSettings(32),
    )
    tokens = list(range(90))
    whole, _ = compose(
        parse("none"), plan.model, True, None, RankOptions(), CacheSettings(32)
    )
    found = sealed.reading(decoder_from(checkpoint, plan, basis))
    expected = decoder_from(checkpoint, whole, Basis())
    torch.testing.assert_close(
        found.logits(tokens, range(90)),
        expected.logits(tokens, range(90)),
        rtol=1e-4,
        atol=1e-4,
    )


TURNS: dict[str, Turn] = {
    "balanced keys": balanced_keys,
    "a head's readers": partial(reader_axes, per_layer=False),
    "a layer's readers": partial(reader_axes, per_layer=True),
}


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("bias", [0, 160])
def test_whole_lanes_in_bases_from_statistics_are_exact(
    folder: Path, bias: int, name: str
) -> None:
    """In full precision, centred keys too: softmax ignores a constant of all keys."""
    checkpoint = Checkpoint(folder / f"{bias}")
    stats = calibrate(checkpoint, "random")
    plan, _ = compose(
        parse("none"), stats.shape, True, None, RankOptions(), CacheSettings(32)
    )
    lanes, basis = in_bases(plan.lanes, TURNS[name](stats, 0))
    if name == "balanced keys":
        centres = [of_lane.centre_k for of_lane in basis.values()]
        assert all(x is not None and abs(x).max() > bias / 2 for x in centres)
    turned = decoder_from(checkpoint, dataclasses.replace(plan, lanes=lanes), basis)
    whole = decoder_from(checkpoint, plan, Basis())
    tokens = list(range(90))
    torch.testing.assert_close(
        turned.logits(tokens, range(90)),
        whole.logits(tokens, range(90)),
        rtol=2e-3,
        atol=2e-3,
    )


@pytest.mark.parametrize("per_layer", [False, True])
def test_axes_of_readers_spread_their_energy_evenly(
    folder: Path, per_layer: bool
) -> None:
    """Eigenvectors, then a Hadamard matrix: every channel is read alike, and the
    matrices are orthogonal."""
    stats = calibrate(Checkpoint(folder / "160"), "random")
    basis = reader_axes(stats, 0, per_layer)
    for layer in range(stats.shape.layers):
        for head in range(stats.shape.kv_heads):
            lane = basis[layer, head]
            assert lane.b is not None and lane.a_v is not None
            heads = slice(None) if per_layer else slice(head, head + 1)
            for axes, moments in (
                (lane.b, stats.whole.qq[layer, heads]),
                (lane.a_v, stats.whole.oo[layer, heads]),
            ):
                np.testing.assert_allclose(axes.T @ axes, np.eye(32), atol=1e-9)
                energy = np.diag(axes.T @ moments.sum(0) @ axes)
                np.testing.assert_allclose(energy, energy.mean(), rtol=1e-6)


def test_the_balanced_basis_is_one_methods_to_choose(folder: Path) -> None:
    assert parse("hack:bits=2").calibration is None
    assert parse("hack:bits=2,basis=balanced").calibration == "text"
    with pytest.raises(KvlatheError, match="two of them choose the basis"):
        verify(parse("fdc+hack:basis=balanced"), RankOptions(), 64)


def test_centring_is_refused_where_nothing_is_centred(tmp_path: Path) -> None:
    with pytest.raises(KvlatheError, match="--centre cannot be used with hack:bits=4"):
        accept(
            BuildConfig(
                model=Path("models/lathe-5m"),
                output_dir=tmp_path / "out",
                compression="hack:bits=4",
                centre=True,
            )
        )

"""Forms chosen by measurement: the knapsack, the losses that price them, and the plans
that come of both."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvlathe.base.errors import KvlatheError
from kvlathe.engines.build import build
from kvlathe.engines.config import BuildConfig
from kvlathe.engines.order import accept
from kvlathe.export.bases.basis import Basis
from kvlathe.export.calibration.calibrate import calibrate_on, random_sequences
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.methods import auto, forms
from kvlathe.export.methods.composition import CacheSettings, compose
from kvlathe.export.methods.compression import UNCOMPRESSED, parse
from kvlathe.export.methods.evidence import evidence
from kvlathe.export.methods.forms import Grid, parts_of
from kvlathe.export.methods.options import RankOptions
from kvlathe.export.methods.variants import for_comparison, removed
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.decoder import Decoder
from kvlathe.export.search import measured, readings, search, sensitivity
from kvlathe.export.search.sealed import reading, rounded
from kvlathe.plan.formats import Format
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import SEAL, Age, Life, Paging, SealAfter, Window
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.llm import LLM
from kvlathe.tasks import metrics
from kvlathe.tasks.tasks import FolderEncoder
from tests.support import stats_cases
from tests.support.nightly import rest_nightly
from tests.support.priced_cases import priced, shuffle
from tests.support.unlike_models import make_unlike

LATHE = Path(__file__).resolve().parents[3] / "models" / "lathe-5m"
TEXT = LATHE.parents[1] / "data" / "calibration_text.jsonl"
FORM = CacheSettings(16)


# -- plans -----------------------------------------------------------------------------
@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize("ratio", [0.6, 0.75, 0.9])
def test_a_plan_removes_the_share_that_was_asked_for(ratio: float, rope: bool) -> None:
    found = priced(1, rope)
    shape, tokens = found.grid.stats.shape, found.grid.tokens
    whole = 4 * shape.layers * shape.kv_heads * shape.head_dim * tokens
    variant = measured.variant(parse("auto"), found, FORM)
    assert variant.least < ratio < variant.most
    plan, basis = variant.at(ratio)
    assert CacheLayout(plan).bytes_for(tokens - 1) <= (1 - ratio) * whole
    for lane in plan.lanes:
        made = basis[lane.layer, lane.head]
        assert made.a is not None and made.a_v is not None
        assert (
            made.a.shape[1] == lane.rank_k
            and made.a_v.shape[1] == lane.rank_v
            and lane.projected == rope
        )
    with pytest.raises(KvlatheError, match="cannot be reached"):
        variant.at(variant.most + 0.01)


@pytest.mark.parametrize(
    ("served", "most", "warns"),
    [(2048, None, False), (2049, None, True), (8192, 2048, False), (8192, 2049, True)],
)
def test_sequences_that_were_not_examined_are_warned_of(
    served: int, most: int | None, warns: bool
) -> None:
    """A model made for longer ones serves what its engine takes at ``most``."""
    found = priced(1)
    stats = found.grid.stats
    shape = dataclasses.replace(stats.shape, max_positions=served)
    grid = dataclasses.replace(
        found.grid, stats=dataclasses.replace(stats, shape=shape)
    )
    longer = dataclasses.replace(found, grid=grid)
    form = dataclasses.replace(FORM, max_seq_len=most)
    plan, _ = measured.variant(parse("auto"), longer, form).at(0.8)
    assert plan.notes["priced on"] == "sequences of up to 2,048 tokens"
    assert ("and serves 2,049" in str(plan.notes.get("reach"))) == warns


@pytest.mark.parametrize(("own", "unseen"), [(0, "so many"), (128, "more distant")])
def test_gaps_are_told_of(
    own: int, unseen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distances of all that is served are examined by fewer tokens, unless a layer has
    a window of its own."""
    monkeypatch.setattr(measured, "FAR_TOKENS", 512)
    notes = measured.exam_note(2048, 2048, [0, own])
    gaps = " at positions of up to 2,048" if not own else ""
    assert notes["priced on"] == f"sequences of up to 512 tokens{gaps}"
    assert unseen in notes["reach"]
    assert measured.spread_over([0, own]) == (not own)


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("rank", [16, 48, 64])
def test_a_cut_is_the_balanced_basis_turned(side: str, rank: int) -> None:
    """It spans what the basis keeps, and whatever is stored has equal variances in all
    its channels."""
    stats = stats_cases.stats(3)
    cut, found = (
        Grid(stats, 64, 7, 256).cut(side, 1, 2, rank),
        auto.rotate(stats, RankOptions()),
    )
    into, back = (found.b, found.a) if side == "k" else (found.a_v, found.o_v.mT)
    kept = into[1, 2][:, :rank] @ back[1, 2][:, :rank].T
    np.testing.assert_allclose(cut.into @ cut.back.T, kept, atol=1e-7)
    stored = np.diag(cut.into.T @ stats.whole.second(side, True)[1, 2] @ cut.into)
    flat = np.diag(
        into[1, 2][:, :rank].T
        @ stats.whole.second(side, True)[1, 2]
        @ into[1, 2][:, :rank]
    )
    assert stored.max() / stored.min() < flat.max() / flat.min() / 2


# -- sensitivity -----------------------------------------------------------------------
def attended(
    q: np.ndarray,
    tokens: Sequence[tuple[np.ndarray, np.ndarray]],
    is_coded: Callable[[int, int], bool],
) -> np.ndarray:
    """Token by token: each query's sums over the tokens up to its own, which it reads as
    they are or coded; ``tokens``: K and V of either kind. [G, T, d]"""
    out = np.zeros((*q.shape[:2], tokens[0][1].shape[-1]))
    for g, t in np.ndindex(*q.shape[:2]):
        seen = [tokens[is_coded(t, token)] for token in range(t + 1)]
        keys, values = (
            np.stack([kind[side][token] for token, kind in enumerate(seen)])
            for side in (0, 1)
        )
        weights = np.exp(keys @ q[g, t])
        out[g, t] = weights @ values / weights.sum()
    return out


@pytest.mark.parametrize(
    "life",
    [SEAL, SealAfter(8), Window(8, 24), Age(8, 8), Age(0, 8, 8), Age(0, 8, 8, 24)],
    ids=repr,
)
def test_losses_are_those_of_attention_token_by_token(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, of what a life has in each of its tiers, near and distant: the pages
    there are coded, all other tokens are as they were computed."""
    monkeypatch.setattr(forms, "NEAR", 16)
    tiers = parts_of(life, 8)
    parts = list(itertools.chain(*tiers))
    rng = np.random.default_rng(0)
    q, k, v, pull = (
        torch.tensor(rng.normal(size=s))
        for s in ((2, 42, 16), (42, 16), (42, 16), (3, 2, 42, 16))
    )
    into, back = (torch.tensor(rng.normal(size=(16, 16)) / 4) for _ in range(2))
    centre = torch.tensor(rng.normal(size=16))
    codes = Format(2, "rank", 128, 0.7), Format(8, "rank", 64)
    form = sensitivity.Candidate(into, back, centre, codes)
    lane = sensitivity.ObservedLane(q, k, v, pull)
    every = sensitivity.Queries.all(42)
    at = Paging(8, life.cold_tiers[-1])
    moves = sensitivity.LaneMoves(lane, 8, every, parts=parts)
    exact = k.numpy(), v.numpy()
    plain = attended(q.numpy(), [exact], lambda *_: False)

    def read(x: torch.Tensor, code: Format) -> list[np.ndarray]:
        kept = torch.nn.functional.pad((x - centre) @ into, (0, 0, 0, 6))
        return [y[:42].double().numpy() for y in (kept, rounded(kept, code, 8))]

    def is_coded(query: int, token: int, tier: int, distant: bool) -> bool:
        """By the tokens that a sequence holds whose page the query is in."""
        sealed = query // 8 * 8
        if distant != (8 <= token < sealed - 16):
            return False
        _, *held = life.held(sealed, at)
        newest = sealed - life.reaches.recent
        first = life.stay_hot <= token < max(life.stay_hot, life.reaches.sink)
        if not life.newest_apart:
            return life.stay_hot <= token < sealed and (first or token >= newest)
        near = sealed - life.newest_apart
        if tier == 0:
            return token < sealed and (first or token >= max(near, life.first_apart))
        older = range(max(life.first_apart, newest), max(life.first_apart, near))
        assert len(older) == held[1]
        return token in older

    found = zip(codes, moves.keys([form]), moves.values([form]), strict=True)
    for code, keys, values in found:
        read_back = [y @ back.numpy().T + centre.numpy() for y in read(v, code)]
        for place, part in enumerate(parts):
            tier = next(i for i, own in enumerate(tiers) if part in own)
            coded = partial(is_coded, tier=tier, distant=part.near >= 16)
            of_keys = [(x, v.numpy()) for x in read(k, code)]
            by_keys = attended((q @ back).numpy(), of_keys, coded) - plain
            of_values = [(k.numpy(), x) for x in read_back]
            by_values = attended(q.numpy(), of_values, coded) - plain
            for squares, change in ((keys, by_keys), (values, by_values)):
                along = np.einsum("sgtd,gtd->st", pull.numpy(), change)
                assert float(squares[place]) == pytest.approx(
                    (along**2).sum(), rel=1e-6
                )


@cache
def lathe() -> tuple[Checkpoint, Stats, Decoder]:
    checkpoint = Checkpoint(LATHE)
    stats = calibrate_on(
        checkpoint, [torch.tensor(ids) for ids in windows(6, 512)], 0, {}
    )
    none = compose(
        UNCOMPRESSED, stats.shape, True, None, RankOptions(), CacheSettings(32)
    )
    return checkpoint, stats, decoder_from(checkpoint, *none)


@cache
def windows(count: int, tokens: int, skipped: int = 0) -> list[tuple[int, ...]]:
    encoder, found = FolderEncoder(LATHE), []
    for line in TEXT.read_text("utf-8").splitlines()[skipped:]:
        ids = encoder.encode(json.loads(line)["text"])
        found += [tuple(ids[:tokens])] if len(ids) >= tokens else []
    return found[:count]


def kl_of(plan: CompressionPlan, basis: Basis, texts: list[tuple[int, ...]]) -> float:
    checkpoint, _, whole = lathe()
    coded, sums = reading(decoder_from(checkpoint, plan, basis)), metrics.Sums()
    for ids in texts:
        rows = range(len(ids) - 1)
        sums += metrics.Sums.of(
            coded.logits(ids, rows).numpy(),
            np.array(ids[1:]),
            whole.logits(ids, rows).numpy(),
        )
    return sums.kl / sums.tokens


@pytest.mark.slow
def test_prices_foretell_what_is_lost_and_dealing_them_wrongly_loses_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On text that nothing was measured on: the sum of losses is the divergence to a
    factor of 2."""
    checkpoint, stats, _ = lathe()
    texts = windows(4, 512, skipped=20)
    assert not set(texts) & set(windows(6, 512))
    exam = search.Exam("perplexity", windows=tuple(windows(2, 512)))
    sources = measured.Sources([exam], 512, exercised=False)
    monkeypatch.setattr(readings, "TEXT_DRAWS", 8)  # two vary by a tenth
    found = measured.price(checkpoint, stats, FORM, sources)
    plan, basis = measured.variant(parse("auto"), found, FORM).at(0.75)
    lost, expected = kl_of(plan, basis, texts), plan.notes["expected loss"]
    assert expected / 2 < lost < 2 * expected
    choice = found.chosen(int(0.25 * 2048 * 512))
    dealt = shuffle(choice)
    worse, its_basis = measured.plan_of(parse("auto"), found, dealt, FORM)
    assert CacheLayout(worse).bytes_for(512) == CacheLayout(plan).bytes_for(512)
    assert kl_of(worse, its_basis, texts) > 1.3 * lost


def brief(*ids: int) -> measured.Sources:
    """Sources that are measured in no time."""
    exam = search.Exam("perplexity", windows=(ids or windows(1, 96)[0],))
    return measured.Sources([exam], 4096, exercised=False)


def test_losses_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, stats, _ = lathe()
    first = measured.price(checkpoint, stats, FORM, brief(), tmp_path)
    monkeypatch.setattr(measured, "losses", None)
    again = measured.price(checkpoint, stats, FORM, brief(), tmp_path)
    np.testing.assert_array_equal(again.loss, first.loss)
    np.testing.assert_array_equal(again.window_loss, first.window_loss)


@pytest.mark.parametrize("unknown", [np.nan, np.inf])
def test_prices_that_are_no_numbers_are_refused(
    unknown: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is enough, since a least sum would take it; and nothing is remembered."""
    checkpoint, stats, _ = lathe()

    def measure(_: Checkpoint, grid: Grid, *__: object) -> sensitivity.Losses:
        shape = len(grid.lives), 2 * len(stats.shape.places), len(grid.options)
        prices = np.ones(shape)
        prices[0, 1, 2] = unknown
        windows = np.ones((shape[1] // 2, len(grid.windows)))
        return sensitivity.Losses(prices, windows, np.ones(0))

    monkeypatch.setattr(measured, "_measured", measure)
    with pytest.raises(KvlatheError, match=r"1 of .* prices are no finite numbers: "):
        measured.price(checkpoint, stats, FORM, brief(), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_a_search_scores_other_methods_beside_its_own_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the middle one of those smaller than its gentlest, each method one line
    of the chart; asked again, nothing is scored."""
    checkpoint, stats, _ = lathe()
    found = measured.price(checkpoint, stats, FORM, brief())
    own = measured.variant(parse("auto"), found, FORM)
    others = for_comparison(stats.shape, True, stats, FORM)
    exam = search.Exam("perplexity", windows=(windows(3, 150)[2],))
    plan, _ = search.search(checkpoint, [own], 0.98, exam, (), tmp_path, others)
    curve = plan.notes["curve"]
    points = curve["points"]
    assert (
        curve["of"] == plan.compression == "auto"
        and CompressionPlan.from_json(plan.to_json()) == plan
    )
    assert {p["of"] for p in points} == {
        "auto",
        "fdc",
        "zack",
        "hack",
        "kivi",
        "kvquant",
        "oscar",
        "turboquant",
    }
    coded = [p for p in points if ":" in p["plan"] and p["of"] != "oscar"]
    assert sorted(p["of"] for p in coded) == ["hack", "kivi", "kvquant", "turboquant"]
    assert all(p["removed"] > own.least for p in coded)
    assert max(
        p["removed"]
        for p in points
        if p["of"] == "auto" and p["score"] >= curve["target"]
    ) == pytest.approx(removed(plan, FORM.bits))
    monkeypatch.setattr(search, "decoder_from", None)
    assert search.search(checkpoint, [own], 0.98, exam, (), tmp_path, others)[0] == plan


# -- any model -------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name",
    rest_nightly(
        ["llama-biased-d80-mqa", "gpt2", "phi3", "falcon-7b", "qwen3"],
        "llama-biased-d80-mqa",
        "gpt2",
        "qwen3",
    ),
)
def test_the_gentlest_plan_of_any_family_is_nearly_the_model(
    name: str, reference: Callable[[str], tuple[Path, object]]
) -> None:
    checkpoint = Checkpoint(reference(name)[0])
    spec = checkpoint.spec
    stats = calibrate_on(
        checkpoint, random_sequences(spec.vocab_size, 1024, 0, 256), 0, {}, spread=False
    )
    ids = tuple(random_sequences(spec.vocab_size, 200, 1, 200)[0].tolist())
    found = measured.price(checkpoint, stats, FORM, brief(*ids))
    assert np.isfinite(found.loss).all() and (found.loss > 0).all()
    family = measured.variant(parse("auto"), found, FORM)
    whole = decoder_from(
        checkpoint,
        *compose(
            UNCOMPRESSED, spec.shape, spec.rope is not None, None, RankOptions(), FORM
        ),
    )
    expected, errors = whole.logits(ids, range(200)), []
    for ratio in (family.least, (family.least + family.most) / 2, family.most):
        plan, basis = family.at(ratio)
        logits = reading(decoder_from(checkpoint, plan, basis)).logits(ids, range(200))
        errors.append(float((logits - expected).square().mean() / expected.var()))
    assert errors[0] < 0.01 and errors[0] < errors[2]


def test_prices_of_a_cache_that_several_layers_read_foretell_what_all_lose(
    tmp_path: Path,
) -> None:
    """Readers' losses count: the sum of prices is the divergence to a factor of 2."""
    make_unlike(tmp_path, "narrow E2B")
    checkpoint = Checkpoint(tmp_path)
    spec = checkpoint.spec
    form = dataclasses.replace(FORM, layer_windows=spec.windows)
    words = random_sequences(spec.vocab_size, 800, 1, 200)
    texts = [tuple(ids.tolist()) for ids in words]
    stats = calibrate_on(checkpoint, words, 0, {}, spread=False)
    found = measured.price(checkpoint, stats, form, brief(*texts[0]))
    none = compose(UNCOMPRESSED, spec.shape, True, None, RankOptions(), form)
    whole = decoder_from(checkpoint, *none)
    for ratio in (0.5, 0.7):
        plan, basis = measured.variant(parse("auto"), found, form).at(ratio)
        cut = reading(decoder_from(checkpoint, plan, basis))
        lost = 0.0
        for ids in texts[1:]:
            said, exact = (
                model.logits(ids, range(200)).log_softmax(-1) for model in (cut, whole)
            )
            kl = (exact.exp() * (exact - said)).sum(-1).mean()
            lost += float(kl) / len(texts[1:])
        expected = plan.notes["expected loss"]
        assert expected / 2 < lost < 2 * expected


def test_a_plan_of_auto_shows_what_it_was_chosen_by() -> None:
    assert (
        evidence(parse("auto"), stats_cases.stats(0), RankOptions(), priced_plan())
        is not None
    )


@pytest.mark.nightly
def test_an_engine_of_a_tiny_model(
    reference: Callable[[str], tuple[Path, object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVLATHE_CACHE", str(tmp_path / "cache"))
    asked = BuildConfig(
        reference("llama")[0],
        tmp_path / "engine",
        "auto",
        compression_ratio=0.5,
        calibration="random",
        tokens_per_block=16,
        prefill_chunk=64,
        kv_bits=16,
    )
    engine = LLM.load(build(asked))
    assert engine.manifest is not None and engine.manifest.kv_bytes.removed >= 0.5
    ids = list(range(60))
    assert np.isfinite(engine.logits(ids, range(60))).all()


def priced_plan() -> CompressionPlan:
    found = priced(0)
    return measured.variant(parse("auto"), found, FORM).at(0.8)[0]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"compression": "auto+hack"},
            "auto and hack cannot be composed: auto chooses",
        ),
        ({"compression": "fdc+auto"}, "fdc and auto cannot be composed"),
        ({"compression": "auto:bits=4"}, "of auto is unknown: it has none"),
        (
            {"compression": "auto", "removal_rate": 0.1},
            "--removal-rate cannot be used with auto",
        ),
    ],
)
def test_auto_refuses_options_that_it_chooses_itself(
    asked: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(KvlatheError, match=said):
        accept(dataclasses.replace(BuildConfig(LATHE, tmp_path / "engine"), **asked))
    assert not (tmp_path / "engine").exists()

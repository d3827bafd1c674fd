"""Heads chosen by what a window costs them: the price follows what the model really
loses, run through with that window; asking again is a look-up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvlathe.engines.config import BuildConfig
from kvlathe.engines.order import accept
from kvlathe.engines.planning import open_checkpoint, plan_for
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.methods.composition import CacheSettings, compose
from kvlathe.export.methods.compression import parse
from kvlathe.export.methods.options import RankOptions
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.decoder import Decoder
from kvlathe.export.search import heads
from kvlathe.export.search.exams import Exam, TorchOracle, read_exam
from kvlathe.export.search.measured import Sources
from kvlathe.export.search.sealed import reading
from kvlathe.plan.lives import KEEP, SEAL, Life, Window
from kvlathe.tasks import metrics, tasks
from kvlathe.tasks.line_retrieval import needle
from tests.support.nightly import rest_nightly

LATHE = Path(__file__).resolve().parents[3] / "models" / "lathe-5m"
TEXT = LATHE.parents[1] / "data" / "calibration_text.jsonl"
FORM = CacheSettings(32)


def exam(checkpoint: Checkpoint) -> Exam:
    return read_exam(checkpoint, "perplexity", TEXT, None)


def windowed(checkpoint: Checkpoint, lane: int | None) -> Decoder:
    """The model as an engine computes it, where this lane alone sees a window."""
    shape = checkpoint.spec.shape
    request = "none"
    if lane is not None:
        others = set(range(shape.layers * shape.kv_heads)) - {lane}
        names = ["{}.{}".format(*divmod(i, shape.kv_heads)) for i in others]
        request = f"window:sink=64,recent=128,whole={'/'.join(names)}"
    made = compose(parse(request), shape, True, None, RankOptions(), FORM)
    return reading(decoder_from(checkpoint, *made))


@pytest.mark.slow
def test_prices_are_what_the_model_loses(tmp_path: Path) -> None:
    """On text alone a price is a KL divergence: that of the whole model, run with the
    window, to second order."""
    checkpoint = Checkpoint(LATHE)
    sources = Sources([exam(checkpoint)], 1024, exercised=False)
    window = Window(64, 128)
    prices = heads.window_losses(checkpoint, window, FORM, sources, tmp_path)
    ids = sources.text[:1024]
    rows = range(len(ids) - 1)
    plain = windowed(checkpoint, None).logits(ids, rows)
    lost = []
    for lane in range(len(prices)):
        logits = windowed(checkpoint, lane).logits(ids, rows)
        lost.append(float(metrics.kl(plain.numpy(), logits.numpy()).mean()))
    ratios = prices / lost
    assert ratios.min() > 0.3 and ratios.max() < 3
    again = heads.window_losses(checkpoint, window, FORM, sources, tmp_path)
    assert np.array_equal(prices, again) and len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_the_dearest_head_is_the_one_that_finds(tmp_path: Path) -> None:
    """Prices of exercises; a line is asked for, 600 tokens after it was said, which is
    no exercise. Without one head the model does not find it."""
    checkpoint = Checkpoint(LATHE)
    sources = Sources([exam(checkpoint)], 1024)
    prices = heads.window_losses(checkpoint, Window(64, 128), FORM, sources)
    rng = np.random.default_rng(0)
    asked = needle(rng, tasks.FolderEncoder(LATHE), 900, 0.3).question
    found = []
    for lane in range(len(prices)):
        oracle = TorchOracle(windowed(checkpoint, lane))
        found.append(tasks.answers(oracle, asked))
    assert np.flatnonzero(~np.array(found)).tolist() == [np.argmax(prices)]


@pytest.mark.parametrize("also", rest_nightly(["", "+hack:bits=8"], "+hack:bits=8"))
def test_a_build_names_the_heads_and_keeps_the_request(
    also: str, tmp_path: Path
) -> None:
    asked = f"duo:share=0.25,sink=64,recent=128{also}"
    request = BuildConfig(
        LATHE, tmp_path / "engine", asked, target_len=512, use_cache=False
    )
    plan = plan_for(accept(request), open_checkpoint(LATHE)).plan
    assert plan.compression == asked
    found = str(plan.notes["heads by measured loss"])
    assert found.startswith("window:sink=64,recent=128,whole=") and found.endswith(also)
    whole: Life = SEAL if also else KEEP
    lanes_of = {group.life: len(group.lanes) for group in plan.groups}
    assert lanes_of == {Window(64, 128): 6, whole: 2}
    assert "512 tokens" in plan.notes["reach"]

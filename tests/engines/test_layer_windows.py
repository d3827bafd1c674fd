"""Models whose layers see windows: their engines compute what transformers computes, far
past every window, whatever is composed with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvlathe.base.errors import KvlatheError
from kvlathe.engines.build import BuildConfig, build
from kvlathe.plan.lives import Window
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.nightly import rest_nightly

Reference = Callable[[str], tuple[Path, torch.nn.Module]]
PAGE = 16
PAGES = {"tokens_per_block": 64, "prefill_chunk": 64}
MEASURED: dict[str, Any] = {
    "calibration": "random",
    "compression_ratio": 0.4,
    "metric": "perplexity",
    "protect": "none",
}
BOTH_AND_OTHERS = ("fdc+hack:bits=8", "window:sink=16,recent=64", "auto")
GREEDY = SamplingParams(30, ignore_eos=True)
IDS = np.random.default_rng(4).integers(0, 97, 200).tolist()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLATHE_CACHE", str(tmp_path / "cache"))


def built(model: Path, folder: Path, compression: str, **options: Any) -> Path:  # noqa: ANN401
    sizes: dict[str, Any] = {
        "tokens_per_block": PAGE,
        "prefill_chunk": 4 * PAGE,
    } | options
    return build(BuildConfig(model, folder, compression, **sizes))


def answers(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].numpy()


@pytest.mark.parametrize(
    "name", rest_nightly(["mistral-window", "phi3-window"], "mistral-window")
)
def test_an_engine_answers_as_transformers_past_every_window(
    name: str, reference: Reference, tmp_path: Path
) -> None:
    """The prompt at once, then token by token; pages of the past are given back."""
    folder, model = reference(name)
    engine = built(folder, tmp_path / "engine", "none", kv_bits=32)
    expected = answers(model)
    with LLM.load(engine) as llm:
        found = llm.logits(IDS, range(len(IDS)))
        np.testing.assert_allclose(found, expected, atol=1e-3)
        (answer,) = llm.generate([IDS[:120]], GREEDY)
        said = [*IDS[:120], *answer.token_ids]
        with torch.no_grad():
            every = model(torch.tensor([said])).logits[0].argmax(-1)
        assert list(answer.token_ids) == every[119:-1].tolist()
        plan = llm.plan
    held = [plan.index.route(0).held(n)[0] for n in (60, 150, 500)]
    assert max(held) <= plan.index.sight(0).recent + PAGE


@pytest.mark.parametrize(
    "compression",
    rest_nightly(
        ["hack:bits=8", "fdc", *BOTH_AND_OTHERS],
        *[one for one in BOTH_AND_OTHERS if one != "auto"],
    ),
)
def test_compressions_keep_the_windows_of_layers(
    compression: str, reference: Reference, tmp_path: Path
) -> None:
    """Near what the model says, and the layers' windows stand in the plan."""
    folder, model = reference("qwen2-some-windows")
    sized: dict[str, Any] = {"removal_rate": 0.15} if "fdc" in compression else {}
    measured = MEASURED if compression == "auto" else sized
    engine = built(folder, tmp_path / "engine", compression, **PAGES, **measured)
    plan = CompressionPlan.from_json((engine / "plan.json").read_text())
    windows = [plan.index.sight(i) for i in range(len(plan.lanes))]
    assert windows[2:] == [Window.of_tokens(33, 64).sees] * 4
    assert windows[0] != windows[2]
    expected = answers(model)
    if compression.startswith("window"):
        return
    with LLM.load(engine) as llm:
        found = llm.logits(IDS, range(len(IDS)))
    difference = np.abs(found - expected)
    assert difference.mean() < 0.15 * np.abs(expected).mean()


@pytest.mark.parametrize("compression", ["h2o", "zipcache", "kvzip", "snapkv+fdc"])
def test_rankings_of_tokens_are_refused_before_anything_is_calibrated(
    compression: str, reference: Reference, tmp_path: Path
) -> None:
    folder, _ = reference("mistral-window")
    with pytest.raises(KvlatheError, match="layers see a window"):
        built(folder, tmp_path / "engine", compression)


def test_windows_that_nothing_leaves_are_none(
    reference: Reference, tmp_path: Path
) -> None:
    folder, _ = reference("mistral-window")
    engine = built(folder, tmp_path / "engine", "h2o", max_seq_len=40)
    plan = CompressionPlan.from_json((engine / "plan.json").read_text())
    assert not plan.index.sees_less

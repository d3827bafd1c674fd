"""Accuracies of compositions: what no search can weigh is refused in one sentence, with
what to do, before a model is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.engines.build import BuildConfig
from kvlathe.engines.order import accept
from kvlathe.export.methods import registry
from kvlathe.export.methods.compression import parse

MODEL = Path(__file__).resolve().parents[2] / "models" / "lathe-5m"


def asked(compression: str, **options: Any) -> BuildConfig:  # noqa: ANN401
    return BuildConfig(MODEL, Path("/nowhere/engine"), compression, **options)


@pytest.mark.parametrize("metric", ["kl", "retrieval", "perplexity", "agreement"])
@pytest.mark.parametrize(
    ("compression", "reason"),
    [
        ("h2o:budget=64", "h2o chooses tokens"),
        ("fdc+h2o:budget=64", "h2o chooses tokens"),
        ("fdc+uncomp:budget=384", "uncomp chooses tokens"),
        ("zack+window:recent=256", "what window removes depends"),
        ("fdc+duo:share=0.25", "what duo removes depends"),
        ("kvzip:keep=0.3", "until a prefix is compacted"),
    ],
)
def test_an_accuracy_that_nothing_can_be_searched_for_is_refused(
    compression: str, reason: str, metric: str
) -> None:
    with pytest.raises(KvlatheError, match=reason) as refusal:
        accept(asked(compression, accuracy=0.99, metric=metric))
    assert compression in refusal.value.fact
    assert refusal.value.remedy.startswith("leave out --accuracy")
    alone = "searched for alone" in refusal.value.remedy
    assert alone == compression.startswith(("fdc", "zack"))
    accept(asked(compression, metric=metric))  # the remedy helps


def test_every_method_that_ranks_tokens_is_refused_with_any_other() -> None:
    """None reaches a search, which could score only what it foresees."""
    for name in registry.methods():
        for text in (name, f"fdc+{name}"):
            try:
                compression = parse(text)
                outlines = [one.outline(64) for one in compression.methods]
                order = accept(asked(text, accuracy=0.99, metric="kl"))
            except KvlatheError as refusal:
                assert refusal.remedy, text
                continue
            assert all(one.score is None for one in outlines), text
            assert order.config.accuracy == 0.99

"""Without a size, methods that choose ranks search for the most that keeps 0.99 of
exp(-KL)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.engines import pricing
from kvlathe.engines.build import BuildConfig
from kvlathe.engines.job import prepare
from kvlathe.engines.order import accept
from kvlathe.engines.planning import Planned, plan_for
from kvlathe.engines.pricing import exam_of
from kvlathe.export.calibration.calibrate import calibrate_on, random_sequences
from kvlathe.export.methods.lowrank import left
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.search.search import FINER
from kvlathe.measuring.divergence import Divergence
from kvlathe.plan.plan import SEARCHED
from tests.support.checkpoints import make_model
from tests.support.families.sizes import sizes

ALLOWED = -math.log(0.99)


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Statistics are taken once, and few tokens are scored."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLATHE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(pricing, "KL_TOKENS", 128)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with heads that are worth cutting."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, "Llama", sizes(64, 2, 1, head_dim=64))
    return folder


def config(model: Path, compression: str, **options: Any) -> BuildConfig:  # noqa: ANN401
    return BuildConfig(
        model,
        model.parent / "engine",
        compression,
        calibration="random",
        prefill_chunk=64,
        **options,
    )


def planned(model: Path, compression: str, **options: Any) -> Planned:  # noqa: ANN401
    """Planned on statistics of few tokens, which are taken once."""
    path = model.parent / f"{model.name}.npz"
    if not path.is_file():
        sequences = random_sequences(97, 400, 0, 200)
        calibrate_on(Checkpoint(model), sequences, 0, {}, with_entropies=False).save(
            path
        )
    asked = config(model, compression, stats=path, **options)
    job = prepare(accept(dataclasses.replace(asked, calibration=None)))
    return plan_for(job.order, job.checkpoint)


@pytest.mark.parametrize(
    ("compression", "options", "accuracy", "searched"),
    [
        ("fdc", {}, 0.99, True),
        ("zack:basis=balanced", {}, 0.99, True),
        ("fdc+hack:bits=4", {}, 0.99, True),
        ("h2o+fdc", {}, 0.99, True),
        ("fdc", {"removal_rate": 0.1}, None, False),
        ("fdc:removal_rate=0.1", {}, None, False),
        ("hack+fdc:compression_ratio=0.6", {}, None, False),
        ("fdc", {"accuracy": 0.9}, 0.9, False),
        ("hack", {}, None, False),
        ("none", {}, None, False),
    ],
)
def test_a_size_is_searched_for_where_ranks_have_none(
    compression: str,
    options: dict[str, Any],
    accuracy: float | None,
    searched: bool,
    model: Path,
) -> None:
    order = accept(config(model, compression, **options))
    assert (order.searched, order.config.accuracy) == (searched, accuracy)
    assert order.config.metric == "kl"


@pytest.fixture(scope="module")
def found(model: Path) -> Planned:
    return planned(model, "fdc")


def test_the_plan_loses_what_is_allowed_and_a_larger_removal_more(
    model: Path, found: Planned
) -> None:
    """Scored again by what any plan is scored with, on the text of the search."""
    order = accept(config(model, "fdc"))
    job = prepare(order)
    kl = Divergence(job.checkpoint, exam_of(order, job.checkpoint).windows).kl
    assert kl((found.plan, found.basis)) <= ALLOWED
    removed = 1 - left(found.plan, 16)
    assert removed > 0.01
    share = removed + 2 * FINER
    larger = planned(model, "fdc", basis="balanced", compression_ratio=share)
    assert kl((larger.plan, larger.basis)) > ALLOWED
    said = found.plan.notes[SEARCHED]
    assert f"takes {removed:.1%} of the bytes" in said
    rate = found.plan.notes["removal_rate"]
    again = planned(model, "fdc", basis="balanced", removal_rate=rate)
    assert again.plan.lanes == found.plan.lanes


def test_a_composition_has_the_ranks_that_would_be_found_alone(
    model: Path, found: Planned
) -> None:
    alone = found.plan
    both = planned(model, "hack:bits=2+fdc").plan
    ranks = [(lane.rank_k, lane.rank_v) for lane in alone.lanes]
    assert [(lane.rank_k, lane.rank_v) for lane in both.lanes] == ranks
    assert both.index.seals and both.compression == "hack:bits=2+fdc"
    assert both.notes[SEARCHED] == alone.notes[SEARCHED]


def test_nothing_to_remove_is_said_with_what_to_take_instead(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Alone it is refused, beside others the ranks stay whole."""
    make_model(tmp_path / "model", "Llama", sizes(64, 4, 2, head_dim=16))
    with pytest.raises(KvlatheError, match=r"removes nothing.*hack:bits=8 or auto"):
        planned(tmp_path / "model", "fdc")
    found = planned(tmp_path / "model", "fdc+hack:bits=8").plan
    assert "the ranks stay whole" in caplog.text
    assert found.index.seals and "stay whole" in found.notes[SEARCHED]

"""A measurement in words, and the line above which a plan breaks the model."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.engines.measuring import check_kl
from kvlathe.plan import json_fields
from kvlathe.plan.measurement import MOST, LengthLoss, Measurement, finite

GOOD = LengthLoss(1024, 2, 2046, 0.0021, 0.961, 1.004, 22, 22)
FAR = LengthLoss(4096, 1, 1024, 0.0042, 0.95, 1.008)


def measured(*lengths: LengthLoss, left_out: str = "") -> Measurement:
    return Measurement(lengths, "held-out text", "pages", left_out, 1.5, "use none")


def test_a_measurement_is_one_line() -> None:
    assert measured(GOOD).line == (
        "measured: KL 0.0021, same token 96.1 %, perplexity x1.004, exercises 22 of 22 "
        "kept, at 1,024 tokens of held-out text"
    )
    both = measured(GOOD, FAR, left_out="no time for 8,192 tokens").line
    assert "at 1,024 and 4,096 tokens of held-out text (no time for 8,192" in both


def test_lengths_count_by_their_places() -> None:
    whole = measured(GOOD, FAR).whole
    assert whole.kl == pytest.approx((2046 * 0.0021 + 1024 * 0.0042) / 3070)
    assert whole.same_token == pytest.approx((2046 * 0.961 + 1024 * 0.95) / 3070)
    mean = (2046 * math.log(1.004) + 1024 * math.log(1.008)) / 3070
    assert math.log(whole.perplexity_ratio) == pytest.approx(mean)
    assert (whole.exercises, whole.kept, whole.windows) == (22, 22, 3)


@pytest.mark.parametrize(
    ("change", "breaks"),
    [
        ({"kl": 0.05}, False),
        ({"kl": 0.051}, True),
        ({"same_token": 0.9}, False),
        ({"same_token": 0.899}, True),
        ({"kl": finite(float("nan"))}, True),
        ({"exercises": 40, "kept": 20}, False),
        ({"exercises": 40, "kept": 19}, True),
        ({"exercises": 7, "kept": 0}, False),
        ({"kl": 0.0009, "same_token": 0.5}, False),
        ({"kl": 0.0009, "exercises": 40, "kept": 19}, True),
    ],
)
def test_a_plan_breaks_the_model_where_any_length_does(
    change: dict[str, Any], breaks: bool
) -> None:
    found = measured(GOOD, dataclasses.replace(FAR, **change))
    assert found.breaks == breaks
    assert bool(found.warning) == breaks
    if breaks:
        assert "at 4,096 tokens" in found.warning and "use none" in found.warning


def test_a_measurement_passes_through_json() -> None:
    found = measured(GOOD, dataclasses.replace(FAR, kl=finite(math.inf)))
    text = json.dumps(dataclasses.asdict(found), allow_nan=False)
    assert json_fields.read(Measurement, json.loads(text)) == found
    assert finite(math.nan) == finite(math.inf) == MOST and finite(2.5) == 2.5


@pytest.mark.parametrize("kl", [0.0, 6e-8, 0.01])
@pytest.mark.parametrize("tokens", [512, 1024, 4096])
def test_a_measurement_that_removed_no_token_proves_nothing(
    tokens: int, kl: float
) -> None:
    """The plan decides so, at any length; what else was lost does not."""
    lost = dataclasses.replace(GOOD, tokens=tokens, kl=kl)
    found = measured(lost, left_out="no time for 8,192 tokens")
    check_kl(found, 0.05, "snapkv")
    assert "too few" not in found.line
    idle = dataclasses.replace(found, is_idle=True)
    assert "too few for the plan to remove any" in idle.line
    words = rf"{tokens:,} tokens .* too few.*--measure-seconds"
    with pytest.raises(KvlatheError, match=words):
        check_kl(idle, 0.05, "snapkv")

"""A config.json that somebody damaged or forged is refused in words, before anything of
its sizes is computed; or it is one that can be read."""

from __future__ import annotations

import copy
import json
import math
import tracemalloc
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.export.model.spec import MOST, read_spec
from tests.support.families import FAMILIES

Json = dict[str, Any]
WRONG: tuple[object, ...] = (
    *(None, True, -1, 0, 1, 3, 1 << 31, 1 << 70, 10**30, 0.5, 1e308),
    *(math.nan, -math.inf, "", "x", [], [-1], ["x"], {}, {"a": 1}),
)
MOST_BYTES = 64 << 20
CHECKS: list[Any] = list(HealthCheck)


@cache
def config(name: str) -> Json:
    """The config.json of a tiny model."""
    kind, sized = FAMILIES[name]
    made = getattr(transformers, f"{kind}Config")(**sized)
    return json.loads(json.dumps({**made.to_dict(), "model_type": made.model_type}))


@cache
def names() -> list[str]:
    """Families whose config has a class of its own."""
    return [x for x in FAMILIES if hasattr(transformers, f"{FAMILIES[x][0]}Config")]


@st.composite
def forged(draw: st.DrawFn) -> Json:
    """A real config with one or two values replaced or removed."""
    made = copy.deepcopy(config(draw(st.sampled_from(names()))))
    for _ in range(draw(st.integers(1, 2))):
        holder, name = made, draw(st.sampled_from(sorted(made)))
        if isinstance(made[name], dict) and made[name] and draw(st.booleans()):
            holder = made[name]
            name = draw(st.sampled_from(sorted(holder)))
        if draw(st.integers(0, 5)):
            holder[name] = copy.deepcopy(draw(st.sampled_from(WRONG)))
        else:
            del holder[name]
        if not made:
            break
    return made


def judge(made: Json, folder: Path) -> None:
    """Refused in words, or read into sizes that a model may have. Little memory."""
    (folder / "config.json").write_text(json.dumps(made))
    tracemalloc.start()
    try:
        spec = read_spec(folder)
        assert 0 < spec.layers <= MOST["num_hidden_layers"]
        assert 0 < spec.head_dim <= MOST["hidden_size"]
        assert 0 < spec.max_seq_len <= spec.max_positions
    except KvlatheError as refusal:
        assert refusal.fact and "\n" not in str(refusal)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MOST_BYTES


@settings(max_examples=100, deadline=None, suppress_health_check=CHECKS)
@given(forged())
def test_a_forged_config_is_one_refusal(tmp_path: Path, made: Json) -> None:
    judge(made, tmp_path)


@pytest.mark.nightly
@settings(max_examples=5_000, deadline=None, suppress_health_check=CHECKS)
@given(forged())
def test_five_thousand_forged_configs(tmp_path: Path, made: Json) -> None:
    judge(made, tmp_path)


@pytest.mark.parametrize("name", MOST)
def test_sizes_that_are_none_are_refused_before_tables_are_made(
    name: str, tmp_path: Path
) -> None:
    plain = config(next(x for x in names() if FAMILIES[x][0] == "Llama"))
    for size in (-1, 0, MOST[name] + 1, 1 << 70, 2.0, "8", [8], True):
        (tmp_path / "config.json").write_text(json.dumps({**plain, name: size}))
        with pytest.raises(KvlatheError, match=rf"{name}|not valid"):
            read_spec(tmp_path)


@pytest.mark.parametrize("name", ["NaN", '{"__float__": "NaN"}'])
def test_a_setting_that_is_nan_is_refused(name: str, tmp_path: Path) -> None:
    plain = json.dumps(config(next(x for x in names() if FAMILIES[x][0] == "Llama")))
    (tmp_path / "config.json").write_text(f'{{"rms_norm_eps": {name}, {plain[1:]}')
    with pytest.raises(KvlatheError, match="a setting is NaN"):
        read_spec(tmp_path)


def test_windows_that_leave_no_cache_are_refused(tmp_path: Path) -> None:
    plain = config(next(x for x in names() if FAMILIES[x][0] == "Mistral"))
    (tmp_path / "config.json").write_text(json.dumps({**plain, "sliding_window": 1}))
    with pytest.raises(KvlatheError, match=r"a window of 1 token.*no cache"):
        read_spec(tmp_path)

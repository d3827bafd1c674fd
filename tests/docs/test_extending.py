"""The code of docs/extending is what the product holds, or runs as it stands there."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.export import families
from kvlathe.export.bases.rotation import balanced_basis, rotation, shared_basis
from kvlathe.export.methods import registry
from kvlathe.export.methods.composition import CacheSettings, compose
from kvlathe.export.methods.compression import parse
from kvlathe.export.methods.options import RankOptions
from kvlathe.plan.formats import Tier
from kvlathe.plan.lives import Window
from kvlathe.plan.plan import CompressionPlan
from tests.docs.pages import ROOT
from tests.export.model import test_families
from tests.runtime.cache.test_ranked_engine import own_llm
from tests.runtime.sessions import test_windows
from tests.support import stats_cases
from tests.support.families import older
from tests.support.formula_laws import Watched
from tests.support.runtime_cases import forced, model_shape, text

PAGES = ROOT / "docs" / "extending"
BLOCK = re.compile(r"^```python *([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[str, str]]:
    """(what follows ``python``, code) of every block of Python."""
    return BLOCK.findall((PAGES / page).read_text(encoding="utf-8"))


def test_the_family_of_the_page_is_the_one_in_the_product(tmp_path: Path) -> None:
    (where, family), (_, name), (_, checkpoint), (_, refusal) = blocks(
        "model_family.md"
    )
    assert family == (ROOT / where.removeprefix("file=")).read_text("utf-8")
    own: dict[str, Any] = {"FAMILIES": {}}
    exec(name, own)
    assert own["FAMILIES"].items() <= families.FAMILIES.items()
    own = vars(older) | {"FAMILIES": {}}
    exec(checkpoint, own)
    assert own["FAMILIES"].items() <= older.OLDER.items()
    own = vars(test_families) | {"REFUSED": {}}
    exec(refusal, own)
    assert own["REFUSED"].items() <= test_families.REFUSED.items()


@pytest.fixture
def pca() -> Iterator[dict[str, Any]]:
    """The method of the page, registered as the page does it."""
    (_, method), (_, register), _ = blocks("method.md")
    module: dict[str, Any] = {}
    exec(method, module)
    exec(register, module)
    yield module
    del registry.methods()["pca"]


@pytest.mark.parametrize("request_", ["pca:removal_rate=0.3", "pca+hack:bits=4"])
def test_the_method_of_the_page_plans(pca: dict[str, Any], request_: str) -> None:
    stats = stats_cases.stats(0)
    assert parse(request_).calibration == pca["METHOD"].calibration
    plan, basis = compose(
        parse(request_), stats.shape, True, stats, RankOptions(), CacheSettings()
    )
    assert sum(lane.rank_k for lane in plan.lanes) < 64 * len(plan.lanes)
    assert all(basis[lane.layer, lane.head].a_v is not None for lane in plan.lanes)
    with pytest.raises(KvlatheError, match="Did you mean pca"):
        parse("pka")


def test_the_method_of_the_page_loses_more_than_the_best_basis(
    pca: dict[str, Any],
) -> None:
    stats = stats_cases.stats(0)
    options = RankOptions(centre=True)
    lost = pca["rotate"](stats, options).loss_k[..., ::-1].cumsum(-1)
    moments = stats.whole
    keys, queries = moments.second("k", True), moments.qq / moments.tokens
    values = shared_basis(moments.second("v", True))
    best = rotation(stats, balanced_basis(keys, queries), values, True)
    least = best.loss_k[..., ::-1].cumsum(-1)
    assert (lost >= least * (1 - 1e-3)).all()
    assert np.median(lost[..., 32] / least[..., 32]) > 1.05


def test_the_format_of_the_page_is_in_the_product_and_read_as_it_is_written() -> None:
    *quoted, (_, example) = blocks("format.md")
    for where, code in quoted:
        assert code in (ROOT / where.removeprefix("file=")).read_text("utf-8")
    exec(example, {})


@pytest.fixture
def vnorm() -> Iterator[dict[str, Any]]:
    """The method of the page, registered as the page does it."""
    _, (_, method), (_, register), _ = blocks("token_score.md")
    module: dict[str, Any] = {}
    exec(method, module)
    exec(register, module)
    yield module
    del registry.methods()["vnorm"]


def test_the_score_of_the_page_is_the_one_in_the_product() -> None:
    (where, quoted), *_, (_, example) = blocks("token_score.md")
    assert quoted == (ROOT / where.removeprefix("file=")).read_text("utf-8")
    exec(example, {})


@pytest.mark.parametrize("request_", ["vnorm:budget=128", "vnorm:budget=128+hack"])
def test_the_score_of_the_page_keeps_the_tokens_of_the_longest_values(
    vnorm: dict[str, Any], request_: str
) -> None:
    shape, settings = model_shape(), CacheSettings(bits=32)
    plan, _ = compose(parse(request_), shape, True, None, RankOptions(), settings)
    assert plan.score == vnorm["decision"].score
    watched = Watched(own_llm(plan), lambda keys, values: values.norm(dim=-1))
    watched.llm.logits(list(text(420)), range(299, 420), prompt=300)
    assert watched.dropped > 500


@pytest.fixture
def stride() -> Iterator[dict[str, Any]]:
    """The life of the page, known by its kind."""
    (_, life), (_, law) = blocks("token_rule.md")
    module: dict[str, Any] = {}
    exec(compile(life, "token_rule.md", "exec", dont_inherit=True), module)
    yield module | {"law": law}
    del module["LIVES"]["stride"]


def test_the_life_of_the_page_keeps_the_law(stride: dict[str, Any]) -> None:
    exec(stride["law"], stride)


def test_the_life_of_the_page_answers_as_the_window_that_sees_the_same(
    stride: dict[str, Any],
) -> None:
    """Pages that nobody sees may leave at any time: alone, beside others, hot, sealed,
    and from a file."""
    page, cold = test_windows.PAGE, Tier(8, 8, "rank", "token", 32, 64)
    window, life = Window(page, page), stride["Stride"](page, page, 3 * page)
    schedule = [(512,), (64,), (100,), *[(1,)] * 3]
    whole = test_windows.plan_of((Window(0, 1 << 20), window))
    first, last = whole.groups
    for tier in ((), (cold,)):
        found: list[Any] = []
        for own in (window, life):
            groups = (
                dataclasses.replace(first, cold=tier),
                dataclasses.replace(last, cold=tier, life=own),
            )
            plan = dataclasses.replace(whole, groups=groups)
            read = CompressionPlan.from_json(plan.to_json())
            assert read == plan
            llm = test_windows.llm_of(read)
            found.append(forced(llm, [text(679)], schedule)[0])
        np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-4)

"""Engines whose tokens are ranked by a formula of their keys: they keep what a reference
in float64 keeps, hot or sealed, and need fewer bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kvlathe.engines.build import BuildConfig, build
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import KEEP
from kvlathe.runtime.cache.page_table import PageTable
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native import library as native
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.formula_laws import REFERENCES, Watched, likeness
from tests.support.runtime_cases import BACKENDS, MODEL, RANKED, decoder, llm, text


@pytest.mark.parametrize("backend", BACKENDS)
def test_hot_and_sealed_keys_are_ranked_as_the_reference_ranks_them(
    backend: str,
) -> None:
    engine = llm(backend, "unlike keys")
    watched = Watched(engine, likeness)
    engine.logits(list(text(420)), range(299, 420), prompt=300)
    assert watched.buckets == {1, 2}, "a sealed and a hot bucket"
    assert watched.dropped > 500


def test_a_formula_keeps_nothing_beside_the_tokens_in_their_pages() -> None:
    plan = decoder("unlike keys").plan
    assert "unlike keys" in RANKED
    assert plan.index.ranked and plan.index.moves_tokens
    assert not (plan.index.observes or plan.index.keeps_positions)
    assert not any(bucket.scored for bucket in plan.index.buckets)
    layout = CacheLayout(plan)
    ends = [layout.scores_at(bucket) for bucket in range(len(layout.page_stride))]
    assert ends == [*layout.page_stride]


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["native", "onnx"])
@pytest.mark.parametrize(
    "asked", ["keydiff:budget=128", "knorm:budget=128+hack:bits=8"]
)
def test_a_built_engine_keeps_what_the_reference_keeps_in_fewer_bytes(
    tmp_path: Path, asked: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLATHE_NATIVE", str(int(kernels == "native")))
    native.find.cache_clear()
    name = asked.partition(":")[0]
    config = BuildConfig(
        MODEL, tmp_path / "engine", compression=asked, max_seq_len=1024, use_cache=False
    )
    engine = LLM.load(build(config))
    watched = Watched(engine, REFERENCES[name])
    most: list[int] = []
    release = engine.pool.release

    def counting(table: PageTable) -> None:
        sizes = zip(table.pages, engine.pool.strides, strict=True)
        most.append(sum(len(pages) * stride for pages, stride in sizes))
        release(table)

    monkeypatch.setattr(engine.pool, "release", counting)
    params = SamplingParams(max_new_tokens=140, temperature=0.0, ignore_eos=True)
    [answer] = engine.generate([list(text(400))], params)
    engine.close()
    native.find.cache_clear()
    assert len(answer.token_ids) == 140
    # Once for the prompt's six full pages, beside which 16 tokens are hot, and for two
    # pages of the answer.
    plan, lanes = engine.plan, len(engine.plan.lanes)
    hot = 0 if plan.index.seals else 16
    assert (watched.kept, watched.dropped) == ((3 * 128 + hot) * lanes, 6 * 64 * lanes)
    keeps = [dataclasses.replace(x, cold=(), life=KEEP) for x in plan.groups]
    whole = dataclasses.replace(plan, groups=tuple(keeps), score=None)
    assert max(most) < 0.4 * CacheLayout(whole).bytes_for(400 + 139)

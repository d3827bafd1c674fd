"""The native session answers as the function's session does, through the whole loop;
and which one runs is said."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import fold
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.onnx.model import export_onnx
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.manifest import FileRecord, KvBytes, Manifest
from kvlathe.runtime.cache.prefix import PrefixCache
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native import library as natives
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.sessions.host.native import (
    HalfSession,
    NativeSession,
    session_class,
)
from kvlathe.runtime.sessions.host.onnx import OrtSession
from kvlathe.runtime.sessions.registry import attention
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.support.mixed_cases import model_plan
from tests.support.nightly import rest_nightly
from tests.support.ranking_laws import arena_bytes
from tests.support.runtime_cases import (
    LIMITS,
    MODEL,
    decoder,
    engine_folder,
    forced,
    llm,
    text,
)
from tests.support.turned_cases import half_engine


def native_llm(native: Native, kind: str) -> LLM:
    layout = CacheLayout(decoder(kind).plan)
    size = layout.bytes_for(8192) + 8 * len(layout.page_stride) * max(
        layout.page_stride
    )
    session = NativeSession(
        engine_folder(kind), layout.plan, LIMITS, size, threads=2, library=native
    )
    return LLM(session, layout.plan, LIMITS, Tokenizer(MODEL), size)


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    rest_nightly(
        [
            ("one", 1e-3),
            ("split", 1e-3),
            ("sealed", 0.02),
            ("sealed after", 0.02),
            ("sealed split", 0.02),
            ("windowed", 1e-3),
            ("sealed windows", 0.02),
            ("aged", 0.02),
            ("aged windows", 0.02),
            ("compacted", 1e-3),
        ],
        ("split", 1e-3),
        ("sealed split", 0.02),
        ("sealed windows", 0.02),
        ("aged windows", 0.02),
        ("compacted", 1e-3),
    ),
)
def test_logits_are_those_of_the_function(
    native: Native, kind: str, tolerance: float
) -> None:
    """A rounding error may move a code by one where pages are sealed."""
    texts = [text(n, 100 * i) for i, n in enumerate((3, 130, 700))]
    schedule = [(1, 64, 512), (1, 1, 1), (1, 65, 187)]
    found, expected = (
        forced(native_llm(native, kind), texts, schedule),
        forced(llm("onnx", kind), texts, schedule),
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(ours - theirs).max() < tolerance


@pytest.mark.nightly
def test_heads_of_a_layer_may_be_in_many_buckets(
    native: Native, tmp_path: Path
) -> None:
    """Formats and windows mixed, as `auto` makes them."""
    plan = model_plan(128)
    checkpoint = Checkpoint(MODEL)
    export_onnx(checkpoint.spec, plan, fold(checkpoint, plan, Basis()), tmp_path)
    size, schedule = arena_bytes(plan), [(128, 60), (128, 1), (65, 1), (1, 1)]
    found: list[list[np.ndarray]] = []
    for made in (partial(NativeSession, library=native), OrtSession):
        session = made(tmp_path, plan, LIMITS, size, threads=2)
        engine = LLM(session, plan, LIMITS, Tokenizer(MODEL), size)
        found.append(forced(engine, [text(330), text(70, 500)], schedule))
    for ours, theirs in zip(*found, strict=True):
        assert np.abs(ours - theirs).max() < 2e-2 * np.abs(theirs).max()


@pytest.mark.parametrize("kind", rest_nightly(["mixed", "budget"], "budget"))
def test_ranked_tokens_are_those_of_the_function(native: Native, kind: str) -> None:
    """Prompt, ranking, sealing, decode, ranking again: the same tokens in the same
    buckets. Two tokens that are equally salient but for rounding may change places,
    which few logits notice."""
    ids, engines = list(text(420)), (native_llm(native, kind), llm("onnx", kind))
    ours, theirs = (
        engine.logits(ids, range(299, 420), prompt=300) for engine in engines
    )
    assert (
        np.abs(ours[0] - theirs[0]).max() < 1e-3
    )  # of the prompt, which nothing has compressed yet
    assert np.median(np.abs(ours - theirs)) < 2e-3 and np.abs(ours - theirs).max() < 0.3
    plain = llm("torch", "one").logits(ids, range(299, 420))
    assert (
        np.median(np.abs(ours - plain)) > 0.01
    )  # and they are tokens that make a difference


def test_a_compacted_prefix_keeps_what_the_function_keeps(native: Native) -> None:
    ids, engines = (
        list(text(320)),
        (native_llm(native, "compacted"), llm("torch", "compacted")),
    )
    kept: list[list[int]] = []
    found: list[np.ndarray] = []
    for engine in engines:
        engine.engine.scheduler.prefixes = PrefixCache(engine.pool)
        kept.append(engine.compact(ids[:256], 0.4).lane_tokens)
        found.append(engine.logits(ids, range(256, 320)))
    assert kept[0] == kept[1] and max(kept[0]) > min(kept[0])
    assert np.abs(found[0] - found[1]).max() < 2e-3


@pytest.mark.parametrize(
    "kind", rest_nightly(["one", "split", "sealed"], "split", "sealed")
)
def test_greedy_answers_are_those_of_the_function(native: Native, kind: str) -> None:
    """Up to the first token whose logit is less than a thousandth from the function's
    best."""
    params, function = (
        SamplingParams(max_new_tokens=100, ignore_eos=True),
        llm("onnx", kind),
    )
    prompts = [list(text(90)), list(text(300, 400))]
    answers = zip(
        native_llm(native, kind).generate(prompts, params),
        function.generate(prompts, params),
        strict=True,
    )
    for prompt, pair in zip(prompts, answers, strict=True):
        ours, theirs = (list(answer.token_ids) for answer in pair)
        same = next((i for i in range(len(ours)) if ours[i] != theirs[i]), None)
        if same is not None:
            ids = prompt + ours[:same]
            logits = function.logits(
                ids, range(len(ids) - 1, len(ids)), prompt=len(prompt)
            )[0]
            assert logits.max() - logits[ours[same]] < 1e-3


def test_an_engine_in_half_precision_is_that_of_the_function(native: Native) -> None:
    """Within what rounding to half moves the logits by, which are up to 24."""
    folder, plan = half_engine()
    size, found = CacheLayout(plan).bytes_for(8192), []
    for session in (
        HalfSession(folder, plan, LIMITS, size, 1, native),
        OrtSession(folder, plan, LIMITS, size, 1),
    ):
        engine = LLM(session, plan, LIMITS, Tokenizer(MODEL), size)
        found.append(
            np.concatenate(
                forced(engine, [text(90), text(130, 50)], [(64, 128), (1, 1), (25, 1)])
            )
        )
    assert np.abs(found[0] - found[1]).max() < 0.06


def manifest(dtype: str) -> Manifest:
    sizes, made_from = KvBytes(1.0, 1.0, 1.0), {"x": FileRecord(1, "")}
    return Manifest(
        model="m",
        compression="none",
        backend="onnxruntime",
        versions={},
        architectures=("cpu",),
        compute_dtype=dtype,
        weights=dtype,
        limits=LIMITS,
        page_tokens=64,
        prefill_chunk=512,
        kv_bytes=sizes,
        plan_digest="",
        model_digest="",
        command="",
        created="",
        made_from=made_from,
    )


def test_a_session_says_loudly_which_path_runs(
    native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    single, half, other = manifest("float32"), manifest("float16"), manifest("bfloat16")
    monkeypatch.setattr(natives, "find", lambda: natives.Found(native))
    assert session_class(single) is NativeSession and attention(single).startswith(
        f"native kernels, {native.isa}"
    )
    assert session_class(half) is HalfSession and attention(half).startswith(
        f"native kernels, {native.isa}"
    )
    assert session_class(other) is OrtSession and "NOT the native kernels" in attention(
        other
    )
    monkeypatch.setattr(natives, "find", lambda: natives.Found(None, "it is not there"))
    assert session_class(single) is OrtSession and "it is not there" in attention(
        single
    )
    both = dataclasses.replace(half, architectures=("cpu", "sm_90"))
    assert "NOT on a GPU" in attention(both, "cpu") and "NOT on a GPU" not in attention(
        half
    )
    assert "it will NOT run here" in attention(
        dataclasses.replace(single, backend="tensorrt_rtx")
    )

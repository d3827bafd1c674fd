"""Engines that vLLM hosts: a folder of a plan and bases, and refusals of what its
blocks cannot hold."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlathe.base.console import human_bytes
from kvlathe.base.errors import KvlatheError
from kvlathe.cli import main as cli
from kvlathe.engines.build import BuildConfig, build, preview
from kvlathe.engines.targets.vllm import check_plan
from kvlathe.export.folding.host_heads import write_heads
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.plan.layer_block import LayerBlock, as_held, newest
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import Window
from kvlathe.plan.manifest import verify
from kvlathe.plan.plan import CompressionPlan
from kvlathe_vllm.hosted import VARIABLE, Hosted, hosted, named, open_hosted
from tests.support.block_cases import plan_of
from tests.support.checkpoints import full_plan, random_basis

Reference = Callable[[str], tuple[Path, object]]


@pytest.fixture(scope="module")
def model(reference: Reference) -> Path:
    return reference("llama-dynamic")[0]


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("engines") / "hosted"
    request = BuildConfig(
        model,
        target,
        "hack:bits=8",
        backend="vllm",
        use_cache=False,
    )
    return build(request)


def test_a_folder_holds_plan_and_bases_and_no_weights(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names == {"plan.json", "heads.npz", "manifest.json", "report.html"}
    manifest = verify(folder)
    assert manifest.weight_bytes == 0 and len(manifest.model_digest) == 64
    assert manifest.prefill_chunk == manifest.page_tokens


def test_tokens_of_a_host_take_the_bytes_of_the_plan(folder: Path) -> None:
    engine = open_hosted(folder)
    layout = CacheLayout(engine.plan)
    blocks = [LayerBlock(layout, x) for x in range(engine.plan.model.layers)]
    assert engine.seals
    said = verify(folder).kv_bytes.per_token
    assert sum(block.token_bytes for block in blocks) == said


@pytest.mark.parametrize("name", ["llama-dynamic", "glm"])
def test_a_basis_of_full_rank_changes_nothing(
    reference: Reference, tmp_path: Path, name: str
) -> None:
    """Heads are in the checkpoint's own order: q' k' is q k, and o is v."""
    checkpoint = Checkpoint(reference(name)[0])
    spec = checkpoint.spec
    plan = full_plan(spec.shape, spec.rope is not None, projected=True)
    basis = random_basis(plan, 3, orthogonal=False)
    write_heads(spec, plan, basis, tmp_path / "heads.npz")
    arrays = np.load(tmp_path / "heads.npz")
    random = np.random.default_rng(0)
    q, k, v = random.standard_normal((3, spec.head_dim))
    others = random.standard_normal((4, spec.head_dim))
    for lane in plan.lanes:
        at = f"{lane.layer}.{lane.head}"
        centred = k @ arrays[f"{at}.k"] - arrays[f"{at}.centre"]
        differences = (others - k) @ q
        keys = others @ arrays[f"{at}.k"] - arrays[f"{at}.centre"]
        ours = (keys - centred) @ (q @ arrays[f"{at}.q"])
        assert np.allclose(ours, differences, atol=1e-3)
        inner = (v - arrays[f"{at}.shift"]) @ arrays[f"{at}.v"]
        back = inner @ arrays[f"{at}.o"] + arrays[f"{at}.shift"]
        assert np.allclose(back, v, atol=1e-3)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_of_projections_are_in_the_order_of_the_checkpoint(
    reference: Reference, tmp_path: Path, interleaved: bool
) -> None:
    checkpoint = Checkpoint(reference("llama-dynamic")[0])
    spec = checkpoint.spec
    assert spec.rope is not None
    turned = dataclasses.replace(spec.rope, interleaved=interleaved)
    plan = full_plan(spec.shape, projected=True)
    basis = random_basis(plan, 3, orthogonal=True)
    ordered = dataclasses.replace(spec, ropes=(turned,) * len(spec.ropes))
    write_heads(ordered, plan, basis, tmp_path / "heads.npz")
    written = np.load(tmp_path / "heads.npz")["0.0.q"][:, : spec.head_dim]
    a = basis[0, 0].a
    assert a is not None
    pairs = [(0, 1), (2, 3)] if interleaved else [(0, spec.head_dim // 2)]
    half = spec.head_dim // 2
    for plane, (first, second) in enumerate(pairs):
        assert np.allclose(written[first], a[plane], atol=1e-6)
        assert np.allclose(written[second], a[plane + half], atol=1e-6)


def test_a_dry_run_counts_no_weights(model: Path, tmp_path: Path) -> None:
    said = preview(BuildConfig(model, tmp_path / "x", backend="vllm"))
    assert said["weight_bytes"] == 0 and said["kv_bytes_removed"] == 0


def windowed(plan: CompressionPlan, sink: int = 16) -> CompressionPlan:
    group = dataclasses.replace(plan.groups[0], life=Window(sink, 32))
    return dataclasses.replace(plan, groups=(group,))


def test_blocks_hold_what_some_head_of_their_layer_sees() -> None:
    """All tokens, where one head sees them or the first ones. Bytes are counted so."""
    plan = plan_of(16, sealed=False)
    assert newest(plan, 0) is None and as_held(plan) == plan
    from_the_first = windowed(plan)
    assert newest(from_the_first, 0) is None and as_held(from_the_first) == plan
    of_the_newest = windowed(plan, 0)
    assert newest(of_the_newest, 0) == 32 + 16
    assert as_held(of_the_newest) == of_the_newest
    mixed = plan_of(16, windows=(Window(0, 16), Window(0, 16)))
    assert newest(mixed, 1) is None and not as_held(mixed).index.drops
    to_the_token = Window.of_tokens(21, 16)
    group = dataclasses.replace(plan.groups[0], life=to_the_token)
    assert newest(dataclasses.replace(plan, groups=(group,)), 0) == 21


@pytest.mark.parametrize("sink", [0, 64])
def test_all_that_is_told_of_bytes_counts_the_same_blocks(
    sink: int, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The build's table, the manifest and the report; where blocks are freed on a CPU
    alone, all three say so."""
    compression = f"window:sink={sink},recent=64"
    words = ["--model", str(model), "--output-dir", str(tmp_path / "engine")]
    words += ["--backend", "vllm", "--compression", compression, "--no-measure"]
    assert cli.run(["build", *words, "--no-cache", "--json"]) == 0
    built = json.loads(capsys.readouterr().out)
    longest = built["memory"][-1]
    per_token = verify(tmp_path / "engine").kv_bytes.per_token
    assert longest["steady"] == per_token * longest["tokens"]
    page = (tmp_path / "engine" / "report.html").read_text("utf-8")
    assert human_bytes(longest["steady"]) in page
    assert (longest["steady"] < longest["uncompressed"]) == (sink == 0)
    for text in (str(built["warnings"]), page):
        assert ("on a GPU it frees no blocks" in text) == (sink == 0)


def test_a_plan_that_shows_more_than_the_model_is_refused() -> None:
    """vLLM would free blocks of a model's window that the plan reads."""
    plan = plan_of(16, sealed=False)
    engine = Hosted(Path("engine"), windowed(plan, 0), {})
    assert engine.window(0, None) == engine.window(0, 48) == 48
    with pytest.raises(KvlatheError, match=r"sees 47 tokens in the model.*plan 48"):
        engine.window(0, 47)
    whole = Hosted(Path("engine"), plan, {})
    assert whole.window(0, None) is None
    with pytest.raises(KvlatheError, match="in the plan all"):
        whole.window(0, 4096)


@pytest.mark.parametrize(
    ("compression", "options", "words"),
    [
        ("uncomp", {}, "vllm cannot run a compression that ranks.*one block table"),
        ("kvzip", {}, "vllm cannot run a compression that ranks.*one block table"),
        ("hack:bits=2,recent=128", {}, "newest tokens have more bits"),
        ("hack:bits=4", {"prefill_chunk": 128}, "sealed every 128.*--prefill-chunk 64"),
        ("none", {"weights": "int8"}, "no product of such weights"),
        ("none", {"tensor_parallel_size": 2}, "vllm runs on one device"),
    ],
)
def test_plans_that_blocks_of_vllm_cannot_hold_are_refused(
    model: Path,
    tmp_path: Path,
    compression: str,
    options: dict[str, Any],
    words: str,
) -> None:
    target = tmp_path / "refused"
    with pytest.raises(KvlatheError, match=words):
        build(BuildConfig(model, target, compression, backend="vllm", **options))
    assert not target.exists()


def test_plans_that_others_wrote_are_refused_too() -> None:
    plan = plan_of(16, sealed=False)
    check_plan("vllm", plan)
    check_plan("vllm", plan_of(64))
    check_plan("vllm", windowed(plan))
    coarse = dataclasses.replace(plan_of(16), prefill_chunk=64)
    with pytest.raises(KvlatheError, match="--prefill-chunk 16"):
        check_plan("vllm", coarse)


def test_a_process_hosts_what_it_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kvlathe_vllm.hosted._opened", {})
    monkeypatch.delenv(VARIABLE, raising=False)
    assert named() is None
    with pytest.raises(KvlatheError, match="not told which engine"):
        hosted()
    assert named({"kvlathe": str(tmp_path)}) == tmp_path
    monkeypatch.setenv(VARIABLE, str(folder))
    engine = hosted()
    assert engine is hosted({}) and engine.folder == folder
    model = engine.plan.model
    shape = (model.layers, model.query_heads, model.kv_heads, model.head_dim)
    engine.check_model(shape, "a model")
    with pytest.raises(KvlatheError, match="no plan for another"):
        engine.check_model((1, 2, 3, 4), "another")

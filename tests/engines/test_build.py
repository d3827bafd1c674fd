"""Building: an engine appears whole, proves itself, comes back from the cache; a
refusal leaves nothing behind."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from kvlathe.base import tokenizer_files
from kvlathe.base.errors import KvlatheError
from kvlathe.cli.build import describe
from kvlathe.engines import build as builds
from kvlathe.engines import cache, planning
from kvlathe.engines.build import BuildConfig, build, calibrate_to, preview
from kvlathe.engines.compare import raw_step
from kvlathe.engines.order import accept
from kvlathe.export.model.spec import DecoderSpec
from kvlathe.export.model.weights_file import Place
from kvlathe.export.onnx import model as model_of
from kvlathe.plan import manifest as manifests
from kvlathe.plan.engine_folder import read_plan
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.tasks.tasks import FolderEncoder
from tests.support.checkpoints import make_model
from tests.support.families.sizes import sizes
from tests.support.nightly import rest_nightly

ROOT = Path(__file__).parents[2]
Reference = Callable[[str], tuple[Path, object]]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLATHE_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module", autouse=True)
def graphs_are_traced_once() -> Iterator[None]:
    """That of a plan is the same for all weights of a model."""
    real = model_of._graph
    known: dict[str, tuple[onnx.ModelProto, dict[str, Place]]] = {}

    def once(
        spec: DecoderSpec,
        plan: CompressionPlan,
        stage: int,
        places: dict[str, Place],
        *rest: Any,  # noqa: ANN401
    ) -> onnx.ModelProto:
        assert not stage and not places
        asked = repr((spec, plan.to_json(), rest))
        if asked not in known:
            graph = real(spec, plan, stage, places, *rest)
            known[asked] = graph, dict(places)
        graph, placed = known[asked]
        places.update(placed)
        return graph

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_of, "_graph", once)
        yield


@pytest.fixture(scope="module")
def model(reference: Reference) -> Path:
    return reference("llama-dynamic")[0]


@pytest.fixture
def request_for(model: Path, tmp_path: Path) -> Callable[..., BuildConfig]:
    def made(**options: Any) -> BuildConfig:  # noqa: ANN401
        return BuildConfig(model, tmp_path / options.pop("name", "engine"), **options)

    return made


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uncompressed engine of the tiny model. Read only."""
    return build(
        BuildConfig(
            model,
            tmp_path_factory.mktemp("engines") / "whole",
            command="kvlathe build whole",
        )
    )


def logits(engine: Path) -> np.ndarray:
    plan = CompressionPlan.from_json((engine / "plan.json").read_text())
    session = onnxruntime.InferenceSession(
        engine / "model.onnx", providers=["CPUExecutionProvider"]
    )
    step = raw_step(plan)
    feeds = {value.name: step[value.name] for value in session.get_inputs()}
    return np.asarray(session.run(["logits"], feeds)[0])


def stored_bytes(engine: Path) -> int:
    """Bytes of the weights in its data file, without what aligns them."""
    graph = onnx.load(engine / "model.onnx", load_external_data=False).graph
    facts = [fact for tensor in graph.initializer for fact in tensor.external_data]
    return sum(int(fact.value) for fact in facts if fact.key == "length")


# -- what is built ---------------------------------------------------------------------
@pytest.mark.slow
def test_an_engine_of_codes_counts_weights_and_cache(
    engine: Path, request_for: Callable[..., BuildConfig]
) -> None:
    """Its logits are near those of the floats, and what is cached is the same."""
    promised = preview(request_for(weights="int8"))["weight_bytes"]
    coded = build(request_for(weights="int8"))
    facts, plain = describe(coded), describe(engine)
    assert (facts["weights"], plain["weights"]) == ("int8", "float32")
    weights = manifests.verify(coded).made_from["model.onnx.data"].size
    assert facts["weight_bytes"] == weights < plain["weight_bytes"]
    assert promised == pytest.approx(stored_bytes(coded), rel=0.02)
    for row, other in zip(facts["memory"], plain["memory"], strict=True):
        assert row["together"] == weights + row["batch_peak"]
        assert row["batch_peak"] == other["batch_peak"]
    expected = logits(engine)
    error = np.linalg.norm(logits(coded) - expected)
    assert error < 0.05 * np.linalg.norm(expected)


def test_an_engine_describes_and_proves_itself(engine: Path) -> None:
    manifest = manifests.verify(engine)
    plan = CompressionPlan.from_json((engine / "plan.json").read_text())
    assert {
        "plan.json",
        "model.onnx",
        "model.onnx.data",
        "basis.npz",
        "report.html",
    } <= set(manifest.files)
    assert (
        manifest.plan_digest == plan.digest
        and manifest.command == "kvlathe build whole"
    )
    assert (
        manifest.kv_bytes.per_token
        == manifest.kv_bytes.baseline
        == CacheLayout(plan).bytes_per_token()
    )
    assert manifest.kv_bytes.baseline_16bit == manifest.kv_bytes.baseline
    assert (
        manifest.limits.max_seq_len == 512
        and manifest.versions["onnxruntime"] == onnxruntime.__version__
    )
    assert all(
        manifest.made_from[name] == manifest.files[name]
        for name in ("plan.json", "model.onnx", "model.onnx.data")
    )
    assert all(b".building-" not in path.read_bytes() for path in engine.iterdir())


@pytest.mark.slow
def test_the_log_names_every_long_step_before_it_begins(
    request_for: Callable[..., BuildConfig],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of a build, and of what loads its engine: nobody waits without a word."""
    steps = {
        "reading": "kvlathe.engines.cache.find",
        "planning": "kvlathe.engines.build.plan_for",
        "calibrating": "kvlathe.export.calibration.calibrate.calibrate",
        "exporting": "kvlathe.export.onnx.model.trace",
        "folding": "kvlathe.export.onnx.model.write_weights",
        "checking": "kvlathe.export.onnx.model.prove",
        "building": "kvlathe.engines.targets.onnxruntime.build",
        "writing the report": "kvlathe.engines.build._report",
        "signing": "kvlathe.plan.manifest.write",
        "keeping": "kvlathe.engines.cache.keep",
        "verifying": "kvlathe.plan.manifest._check_file",
        "loading": "kvlathe.runtime.sessions.registry.cache_bytes",
    }
    last: list[str] = []

    def heard(said: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*values: Any, **named: Any) -> object:  # noqa: ANN401
            last.append(said if said in caplog.messages[-1] else caplog.messages[-1])
            return real(*values, **named)

        return step

    for said, name in steps.items():
        module, _, function = name.rpartition(".")
        real = getattr(importlib.import_module(module), function)
        monkeypatch.setattr(name, heard(said, real))
    with caplog.at_level("INFO", "kvlathe"):
        sizes = {"removal_rate": 0.15, "max_batch_size": 5}
        LLM.load(build(request_for(compression="fdc", seed=77, **sizes)))
    assert list(dict.fromkeys(last)) == list(steps)


def test_an_interrupted_build_says_what_the_next_one_finds(
    request_for: Callable[..., BuildConfig],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    config = request_for(compression="fdc", seed=78, removal_rate=0.15)
    with monkeypatch.context() as patch, caplog.at_level("INFO", "kvlathe"):
        patch.setattr("kvlathe.engines.build._export", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build(config)
    assert any("goes on from there" in said for said in caplog.messages)
    assert not config.output_dir.exists()
    caplog.clear()
    with caplog.at_level("INFO", "kvlathe"):
        build(config)
    assert any("calibrated before" in said for said in caplog.messages)


def test_a_changed_weight_is_refused(engine: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(engine, tmp_path / "copy")
    with (copy / "model.onnx.data").open("r+b") as file:
        file.write(b"\x00\x01\x02")
    with pytest.raises(KvlatheError, match=r"model\.onnx\.data .* has changed"):
        manifests.verify(copy)


@pytest.mark.slow
def test_a_compressed_engine_at_full_rank_has_the_same_logits(
    request_for: Callable[..., BuildConfig],
) -> None:
    """The whole path, calibration included, changes nothing until it removes
    something."""
    exact = build(request_for(kv_bits=32, name="exact"))
    whole = logits(exact)
    same = build(
        request_for(compression="fdc", removal_rate=0.0, kv_bits=32, name="same")
    )
    assert np.abs(logits(same) - whole).max() < 1e-4
    assert "<svg" in (same / "report.html").read_text()
    assert "Memory to plan for" in (same / "report.html").read_text()


@pytest.mark.nightly
def test_a_compressed_engine_has_fewer_bytes(
    engine: Path, request_for: Callable[..., BuildConfig]
) -> None:
    """That of lathe-5m in cli/test_main_job.py has, too."""
    less = build(request_for(compression="fdc", compression_ratio=0.4, name="less"))
    sizes = manifests.verify(less).kv_bytes
    assert (
        0.4 <= sizes.removed < 0.75
        and sizes.baseline == manifests.read(engine).kv_bytes.per_token
    )
    assert logits(less).shape == logits(engine).shape
    assert "<svg" in (less / "report.html").read_text()


def test_an_engine_of_8_bit_floats_has_half_the_bytes_and_nearly_the_logits(
    engine: Path,
    request_for: Callable[..., BuildConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A byte a number and a half a token of each K and V. By the graph alone, as
    runtimes without our kernels run it."""
    monkeypatch.setenv("KVLATHE_NATIVE", "0")
    floats = build(request_for(compression="fp8", prefill_chunk=64))
    shape = read_plan(floats).model
    heads = shape.layers * shape.kv_heads
    per_token = manifests.verify(floats).kv_bytes.per_token
    assert per_token == 2 * heads * (shape.head_dim + 2)
    tokens = np.random.default_rng(0).integers(0, shape.vocab_size, 200).tolist()
    whole, coded = (
        LLM.load(folder).logits(tokens, range(200)) for folder in (engine, floats)
    )
    np.testing.assert_allclose(coded[:64], whole[:64], atol=1e-4)
    apart = np.abs(coded - whole).max()
    assert 1e-4 < apart < 0.1 * np.abs(whole).max()


@pytest.mark.slow
def test_engines_cache_in_16_bit_unless_they_are_asked_for_32(
    request_for: Callable[..., BuildConfig], engine: Path
) -> None:
    """Whatever they compute in, so that their bytes are beside those that others
    count."""
    half = build(request_for(dtype="float16"))
    manifest = manifests.verify(half)
    assert manifest.compute_dtype == "float16"
    assert manifest.kv_bytes == manifests.read(engine).kv_bytes
    assert np.abs(logits(half) - logits(engine)).max() < 0.1
    wide = manifests.read(build(request_for(kv_bits=32, name="wide"))).kv_bytes
    assert wide.per_token == 2 * manifest.kv_bytes.per_token
    assert wide.baseline == 2 * wide.baseline_16bit


def test_an_engine_ends_its_text_where_the_checkpoint_says(
    model: Path, request_for: Callable[..., BuildConfig], tmp_path: Path
) -> None:
    """Here only config.json says it, and it does not come along: every token ends a
    text."""
    copy = shutil.copytree(
        model,
        tmp_path / "model",
        ignore=shutil.ignore_patterns("generation_config.json"),
    )
    config = json.loads((copy / "config.json").read_text())
    ends = list(range(config["vocab_size"]))[::-1]
    (copy / "config.json").write_text(json.dumps(config | {"eos_token_id": ends}))
    (copy / "generation_config.json").write_text(
        json.dumps({"eos_token_id": None, "pad_token_id": 3})
    )
    llm = LLM.load(build(dataclasses.replace(request_for(), model=copy)))
    assert llm.generate([[5, 6, 7]])[0].finish_reason == "stop"
    assert (
        tokenizer_files.separator(llm.tokenizer.eos_ids)
        == FolderEncoder(copy).eos_id
        == ends[0]
    )
    written = json.loads((tmp_path / "engine" / "generation_config.json").read_text())
    assert written == {"eos_token_id": ends, "pad_token_id": 3}


# -- the cache -------------------------------------------------------------------------
def test_the_same_request_again_builds_nothing(
    engine: Path,
    request_for: Callable[..., BuildConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(builds, "_make", never)
    again = build(request_for(command="another command"))
    assert manifests.verify(again).command == "another command"
    assert not (again / "model.onnx.data").samefile(engine / "model.onnx.data")
    same, kept = (
        set(manifests.read(folder).files.items()) for folder in (again, engine)
    )
    assert {name for name, _ in same ^ kept} == {"report.html"}
    with pytest.raises(AssertionError):
        build(request_for(name="fresh", use_cache=False))


def test_a_cached_engine_speaks_of_this_build_and_the_first_one_stays_as_it_is(
    engine: Path, model: Path, tmp_path: Path
) -> None:
    """The same weights under another name, by another command: the engine is the cached
    one, what it says is not."""
    renamed = shutil.copytree(model, tmp_path / "an & other")
    again = build(
        BuildConfig(
            renamed, tmp_path / "again", command="kvlathe build --model 'an & other'"
        )
    )
    first, second = ((folder / "report.html").read_text() for folder in (engine, again))
    assert "kvlathe build whole" in first and "an &amp; other" not in first
    assert (
        "kvlathe build whole" not in second
        and "kvlathe build --model &#39;an &amp; other&#39;" in second
    )
    assert (
        '<span data-field="model">an &amp; other</span>' in second
        and model.name not in second
    )
    assert (
        manifests.verify(again).model == "an & other"
        and manifests.verify(engine).model == model.name
    )
    assert cache.find(accept(BuildConfig(model, tmp_path / "third")).key) is not None


def test_every_option_that_matters_is_in_the_key(
    request_for: Callable[..., BuildConfig], reference: Reference
) -> None:
    request = request_for()
    same = [
        request,
        dataclasses.replace(
            request, output_dir=request.output_dir / "x", command="y", workers=1
        ),
    ]
    changes = {
        "dtype": "float16",
        "kv_bits": 32,
        "max_batch_size": 4,
        "max_seq_len": 256,
        "tokens_per_block": 128,
        "device": "cpu",
    }
    others = [
        dataclasses.replace(request, **{name: value}) for name, value in changes.items()
    ]
    others += [
        dataclasses.replace(request, compression="fdc", basis=basis)
        for basis in ("svd", "balanced")
    ]
    others.append(dataclasses.replace(request, model=reference("qwen2-g7")[0]))
    assert len({accept(one).key for one in same}) == 1
    assert len({accept(one).key for one in (request, *others)}) == 1 + len(others)


def test_calibration_is_kept_as_a_file_and_in_the_cache(
    model: Path,
    tmp_path: Path,
    request_for: Callable[..., BuildConfig],
    monkeypatch: pytest.MonkeyPatch,
    reference: Reference,
) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path / "file" / "model.npz", Path("/proc/model.npz")):
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(KvlatheError, match="no folder"),
        ):
            patch.setattr(planning, "calibrated", lambda *_: pytest.fail("ran first"))
            calibrate_to(model, output, "random")
    written = calibrate_to(model, tmp_path / "model.npz", "random")
    with pytest.raises(KvlatheError, match="exists"):
        calibrate_to(model, tmp_path / "model.npz", "random")
    checkpoint = planning.open_checkpoint(model)
    monkeypatch.setattr(
        "kvlathe.export.calibration.calibrate.calibrate",
        lambda *_: pytest.fail("calibrated again"),
    )
    loaded = planning.statistics(
        accept(
            request_for(
                compression="fdc", removal_rate=0.2, stats=tmp_path / "model.npz"
            )
        ),
        checkpoint,
    )
    rate = request_for(compression="fdc", removal_rate=0.2)
    cached = planning.statistics(accept(rate), checkpoint)
    assert loaded is not None and cached is not None
    assert written.digest == loaded.digest
    assert written.entropies.texts > 0
    np.testing.assert_array_equal(cached.whole.kk, written.whole.kk)
    other = planning.open_checkpoint(reference("qwen2-g7")[0])
    with pytest.raises(KvlatheError, match="another model"):
        planning.statistics(
            accept(request_for(compression="fdc", stats=tmp_path / "model.npz")),
            other,
        )


# -- refusals --------------------------------------------------------------------------
def test_a_dry_run_counts_bytes_and_writes_nothing(
    request_for: Callable[..., BuildConfig], tmp_path: Path
) -> None:
    seen = preview(request_for(compression="fdc", removal_rate=0.4))
    json.dumps(seen)
    assert (
        seen["weight_bytes"] > 100_000
        and seen["kv_bytes_per_token_baseline"] == 2 * 2 * 2 * 32 * 2
    )
    assert 0 < seen["kv_bytes_removed"] < 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"removal_rate": 0.1, "accuracy": 0.9, "compression": "fdc"},
            "--removal-rate and --accuracy",
        ),
        ({"removal_rate": 0.1}, "--removal-rate with --compression none"),
        ({"compression": "fdc", "compression_ratio": 1.0}, "--compression-ratio 1.0"),
        ({"compression": "fdc", "accuracy": -0.5}, "--accuracy -0.5"),
        ({"compression": "fdc", "compression_ratio": 0.99}, "0.99 cannot be reached"),
        ({"compression": "zip"}, "unknown"),
        ({"stats": Path("nowhere.npz"), "compression": "fdc"}, "no such file"),
        ({"max_batch_size": 0}, "--max-batch-size 0"),
        ({"tokens_per_block": 40}, "multiples of 16"),
        ({"prefill_chunk": 100}, "whole pages"),
        ({"max_num_tokens": 10}, "--max-num-tokens 10"),
        ({"max_seq_len": 513}, "513"),
        ({"max_seq_len": 256, "max_input_len": 300}, "--max-input-len 300"),
        ({"kv_bits": 8}, "--kv-bits 8"),
        ({"compression": "auto", "metric": "speed"}, "--metric speed"),
        ({"compression": "fdc", "basis": "qr"}, "--basis qr .* svd, balanced"),
        ({"prefill_chunk": 1 << 36}, "--prefill-chunk 68719476736"),
        ({"seed": 1 << 80}, "--seed .* out of range"),
        ({"seed": -1}, "--seed -1"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16"),
        ({"backend": "cuda", "kv_bits": 32}, "its hot pages have 32 bits"),
        ({"backend": "abacus"}, "Choose one of onnxruntime"),
        ({"backend": []}, r"backend=list \[\] cannot be used: it is no text"),
        ({"max_batch_size": "8"}, "max_batch_size=str '8' cannot be used"),
        ({"max_seq_len": 8.0}, "it is no whole number"),
        ({"tokens_per_block": None}, "tokens_per_block=NoneType"),
        ({"use_cache": 1}, "it is no truth value"),
        ({"max_batch_size": True}, "it is no whole number"),
        ({"model": Path("nowhere")}, "nowhere"),
        ({"compression": "fdc", "calibration_tokens": 64}, "too few"),
    ],
)
def test_impossible_builds_are_refused_in_a_sentence_and_leave_nothing(
    options: dict[str, Any],
    words: str,
    request_for: Callable[..., BuildConfig],
    tmp_path: Path,
) -> None:
    """And the dry run refuses it, too."""
    request = dataclasses.replace(request_for(), **options)
    for verb in (build, preview):
        with pytest.raises(KvlatheError, match=words) as refused:
            verb(request)
        assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("family", "reason"), [("qwen3", "QK-norm"), ("gpt2", "no RoPE")]
)
def test_planes_that_a_model_cannot_choose_are_refused_before_calibration(
    family: str,
    reason: str,
    reference: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "statistics", lambda *_: pytest.fail("calibrated"))
    asked: dict[str, dict[str, Any]] = {
        "fdc": {"rope_fold": "planes"},
        "hack:bits=8+fdc:rope_fold=planes": {},
    }
    for compression, options in asked.items():
        request = BuildConfig(
            reference(family)[0], tmp_path / "engine", compression, **options
        )
        for verb in (build, preview):
            with pytest.raises(
                KvlatheError, match=f"{reason}.*Leave out --rope-fold planes"
            ):
                verb(request)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("compression", "options", "words"),
    [
        ("fdc+zack", {}, "fdc and zack cannot be composed"),
        ("uncomp+h2o", {}, "uncomp and h2o cannot be composed.*which tokens"),
        ("zipcache+hack", {}, "zipcache and hack cannot be composed.*number format"),
        ("uncomp+kivi:bits=4", {}, "by channel cannot be composed with token budgets"),
        ("uncomp+hack:sums=stored", {}, "sums=stored cannot be composed"),
        ("uncomp:budget=20", {}, "a page holds 64"),
        ("uncomp:budgets=400", {}, "Did you mean budget"),
        ("fdc:basis=sdv", {}, "Did you mean svd"),
        ("fdc+hack:group=128", {}, "--tokens-per-block 128"),
        ("zipcache:high=4,low=4", {}, "contradict"),
        (
            "kvzip",
            {"backend": "tensorrt"},
            "tensorrt cannot run a compression that ranks tokens.*onnxruntime or cuda",
        ),
        (
            "uncomp+fdc",
            {"backend": "tensorrt_rtx"},
            "tensorrt_rtx cannot run a compression that ranks tokens",
        ),
        ("fdc+h2o", {"compression_ratio": 0.5}, "depends on the sequence's length"),
        ("fdc+window", {"compression_ratio": 0.5}, "depends on the sequence's length"),
        ("window+h2o", {}, "window and h2o cannot be composed.*which tokens"),
        ("window:recent=many", {}, "a count of tokens"),
        ("window:whole=3", {}, "a head is layer.head"),
        ("duo:share=2", {}, "it is a share of the heads"),
        ("duo+window", {}, "duo and window cannot be composed.*which tokens"),
        ("duo", {"compression_ratio": 0.5}, "none of its methods chooses the ranks"),
        (
            "hack+window",
            {"backend": "tensorrt"},
            "tensorrt cannot run a compression with windows.*onnxruntime or cuda",
        ),
        (
            "window",
            {"backend": "tensorrt_rtx"},
            "tensorrt_rtx cannot run a compression with windows",
        ),
        (
            "fdc+zipcache",
            {"accuracy": 0.99, "metric": "perplexity"},
            "--accuracy cannot be used",
        ),
    ],
)
def test_requests_that_no_model_can_have_are_refused_before_calibration(
    compression: str,
    options: dict[str, Any],
    words: str,
    request_for: Callable[..., BuildConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "statistics", lambda *_: pytest.fail("calibrated"))
    for verb in (build, preview):
        with pytest.raises(KvlatheError, match=words):
            verb(request_for(compression=compression, **options))


def test_an_engine_without_tokenizer_json_takes_token_ids_and_says_what_gives_it_text(
    model: Path,
    request_for: Callable[..., BuildConfig],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    copy = shutil.copytree(
        model, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer.json")
    )
    (copy / "tokenizer.model").write_bytes(b"sentencepiece")
    with caplog.at_level("WARNING", "kvlathe"):
        llm = LLM.load(build(dataclasses.replace(request_for(), model=copy)))
    assert "takes token ids only" in caplog.text and "save_pretrained" in caplog.text
    whole = LLM.load(build(request_for(name="whole")))
    params = SamplingParams(max_new_tokens=5)
    assert (
        llm.generate([3, 4, 5], params)[0].token_ids
        == whole.generate([3, 4, 5], params)[0].token_ids
    )
    with pytest.raises(
        KvlatheError, match=r"no tokenizer\.json.*AutoTokenizer.*save_pretrained"
    ):
        llm.generate("text", params)


def test_a_library_that_is_missing_is_named_with_what_to_install(
    request_for: Callable[..., BuildConfig],
) -> None:
    from importlib import util

    if util.find_spec("tensorrt") is not None:
        pytest.skip("TensorRT is installed here")
    with pytest.raises(KvlatheError, match=r"needs the package tensorrt.*pip install"):
        build(request_for(backend="tensorrt"))


def test_an_existing_folder_is_refused_or_replaced_whole(
    engine: Path, request_for: Callable[..., BuildConfig]
) -> None:
    request = request_for()
    old = shutil.copytree(engine, request.output_dir)
    (old / "mine").write_text("")
    with pytest.raises(KvlatheError, match="exists"):
        build(request)
    replacing = dataclasses.replace(request, overwrite=True)
    with pytest.raises(KvlatheError, match=r"no build wrote \(mine\)"):
        build(replacing)
    assert (old / "mine").exists()
    (old / "mine").unlink()
    created = manifests.read(old).created
    build(replacing)
    assert manifests.verify(old).command == "" != manifests.read(engine).command
    assert manifests.read(old).created >= created


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    request_for: Callable[..., BuildConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(KvlatheError, match="with 1,000 free"):
        build(request_for(use_cache=False))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_nothing(
    request_for: Callable[..., BuildConfig], tmp_path: Path
) -> None:
    """The system call fails while the weights are written: a file size limit stands in
    for the full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(KvlatheError, match="disk is full"):
            build(request_for(use_cache=False))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []


BUILD = """
import sys
from pathlib import Path
from kvlathe.engines.build import BuildConfig, build
build(BuildConfig(Path(sys.argv[1]), Path(sys.argv[2]), use_cache=False))
"""


@pytest.mark.parametrize(
    "ending", rest_nightly([signal.SIGTERM, signal.SIGINT], signal.SIGTERM)
)
def test_a_build_that_is_interrupted_leaves_nothing(
    model: Path, tmp_path: Path, ending: signal.Signals
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", BUILD, str(model), str(tmp_path / "engine")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    while not list(tmp_path.glob("*/plan.json")) and not list(
        tmp_path.glob(".*/plan.json")
    ):
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(ending)
    _, err = child.communicate(timeout=300)
    assert child.returncode != 0 and "nothing was written" in err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_failed_build_and_the_cache_stays_clean(
    request_for: Callable[..., BuildConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    kept = len(cache.entries())
    monkeypatch.setattr("kvlathe.export.onnx.model.prove", broken)
    with pytest.raises(RuntimeError):
        build(request_for(max_batch_size=3))
    assert list(tmp_path.iterdir()) == [] and len(cache.entries()) == kept


@pytest.mark.slow
def test_ratios_are_against_a_cache_without_padding(tmp_path: Path) -> None:
    """Heads of 20 dims are cached as 32: an engine that keeps all of them is larger
    than an ordinary cache."""
    make_model(tmp_path / "model", "Llama", sizes(64, 4, 2, head_dim=20))
    engine = build(
        BuildConfig(tmp_path / "model", tmp_path / "engine", use_cache=False)
    )
    kv = manifests.read(engine).kv_bytes
    assert kv.per_token / kv.baseline == pytest.approx(32 / 20)
    assert kv.removed == pytest.approx(1 - 32 / 20)


def test_paths_may_be_given_as_text(model: Path, tmp_path: Path) -> None:
    texts: dict[str, Any] = {
        "model": str(model),
        "output_dir": str(tmp_path / "engine"),
    }
    request = BuildConfig(**texts)
    assert accept(request).key == accept(BuildConfig(model, tmp_path / "engine")).key


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"basis": "balanced"}, "--basis"),
        ({"calibration": "random"}, "--calibration"),
        ({"compression": "hack", "metric": "agreement"}, "--metric"),
        (
            {
                "compression": "fdc:removal_rate=0",
                "text": Path(__file__),
                "measure": False,
            },
            "--text",
        ),
    ],
)
def test_an_option_that_nothing_looks_at_is_named(
    request_for: Callable[..., BuildConfig],
    options: dict[str, Any],
    flag: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("WARNING", "kvlathe"):
        accept(request_for(**options))
    assert f"{flag} has no effect" in caplog.text


def test_text_that_the_measurement_reads_is_not_called_useless(
    request_for: Callable[..., BuildConfig], caplog: pytest.LogCaptureFixture
) -> None:
    given = {"compression": "hack:bits=8", "text": Path(__file__)}
    with caplog.at_level("WARNING", "kvlathe"):
        accept(request_for(**given))
    assert not caplog.text

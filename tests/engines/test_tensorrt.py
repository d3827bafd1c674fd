"""TensorRT engines: built ahead of time, and refused unless every layer's attention is
in the finished engine."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import onnx
import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.base.tensorrt_library import PLUGIN as PLUGIN_FILE
from kvlathe.base.tensorrt_library import VARIABLE, find_plugin
from kvlathe.engines.build import BuildConfig, build
from kvlathe.engines.targets import cuda, onnxruntime, tensorrt
from kvlathe.engines.targets.layers import PLUGIN, check_attention, required_nodes
from kvlathe.engines.targets.tensorrt import profiles
from kvlathe.plan import manifest as manifests
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import SEAL, Window
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.sessions.gpu.tensorrt import TensorRTCompute

MODEL = Path(__file__).parents[2] / "models" / "lathe-5m"
LIMITS = Limits(max_batch_size=4, max_num_tokens=80, max_input_len=200, max_seq_len=200)

needs_rtx = pytest.mark.skipif(
    util.find_spec("tensorrt_rtx_bindings") is None,
    reason="TensorRT-RTX is not installed: pip install '.[tensorrt]'",
)


@pytest.fixture(autouse=True)
def without_plugin(monkeypatch: pytest.MonkeyPatch) -> str:
    """The plugin that the environment names ("" if none); the tests run without unless
    they name it again."""
    named = os.environ.get(VARIABLE, "0")
    monkeypatch.setenv(VARIABLE, "0")
    return "" if named == "0" else named


def two_groups() -> CompressionPlan:
    lanes = tuple(
        Lane(0, head, 32, 32, 16 + 16 * head, projected=True) for head in range(2)
    )
    shape = ModelShape(1, 4, 2, 32, 64, 97, 512)
    groups = (Group((0,), Tier(16, 16)), Group((1,), Tier(16, 16)))
    return CompressionPlan(shape, lanes, groups, 64, 64)


def test_products_of_codes_are_refused_without_the_plugin() -> None:
    """The parser has no MatMulInteger."""
    plain = two_groups()
    cold = (Tier(4, 8, "rank", "token", 32, 64, "int"),)
    groups = (Group((0, 1), Tier(16, 16), cold, SEAL),)
    coded = CompressionPlan(plain.model, plain.lanes, groups, 64, 64)
    with pytest.raises(KvlatheError, match=r"codes of 4 and 8 bits.*MatMulInteger"):
        tensorrt.check_plan("tensorrt_rtx", coded)


# -- shapes ----------------------------------------------------------------------------
def test_profiles_are_ordered_and_hold_what_the_limits_allow() -> None:
    plan = two_groups()
    decode, mixed = profiles(plan, LIMITS)
    assert (
        decode.keys()
        == mixed.keys()
        >= {"input_ids", "query_offsets", "page_table_1", "pool_f16"}
    )
    for low, usual, high in (*decode.values(), *mixed.values()):
        assert all(a <= b <= c for a, b, c in zip(low, usual, high, strict=True))
    assert decode["query_offsets"][2] == (1,) and mixed["input_ids"][2] == (80,)
    assert mixed["page_table_0"][2] == (4, 4)  # 200 tokens are four pages of 64
    pool_bytes = 2 * mixed["pool_f16"][2][0] * mixed["pool_f16"][2][1]
    assert pool_bytes == 4 * 4 * sum(CacheLayout(plan).page_stride)


# -- the proof -------------------------------------------------------------------------
REQUIRED = {
    f"layers.{i}.attend/Attend": frozenset({"MatMul_1", "Softmax_2"}) for i in range(2)
}
WHOLE = "".join(
    f"Name: fused{i}, LayerType: gemm, Metadata: [ONNX Layer: MatMul_1 | layers.{i}.attend/Attend (Attend)]"
    f"[ONNX Layer: Softmax_2 | layers.{i}.attend/Attend (Attend)]\n"
    for i in range(2)
)


def test_an_engine_that_shows_all_attention_passes() -> None:
    check_attention(WHOLE, REQUIRED)
    check_attention(
        "Metadata: [ONNX Layer: layers.0.attend/Attend][ONNX Layer: layers.1.attend/Attend]",
        REQUIRED,
    )


@pytest.mark.parametrize("lost", ["MatMul_1 | layers.1", "Softmax_2 | layers.1"])
def test_a_lost_node_is_named_with_its_layer(lost: str) -> None:
    with pytest.raises(
        KvlatheError, match=rf"layers\.1\.attend/Attend \({lost.split()[0]}\)"
    ) as refused:
        check_attention(WHOLE.replace(lost, "other | layers.1"), REQUIRED)
    assert "layers.0" not in str(refused.value)


def test_an_engine_of_a_graph_without_attention_is_refused() -> None:
    with pytest.raises(KvlatheError, match="every layer"):
        check_attention(WHOLE, {})


# -- real builds -----------------------------------------------------------------------
@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fp16 ONNX engine of the shipped model. Read only."""
    folder = tmp_path_factory.mktemp("exported") / "engine"
    return build(
        BuildConfig(MODEL, folder, dtype="float16", max_seq_len=512, use_cache=False)
    )


@pytest.mark.slow
def test_the_products_and_the_softmaxes_of_every_layer_are_required(
    exported: Path,
) -> None:
    required = required_nodes(exported / "model.onnx")
    assert len(required) == 4
    kinds = [name.split("_")[0] for name in next(iter(required.values()))]
    assert kinds.count("MatMul") == 4  # fresh and cached tokens, scores and values
    assert kinds.count("Softmax") == 3  # fresh, cached, and their merger


def test_a_float16_engine_for_the_cpu_names_the_gpus_that_run_its_graph(
    exported: Path,
) -> None:
    """Not in float32, and not where the CUDA kernels do not attend its pages."""
    assert {"cpu", "sm_90"} <= set(manifests.read(exported).architectures)
    plan = CompressionPlan.from_json((exported / manifests.PLAN_FILE).read_text())
    assert (
        "sm_90" in onnxruntime.gpus(plan, "float16")
        and onnxruntime.gpus(plan, "float32") == ()
    )
    (group,) = plan.groups
    cold = (Tier(4, 4, "rank", "token", 32, 48),)
    coded = dataclasses.replace(group, cold=cold, life=SEAL)
    sealed = dataclasses.replace(plan, groups=(coded,))
    assert onnxruntime.gpus(sealed, "float16") == ()
    window = dataclasses.replace(group, life=Window(64, 128))
    windowed = dataclasses.replace(plan, groups=(window,))
    assert onnxruntime.gpus(windowed, "float16") == cuda.ARCHITECTURES


@needs_rtx
def test_the_shipped_model_becomes_an_engine_without_a_gpu(tmp_path: Path) -> None:
    folder = build(
        BuildConfig(
            MODEL,
            tmp_path / "engine",
            backend="tensorrt_rtx",
            max_seq_len=512,
            use_cache=False,
        )
    )
    manifest = manifests.verify(folder)
    assert manifest.compute_dtype == "float16" and "sm_89" in manifest.architectures
    assert "sm_75" not in manifest.architectures
    assert manifest.versions["tensorrt_rtx"]
    assert "model.engine" in manifest.files and "model.onnx" not in manifest.files
    assert {"model.onnx", "model.onnx.data"} <= set(manifest.made_from)
    layers = (folder / "layers.txt").read_text()
    assert all(f"layers.{i}.attend/Attend" in layers for i in range(4))


# -- with the plugin -------------------------------------------------------------------
@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin library: the one that the environment names, or a fresh build without
    kernels."""
    if named := os.environ.get(VARIABLE, "0").strip("0"):
        return Path(named)
    headers = os.environ.get("TENSORRT_INCLUDE_DIR", "")
    if not Path(headers, "NvInfer.h").is_file():
        pytest.skip(
            "no TensorRT headers: set TENSORRT_INCLUDE_DIR to include/ of https://github.com/NVIDIA/TensorRT"
        )
    sources, folder = (
        Path(__file__).parents[2] / "plugins_cpp",
        tmp_path_factory.mktemp("plugin"),
    )
    for command in (
        [
            "cmake",
            "-S",
            str(sources),
            "-B",
            str(folder),
            "-DKVLATHE_CUDA=OFF",
            f"-DTENSORRT_INCLUDE_DIR={headers}",
        ],
        ["cmake", "--build", str(folder), "-j2", "--target", "kvlathe_trt"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or "SKIPPING the TensorRT plugin" in done.stderr:
            pytest.skip(f"the plugin cannot be built here: {done.stderr[-300:]}")
    return folder / PLUGIN_FILE


@needs_rtx
@pytest.mark.parametrize("compression", ["none", "hack:bits=8"])
def test_every_attention_becomes_one_plugin_layer(
    plugin: Path, compression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantized pages too: the graph's unsigned bytes, which no plugin takes, reach it
    as signed ones."""
    monkeypatch.setenv(VARIABLE, str(plugin))
    request = BuildConfig(
        MODEL,
        tmp_path / "engine",
        compression=compression,
        backend="tensorrt_rtx",
        max_seq_len=512,
        use_cache=False,
    )
    folder = build(request)
    layers = (folder / "layers.txt").read_text()
    found = re.findall(
        r"Name: (layers\.\d+\.attend/Attend), LayerType: PluginV3,", layers
    )
    assert sorted(set(found)) == [f"layers.{i}.attend/Attend" for i in range(4)]
    assert "Softmax" not in layers and "Gather" not in "".join(
        line for line in layers.splitlines() if "attend" in line
    )
    manifest = manifests.verify(folder)
    assert manifest.versions["plugin"]
    plan = CompressionPlan.from_json((folder / manifests.PLAN_FILE).read_text())
    listed = Listed(layers)
    compute = TensorRTCompute(listed, listed, plan, stream=0)
    named = {"input_ids", "query_offsets", "pool_f16", "logits", "rows"}
    assert named <= set(compute.tensors)


class Listed:
    """A finished engine's tensors as its layer list names them: what TensorRTCompute
    checks when it is made."""

    KINDS: ClassVar = {
        "Int32": np.int32,
        "Half": np.float16,
        "Float": np.float32,
        "Int8": np.int8,
    }

    def __init__(self, layers: str) -> None:
        found = re.findall(
            r"Name: (\w+), IOMode: \w+, DataType: (\w+), .*?IsShapeInferenceIO: (\w+)",
            layers,
        )
        self.kinds = {name: self.KINDS[kind] for name, kind, _ in found}
        self.on_host = {name for name, _, wanted in found if wanted != "false"}
        self.num_io_tensors = len(self.kinds)
        self.nptype = np.dtype

    def get_tensor_name(self, place: int) -> str:
        return list(self.kinds)[place]

    def get_tensor_dtype(self, name: str) -> type:
        return self.kinds[name]

    def is_shape_inference_io(self, name: str) -> bool:
        return name in self.on_host

    def create_execution_context(self) -> SimpleNamespace:
        return SimpleNamespace(
            set_optimization_profile_async=lambda profile, stream: True
        )


def test_a_plugin_that_is_named_must_be_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nothing.so"))
    with pytest.raises(KvlatheError, match="there is no such file"):
        find_plugin()


def test_an_engine_that_ran_the_function_instead_of_the_plugin_is_refused() -> None:
    with pytest.raises(KvlatheError, match=r"layers\.0\.attend/Attend \(its plugin\)"):
        check_attention(WHOLE, dict.fromkeys(REQUIRED, PLUGIN))


@needs_rtx
def test_a_graph_whose_attention_is_not_used_is_refused(
    exported: Path, tmp_path: Path
) -> None:
    """Layer 2's output is wired past its attention: TensorRT drops the products, and
    the check names that layer."""
    broken = shutil.copytree(exported, tmp_path / "broken")
    model = onnx.load(broken / "model.onnx", load_external_data=False)
    attend = next(
        node for node in model.graph.node if node.name.startswith("layers.2.attend")
    )
    kept = next(
        node for node in model.graph.node if node.name.startswith("layers.1.attend")
    )
    for node in model.graph.node:
        node.input[:] = [
            kept.output[0] if name == attend.output[0] else name for name in node.input
        ]
    onnx.save(model, broken / "model.onnx")
    plan = CompressionPlan.from_json((broken / "plan.json").read_text())
    with pytest.raises(
        KvlatheError, match=r"lacks attention of layers\.2\.attend/Attend \(MatMul_"
    ) as refused:
        tensorrt.build("tensorrt_rtx", broken, plan, LIMITS)
    assert "layers.1" not in str(refused.value)


@needs_rtx
def test_a_refusal_of_tensorrts_parser_is_told_in_its_words(
    exported: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(exported, tmp_path / "broken")
    model = onnx.load(broken / "model.onnx", load_external_data=False)
    next(node for node in model.graph.node if node.op_type == "Sqrt").op_type = "Det"
    onnx.save(model, broken / "model.onnx")
    plan = CompressionPlan.from_json((broken / "plan.json").read_text())
    with pytest.raises(KvlatheError, match=r"tensorrt_rtx cannot build .*Det"):
        tensorrt.build("tensorrt_rtx", broken, plan, LIMITS)
    assert (broken / "model.onnx").exists()

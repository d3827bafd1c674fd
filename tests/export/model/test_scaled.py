"""Codes with scales beside them are the numbers that their formats define, in engines
that keep them, too; folders that contradict themselves are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from kvlathe.base.errors import KvlatheError
from kvlathe.engines.build import BuildConfig
from kvlathe.engines.job import prepare
from kvlathe.engines.order import accept
from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import fold
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.coded_weights import CodedWeights
from kvlathe.export.model.packed import Header
from kvlathe.export.model.scaled import ScaledMap
from kvlathe.export.model.scaled_config import BESIDE, Names, read_scaling
from kvlathe.export.model.stored_codes import read_codes
from kvlathe.layers.coded_weight import CodedWeight
from kvlathe.plan.weight_formats import WeightFormat, WeightFormats
from tests.support.checkpoints import make_model, whole_plan
from tests.support.families import FAMILIES
from tests.support.families.sizes import sizes
from tests.support.scaled_codes import KINDS, Kind, Tensors, coded_folder, write_folder

DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
}
SMALL = sizes(64, 4, 2, 16, intermediate_size=96, num_hidden_layers=1)


def map_of(kind: Kind, tensors: Tensors) -> ScaledMap:
    form = read_scaling(kind.said)
    assert form is not None

    def header(name: str) -> Header | None:
        if name not in tensors:
            return None
        return tuple(tensors[name].shape), DTYPES[tensors[name].dtype]

    schemes = [x for x in form.schemes("m") if f"m.weight{x.parts.scales}" in tensors]
    return ScaledMap(schemes[0], "m.weight", tensors.__getitem__, header)


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(1, 300), st.integers(1, 9), st.integers(0, 1 << 20))
def test_codes_are_the_numbers_that_their_format_defines(
    kind: str, outputs: int, groups: int, seed: int
) -> None:
    shape = (outputs, 32 * groups)
    parts, expected = KINDS[kind].made(shape, torch.Generator().manual_seed(seed))
    tensors = {f"m.weight{end}": part for end, part in parts.items()}
    coded = map_of(KINDS[kind], tensors)
    assert coded.checked(shape) == set(tensors)
    torch.testing.assert_close(coded.matrix().T.double(), expected, rtol=1e-6, atol=0)


def plain_and_coded(
    folder: Path, family: str, kind: Kind, beside: Tensors | None = None
) -> tuple[Path, Path]:
    plain, coded = folder / "plain", folder / "coded"
    make_model(plain, *FAMILIES[family])
    coded_folder(plain, coded, kind, beside)
    return plain, coded


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "fp8 in blocks"),
        ("llama", "nvfp4-pack-quantized"),
        ("qwen3_moe", "modelopt FP8"),
        ("qwen3_moe", "fp8 in small blocks"),
        ("deepseek_v3", "fp8 in small blocks"),
        ("mistral4-images", "fp8 of whole maps"),
        ("phi3", "float-quantized"),
    ],
)
def test_a_folder_of_codes_holds_the_weights_of_its_numbers(
    family: str, kind: str, tmp_path: Path
) -> None:
    """Also those of experts one by one and in a stack, of fused maps, and of heads that
    share a latent."""
    plain, coded = map(Checkpoint, plain_and_coded(tmp_path, family, KINDS[kind]))
    assert coded.codes and plain.weights == coded.weights
    for name in plain.weights:
        torch.testing.assert_close(coded.weight(name), plain.weight(name))


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("pack-quantized", WeightFormat("int4", 32)),
        ("pack-quantized zeros", WeightFormat("int4", 32, True)),
        ("pack-quantized 8 bits", WeightFormat("int8", 128)),
        ("int-quantized", WeightFormat("int8", 128)),
        ("float-quantized", WeightFormat("fp8", 0)),
        ("modelopt FP8", WeightFormat("fp8", 0)),
    ],
)
def test_an_engine_keeps_the_codes_of_its_checkpoint(
    kind: str, form: WeightFormat, tmp_path: Path
) -> None:
    _, folder = plain_and_coded(tmp_path, "llama", KINDS[kind])
    opened = Checkpoint(folder)
    weights = fold(opened, whole_plan(opened.spec), Basis())
    kept = CodedWeights(weights, WeightFormats(form), torch.float32, opened.grid)
    for name in [x for x in weights if x.endswith(("q.weight", "down.weight"))]:
        base = name.removesuffix(".weight")
        zeros = kept[f"{base}.zeros"] if form.zeros else None
        coded = CodedWeight(
            kept[f"{base}.codes"], kept[f"{base}.scales"], zeros, form.bits
        )
        found = coded.matrix(weights[name].shape[0]).T
        torch.testing.assert_close(found, weights[name], rtol=1e-6, atol=0)


def test_integers_give_an_engine_of_as_many_bits_and_floats_one_of_floats(
    tmp_path: Path,
) -> None:
    wanted = {"pack-quantized zeros": "int4", "modelopt NVFP4": None}
    for kind, weights in wanted.items():
        _, coded = plain_and_coded(tmp_path / kind, "llama", KINDS[kind])
        job = prepare(accept(BuildConfig(coded, tmp_path / "engine")))
        assert job.order.config.weights == weights
    _, coded = plain_and_coded(tmp_path, "qwen3_moe", KINDS["pack-quantized 8 bits"])
    job = prepare(accept(BuildConfig(coded, tmp_path / "engine")))
    assert job.order.config.weights is None  # experts are no maps that stay codes


def test_scales_of_activations_and_of_the_cache_are_passed_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    at = "model.layers.0.self_attn"
    scale = torch.tensor(0.5)
    ends = ("k_proj.k_scale", "v_proj.v_scale", "q_proj.input_scale", "k_scale")
    said = KINDS["modelopt FP8"].said | {"kv_cache_scheme": {"num_bits": 8}}
    kind = Kind(said, KINDS["modelopt FP8"].made)
    beside = {f"{at}.{end}": scale.clone() for end in ends}
    plain, coded = map(Checkpoint, plain_and_coded(tmp_path, "llama", kind, beside))
    name = "layers.0.q.weight"
    torch.testing.assert_close(coded.weight(name), plain.weight(name))
    assert "activations stay" in caplog.text and "cache in fewer bits" in caplog.text


@pytest.mark.parametrize("end", ["q_proj.pre_quant_scale", "k_proj.k_bias"])
def test_parts_that_change_results_are_refused(end: str, tmp_path: Path) -> None:
    beside = {f"model.layers.0.self_attn.{end}": torch.ones(64)}
    kind = KINDS["modelopt NVFP4"]
    _, coded = plain_and_coded(tmp_path, "llama", kind, beside)
    with pytest.raises(KvlatheError, match="leaving it out changes results"):
        Checkpoint(coded)


def test_modelopts_own_file_is_read_where_config_says_nothing(tmp_path: Path) -> None:
    plain, coded = plain_and_coded(tmp_path, "llama", KINDS["modelopt NVFP4"])
    path = coded / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    with pytest.raises(KvlatheError, match=r"stored as U8|has shape"):
        Checkpoint(coded)
    said = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    (coded / BESIDE).write_text(json.dumps({"quantization": said}))
    name = "layers.1.down.weight"
    found, expected = Checkpoint(coded), Checkpoint(plain)
    torch.testing.assert_close(found.weight(name), expected.weight(name))
    (coded / BESIDE).write_text("{")
    with pytest.raises(KvlatheError, match="cannot be read"):
        Checkpoint(coded)


def mixed(folder: Path) -> tuple[Path, Path]:
    """Attention in FP8, the MLP in NVFP4, as ModelOpt names them module by module."""
    plain, coded = folder / "plain", folder / "coded"
    make_model(plain, "Llama", SMALL)
    coded_folder(plain, coded, KINDS["modelopt FP8"])
    other = folder / "other"
    make_model(other, "Llama", SMALL)
    coded_folder(other, folder / "fours", KINDS["modelopt NVFP4"])
    tensors = load_file(coded / "model.safetensors")
    fours = load_file(folder / "fours" / "model.safetensors")
    joined = {x: t for x, t in tensors.items() if "mlp" not in x}
    joined |= {x: t for x, t in fours.items() if "mlp" in x}
    layers = {
        "model.layers.0.self_attn": {"quant_algo": "FP8"},
        "model.layers.0.mlp.gate_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16},
    }
    said = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    config = json.loads((coded / "config.json").read_text())
    write_folder(coded, joined, config, said | {"quantized_layers": layers})
    return coded, other


def test_maps_of_one_folder_may_have_schemes_of_their_own(tmp_path: Path) -> None:
    coded, fours = map(Checkpoint, mixed(tmp_path))
    plain = Checkpoint(tmp_path / "plain")
    assert coded.packing is None
    for name, expected in (("q", plain), ("o", plain), ("up", fours), ("down", fours)):
        at = f"layers.0.{name}.weight"
        torch.testing.assert_close(coded.weight(at), expected.weight(at))


@pytest.mark.parametrize(
    ("pattern", "module", "named"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head_norm", False),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("gate", "model.layers.1.mlp.gate", True),
        ("gate", "model.layers.1.mlp.gate_proj", False),
        ("model.layers.0*", "model.layers.0.mlp.up_proj", True),
        ("*.self_attn*", "model.layers.0.self_attn.q_proj", True),
        ("re:.*mlp.*", "model.layers.0.mlp.up_proj", True),
        ("re:mlp", "model.layers.0.mlp.up_proj", False),
        ("Linear", "model.layers.0.mlp.up_proj", True),
        ("LlamaAttention", "model.layers.0.self_attn", False),
    ],
)
def test_patterns_name_modules_as_toolkits_mean_them(
    pattern: str, module: str, named: bool
) -> None:
    assert (module in Names([pattern])) is named


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"},
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 128},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
        {"quant_method": "modelopt", "quant_algo": ["FP8"]},
        {"quant_method": "fp8", "fmt": "e5m2"},
        {"quant_method": "fp8", "expert_dtype": "fp4"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [128, -1]},
        {"quant_method": "fp8", "modules_to_not_convert": "lm_head"},
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "x"}},
        {"quant_method": "compressed-tensors", "ignore": ["re:("]},
        {
            "quant_method": "compressed-tensors",
            "transform_config": {"config_groups": {"R1": {}}},
        },
        {"quant_method": ["fp8"]},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"quant_method": "quark"},
        ["fp8"],
    ],
)
def test_codes_that_are_not_read_are_refused_by_name(said: object) -> None:
    with pytest.raises(KvlatheError, match="the checkpoint is quantized"):
        read_codes({"quantization_config": said})


# -- folders that are not what they say -------------------------------------------------
Change = Callable[[Tensors, dict[str, Any], int], None]
"""Changes tensors and quantization_config in place, in a way that a seed chooses."""
MUTATED = (
    "fp8 in small blocks",
    "modelopt NVFP4",
    "pack-quantized zeros",
    "int-quantized",
)
DOWN = "model.layers.0.mlp.down_proj.weight"


def on_part(change: Callable[[Tensor], Tensor | None]) -> Change:
    """A change of one part of one map; None takes it away."""

    def changed(tensors: Tensors, said: dict[str, Any], seed: int) -> None:
        names = sorted(name for name in tensors if name.startswith(DOWN))
        name = names[seed % len(names)]
        other = change(tensors.pop(name))
        tensors |= {} if other is None else {name: other.contiguous()}

    return changed


def say(**more: object) -> Change:
    def changed(tensors: Tensors, said: dict[str, Any], seed: int) -> None:
        said |= more

    return changed


def say_of_weights(**more: object) -> Change:
    def changed(tensors: Tensors, said: dict[str, Any], seed: int) -> None:
        for group in said.get("config_groups", {}).values():
            group["weights"] |= more

    return changed


def put(end: str, value: float) -> Change:
    """A number at the beginning of a part, where there is one."""

    def changed(tensors: Tensors, said: dict[str, Any], seed: int) -> None:
        if f"{DOWN}{end}" in tensors:
            part = tensors[f"{DOWN}{end}"] = tensors[f"{DOWN}{end}"].clone()
            part.view(-1)[0] = value

    return changed


CHANGES: dict[str, Change] = {
    "a part lacks": on_part(lambda x: None),
    "a part is short": on_part(lambda x: x[:-1] if x.ndim else None),
    "a part is turned": on_part(lambda x: x.T if x.ndim == 2 else x.expand(2)),
    "a part is long": on_part(lambda x: torch.cat([x, x]) if x.ndim else x.expand(3)),
    "float64": on_part(lambda x: x.double()),
    "int64": on_part(lambda x: x.long()),
    "int16": on_part(lambda x: x.to(torch.int16)),
    "bytes": on_part(lambda x: x.view(torch.int8) if x.dtype == torch.uint8 else None),
    "a scale that is none": put("_scale", float("nan")),
    "an endless scale": put("_scale_inv", float("inf")),
    "a whole scale that is none": put("_scale_2", float("nan")),
    "another width": put("_shape", 63),
    "other bits": say_of_weights(num_bits=8),
    "another group": say_of_weights(group_size=64),
    "no group": say_of_weights(group_size=0, strategy="group"),
    "half a group": say_of_weights(group_size=1.5, strategy="group"),
    "whole columns": say_of_weights(strategy="channel"),
    "whole maps": say_of_weights(strategy="tensor"),
    "a strategy that is none": say_of_weights(strategy=["group"]),
    "symmetric": say_of_weights(symmetric=True),
    "not symmetric": say_of_weights(symmetric=False),
    "a symmetry that is none": say_of_weights(symmetric="yes"),
    "floats": say_of_weights(type="float"),
    "another format": say(format="float-quantized"),
    "a format that is none": say(format=["int-quantized"]),
    "other blocks": say(weight_block_size=[16, 32]),
    "no blocks": say(weight_block_size=None),
    "blocks that are none": say(weight_block_size="128"),
    "groups that are none": say(config_groups=[1]),
    "no groups": say(config_groups={}),
    "all ignored": say(ignore=["re:.*"], modules_to_not_convert=["model"]),
    "an algorithm of others": say(quant_algo="FP8"),
    "another method": say(quant_method="fp8"),
}


@pytest.mark.parametrize("kind", MUTATED)
def test_a_folder_that_contradicts_itself_is_refused_or_read_as_it_was(
    kind: str, tmp_path: Path
) -> None:
    """No change leaves other weights, and none raises anything but a refusal."""
    plain, coded = tmp_path / "plain", tmp_path / "coded"
    make_model(plain, "Llama", SMALL)
    coded_folder(plain, coded, KINDS[kind])
    tensors = load_file(coded / "model.safetensors")
    config = json.loads((coded / "config.json").read_text())
    expected = load_file(plain / "model.safetensors")[DOWN].T
    refused = 0
    for name, change in {"": say(), **CHANGES}.items():
        for seed in range(4 if name.startswith(("a part", "int", "float6")) else 1):
            own, said = dict(tensors), json.loads(json.dumps(KINDS[kind].said))
            change(own, said, seed)
            write_folder(coded, own, config, said)
            try:
                found = Checkpoint(coded).weight("layers.0.down.weight")
            except KvlatheError as error:
                assert "\n" not in str(error) and name, str(error)
                refused += 1
                continue
            assert torch.allclose(found, expected, rtol=1e-6, atol=0), (name, seed)
    assert refused > 14

"""Checkpoints in MXFP4 hold the numbers that transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kvlathe.base.errors import KvlatheError
from kvlathe.export.model.checkpoint import Checkpoint
from tests.support.checkpoints import make_model
from tests.support.families.sizes import sizes

SIZES = sizes(64, 4, 2, 16, num_hidden_layers=1, intermediate_size=96)
MANY = SIZES | {"num_local_experts": 3, "num_experts_per_tok": 2}
QUANTIZED = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def packed_folder(plain: Path, packed: Path) -> None:
    """Random codes into ``packed``, and what transformers makes of them into
    ``plain``."""
    make_model(plain, "GptOss", MANY)
    numbers = load_file(plain / "model.safetensors")
    coded = dict(numbers)
    draw = torch.Generator().manual_seed(1)
    for name in [x for x in numbers if x.endswith(("gate_up_proj", "down_proj"))]:
        count, ins, outs = coded.pop(name).shape
        shape = (count, outs, ins // 32)
        blocks = torch.randint(256, (*shape, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(118, 130, shape, generator=draw, dtype=torch.uint8)
        coded |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    packed.mkdir()
    save_file(coded, packed / "model.safetensors")
    save_file(numbers, plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = QUANTIZED
    (packed / "config.json").write_text(json.dumps(config))
    (packed / "tokenizer.json").write_bytes((plain / "tokenizer.json").read_bytes())


def test_packed_experts_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    packed_folder(tmp_path / "plain", tmp_path / "packed")
    plain, packed = Checkpoint(tmp_path / "plain"), Checkpoint(tmp_path / "packed")
    assert plain.weights == packed.weights
    for name in plain.weights:
        assert torch.equal(packed.weight(name), plain.weight(name)), name


def test_packed_experts_of_other_shapes_are_refused(tmp_path: Path) -> None:
    packed_folder(tmp_path / "plain", tmp_path / "packed")
    path = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file(tensors | {name: tensors[name].float()}, path)
    with pytest.raises(KvlatheError, match="stored as F32"):
        Checkpoint(tmp_path / "packed")
    save_file(tensors | {name: tensors[name][:, :2].contiguous()}, path)
    with pytest.raises(KvlatheError, match="has shape"):
        Checkpoint(tmp_path / "packed")

"""Random codes with scales, as compressed-tensors, ModelOpt and Hugging Face store them,
and the numbers in float64 that their formats define. Nothing of kvlathe is used.

OCP Microscaling Formats 1.0 defines e4m3, e2m1 and e8m0; FP8 Formats for Deep Learning
(arXiv 2209.05433) e4m3, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]


def float_of(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """The value of a code of sign, exponent and mantissa, by its bits."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    bias = (1 << (exponent_bits - 1)) - 1
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1 + fraction) * 2.0 ** (exponent - bias)


E4M3 = torch.tensor([float_of(code, 4, 3) for code in range(256)], dtype=torch.float64)
E2M1 = torch.tensor([float_of(code, 2, 1) for code in range(16)], dtype=torch.float64)
NAN = 0x7F
"""The bits of e4m3 that are no number, whatever the sign."""


@dataclass(frozen=True)
class Kind:
    """``said``: the quantization_config. ``made``: a weight's shape and a seed -> its
    parts by the ends of their names, and the numbers [..., N, K] float64."""

    said: dict[str, Any]
    made: Callable[[tuple[int, ...], torch.Generator], tuple[Tensors, Tensor]]


def compressed(form: str, **weights: object) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*router"],
        "quantization_status": "compressed",
    }


def modelopt(algorithm: str) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": ["lm_head", "*router*"],
    }


def fp8(blocks: list[int] | None) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": blocks,
        "modules_to_not_convert": ["lm_head"],
    }


def each(blocks: Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> Tensor:
    """What each weight of ``shape`` has of its block's number [..., R, G]."""
    rows = torch.arange(shape[-2]) // (block[0] or shape[-2])
    columns = torch.arange(shape[-1]) // (block[1] or shape[-1])
    return blocks[..., rows[:, None], columns]


def grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    outputs, inputs = shape[-2:]
    return (
        *shape[:-2],
        -(-outputs // (block[0] or outputs)),
        -(-inputs // (block[1] or inputs)),
    )


def floats(
    block: tuple[int, int], scale: str, dtype: torch.dtype = torch.float32
) -> Callable[..., tuple[Tensors, Tensor]]:
    """Codes of e4m3 with scales under the end ``scale``; uint8: powers of two."""

    def made(shape: tuple[int, ...], draw: torch.Generator) -> tuple[Tensors, Tensor]:
        codes = torch.randint(256, shape, generator=draw, dtype=torch.uint8)
        codes[codes & NAN == NAN] = 0
        sizes = grid(shape, block)
        if dtype == torch.uint8:
            stored = torch.randint(112, 118, sizes, generator=draw, dtype=torch.uint8)
            scales = 2.0 ** (stored.double() - 127)
        else:
            stored = (torch.rand(sizes, generator=draw) / 500 + 1e-4).to(dtype)
            scales = stored.double()
        if block == (0, 0):
            stored = stored.reshape(shape[:-2])
        parts = {"": codes.view(torch.float8_e4m3fn), scale: stored}
        return parts, E4M3[codes.long()] * each(scales, shape, block)

    return made


def fours(
    group: int, names: tuple[str, str, str], divides: bool = False
) -> Callable[..., tuple[Tensors, Tensor]]:
    """Codes of e2m1; scales of e4m3 and one more, or powers of two where there is no
    name for one more."""
    codes_end, scale_end, whole_end = names

    def made(shape: tuple[int, ...], draw: torch.Generator) -> tuple[Tensors, Tensor]:
        codes = torch.randint(16, shape, generator=draw, dtype=torch.uint8)
        packed = codes[..., ::2] + 16 * codes[..., 1::2]
        sizes = grid(shape, (1, group))
        if not whole_end:
            stored = torch.randint(120, 126, sizes, generator=draw, dtype=torch.uint8)
            scales = 2.0 ** (stored.double() - 127)
            parts = {codes_end: packed, scale_end: stored}
        else:
            stored = torch.randint(1, 120, sizes, generator=draw, dtype=torch.uint8)
            whole = torch.rand(shape[:-2], generator=draw) / 500 + 1e-4
            if divides:
                whole = 1 / whole
            factor = 1 / whole.double() if divides else whole.double()
            scales = E4M3[stored.long()] * factor[..., None, None]
            parts = {
                codes_end: packed,
                scale_end: stored.view(torch.float8_e4m3fn),
                whole_end: whole if shape[:-2] else whole.reshape(1),
            }
        return parts, E2M1[codes.long()] * each(scales, shape, (1, group))

    return made


def into_words(codes: Tensor, bits: int) -> Tensor:
    """[N, K] -> int32 [N, K * bits / 32 rounded up], a code at a time."""
    per = 32 // bits
    words = torch.zeros(len(codes), -(-codes.shape[1] // per), dtype=torch.int64)
    for at in range(codes.shape[1]):
        words[:, at // per] |= codes[:, at].long() << (bits * (at % per))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def integers(
    bits: int, group: int, symmetric: bool = True, packed: bool = True
) -> Callable[..., tuple[Tensors, Tensor]]:
    """compressed-tensors' integers: in words, the middle code for 0, or as int8."""

    def made(shape: tuple[int, ...], draw: torch.Generator) -> tuple[Tensors, Tensor]:
        middle = 1 << (bits - 1)
        sizes = grid(shape, (1, group))
        numbers = torch.randint(-middle, middle, shape, generator=draw)
        scales = (torch.rand(sizes, generator=draw) / 50 + 1e-3).to(torch.bfloat16)
        zeros = torch.zeros(sizes, dtype=torch.int64)
        parts: Tensors = {"_scale": scales}
        if packed:
            parts["_packed"] = into_words(numbers + middle, bits)
            parts["_shape"] = torch.tensor(shape)
        else:
            parts[""] = numbers.to(torch.int8)
        if not symmetric:
            zeros = torch.randint(-middle, middle, sizes, generator=draw)
            words = into_words((zeros + middle).T.contiguous(), bits).T
            parts["_zero_point"] = words if packed else zeros.to(torch.int8)
        numbers = numbers - each(zeros, shape, (1, group))
        return parts, numbers.double() * each(scales.double(), shape, (1, group))

    return made


MODELOPT_FP4 = ("", "_scale", "_scale_2")
COMPRESSED_FP4 = ("_packed", "_scale", "_global_scale")
FLOAT8 = {"num_bits": 8, "type": "float"}
FLOAT4 = {"num_bits": 4, "type": "float"}
KINDS = {
    "fp8 in blocks": Kind(fp8([128, 128]), floats((128, 128), "_scale_inv")),
    "fp8 in small blocks": Kind(fp8([32, 16]), floats((32, 16), "_scale_inv")),
    "fp8 in blocks, powers of two": Kind(
        fp8([128, 128]) | {"scale_fmt": "ue8m0"},
        floats((128, 128), "_scale_inv", torch.uint8),
    ),
    "fp8 of whole maps": Kind(fp8(None), floats((0, 0), "_scale_inv", torch.bfloat16)),
    "autofp8": Kind(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": []},
        floats((0, 0), "_scale"),
    ),
    "fbgemm_fp8": Kind({"quant_method": "fbgemm_fp8"}, floats((1, 0), "_scale")),
    "float-quantized": Kind(
        compressed("float-quantized", strategy="channel", **FLOAT8),
        floats((1, 0), "_scale", torch.bfloat16),
    ),
    "float-quantized blocks": Kind(
        compressed(
            "float-quantized", strategy="block", block_structure=[16, 32], **FLOAT8
        ),
        floats((16, 32), "_scale"),
    ),
    "naive-quantized": Kind(
        compressed("naive-quantized", strategy="tensor", **FLOAT8),
        floats((0, 0), "_scale"),
    ),
    "mxfp8": Kind(
        compressed("mxfp8-quantized", group_size=32, **FLOAT8),
        floats((1, 32), "_scale", torch.uint8),
    ),
    "nvfp4-pack-quantized": Kind(
        compressed("nvfp4-pack-quantized", group_size=16, **FLOAT4),
        fours(16, COMPRESSED_FP4, divides=True),
    ),
    "mxfp4-pack-quantized": Kind(
        compressed("mxfp4-pack-quantized", group_size=32, **FLOAT4),
        fours(32, ("_packed", "_scale", "")),
    ),
    "pack-quantized": Kind(
        compressed(
            "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32
        ),
        integers(4, 32),
    ),
    "pack-quantized zeros": Kind(
        compressed(
            "pack-quantized", num_bits=4, type="int", group_size=32, symmetric=False
        ),
        integers(4, 32, symmetric=False),
    ),
    "pack-quantized 8 bits": Kind(
        compressed("pack-quantized", num_bits=8, type="int", strategy="channel"),
        integers(8, 0),
    ),
    "int-quantized": Kind(
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        integers(8, 0, packed=False),
    ),
    "int-quantized zeros": Kind(
        compressed(
            "int-quantized", num_bits=8, type="int", group_size=-1, symmetric=False
        ),
        integers(8, 0, symmetric=False, packed=False),
    ),
    "modelopt FP8": Kind(modelopt("FP8"), floats((0, 0), "_scale")),
    "modelopt FP8 channels": Kind(
        modelopt("FP8_PER_CHANNEL_PER_TOKEN"), floats((1, 0), "_scale")
    ),
    "modelopt FP8 blocks": Kind(modelopt("FP8_PB_WO"), floats((128, 128), "_scale")),
    "modelopt NVFP4": Kind(modelopt("NVFP4"), fours(16, MODELOPT_FP4)),
    "modelopt MXFP4": Kind(modelopt("MXFP4"), fours(32, ("", "_scale", ""))),
    "modelopt MXFP8": Kind(modelopt("MXFP8"), floats((1, 32), "_scale", torch.uint8)),
}


def is_map(name: str) -> bool:
    """Whether a tensor of a checkpoint is one that toolkits quantize."""
    return "proj" in name and "norm" not in name and not name.endswith("bias")


def coded_folder(
    plain: Path, coded: Path, kind: Kind, beside: Tensors | None = None
) -> None:
    """The maps of the folder ``plain`` as random codes in ``coded``, and the numbers
    that these are in ``plain``. ``beside``: more tensors of ``coded``."""
    numbers = load_file(plain / "model.safetensors")
    stored = dict(numbers)
    draw = torch.Generator().manual_seed(1)
    for name in sorted(filter(is_map, numbers)):
        shape = tuple(stored.pop(name).shape)
        parts, weight = kind.made(shape, draw)
        stored |= {f"{name}{end}": part.contiguous() for end, part in parts.items()}
        numbers[name] = weight.float()
    save_file(numbers, plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    tokenizer = (plain / "tokenizer.json").read_bytes()
    write_folder(coded, stored | (beside or {}), config, kind.said)
    (coded / "tokenizer.json").write_bytes(tokenizer)


def write_folder(
    folder: Path, tensors: Tensors, config: dict[str, Any], said: object
) -> None:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    whole = config | {"quantization_config": said}
    (folder / "config.json").write_text(json.dumps(whole))

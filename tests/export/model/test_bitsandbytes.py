"""Checkpoints of bitsandbytes in 4 bits hold the numbers that their tables say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kvlathe.base.errors import KvlatheError
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.stored_codes import read_codes
from tests.support.checkpoints import make_model
from tests.support.families.sizes import sizes
from tests.support.scaled_codes import Kind, Tensors, coded_folder, write_folder

SMALL = sizes(64, 4, 2, 16, intermediate_size=88, num_hidden_layers=1)
SAID = {"quant_method": "bitsandbytes", "load_in_4bit": True}
STATE = ".quant_state.bitsandbytes__nf4"
DOWN = "model.layers.0.mlp.down_proj.weight"


def four_bits(block: int, nested: int, changed: dict[str, Any] | None = None) -> Kind:
    """Codes of a random table, one by one, in rows that blocks do not respect."""

    def made(shape: tuple[int, ...], draw: torch.Generator) -> tuple[Tensors, Tensor]:
        codes = torch.randint(16, shape, generator=draw, dtype=torch.uint8).flatten()
        table = torch.randn(16, generator=draw)
        blocks = -(-len(codes) // block)
        said: dict[str, Any] = {"quant_type": "nf4", "blocksize": block}
        said |= {"shape": shape, "dtype": "bfloat16"}
        parts = {"": (codes[::2] * 16 + codes[1::2])[:, None], ".quant_map": table}
        largest = torch.rand(blocks, generator=draw).double()
        if nested:
            said |= {"nested_blocksize": nested, "nested_offset": 0.25}
            inner = torch.randint(256, (blocks,), generator=draw, dtype=torch.uint8)
            outer = torch.rand(-(-blocks // nested), generator=draw)
            map256 = torch.randn(256, generator=draw)
            parts |= {".nested_absmax": outer, ".nested_quant_map": map256}
            parts[".absmax"] = inner
            for at in range(blocks):
                product = map256[int(inner[at])].double() * outer[at // nested].double()
                largest[at] = product + 0.25
        else:
            parts[".absmax"] = largest.float()
        said |= changed or {}
        parts[STATE] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
        each = largest.float().double()[torch.arange(len(codes)) // block]
        return parts, (table.double()[codes.int()] * each).reshape(shape)

    return Kind(SAID | {"bnb_4bit_quant_type": "nf4"}, made)


@pytest.mark.parametrize(("block", "nested"), [(64, 0), (128, 16), (32, 256)])
def test_four_bits_are_the_numbers_of_their_table_times_their_blocks(
    block: int, nested: int, tmp_path: Path
) -> None:
    plain, coded = tmp_path / "plain", tmp_path / "coded"
    make_model(plain, "Llama", SMALL)
    coded_folder(plain, coded, four_bits(block, nested))
    expected, found = Checkpoint(plain), Checkpoint(coded)
    assert found.codes and found.packing is None
    for name in expected.weights:
        torch.testing.assert_close(found.weight(name), expected.weight(name))


@pytest.mark.parametrize(
    "changed",
    [
        {"shape": [88, 64]},
        {"shape": "64"},
        {"blocksize": 0},
        {"blocksize": 32},
        {"nested_blocksize": -1},
        {"nested_blocksize": 8},
        {"nested_offset": "x"},
        {"quant_type": "fp4"},
    ],
)
def test_a_state_that_contradicts_its_map_is_refused(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    make_model(tmp_path / "plain", "Llama", SMALL)
    kind = four_bits(64, 16, changed)
    coded_folder(tmp_path / "plain", tmp_path / "coded", kind)
    with pytest.raises(KvlatheError, match="are not what config"):
        Checkpoint(tmp_path / "coded")


PARTS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "lacks": lambda x: None,
    "is short": lambda x: x[:-1],
    "is of another type": lambda x: x.double(),
}


@pytest.mark.parametrize("change", PARTS)
def test_every_part_of_four_bits_is_checked(change: str, tmp_path: Path) -> None:
    make_model(tmp_path / "plain", "Llama", SMALL)
    folder = tmp_path / "coded"
    coded_folder(tmp_path / "plain", folder, four_bits(64, 16))
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    said = config.pop("quantization_config")
    for name in [name for name in tensors if name.startswith(DOWN)]:
        other = PARTS[change](tensors[name])
        own = {key: x for key, x in tensors.items() if key != name}
        own |= {} if other is None else {name: other.contiguous()}
        write_folder(folder, own, config, said)
        with pytest.raises(KvlatheError):
            Checkpoint(folder)


@pytest.mark.parametrize(
    "changed",
    [
        {"load_in_4bit": False, "load_in_8bit": True},
        {"bnb_4bit_quant_type": "int4"},
        {"bnb_4bit_quant_storage": "bfloat16"},
    ],
)
def test_other_codes_of_bitsandbytes_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(KvlatheError, match="quantized by bitsandbytes"):
        read_codes({"quantization_config": SAID | changed})

"""GPTQ and AWQ checkpoints are read as their packing formulas say, and keep their codes
in an engine of as many bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvlathe.base.adapters import Adapter
from kvlathe.base.errors import KvlatheError
from kvlathe.engines.build import BuildConfig
from kvlathe.engines.job import prepare
from kvlathe.engines.order import accept
from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import decoder_from, fold
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.coded_weights import CodedWeights
from kvlathe.export.model.packed import PackedMap, Packing, read_packing, unpack_words
from kvlathe.layers.coded_weight import CodedWeight, unpack
from kvlathe.plan.weight_formats import WeightFormat, WeightFormats
from tests.support.checkpoints import make_model, whole_plan
from tests.support.families.sizes import sizes

GROUP = 32
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ's order_map: which output of eight each nibble of a word has, lowest
first."""


def words(codes: Tensor, bits: int, columns: tuple[int, ...] | None = None) -> Tensor:
    """[n, m] -> int32 [n, m * bits / 32], a word at a time, as AutoGPTQ and AutoAWQ
    pack."""
    per = 32 // bits
    packed = torch.zeros(len(codes), codes.shape[1] // per, dtype=torch.int64)
    for i in range(per):
        source = i if columns is None else columns[i]
        packed |= codes[:, source::per].long() << (bits * i)
    signed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed)
    return signed.to(torch.int32)


def parts(
    packing: Packing, codes: Tensor, zeros: Tensor, scales: Tensor
) -> dict[str, Tensor]:
    """codes [K, N], zeros and scales [G, N] as a checkpoint has them."""
    if packing.method == "awq":
        weight = words(codes, 4, AWQ_COLUMNS)
        return {"qweight": weight, "qzeros": words(zeros, 4, AWQ_COLUMNS)} | {
            "scales": scales
        }
    stored = (zeros - int(packing.less_one)) % (1 << packing.bits)
    weight = words(codes.T.contiguous(), packing.bits).T.contiguous()
    return {
        "qweight": weight,
        "qzeros": words(stored, packing.bits),
        "scales": scales,
    }


def random_map(
    packing: Packing, inputs: int, outputs: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [K, N], zeros and scales [G, N]."""
    torch.manual_seed(seed)
    most = 1 << packing.bits
    groups = packing.groups(inputs)
    zeros = torch.randint(0, most, (groups, outputs))
    if packing.symmetric:
        zeros = torch.full((groups, outputs), most // 2)
    scales = (torch.rand(groups, outputs) + 0.5) / most / inputs**0.5
    return torch.randint(0, most, (inputs, outputs)), zeros, scales.half()


PACKINGS = st.one_of(
    st.builds(
        Packing,
        st.just("gptq"),
        st.sampled_from([4, 8]),
        st.sampled_from([0, 16, 32]),
        st.booleans(),
        st.booleans(),
    ),
    st.just(Packing("awq", 4, 32, False, False)),
)


@given(PACKINGS, st.integers(1, 4), st.integers(1, 3), st.integers(0, 1 << 20))
def test_packed_words_give_the_codes_that_were_packed(
    packing: Packing, rows: int, columns: int, seed: int
) -> None:
    inputs, outputs = 32 * rows, 32 * columns
    codes, zeros, scales = random_map(packing, inputs, outputs, seed)
    stored = parts(packing, codes, zeros, scales)
    order = torch.randint(0, packing.groups(inputs), (inputs,))
    regular = torch.arange(inputs) // (packing.group or inputs)
    for group, named in ((regular, {}), (order, {"g_idx": order.int()})):
        read = {f"m.{name}": x for name, x in (stored | named).items()}
        headers = {name: (tuple(x.shape), "") for name, x in read.items()}
        found = PackedMap(packing, "m", read.__getitem__, headers.get).matrix()
        expected = (codes - zeros[group]) * scales.float()[group]
        assert torch.equal(found, expected)


def quantization(packing: Packing) -> dict[str, Any]:
    shared = {"bits": packing.bits, "group_size": packing.group}
    if packing.method == "awq":
        return shared | {"quant_method": "awq", "version": "gemm", "zero_point": True}
    form = "gptq" if packing.less_one else "gptq_v2"
    sym = packing.symmetric
    return shared | {"quant_method": "gptq", "checkpoint_format": form, "sym": sym}


def checkpoint(folder: Path, packing: Packing, disorder: bool = False) -> Any:  # noqa: ANN401
    """A tiny llama whose maps are codes; return transformers' model that holds what
    they stand for, and the codes of each map."""
    make_model(folder, "Llama", sizes(64, 4, 2, 16, intermediate_size=96))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    held: dict[str, Tensor] = {}
    for seed, name in enumerate(sorted(tensors)):
        if "proj" not in name:
            continue
        base = name.removesuffix(".weight")
        outputs, inputs = tensors.pop(name).shape
        codes, zeros, scales = random_map(packing, inputs, outputs, seed)
        own = parts(packing, codes, zeros, scales)
        group = torch.arange(inputs) // packing.group
        if packing.method == "gptq":
            group = group.flip(0) if disorder else group
            own["g_idx"] = group.int()
        for part, tensor in own.items():
            tensors[f"{base}.{part}"] = tensor.contiguous()
        held[name] = ((codes - zeros[group]) * scales.float()[group]).T
        tensors[f"{base}.bias"] = torch.zeros(outputs)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {
        "quantization_config": quantization(packing)
    }
    path.write_text(json.dumps(config))
    model.load_state_dict(held, strict=False)
    return model


KINDS = {
    "gptq": Packing("gptq", 4, GROUP, True, True),
    "gptq_v2, zeros, 8 bit": Packing("gptq", 8, GROUP, False, False),
    "awq": Packing("awq", 4, GROUP, False, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_codes_is_its_float_model(kind: str, tmp_path: Path) -> None:
    packing = KINDS[kind]
    model = checkpoint(tmp_path, packing)
    opened = Checkpoint(tmp_path)
    plan = whole_plan(opened.spec)
    text = list(range(3, 40))
    found = decoder_from(opened, plan, Basis()).logits(text, range(len(text)))
    with torch.no_grad():
        expected = model(torch.tensor([text])).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    keeps_its_codes(opened, packing)


def keeps_its_codes(opened: Checkpoint, packing: Packing) -> None:
    """An engine of as many bits stands for the same numbers as the checkpoint."""
    form = WeightFormat(f"int{packing.bits}", GROUP, not packing.symmetric)
    weights = fold(opened, whole_plan(opened.spec), Basis())
    codes = CodedWeights(weights, WeightFormats(form), torch.float32, opened.grid)
    for name in weights:
        base = name.removesuffix(".weight")
        if f"{base}.codes" not in codes:
            continue
        zeros = codes[f"{base}.zeros"] if form.zeros else None
        kept = CodedWeight(
            codes[f"{base}.codes"], codes[f"{base}.scales"], zeros, form.bits
        )
        inputs = weights[name].shape[0]
        torch.testing.assert_close(kept.matrix(inputs).T, weights[name], rtol=0, atol=0)
        assert int(unpack(kept.codes, form.bits).max()) == (1 << form.bits) - 1


def test_an_engine_has_the_groups_of_its_checkpoint(tmp_path: Path) -> None:
    checkpoint(tmp_path, KINDS["awq"])
    request = BuildConfig(tmp_path, tmp_path / "engine")
    job = prepare(accept(request))
    assert job.order.config.weights == "int4"
    assert job.formats.maps == WeightFormat("int4", GROUP, True)


def test_a_lora_adapter_on_a_checkpoint_of_codes_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, KINDS["awq"])
    with pytest.raises(KvlatheError, match="not on their grid"):
        Checkpoint(tmp_path, adapters=[Adapter(tmp_path)])


def test_groups_out_of_order_are_refused_in_as_many_bits(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, KINDS["gptq"], disorder=True)
    with pytest.raises(KvlatheError, match="desc_act"):
        prepare(accept(BuildConfig(tmp_path, tmp_path / "engine")))
    floats = BuildConfig(tmp_path, tmp_path / "engine", weights="float32")
    opened = prepare(accept(floats)).checkpoint
    name = "model.layers.0.mlp.down_proj.weight"
    expected = dict(model.named_parameters())[name].T
    torch.testing.assert_close(opened.weight("layers.0.down.weight"), expected)


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "gptq", "checkpoint_format": "marlin"},
        {"quant_method": "gptq", "group_size": 48},
        {"quant_method": "awq", "version": "gemv"},
        {"quant_method": "aqlm"},
    ],
)
def test_checkpoints_in_unknown_codes_are_refused(said: dict[str, Any]) -> None:
    with pytest.raises(KvlatheError, match="is quantized"):
        read_packing(said)


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_auto_round_writes_in_the_layouts_of_others(layout: str) -> None:
    said = {"bits": 4, "group_size": 64, "sym": True, "quant_method": layout}
    own = {"quant_method": "auto-round", "packing_format": f"auto_round:auto_{layout}"}
    assert read_packing(said | own) == read_packing(said)
    with pytest.raises(KvlatheError, match="by 'auto-round'"):
        read_packing(said | own | {"packing_format": "auto_round"})


# -- folders that are not what they say -------------------------------------------------
MUTATED = {
    "gptq": Packing("gptq", 4, GROUP, True, True),
    "gptq with zeros": Packing("gptq", 4, GROUP, False, True),
    "gptq_v2 of 8 bits": Packing("gptq", 8, GROUP, True, False),
    "awq": Packing("awq", 4, GROUP, False, False),
}
DOWN = "layers.0.down.weight"
Tensors = dict[str, Tensor]
Change = Callable[[Tensors, dict[str, Any], int], None]
"""Changes tensors and quantization_config in place, in a way that a seed chooses."""


def quantized(
    packing: Packing, inputs: int, outputs: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [K, N], zeros and scales [G, N] of random weights, as GPTQ rounds them."""
    weight = torch.randn(inputs, outputs, generator=torch.Generator().manual_seed(seed))
    most = (1 << packing.bits) - 1
    low, high = weight.unflatten(0, (-1, packing.group)).aminmax(dim=1)
    low, high = low.clamp(max=0), high.clamp(min=0)
    if packing.symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scales = ((high - low) / most).half()
    middle = torch.full_like(low, (most + 1) // 2)
    zeros = middle if packing.symmetric else (-low / scales.float()).round()
    group = torch.arange(inputs) // packing.group
    codes = (weight / scales.float()[group] + zeros[group]).round().clamp(0, most)
    return codes.long(), zeros.long(), scales


def tiny(folder: Path, packing: Packing) -> tuple[Tensors, dict[str, Any], Tensor]:
    """The tensors and the config of a tiny model of codes, and what its map DOWN stands
    for."""
    sized = sizes(64, 4, 2, 16, intermediate_size=96, num_hidden_layers=1)
    make_model(folder, "Llama", sized)
    down = torch.empty(0)
    tensors = load_file(folder / "model.safetensors")
    for seed, name in enumerate(sorted(tensors)):
        if "proj" in name:
            outputs, inputs = tensors.pop(name).shape
            codes, zeros, scales = quantized(packing, inputs, outputs, seed)
            own = parts(packing, codes, zeros, scales)
            group = torch.arange(inputs) // packing.group
            if packing.method == "gptq":
                own["g_idx"] = group.int()
            if "down" in name:
                down = (codes - zeros[group]) * scales.float()[group]
            base = name.removesuffix(".weight")
            tensors |= {f"{base}.{part}": x.contiguous() for part, x in own.items()}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**quantization(packing), "desc_act": False}
    return tensors, config, down


def one(tensors: Tensors, part: str, seed: int) -> str:
    """One of the tensors that are this part of a map; empty where there is none."""
    names = sorted(name for name in tensors if name.endswith(f".{part}"))
    return names[seed % len(names)] if names else ""


def on_part(change: Callable[[Tensor, int], Tensor | None]) -> Change:
    """A change of one part of one map; None takes it away."""

    def changed(tensors: Tensors, said: dict[str, Any], seed: int) -> None:
        part = ("qweight", "qzeros", "scales", "g_idx")[seed % 4]
        if name := one(tensors, part, seed // 4):
            other = change(tensors.pop(name), seed)
            tensors |= {} if other is None else {name: other.contiguous()}

    return changed


def on_order(change: Callable[[Tensor, int], Tensor]) -> Change:
    def changed(tensors: Tensors, said: dict[str, Any], seed: int) -> None:
        if name := one(tensors, "g_idx", seed):
            tensors[name] = change(tensors[name].clone(), seed)

    return changed


def put(index: int, value: int) -> Callable[[Tensor, int], Tensor]:
    def changed(order: Tensor, seed: int) -> Tensor:
        order[index] = value
        return order

    return changed


def say(**said: object) -> Change:
    def changed(tensors: Tensors, config: dict[str, Any], seed: int) -> None:
        config |= said

    return changed


def other_convention(tensors: Tensors, said: dict[str, Any], seed: int) -> None:
    """Zeros as GPTQ's other format stores them."""
    bits, step = said["bits"], 1 if said.get("checkpoint_format") == "gptq" else -1
    for name in [x for x in tensors if x.endswith("qzeros") and "version" not in said]:
        zeros = unpack_words(tensors[name], bits) + step
        tensors[name] = words(zeros % (1 << bits), bits)


def odd_zeros(tensors: Tensors, said: dict[str, Any], seed: int) -> None:
    """One zero that is not in the middle, where all should be."""
    if said.get("sym"):
        tensors[one(tensors, "qzeros", seed)].view(-1)[0] ^= 5


def doubled(tensors: Tensors, said: dict[str, Any], seed: int) -> None:
    name = one(tensors, "qweight", seed)
    tensors[name.replace("qweight", "weight")] = torch.ones(64, 64)


CHANGES: dict[str, Change] = {
    "a part lacks": on_part(lambda x, _: None),
    "a part is short": on_part(lambda x, _: x[:-1]),
    "a part is long": on_part(lambda x, _: torch.cat([x, x[:1]])),
    "a part is turned": on_part(lambda x, _: x.T if x.ndim == 2 else x[None]),
    "a part is empty": on_part(lambda x, _: x[:0]),
    "a part is flat": on_part(lambda x, _: x.flatten()),
    "int64": on_part(lambda x, _: x.long()),
    "int16": on_part(lambda x, _: x.to(torch.int16)),
    "float32": on_part(lambda x, _: x.float()),
    "bytes": on_part(lambda x, _: x.to(torch.uint8)),
    "truth values": on_part(lambda x, _: x.bool()),
    "a group too high": on_order(put(3, 9)),
    "a group below 0": on_order(put(3, -1)),
    "a group with too many": on_order(put(-1, 0)),
    "groups in another order": on_order(lambda x, _: x.flip(0)),
    "all in one group": on_order(lambda x, _: x * 0),
    "infinite scales": on_part(lambda x, _: x / 0 if x.is_floating_point() else x),
    "zeros of the other format": other_convention,
    "the other format": say(checkpoint_format="gptq_v2"),
    "the first format": say(checkpoint_format="gptq"),
    "one odd zero": odd_zeros,
    "codes and numbers": doubled,
    "symmetric": say(sym=True),
    "not symmetric": say(sym=False),
    "nobody says whether": say(sym=None),
    "a symmetry that is none": say(sym="yes"),
    "ordered": say(desc_act=True),
    "not ordered": say(desc_act=False),
    "an order that is none": say(desc_act=[1]),
    "bits of a text": say(bits="4"),
    "other bits": say(bits=8),
    "truth bits": say(bits=True),
    "another group": say(group_size=64),
    "whole columns": say(group_size=-1),
    "no group": say(group_size=0),
    "part of a group": say(group_size=32.5),
    "an endless group": say(group_size=1 << 70),
    "the other method": say(quant_method="awq", version="gemm"),
    "gptq": say(quant_method="gptq"),
    "a method that is none": say(quant_method={"a": 1}),
    "a layout that is none": say(checkpoint_format=["gptq"], version=3),
}


def maps_of(folder: Path) -> Tensors:
    opened = Checkpoint(folder)
    return {name: opened.weight(name) for name in opened.weights}


@pytest.mark.parametrize("kind", MUTATED)
def test_a_folder_that_contradicts_itself_is_refused_or_read_as_it_was(
    kind: str, tmp_path: Path
) -> None:
    """No change leaves other weights, and none raises anything but a refusal."""
    packing, config_file = MUTATED[kind], tmp_path / "config.json"
    tensors, config, down = tiny(tmp_path, packing)
    expected: Tensors = {}
    refused = 0
    for name, change in {"": say(), **CHANGES}.items():
        for seed in range(4 if name.startswith(("a part", "int", "float")) else 1):
            own = {key: tensor.clone() for key, tensor in tensors.items()}
            said = dict(config["quantization_config"])
            change(own, said, seed)
            save_file(own, tmp_path / "model.safetensors", {"format": "pt"})
            config_file.write_text(json.dumps({**config, "quantization_config": said}))
            try:
                found = maps_of(tmp_path)
            except KvlatheError as error:
                assert "\n" not in str(error) and name, str(error)
                refused += 1
                continue
            expected = expected or found
            for key, weight in found.items():
                assert torch.equal(weight, expected[key]), (name, seed, key)
    assert torch.equal(expected[DOWN], down) and refused > 25


@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_are_read_as_they_are_stored_and_a_warning_says_so(
    symmetric: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors, config, down = tiny(tmp_path, Packing("gptq", 4, GROUP, symmetric, False))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config["quantization_config"]["checkpoint_format"] = "gptq"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(Checkpoint(tmp_path).weight(DOWN), down)
    assert "as in gptq_v2: they are read so" in caplog.text

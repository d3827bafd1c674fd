"""A checkpoint with LoRA adapters is the model whose weights are the sum; what is not
such a sum is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvlathe.base.adapters import Adapter
from kvlathe.base.errors import KvlatheError
from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.model.checkpoint import Checkpoint
from tests.support.adapters import RANK, change_tensors, with_sum, write_adapter
from tests.support.checkpoints import make, whole_plan

Reference = Callable[[str], tuple[Path, torch.nn.Module]]
TOLERANCE = 1e-4
IDS = range(40)
Q = "base_model.model.model.layers.1.self_attn.q_proj"


@pytest.fixture
def llama(reference: Reference, tmp_path: Path) -> tuple[Path, torch.nn.Module, Path]:
    """(checkpoint, model, adapter): the adapter is this test's own."""
    folder, model = reference("llama")
    write_adapter(tmp_path / "adapter", model)
    return folder, model, tmp_path / "adapter"


def logits(folder: Path, *adapters: Adapter) -> Tensor:
    checkpoint = Checkpoint(folder, adapters=adapters)
    decoder = decoder_from(checkpoint, whole_plan(checkpoint.spec), Basis())
    return decoder.logits(IDS, IDS)


def expected(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([list(IDS)])).logits[0]


@pytest.mark.parametrize(
    "name", ["llama", "phi3", "gpt2", "falcon-40b", "gemma3-images"]
)
def test_logits_are_those_of_the_model_with_the_sum_put_in(
    name: str, reference: Reference, tmp_path: Path
) -> None:
    """Separate and fused projections, and maps that are stored [in, out]."""
    folder, model = reference(name)
    deltas = write_adapter(tmp_path, model, lora_alpha=3)
    merged = with_sum(model, deltas, lambda _: 0.5 * 3 / RANK)
    found = logits(folder, Adapter(tmp_path, 0.5))
    torch.testing.assert_close(found, expected(merged), atol=TOLERANCE, rtol=0)
    assert (found - expected(model)).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("square_root", [False, True])
def test_ranks_and_alphas_may_differ_by_map(
    square_root: bool, reference: Reference, tmp_path: Path
) -> None:
    """The first pattern that a name ends with counts; names may be expressions."""

    def rank_of(module: str) -> int:
        return 2 if module.endswith("v_proj") else RANK

    def scale_of(module: str) -> float:
        alpha = 5.0 if "layers.1.mlp" in module else 3.0
        return alpha / rank_of(module) ** (0.5 if square_root else 1)

    folder, model = reference("llama")
    deltas = write_adapter(
        tmp_path,
        model,
        rank_of=rank_of,
        lora_alpha=3,
        rank_pattern={"v_proj": 2},
        alpha_pattern={r"layers\.1\.mlp\..*_proj": 5, "proj": 7},
        use_rslora=square_root,
        target_modules=r".*\.(q|k|v|o|gate|up|down)_proj",
    )
    found = logits(folder, Adapter(tmp_path))
    merged = with_sum(model, deltas, scale_of)
    torch.testing.assert_close(found, expected(merged), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["llama", "llama-llama3-tied"])
def test_only_a_head_of_its_own_can_be_adapted(
    name: str, reference: Reference, tmp_path: Path
) -> None:
    folder, model = reference(name)
    width = model.get_submodule("lm_head").get_parameter("weight").shape[1]
    write_adapter(tmp_path, model, target_modules="all-linear")
    change_tensors(tmp_path, _put("base_model.model.lm_head.lora_A.weight", 4, width))
    change_tensors(tmp_path, _put("base_model.model.lm_head.lora_B.weight", 97, 4))
    if name != "llama":
        with pytest.raises(KvlatheError, match="no map lm_head"):
            Checkpoint(folder, adapters=[Adapter(tmp_path)])
        return
    head = Checkpoint(folder, adapters=[Adapter(tmp_path)]).weight("head.weight")
    added = head - Checkpoint(folder).weight("head.weight")
    torch.testing.assert_close(added, torch.full((width, 97), 2.0))


def test_several_lora_adapters_add_up(reference: Reference, tmp_path: Path) -> None:
    folder, model = reference("llama")
    first = write_adapter(tmp_path / "a", model, seed=1)
    second = write_adapter(tmp_path / "b", model, seed=2)
    adapters = (Adapter(tmp_path / "a", 0.7), Adapter(tmp_path / "b", -0.3))
    both = {name: 0.7 * first[name] - 0.3 * second[name] for name in first}
    merged = with_sum(model, both, lambda _: 2 / RANK)
    found = logits(folder, *adapters)
    torch.testing.assert_close(found, expected(merged), atol=TOLERANCE, rtol=0)


def test_an_adapter_of_weight_0_changes_no_bit(
    llama: tuple[Path, torch.nn.Module, Path],
) -> None:
    folder, _, adapter = llama
    plain, same = Checkpoint(folder), Checkpoint(folder, adapters=[Adapter(adapter, 0)])
    assert same.digest == plain.digest
    for name in plain.weights:
        bits = plain.weight(name).view(torch.int32)
        assert torch.equal(same.weight(name).view(torch.int32), bits)


def test_sums_are_taken_in_float32(tmp_path: Path) -> None:
    """The checkpoint has 16 bits, whose own numbers could not hold them."""
    model = make(tmp_path / "model", "llama")
    model.bfloat16().save_pretrained(tmp_path / "model")
    deltas = write_adapter(tmp_path / "adapter", model, lora_alpha=1e-3)
    adapted = Checkpoint(tmp_path / "model", adapters=[Adapter(tmp_path / "adapter")])
    name = "model.layers.0.mlp.up_proj"
    weight = model.get_submodule(name).get_parameter("weight").detach().double()
    wanted = weight + 1e-3 / RANK * deltas[name]
    found = adapted.weight("layers.0.up.weight").T.double()
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


def test_a_digest_knows_adapters_weights_and_settings(
    llama: tuple[Path, torch.nn.Module, Path],
) -> None:
    folder, _, adapter = llama

    def digest(*adapters: Adapter) -> str:
        return Checkpoint(folder, adapters=adapters).digest

    seen = {digest(), digest(Adapter(adapter)), digest(Adapter(adapter, 0.5))}
    change_config(adapter, lora_alpha=9)
    seen.add(digest(Adapter(adapter)))
    change_tensors(adapter, lambda tensors: tensors[f"{Q}.lora_A.weight"].mul_(2))
    seen |= {digest(Adapter(adapter)), digest(Adapter(adapter), Adapter(adapter))}
    assert len(seen) == 6


def test_another_base_model_is_a_warning(
    llama: tuple[Path, torch.nn.Module, Path], logged: list[str]
) -> None:
    folder, _, adapter = llama
    change_config(adapter, base_model_name_or_path=f"org/{folder.name}")
    Checkpoint(folder, adapters=[Adapter(adapter)])
    assert not logged
    change_config(adapter, base_model_name_or_path="org/another")
    Checkpoint(folder, adapters=[Adapter(adapter)])
    assert any("was trained on org/another" in line for line in logged)


# -- refusals --------------------------------------------------------------------------
def change_config(adapter: Path, **settings: object) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    "dora": ({"use_dora": True}, "DoRA"),
    "bias": ({"bias": "lora_only"}, "trains biases"),
    "whole": ({"modules_to_save": ["embed_tokens"]}, "whole modules"),
    "experts": ({"target_parameters": ["experts.down_proj"]}, "three dimensions"),
    "start": ({"init_lora_weights": "pissa_niter_4"}, "model's own weights too"),
    "unnamed": ({"target_modules": ["k_proj"]}, "target_modules does not name"),
    "modules": ({"target_modules": None}, "neither text nor a list"),
    "rank": ({"r": 0}, "rank is not above 0"),
    "other rank": ({"r": 8}, r"has shape \[4, 88\], and the model takes \[8, 88\]"),
    "alpha": ({"lora_alpha": "much"}, "lora_alpha is no number"),
    "patterns": ({"rank_pattern": [3]}, "rank_pattern is no object"),
    "expression": ({"alpha_pattern": {"(": 3}}, "cannot be matched"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_mean_more_are_refused(
    case: str, llama: tuple[Path, torch.nn.Module, Path]
) -> None:
    folder, _, adapter = llama
    settings, said = SETTINGS[case]
    change_config(adapter, **settings)
    with pytest.raises(KvlatheError, match=said):
        Checkpoint(folder, adapters=[Adapter(adapter)])


def _put(name: str, *shape: int) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "embedding": (_put("base_model.model.x.lora_embedding_A", 4, 97), "no LoRA of"),
    "no map": (_put(f"{Q}x.lora_A.weight", 4, 64), "lacks .*q_projx.lora_B"),
    "half": (lambda tensors: tensors.pop(f"{Q}.lora_B.weight"), "lacks .*lora_B"),
    "inputs": (_put(f"{Q}.lora_A.weight", 4, 63), r"has shape \[4, 63\]"),
    "outputs": (_put(f"{Q}.lora_B.weight", 65, 4), r"has shape \[65, 4\]"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_refused(
    case: str, llama: tuple[Path, torch.nn.Module, Path]
) -> None:
    folder, _, adapter = llama
    change, said = TENSORS[case]
    change_tensors(adapter, change)
    with pytest.raises(KvlatheError, match=said):
        Checkpoint(folder, adapters=[Adapter(adapter)])


def test_an_adapter_of_another_model_is_refused(
    llama: tuple[Path, torch.nn.Module, Path], reference: Reference
) -> None:
    _, _, adapter = llama
    other, _ = reference("phi3")
    with pytest.raises(KvlatheError, match=r"no map model\.layers\.0\.mlp\.gate_proj"):
        Checkpoint(other, adapters=[Adapter(adapter)])


def test_numbers_that_are_not_finite_are_named_when_read(
    llama: tuple[Path, torch.nn.Module, Path],
) -> None:
    folder, _, adapter = llama
    name = f"{Q}.lora_A.weight"
    change_tensors(adapter, lambda tensors: tensors[name].fill_(float("nan")))
    checkpoint = Checkpoint(folder, adapters=[Adapter(adapter)])
    with pytest.raises(KvlatheError, match=f"{name} holds NaN"):
        checkpoint.weight("layers.1.q.weight")


def test_pickles_and_folders_without_an_adapter_are_refused(
    llama: tuple[Path, torch.nn.Module, Path],
) -> None:
    folder, _, adapter = llama
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(KvlatheError, match="are pickled"):
        Checkpoint(folder, adapters=[Adapter(adapter)])
    with pytest.raises(KvlatheError, match="is no LoRA adapter"):
        Checkpoint(folder, adapters=[Adapter(folder)])
    with pytest.raises(KvlatheError, match="there is no folder"):
        Checkpoint(folder, adapters=[Adapter(adapter / "nowhere")])


def test_a_lora_adapter_is_merged_as_peft_merges_it(
    reference: Reference, tmp_path: Path
) -> None:
    """Written by PEFT, and merged by PEFT."""
    peft = pytest.importorskip("peft")
    for name, ends in (("llama", ["q_proj", "v_proj"]), ("gpt2", ["c_attn", "c_proj"])):
        folder, _ = reference(name)
        model = make(tmp_path / f"copy of {name}", name)
        config = peft.LoraConfig(
            r=RANK,
            lora_alpha=3,
            target_modules=ends,
            rank_pattern={ends[1]: 2},
            use_rslora=True,
            init_lora_weights=False,
        )
        adapted = peft.get_peft_model(model, config)
        adapted.save_pretrained(tmp_path / name)
        found = logits(folder, Adapter(tmp_path / name))
        wanted = expected(adapted.merge_and_unload().eval())
        torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)

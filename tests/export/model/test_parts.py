"""Models that also read images: their text is what transformers computes of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvlathe.base.errors import KvlatheError
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.search.measured import uncompressed
from tests.support.checkpoints import make_model
from tests.support.families.seeing import TEXTS, settings_of, text_of

TOKENS = 90
INTERNLM2 = {
    "embed_tokens": "tok_embeddings",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "lm_head": "output",
}
"""Names of Llama -> those of InternLM 2."""
Reference = Callable[[str], tuple[Path, torch.nn.Module]]


@pytest.mark.parametrize("prefix", TEXTS)
def test_text_of_a_model_that_reads_images_is_that_of_transformers(
    prefix: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path, prefix, settings_of(prefix))
    ids = torch.randint(5, 97, (TOKENS,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = text_of(model)(input_ids=ids[None]).logits[0]
    assert expected.abs().max() > 1, "the reference says too little to compare with"
    found = uncompressed(Checkpoint(tmp_path)).logits(ids.tolist(), range(TOKENS))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def folder_of(
    folder: Path, known: Path, names: tuple[str, str], config: dict[str, Any]
) -> Path:
    """The tensors of ``known`` under other names, beside parts that see."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(known / "tokenizer.json", folder)
    tensors = load_file(known / "model.safetensors")
    text = {name: x for name, x in tensors.items() if "vision" not in name}
    text = {name: x for name, x in text.items() if "proj" not in name.split(".")[1]}
    named = {name.replace(*names, 1): x for name, x in text.items()}
    beside = {"model.sam_model.w": torch.ones(2), "vision_model.w": torch.ones(2)}
    save_file(named | beside, folder / "model.safetensors")
    return folder


def equal_weights(ours: Checkpoint, theirs: Checkpoint) -> None:
    assert ours.weights == theirs.weights
    for name in ours.weights:
        assert torch.equal(ours.weight(name), theirs.weight(name)), name


def test_text_of_an_omni_model_is_read_as_published(tmp_path: Path) -> None:
    """Beside a part that talks."""
    prefix = "Qwen2_5OmniThinker"
    make_model(tmp_path / "known", prefix, settings_of(prefix))
    thinker = json.loads((tmp_path / "known" / "config.json").read_text())
    config = {"model_type": "qwen2_5_omni", "thinker_config": thinker}
    config["architectures"] = ["Qwen2_5OmniModel"]
    ours = folder_of(tmp_path / "ours", tmp_path / "known", ("", ""), config)
    tensors = load_file(ours / "model.safetensors")
    save_file(tensors | {"talker.w": torch.ones(2)}, ours / "model.safetensors")
    equal_weights(Checkpoint(ours), Checkpoint(tmp_path / "known"))


def test_text_of_gemma_3n_is_read_as_published(
    reference: Reference, tmp_path: Path
) -> None:
    """Parts that see need a library which is not installed: they are not made."""
    known, _ = reference("gemma3n")
    text = json.loads((known / "config.json").read_text())
    config = {"model_type": "gemma3n", "text_config": text}
    config["architectures"] = ["Gemma3nForConditionalGeneration"]
    names = "model.", "model.language_model."
    ours = folder_of(tmp_path / "ours", known, names, config)
    tensors = load_file(known / "model.safetensors")
    named = {name.replace(*names, 1): x for name, x in tensors.items()}
    beside = ("vision_tower.w", "audio_tower.w", "embed_vision.w", "embed_audio.w")
    named |= {f"model.{name}": torch.ones(2) for name in beside}
    named["model.language_model.layers.4.self_attn.k_proj.weight"] = torch.ones(2)
    save_file(named, ours / "model.safetensors")
    equal_weights(Checkpoint(ours), Checkpoint(known))


def test_text_of_deepseek_ocr_is_read_as_published(tmp_path: Path) -> None:
    make_model(tmp_path / "known", "DeepseekOcr2", settings_of("DeepseekOcr2"))
    text = json.loads((tmp_path / "known" / "config.json").read_text())["text_config"]
    del text["mlp_layer_types"]
    text |= {"model_type": "deepseek_v2", "first_k_dense_replace": 1, "use_mla": False}
    config = {"model_type": "deepseek_vl_v2", "language_config": text}
    config["architectures"] = ["DeepseekOCRForCausalLM"]
    names = "model.language_model.", "model."
    ours = folder_of(tmp_path / "ours", tmp_path / "known", names, config)
    equal_weights(Checkpoint(ours), Checkpoint(tmp_path / "known"))
    config["language_config"] = text | {"use_mla": True}
    (ours / "config.json").write_text(json.dumps(config))
    with pytest.raises(KvlatheError, match="share a latent"):
        Checkpoint(ours)


@pytest.mark.parametrize("model_type", ["internvl_chat", "h2ovl_chat"])
def test_text_of_an_older_internvl_is_read_as_published(
    model_type: str, reference: Reference, tmp_path: Path
) -> None:
    known, _ = reference("llama")
    text = json.loads((known / "config.json").read_text())
    config = {"model_type": model_type, "llm_config": text}
    config["architectures"] = ["InternVLChatModel"]
    names = "", "language_model."
    ours = folder_of(tmp_path / "ours", known, names, config)
    equal_weights(Checkpoint(ours), Checkpoint(known))


def test_internlm2_is_llama_with_q_k_and_v_in_one_tensor(
    reference: Reference, tmp_path: Path
) -> None:
    """Alone, and as the text of an older InternVL."""
    known, _ = reference("llama")
    theirs = Checkpoint(known)
    tensors = load_file(known / "model.safetensors")
    for layer in range(theirs.spec.layers):
        at = f"model.layers.{layer}.self_attn."
        q, k, v = (tensors.pop(f"{at}{end}_proj.weight") for end in "qkv")
        heads = [x.unflatten(0, (theirs.spec.kv_heads, -1)) for x in (q, k, v)]
        own = torch.cat(heads, 1).flatten(0, 1).contiguous()
        tensors[f"model.layers.{layer}.attention.wqkv.weight"] = own
    named: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        for part, other in INTERNLM2.items():
            name = name.replace(part, other)
        named[name] = tensor
    text = json.loads((known / "config.json").read_text())
    text |= {"model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"]}
    whole = {"model_type": "internvl_chat", "llm_config": text | {"bias": False}}
    for lead, config in (("", text), ("language_model.", whole)):
        folder = tmp_path / f"of-{lead}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        shutil.copy(known / "tokenizer.json", folder)
        inside = {f"{lead}{name}": tensor for name, tensor in named.items()}
        save_file(inside, folder / "model.safetensors")
        equal_weights(Checkpoint(folder), theirs)


@pytest.mark.parametrize("turned", [False, True])
def test_experts_in_one_stack_are_those_that_lie_apart(
    turned: bool, reference: Reference, tmp_path: Path
) -> None:
    """As folders of Qwen3.5 and of Qwen3-VL with experts have them."""
    folder, _ = reference("qwen3_moe")
    apart = Checkpoint(folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(apart.spec.layers):
        at = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{at}.{e}.{end}_proj.weight") for e in range(6)])
            for end in ("gate", "up", "down")
        )
        stacks = {"gate_up_proj": torch.cat([gate, up], 1), "down_proj": down}
        for end, stack in stacks.items():
            tensors[f"{at}.{end}"] = (stack.mT if turned else stack).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    stacked = Checkpoint(tmp_path)
    assert stacked.weights and {*stacked.weights} == {*apart.weights}
    for name in apart.weights:
        assert torch.equal(stacked.weight(name), apart.weight(name)), name

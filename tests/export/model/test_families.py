"""Every family at full rank computes what transformers computes; what it would compute
otherwise is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from kvlathe.base.errors import KvlatheError
from kvlathe.export.bases.basis import Basis
from kvlathe.export.families import SUPPORTED
from kvlathe.export.families.gpt_oss import gpt_oss
from kvlathe.export.folding.fold import decoder_from, fold
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.coded_weights import CodedWeights
from kvlathe.export.model.decoder import Decoder
from kvlathe.export.model.layer_runner import LayerRunner, beside, embed
from kvlathe.export.model.spec import DecoderSpec, read_spec
from kvlathe.plan.weight_formats import WeightFormat, WeightFormats
from tests.support.checkpoints import make_model, whole_plan
from tests.support.families import FAMILIES
from tests.support.families.plain import longrope
from tests.support.families.sizes import latent, sizes

TOLERANCE = 1e-4
UNCACHED = ("openai-gpt",)
"""Those whose reference computes every token again for each."""
Reference = Callable[[str], tuple[Path, torch.nn.Module]]


def identity_decoder(checkpoint: Checkpoint) -> Decoder:
    return decoder_from(
        checkpoint,
        whole_plan(checkpoint.spec),
        Basis(),
    )


def some_ids(checkpoint: Checkpoint, length: int) -> Tensor:
    return torch.randint(
        0,
        checkpoint.spec.vocab_size,
        (length,),
        generator=torch.Generator().manual_seed(length),
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_computes_what_transformers_computes(
    name: str, reference: Reference
) -> None:
    """Lengths on both sides of the 64 positions at which LongRoPE changes its
    factors."""
    folder, model = reference(name)
    for length, served in ((1, 64), (37, 64), (150, None)):
        checkpoint = Checkpoint(folder, served)
        ids = some_ids(checkpoint, length)
        with torch.no_grad():
            expected = model(ids[None]).logits[0]
        assert expected.abs().max() > 1, "the reference says too little to compare with"
        found = identity_decoder(checkpoint).logits(ids.tolist(), range(length))
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", [x for x in FAMILIES if x not in UNCACHED])
def test_layer_runner_shows_what_the_reference_caches(
    name: str, reference: Reference
) -> None:
    """Hidden states, post-RoPE keys (up to the canonical order of dims) and values of
    every layer."""
    folder, model = reference(name)
    checkpoint = Checkpoint(folder)
    spec, ids, positions = checkpoint.spec, some_ids(checkpoint, 90), torch.arange(90)
    with torch.no_grad():
        expected = model(ids[None], output_hidden_states=True, use_cache=True)
    x = embed(checkpoint, ids, positions)
    given = beside(checkpoint, ids, x)
    for i, cached in enumerate(expected.past_key_values.layers):
        heads, order = spec.heads(i), spec.order(i)
        if spec.family.latent is not None:
            cached = of_latent(spec, cached)
        hidden = expected.hidden_states[i]
        if spec.family.streams:  # [N, 1, T, D]
            hidden = hidden.permute(1, 2, 0, 3).flatten(2)
        torch.testing.assert_close(x, hidden[0], atol=TOLERANCE, rtol=0)
        x, q, k, v, _ = LayerRunner(checkpoint, i)(x, positions, beside=given)
        if not spec.attends(i):
            continue
        assert q.shape == (90, spec.query_heads, heads.head_dim)
        if cached.keys is None:
            continue  # it reads another layer's
        # Falcon's cache repeats each KV head for its whole group, and that of a layer
        # with a window has its newest tokens alone.
        every = spec.query_heads // cached.keys.shape[1]
        repeat = spec.group(i) // every
        kept = slice(90 - cached.keys.shape[2], None)
        keys = cached.keys[0, ::repeat, :, order].transpose(0, 1)
        values = cached.values[0, ::repeat].transpose(0, 1)
        values = F.pad(values, (0, v.shape[-1] - values.shape[-1]))
        torch.testing.assert_close(k[kept], keys, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(v[kept], values, atol=TOLERANCE, rtol=0)


def of_latent(spec: DecoderSpec, cached: DynamicLayer) -> SimpleNamespace:
    """Keys and values of a cache that holds latents in place of keys, and keys that
    turn in place of values. DeepSeek V2 keeps neighbours that turn side by side."""
    latents, turned = cached.keys, cached.values
    assert latents is not None and turned is not None
    if spec.model_type == "deepseek_v2":
        turned = turned[..., spec.ropes[0].order]
    return SimpleNamespace(keys=torch.cat([latents, turned], -1), values=latents)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
PHI = {
    "original_max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAR = {
    "llama3": (
        "Llama",
        {
            "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192},
            "rope_theta": 5e5,
        },
    ),
    "yarn": ("Qwen2", {"rope_scaling": YARN, "rope_theta": 1e6}),
    "longrope": ("Phi3", {"rope_scaling": longrope(16), **PHI}),
    "partial": (
        "Phi3",
        {"rope_scaling": longrope(12), "partial_rotary_factor": 0.75, **PHI},
    ),
    "latent": (
        "Youtu",
        latent(rope_scaling=YARN | {"mscale_all_dim": 1.0}, rope_theta=1e6)
        | {"max_position_embeddings": 131072},
    ),
    "yarn-new-style": (
        "Qwen3",
        {"rope_parameters": YARN | {"rope_theta": 1e6}, "head_dim": 32},
    ),
}


@pytest.mark.parametrize("name", FAR)
@pytest.mark.parametrize("start", [0, 4000, 131000])
def test_rope_at_far_positions_is_that_of_transformers(
    name: str, start: int, tmp_path: Path
) -> None:
    kind, settings = FAR[name]
    model = make_model(
        tmp_path,
        kind,
        sizes(128, 4, 2) | {"max_position_embeddings": 131072} | settings,
    )
    checkpoint = Checkpoint(tmp_path, 4096 if start < 4096 else None)
    ids, positions = some_ids(checkpoint, 60), start + torch.arange(60)
    with torch.no_grad():
        expected = model(ids[None], position_ids=positions[None]).logits[0]
    empty, starts = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 60])
    every = torch.arange(60)
    found, _ = identity_decoder(checkpoint)(
        ids, positions, starts, every, empty, [], {}, every
    )
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("width", [96, 160, 192, 256])
def test_wide_heads_are_those_of_transformers(width: int, tmp_path: Path) -> None:
    model = make_model(tmp_path, "Llama", sizes(64, 2, 1, width))
    checkpoint = Checkpoint(tmp_path)
    ids = some_ids(checkpoint, 50)
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    found = identity_decoder(checkpoint).logits(ids.tolist(), range(50))
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_longrope_factors_follow_max_seq_len(reference: Reference) -> None:
    folder, _ = reference("phi3-longrope")
    short, long = (read_spec(folder, n).rope for n in (64, 65))
    assert (
        short
        and long
        and short.inv_freq[3] > 2 * long.inv_freq[3]
        and short.amplitude == long.amplitude
    )


def test_a_build_says_where_longrope_differs_from_transformers(
    reference: Reference,
) -> None:
    folder, _ = reference("phi3-longrope")
    assert read_spec(folder, 64).rope_note == ""
    assert "up to 64 tokens differ from transformers" in read_spec(folder).rope_note
    assert "--max-seq-len 64" in read_spec(folder, 65).rope_note
    assert read_spec(reference("llama")[0]).rope_note == ""


def config_of(kind: str, **changes: object) -> dict[str, Any]:
    base = {
        "model_type": kind,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 9,
    }
    return base | changes


REFUSED = {
    "no family": (
        {"vocab_size": 3},
        f"Choose one of {', '.join(SUPPORTED)}",
    ),
    "bloom": (config_of("bloom"), "Choose one of afmoe, apertus, arcee"),
    "alibi": (config_of("falcon", alibi=True), "ALiBi"),
    "falcon block": (config_of("falcon", num_ln_in_parallel_attn=2), "2 norms"),
    "layer type": (
        config_of(
            "qwen3",
            num_key_value_heads=2,
            layer_types=["full_attention", "chunked_attention"],
        ),
        "chunked_attention",
    ),
    "quantized": (
        config_of("llama", quantization_config={"quant_method": "torchao"}),
        "quantized",
    ),
    "classifier": (
        config_of("llama", architectures=["LlamaForSequenceClassification"]),
        "SequenceClassification",
    ),
    "latent": (config_of("minimax", kv_lora_rank=8), "share one latent"),
    "indexer": (config_of("deepseek_v32", index_topk=8), "an indexer chooses"),
    "two attentions": (config_of("longcat_flash"), "two attentions"),
    "choice of experts": (config_of("deepseek_v2", topk_method="best"), "'best'"),
    "state": (config_of("recurrent_gemma"), "keep a state"),
    "no cache": (config_of("mamba"), "no cache"),
    "decays of numbers": (config_of("jamba"), "a rate of its own"),
    "other codes": (
        config_of("gpt_oss", quantization_config={"quant_method": "other"}),
        "quantized",
    ),
    "clipped": (config_of("olmo", clip_qkv=8.0), "bounds q, k and v"),
    "tied with a bias": (config_of("gptj", tie_word_embeddings=True), "has a bias"),
    "tied with a norm": (
        config_of("nanochat", tie_word_embeddings=True),
        "the norm of embeddings",
    ),
    "experts without a range": (
        config_of("phimoe", num_key_value_heads=2, router_jitter_noise=0.0),
        "SparseMixer",
    ),
    "text of no family": (
        {"model_type": "mistral3", "text_config": {"model_type": "bloom"}},
        "bias by distance",
    ),
    "both ways": (
        config_of("gemma3_text", use_bidirectional_attention=True),
        "earlier tokens alone",
    ),
    "opt 350m": (config_of("opt", do_layer_norm_before=False), "after its blocks"),
    "softcap": (
        config_of("llama", attn_logit_softcapping=30.0),
        "attn_logit_softcapping",
    ),
    "activation": (config_of("llama", hidden_act="laplace"), "laplace"),
    "groups": (config_of("llama", num_key_value_heads=3), "do not divide"),
    "odd head": (config_of("llama", head_dim=3), "head_dim is 3"),
    "partial": (config_of("llama", partial_rotary_factor=0.5), "partial_rotary_factor"),
    "rope": (
        config_of("llama", rope_scaling={"rope_type": "axial"}),
        "'axial'",
    ),
    "rope factor": (
        config_of("llama", rope_scaling={"rope_type": "yarn", "factor": "much"}),
        "RoPE|not valid",
    ),
    "head norms": (config_of("stablelm", qk_layernorm=True), "one QK-norm"),
    "cross": (config_of("gpt2", add_cross_attention=True), "cross-attention"),
    "type": (config_of("llama", hidden_size="wide"), "not valid"),
    "code": (
        config_of("mine", auto_map={"AutoConfig": "evil.Config"}),
        "'mine' is not supported",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_would_change_what_a_model_computes_are_refused(
    case: str, tmp_path: Path
) -> None:
    config, said = REFUSED[case]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('the folder was executed')")
    with pytest.raises(KvlatheError, match=said):
        read_spec(tmp_path)


def test_coded_maps_of_a_latent_are_those_of_the_decoder(
    reference: Reference,
) -> None:
    checkpoint, form = Checkpoint(reference("youtu")[0]), WeightFormat("int8", 32)
    plan, formats = whole_plan(checkpoint.spec), WeightFormats(form)
    coded = CodedWeights(fold(checkpoint, plan, Basis()), formats, torch.float32)
    decoder = Decoder(checkpoint.spec, plan, formats=formats)
    assert {*coded} == {*decoder.state_dict()}


def test_a_type_of_another_name_is_read_as_transformers_reads_it(
    reference: Reference, tmp_path: Path
) -> None:
    folder, _ = reference("deepseek_v3")
    shutil.copytree(folder, tmp_path / "k2")
    config = tmp_path / "k2" / "config.json"
    text = json.loads(config.read_text()) | {"model_type": "kimi_k2"}
    config.write_text(json.dumps(text))
    assert Checkpoint(tmp_path / "k2").spec == Checkpoint(folder).spec


@pytest.mark.parametrize(
    ("name", "setting", "said"),
    [
        ("deepseek_v32", "index_topk", "an indexer chooses"),
        ("glm_moe_dsa", "index_topk", "an indexer chooses"),
        ("llama4", "attention_chunk_size", "begins anew"),
    ],
)
def test_models_are_refused_where_queries_would_not_see_all_tokens(
    name: str, setting: str, said: str, tmp_path: Path
) -> None:
    kind, settings = FAMILIES[name]
    model = make_model(tmp_path, kind, settings | {setting: 64})
    with pytest.raises(KvlatheError, match="--max-seq-len 64"):
        Checkpoint(tmp_path)
    with pytest.raises(KvlatheError, match=said):
        Checkpoint(tmp_path, 65)
    checkpoint = Checkpoint(tmp_path, 64)
    ids = some_ids(checkpoint, 65)
    with torch.no_grad():
        expected, longer = (model(x[None]).logits[0] for x in (ids[:64], ids))
    found = identity_decoder(checkpoint).logits(ids[:64].tolist(), range(64))
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    dense = make_model(tmp_path, kind, settings)(ids[None]).logits[0]
    assert not torch.allclose(longer, dense, atol=TOLERANCE)  # one token more is sparse


def test_text_of_kimi_is_deepseeks(reference: Reference, tmp_path: Path) -> None:
    """As published: under names of its own, beside parts that read images."""
    folder, _ = reference("deepseek_v3")
    text = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "kimi_k25", "text_config": text})
    )
    shutil.copy(folder / "tokenizer.json", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    named = {f"language_model.{name}": x for name, x in tensors.items()}
    named |= {"vision_tower.w": torch.ones(2), "mm_projector.w": torch.ones(2)}
    save_file(named, tmp_path / "model.safetensors")
    ours, theirs = Checkpoint(tmp_path), Checkpoint(folder)
    assert ours.weights == theirs.weights
    for name in ours.weights:
        assert torch.equal(ours.weight(name), theirs.weight(name)), name


@pytest.mark.parametrize("length", [0, -1, 513])
def test_lengths_beyond_the_model_are_refused(
    length: int, reference: Reference
) -> None:
    with pytest.raises(KvlatheError, match="1 to 512 positions"):
        read_spec(reference("gpt2")[0], length)


def test_a_window_that_nothing_leaves_is_exact(tmp_path: Path) -> None:
    """Mistral with a window of 40: sequences of up to 40 tokens are what full attention
    computes, and so are served."""
    model = make_model(tmp_path, "Mistral", sizes(64, 4, 2, sliding_window=40))
    checkpoint = Checkpoint(tmp_path, 40)
    ids = some_ids(checkpoint, 40)
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    found = identity_decoder(checkpoint).logits(ids.tolist(), range(40))
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_an_older_config_has_the_same_bounded_swiglu() -> None:
    """As in transformers 5.0, whose model has the numbers that its config lacks."""
    config = transformers.GptOssConfig()
    known = dict(vars(config))
    known = {key: known[key] for key in known if not key.startswith("swiglu")}
    older = SimpleNamespace(**known)
    family = gpt_oss(cast("transformers.GptOssConfig", older))
    assert family.experts == gpt_oss(config).experts

"""Writes a checkpoint of random weights in the shape of Llama-3.1-8B or 70B, of
Qwen3-30B-A3B, of gpt-oss-20b in 16 bits, or of a dense model as wide as what a token reads
of the one (dense-a3b) or the other (dense-oss): for time and memory, which do not depend on
what a model has learnt.

  python3 -m benchmarks.random_checkpoint out/8b --tokenizer models/lathe-5m
  python3 -m benchmarks.random_checkpoint out/70b --shape 70b --layers 10
  python3 -m benchmarks.random_checkpoint out/moe --shape qwen3-30b-a3b

The tokenizer is the shipped one, whose ids are the first of the vocabulary; the others
stand for words of their own, so that every answer has text. Needs torch and safetensors;
weights are drawn on the GPUs where there are some, several files at a time.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.support.commands import parser_of

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 0,
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "head_dim": 64,
    "vocab_size": 201088,
    "rope_theta": 150000.0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {},
    "70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "qwen3-30b-a3b": QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "dense-a3b": QWEN3,
    "gpt-oss-20b": OSS
    | {
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "attention_bias": True,
    },
    "dense-oss": OSS
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": 4 * 2880,
    },
}
"""Fields that differ from ``CONFIG``."""
STACKED = "num_local_experts"
"""The field of models whose experts are stacks with biases, beside which there are sinks."""
LAYERS_A_SHARD = 2
"""Few, so that ``AT_ONCE`` files of the 70B shape fit the host."""
AT_ONCE = 8
"""Files that are written at a time where GPUs draw: each is in the host's memory twice."""
SPREAD = 0.02
"""Standard deviation of a weight."""


def layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, head = config["hidden_size"], config["head_dim"]
    query, key = (
        config["num_attention_heads"] * head,
        config["num_key_value_heads"] * head,
    )
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (query, width),
        "self_attn.k_proj.weight": (key, width),
        "self_attn.v_proj.weight": (key, width),
        "self_attn.o_proj.weight": (width, query),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    if config["model_type"].startswith("qwen3"):
        shapes |= {f"self_attn.{lane}_norm.weight": (head,) for lane in "qk"}
    if STACKED in config:
        return shapes | stacked_shapes(config)
    mlps = {"mlp": config["intermediate_size"]}
    if experts := config.get("num_experts", 0):
        shapes["mlp.gate.weight"] = experts, width
        inner = config["moe_intermediate_size"]
        mlps = {f"mlp.experts.{number}": inner for number in range(experts)}
    for name, inner in mlps.items():
        shapes[f"{name}.gate_proj.weight"] = shapes[f"{name}.up_proj.weight"] = (
            inner,
            width,
        )
        shapes[f"{name}.down_proj.weight"] = width, inner
    return shapes


def stacked_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors of a layer of gpt-oss beside weights of attention and norms."""
    count, width, inner = (
        config[key] for key in (STACKED, "hidden_size", "intermediate_size")
    )
    queries, keys = (config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    heads = {"q": queries, "k": keys, "v": keys}
    shapes: dict[str, tuple[int, ...]] = {
        f"self_attn.{lane}_proj.bias": (many * config["head_dim"],)
        for lane, many in heads.items()
    }
    return shapes | {
        "self_attn.o_proj.bias": (width,),
        "self_attn.sinks": (queries,),
        "mlp.router.weight": (count, width),
        "mlp.router.bias": (count,),
        "mlp.experts.gate_up_proj": (count, width, 2 * inner),
        "mlp.experts.gate_up_proj_bias": (count, 2 * inner),
        "mlp.experts.down_proj": (count, inner, width),
        "mlp.experts.down_proj_bias": (count, width),
    }


def drawn(name: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    """A norm's weights are 1, all others are normal."""
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    values = torch.empty(shape, dtype=torch.bfloat16, device=random.device)
    return values.normal_(0, SPREAD, generator=random).cpu()


def write_shard(path: Path, shard: dict[str, tuple[int, ...]], number: int) -> None:
    """A file of weights. Its number is its seed, and says which GPU draws."""
    gpus = torch.cuda.device_count()
    device = f"cuda:{number % gpus}" if gpus else "cpu"
    random = torch.Generator(device).manual_seed(number)
    save_file({key: drawn(key, shape, random) for key, shape in shard.items()}, path)


def write(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    ends = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "lm_head.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    shards = [ends]
    for first in range(0, layers, LAYERS_A_SHARD):
        shard = {}
        for layer in range(first, min(layers, first + LAYERS_A_SHARD)):
            for name, shape in layer_shapes(config).items():
                shard[f"model.layers.{layer}.{name}"] = shape
        shards.append(shard)
    numbers = range(1, 1 + len(shards))
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in numbers]
    paths = [folder / name for name in names]
    workers = AT_ONCE if torch.cuda.device_count() else 1
    spawn = multiprocessing.get_context("spawn")  # a fork cannot use CUDA
    with ProcessPoolExecutor(min(workers, len(shards)), spawn) as pool:
        list(pool.map(write_shard, paths, shards, numbers))
    places = {
        key: name for name, shard in zip(names, shards, strict=True) for key in shard
    }
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def write_tokenizer(source: Path, folder: Path, vocab_size: int) -> None:
    """The tokenizer of ``source``, with a word for each id that it lacks."""
    shutil.copy(source / "tokenizer_config.json", folder / "tokenizer_config.json")
    tokenizer = json.loads((source / "tokenizer.json").read_text("utf-8"))
    known = tokenizer["model"]["vocab"]
    added = {entry["id"] for entry in tokenizer["added_tokens"]}
    for number in set(range(vocab_size)) - added - set(known.values()):
        known[f"w{number}"] = number
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, default=Path("models/lathe-5m"))
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, help="default: as many as the model has")
    options = parser.parse_args()
    config = CONFIG | SHAPES[options.shape]
    if options.layers is not None:
        config |= {"num_hidden_layers": options.layers}
    write(options.folder, config)
    write_tokenizer(options.tokenizer, options.folder, config["vocab_size"])


if __name__ == "__main__":
    main()

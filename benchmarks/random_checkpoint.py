"""Writes a checkpoint of random weights in the shape of Llama-3.1-8B or 70B: for time and
memory, which do not depend on what a model has learnt.

  python3 -m benchmarks.random_checkpoint out/8b --tokenizer models/lathe-5m
  python3 -m benchmarks.random_checkpoint out/70b --shape 70b --layers 10

The tokenizer is the shipped one, whose ids are the first of the 128,256; the others
stand for words of their own, so that every answer has text. Needs torch and safetensors;
weights are drawn on the GPUs where there are some, several files at a time.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.support.commands import parser_of

VOCAB_SIZE = 128256
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SHAPES = {
    "8b": {},
    "70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
"""Fields that differ from ``CONFIG``."""
LAYERS_A_SHARD = 2
"""Few, so that ``AT_ONCE`` files of the 70B shape fit the host."""
AT_ONCE = 8
"""Files that are written at a time where GPUs draw: each is in the host's memory twice."""
SPREAD = 0.02
"""Standard deviation of a weight."""


def layer_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    width, inner = config["hidden_size"], config["intermediate_size"]
    head = config["head_dim"]
    query, key = (
        config["num_attention_heads"] * head,
        config["num_key_value_heads"] * head,
    )
    return {
        "self_attn.q_proj.weight": (query, width),
        "self_attn.k_proj.weight": (key, width),
        "self_attn.v_proj.weight": (key, width),
        "self_attn.o_proj.weight": (width, query),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }


def drawn(shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    """A norm's weights are 1, all others are normal."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    values = torch.empty(shape, dtype=torch.bfloat16, device=random.device)
    return values.normal_(0, SPREAD, generator=random).cpu()


def write_shard(path: Path, shard: dict[str, tuple[int, ...]], number: int) -> None:
    """A file of weights. Its number is its seed, and says which GPU draws."""
    gpus = torch.cuda.device_count()
    device = f"cuda:{number % gpus}" if gpus else "cpu"
    random = torch.Generator(device).manual_seed(number)
    save_file({key: drawn(shape, random) for key, shape in shard.items()}, path)


def write(folder: Path, config: dict) -> None:
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
    write_tokenizer(options.tokenizer, options.folder, VOCAB_SIZE)


if __name__ == "__main__":
    main()

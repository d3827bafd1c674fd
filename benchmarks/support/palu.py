"""Palu (arXiv 2407.21118) as far as accuracy and bytes go: low-rank K before RoPE and
low-rank V. For comparison only.

Palu caches x L of W = L R before RoPE and rebuilds keys by R at every step, then
rotates them by their positions. Ours caches keys after RoPE, so its plans cannot hold
that; but what is attended is the same as with W_K and W_V of low rank. So this writes a
checkpoint with those weights, whose uncompressed engine says what Palu's accuracy is,
and counts the bytes that Palu's cache would take (16 bit, no padding). Heads of a layer
are decomposed together in groups of up to GROUP (the paper's G-LRD), weighed by the
activations of calibration text (its whitening); ranks are the same in every layer,
where the paper spreads them by Fisher information.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import safetensors.torch
import torch
import transformers

GROUP = 4
TOKENS = 16_384


@torch.inference_mode()
def low_rank_checkpoint(model: Path, output: Path, text: Path, kept: float) -> Path:
    """``model`` (of Llama's weight names) in folder ``output`` with W_K and W_V cut to
    ``kept`` of their rank."""
    network = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32
    ).eval()
    moments = _moments(network, model, text)
    width, heads = network.config.head_dim, network.config.num_key_value_heads
    for name, moment in moments.items():
        weight = network.get_parameter(f"{name}.weight")
        for first in range(0, heads, GROUP):
            rows = slice(first * width, min(first + GROUP, heads) * width)
            vectors = torch.linalg.eigh(moment[rows, rows]).eigenvectors.float()
            basis = vectors[:, vectors.shape[1] - round(kept * vectors.shape[1]) :]
            weight[rows] = basis @ (basis.T @ weight[rows])
    output.mkdir(parents=True)
    for file in model.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, output)
    state = {name: x.contiguous() for name, x in network.state_dict().items()}
    if network.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    safetensors.torch.save_file(state, output / "model.safetensors", {"format": "pt"})
    return output


def _moments(
    network: transformers.PreTrainedModel, model: Path, text: Path
) -> dict[str, torch.Tensor]:
    """Second moments [heads * width] of what every k_proj and v_proj gives out, in
    float64."""
    found: dict[str, torch.Tensor] = {}

    def add(name: str, out: torch.Tensor) -> None:
        rows = out.flatten(0, 1).double()
        found[name] = found.get(name, 0) + rows.T @ rows

    for name, module in network.named_modules():
        if name.endswith(("k_proj", "v_proj")):
            module.register_forward_hook(lambda _m, _i, out, name=name: add(name, out))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    lines = text.read_text("utf-8").split("\n")
    stream = [
        i
        for line in lines
        if line.strip()
        for i in tokenizer.encode(json.loads(line)["text"])
    ][:TOKENS]
    for at in range(0, len(stream), 1024):
        network(torch.tensor([stream[at : at + 1024]]))
    return found

"""Checkpoints with a layer that guesses tokens, random but whole, and the published formula
in float64: DeepSeek-V3 (arXiv 2412.19437), equations 21 to 24. transformers leaves such
layers out; here its own model of one layer is the block of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import make_model
from tests.support.families import FAMILIES

LAYERS = 3
ONE_LAYER: dict[str, object] = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "mlp_layer_types": ["sparse"],
}
ONE_FULL_LAYER: dict[str, object] = {
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "mlp_only_layers": [],
}


@dataclass(frozen=True)
class Stored:
    """How a checkpoint stores such a layer: names of its parts, and of its block's.
    ``offset``: what is added to a norm's weights."""

    embed_norm: str
    hidden_norm: str
    join: str
    norm: str
    block: str
    one_layer: dict[str, object]
    offset: float = 0.0


BEHIND = f"model.layers.{LAYERS}."
LAST = Stored(
    f"{BEHIND}enorm",
    f"{BEHIND}hnorm",
    f"{BEHIND}eh_proj",
    f"{BEHIND}shared_head.norm",
    BEHIND,
    ONE_LAYER,
)
BESIDE = Stored(
    "mtp.pre_fc_norm_embedding",
    "mtp.pre_fc_norm_hidden",
    "mtp.fc",
    "mtp.norm",
    "mtp.layers.0.",
    ONE_FULL_LAYER,
    offset=1.0,
)


def stored_as(name: str) -> Stored:
    return BESIDE if name.startswith("qwen3") else LAST


WEIGHTS, ALONE = "model.safetensors", "alone"
OUTPUTS = ("o_proj.weight", "down_proj.weight")


def make_guessing(folder: Path, name: str = "glm4_moe", quiet: bool = False) -> None:
    """Write checkpoint ``name`` of FAMILIES with such a layer behind its layers, and in
    ``alone`` a model of the layer's block. ``quiet``: what layers add is little, so that
    the next token follows from the newest one; and the layer reads mostly that."""
    kind, settings = FAMILIES[name]
    form = stored_as(name)
    settings = settings | {"num_hidden_layers": LAYERS}
    make_model(folder, kind, settings)
    make_model(folder / ALONE, kind, settings | form.one_layer, seed=1)
    stored = {x: t.clone() for x, t in load_file(folder / WEIGHTS).items()}
    block = load_file(folder / ALONE / WEIGHTS)
    for role, tensor in block.items():
        if role.startswith("model.layers.0."):
            stored[form.block + role.removeprefix("model.layers.0.")] = tensor.clone()
    norm = stored["model.norm.weight"] if quiet else block["model.norm.weight"]
    stored[f"{form.norm}.weight"] = norm.clone()
    width = len(norm)
    for role in (form.embed_norm, form.hidden_norm):
        noise = torch.zeros(width) if quiet else 0.3 * torch.randn(width)
        stored[f"{role}.weight"] = 1 - form.offset + noise
    joined = torch.randn(width, 2 * width) / (2 * width) ** 0.5
    if quiet:
        joined = torch.cat([torch.eye(width), 0.02 * joined[:, width:]], 1)
        for role in stored:
            if role.endswith(OUTPUTS):
                stored[role] *= 0.002
    stored[f"{form.join}.weight"] = joined
    save_file(stored, folder / WEIGHTS, {"format": "pt"})


class Formula:
    """The guesses of such a layer, in float64."""

    def __init__(self, folder: Path, name: str = "glm4_moe") -> None:
        self.model, self.block = _model(folder), _model(folder / ALONE)
        self.stored = {x: t.double() for x, t in load_file(folder / WEIGHTS).items()}
        self.form = stored_as(name)

    @torch.no_grad()
    def guesses(self, tokens: Sequence[int], first: int, count: int) -> list[int]:
        """The best ``count`` tokens behind ``tokens``, one after the other, where the
        layer has seen the places from ``first`` on."""
        ids = torch.tensor([tokens[:-1]])
        hidden = self.model.model(ids).last_hidden_state[0]
        x = self.joined(tokens[first + 1 :], hidden[first:])
        found: list[int] = []
        for _ in range(count):
            out = self.block.model(inputs_embeds=x[None]).last_hidden_state[0, -1:]
            logits = out @ self.stored["lm_head.weight"].T
            found.append(int(logits.argmax()))
            x = torch.cat([x, self.joined(found[-1:], out)])
        return found

    def joined(self, tokens: Sequence[int], hidden: Tensor) -> Tensor:
        """Inputs of the block, [T, D]."""
        embedded = self.stored["model.embed_tokens.weight"][torch.tensor(tokens)]
        given = (self.form.embed_norm, embedded), (self.form.hidden_norm, hidden)
        both = [self._normed(role, x) for role, x in given]
        return torch.cat(both, -1) @ self.stored[f"{self.form.join}.weight"].T

    def _normed(self, role: str, x: Tensor) -> Tensor:
        eps = self.model.config.rms_norm_eps
        mean = x.pow(2).mean(-1, keepdim=True)
        weight = self.form.offset + self.stored[f"{role}.weight"]
        return x / (mean + eps).sqrt() * weight


def _model(folder: Path) -> transformers.PreTrainedModel:
    """In float64. The norm of ``alone`` is that of the layer."""
    given = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **given)
    return model.double().eval()

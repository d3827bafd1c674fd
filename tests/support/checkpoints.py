"""Tiny random-weight Hugging Face checkpoints of every family, and full-rank plans and
bases to fold them with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedModel,
)

from kvlathe.export.bases.basis import Basis, LaneBasis
from kvlathe.export.model.spec import DecoderSpec
from kvlathe.plan.formats import Bits, Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.lives import KEEP, Window
from kvlathe.plan.plan import CompressionPlan
from tests.support.families import FAMILIES

torch.set_num_threads(1)  # tiny matrices: threads would only wait for one another
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


OWN_HEADS = tuple(
    name
    for name, (prefix, settings) in FAMILIES.items()
    if "kv_lora_rank" not in settings.get("text_config", settings)
    and not prefix.startswith(("Gemma3n", "Gemma4", "MiMo"))
)
"""Those whose heads have keys and values of their own, alike in all layers."""
STATEFUL = ("Lfm", "Qwen3Next", "Qwen3_5", "GraniteMoeHybrid", "Bamba", "NemotronH")
STATEFUL += ("FalconH1", "OlmoHybrid")
"""Beginnings of the names of models whose layers keep states."""
GATED = ("Afmoe", "Laguna", "Lfm3", "Qwen3Next", "Qwen3_5", "Step3p7")
"""Those of models with gates of outputs."""


def kind_of(name: str) -> str:
    """The transformers class prefix of checkpoint ``name`` of FAMILIES."""
    return FAMILIES[name][0]


WITH_STATES = tuple(x for x in FAMILIES if kind_of(x).startswith(STATEFUL))
ON_GPUS = tuple(name for name in FAMILIES if name not in WITH_STATES)
"""Those that one GPU runs."""
UNGATED = tuple(x for x in OWN_HEADS if not kind_of(x).startswith(GATED))


def make(folder: Path, name: str, seed: int = 0, **save: object) -> PreTrainedModel:
    """Write checkpoint ``name`` of FAMILIES to ``folder``; return the reference model,
    float32."""
    kind, settings = FAMILIES[name]
    return make_model(folder, kind, settings, seed, **save)


def make_model(
    folder: Path, kind: str, settings: dict[str, Any], seed: int = 0, **save: object
) -> PreTrainedModel:
    """Random weights large enough that every one of them matters: biases and norms
    too."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(
        **settings, attn_implementation="eager"
    )
    part = "text_config" in settings
    of_kind = AutoModelForMultimodalLM if part else AutoModelForCausalLM
    model = of_kind.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if name.endswith("A_log"):  # states remember for long
                parameter.copy_(noise - 3)
            elif parameter.ndim == 1:
                parameter.copy_(
                    0.3 * noise if name.endswith("bias") else 1 + 0.3 * noise
                )
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.3 * torch.randn_like(buffer))
            if name.endswith("correction_bias"):  # a router's, which training fits
                buffer.copy_(0.3 * torch.randn_like(buffer))
    model.save_pretrained(folder, **save)
    vocabulary = config.get_text_config().vocab_size
    words = {f"t{i}": i for i in range(vocabulary)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "t0")).save(
        str(Path(folder) / "tokenizer.json")
    )
    return model


def full_plan(
    shape: ModelShape, rope: bool = True, projected: bool = False, bits: Bits = 32
) -> CompressionPlan:
    """Every dim of every lane kept, ranks rounded up to 16; one group, page 16."""
    kind = "full" if rope else "none"
    lanes: list[Lane] = []
    for layer, head in shape.places:
        d, of_value = shape.heads(layer).head_dim, shape.value_dim(layer)
        ranks = -(-d // 16) * 16, -(-of_value // 16) * 16
        lanes.append(Lane(layer, head, d, *ranks, kind, projected=projected))
    groups = (Group(tuple(range(len(lanes))), Tier(bits, bits)),)
    return CompressionPlan(
        shape, tuple(lanes), groups, page_tokens=16, prefill_chunk=32
    )


def whole_plan(
    spec: DecoderSpec, projected: bool = False, bits: Bits = 32
) -> CompressionPlan:
    """The full plan of a model, with the windows of its layers."""
    plan = full_plan(spec.shape, spec.rope is not None, projected, bits)
    by_window: dict[int, list[int]] = {}
    for i, lane in enumerate(plan.lanes):
        by_window.setdefault(spec.windows[lane.layer], []).append(i)
    groups = []
    for window, lanes in by_window.items():
        life = Window.of_tokens(window, plan.page_tokens) if window else KEEP
        groups.append(Group(tuple(lanes), Tier(bits, bits), life=life))
    return dataclasses.replace(plan, groups=tuple(groups))


def random_basis(plan: CompressionPlan, seed: int, orthogonal: bool) -> Basis:
    """Full-rank bases with random centres for every lane: orthogonal (a = b), or any
    invertible a with b = a^-T."""
    rng = np.random.default_rng(seed)
    centred = float(plan.model.shifts)

    def pair(d: int) -> tuple[np.ndarray, np.ndarray]:
        u, v = (np.linalg.qr(rng.normal(size=(d, d)))[0] for _ in range(2))
        if orthogonal:
            return u, u
        scales = rng.uniform(0.5, 2.0, d)
        return u * scales @ v, u / scales @ v

    basis = Basis()
    for lane in plan.lanes:
        d = plan.model.heads(lane.layer).head_dim
        (a, b), (a_v, o_v) = pair(d), pair(d)
        centre_k, centre_v = centred * rng.normal(size=(2, d))
        qk = (
            (a, b, centre_k)
            if lane.projected or lane.rope == "none"
            else (None, None, None)
        )
        basis[lane.layer, lane.head] = LaneBasis(
            *qk, a_v=a_v, o_v=o_v.T, centre_v=centre_v
        )
    return basis

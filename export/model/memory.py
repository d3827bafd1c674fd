"""Memory that work on a model takes beside what the process already has, foretold
before it begins, and what is free.

Numbers are those of the largest moment. They are counted from shapes; machine.REST is
what allocators and libraries add.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvlathe.base import machine
from kvlathe.base.console import human_bytes, log
from kvlathe.base.errors import KvlatheError
from kvlathe.export.model.plain_attention import SCORES_AT_ONCE
from kvlathe.export.model.sliced_head import LOGITS_AT_ONCE, WEIGHTS_AT_ONCE
from kvlathe.export.model.spec import DecoderSpec
from kvlathe.export.model.tensors import stored_shapes

FLOAT = 4
LARGE = 1 << 30
"""A need above this is told of."""


def free_bytes(device: torch.device) -> int:
    """Bytes that tensors may still take on ``device``: of a GPU at most what is left of
    this process's share (``within_share``)."""
    if device.type != "cuda":
        return machine.free_bytes()
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    held = torch.cuda.memory_reserved(device) - used
    share = torch.cuda.get_per_process_memory_fraction(device)
    return max(0, min(free + held, int(share * total) - used))


@dataclass(frozen=True)
class Need:
    """Bytes of each part of some ``work``, all there at once."""

    work: str
    weights: int
    activations: int
    block: int

    @property
    def bytes(self) -> int:
        return self.weights + self.activations + self.block + machine.REST

    def require(self, device: torch.device, remedy: str) -> None:
        """Raise KvlatheError where that much is not free. A large need is logged."""
        free = free_bytes(device)
        if self.bytes > free:
            where = "GPU memory" if device.type == "cuda" else "memory"
            raise KvlatheError(
                f"{self.work} takes {human_bytes(self.bytes)} of {where}",
                f"{human_bytes(free)} are free (limits of containers counted)",
                remedy,
            )
        if self.bytes > LARGE:
            log.info(
                "%s: up to %s of memory (weights %s, activations %s, block %s), %s free",
                self.work,
                *(human_bytes(x) for x in (self.bytes, self.weights)),
                *(human_bytes(x) for x in (self.activations, self.block, free)),
            )


def layer_weights(spec: DecoderSpec) -> int:
    """Bytes of the weights of one layer, float32."""
    shapes = stored_shapes(spec).items()
    roles = ("embed", "head", "inputs_embed")
    beside = {f"{spec.family.names.get(x)}.weight" for x in roles}
    beside.add(f"{spec.family.names.get('positions')}.weight")
    total = sum(math.prod(shape) for name, shape in shapes if name not in beside)
    return FLOAT * total // spec.layers


def _layer(spec: DecoderSpec, tokens: int, gradients: bool) -> int:
    """Bytes of one layer's activations over ``tokens`` tokens; with gradients, of all
    that is kept for them and of what they pass through."""
    family = spec.family
    width = max(family.intermediate_size, family.dense_size)
    if family.experts is not None:
        width += family.experts.count * family.experts.intermediate_size
    heads = spec.query_heads * spec.head_dim
    of_token = 4 * spec.hidden_size + 7 * heads + 3 * width
    scores = 0
    if any(spec.windows) or family.attn_softcap or spec.shape.sinks:
        scores = 4 * SCORES_AT_ONCE
    return FLOAT * ((2 if gradients else 1) * of_token * tokens + scores)


def of_prices(
    spec: DecoderSpec, tokens: int, remembered: int, draws: int, queries: int
) -> Need:
    """Gradients of ``draws`` scores through the layered model on one sequence, beside
    passes over ``remembered`` tokens, and the attention of ``queries`` of one lane with
    its forms."""
    states = (spec.layers + 1) * (tokens + remembered) + 2 * draws * tokens
    states *= spec.hidden_size * max(1, spec.family.streams)
    # Layers that read another's cache wait until that one comes.
    waiting = sum(spec.shape.source(i) != i for i in range(spec.layers))
    lanes = (draws + 2) * tokens * spec.query_heads * spec.head_dim * (1 + waiting)
    logits = 4 * max(LOGITS_AT_ONCE, spec.vocab_size) + WEIGHTS_AT_ONCE
    group = max(spec.group(i) * spec.shape.readers(i) for i in range(spec.layers))
    forms = (6 + 2 * draws) * group * queries * tokens
    layer = _layer(spec, tokens, gradients=True)
    head = 2 * spec.vocab_size * spec.hidden_size
    return Need(
        "measuring sensitivity",
        2 * layer_weights(spec) + head,
        FLOAT * (states + lanes) + layer,
        FLOAT * max(logits, forms),
    )


def of_calibration(spec: DecoderSpec, tokens: int, length: int) -> Need:
    """Statistics of ``tokens`` tokens in sequences of up to ``length``: sums are in
    float64, and a layer is widened for them."""
    hidden = tokens * spec.hidden_size * max(1, spec.family.streams)
    heads = length * (spec.query_heads + 2 * spec.kv_heads) * spec.head_dim
    square = spec.shape.layers * spec.kv_heads * spec.head_dim**2
    return Need(
        "calibrating",
        3 * layer_weights(spec),
        FLOAT * (hidden + 4 * heads + 20 * square) + _layer(spec, length, False),
        FLOAT * length * spec.hidden_size * 4,
    )

"""LayerRunner: one layer of the original model at a time, for calibration: its q, k and
v as a cache would see them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlathe.export.model.blocks import ROWS, Rotator
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.device import CPU
from kvlathe.export.model.layer import DecoderLayer, Widths
from kvlathe.export.model.plain_attention import PlainAttention
from kvlathe.export.model.spec import DecoderSpec
from kvlathe.export.model.tensors import rope_state, stream_maps
from kvlathe.layers.beside import Beside, in_table, layer_inputs
from kvlathe.layers.mixers import Spans
from kvlathe.layers.streams import RowMap, narrowed, widened
from kvlathe.layers.temperature import query_factors


class Rotation(NamedTuple):
    """All that a layer needs of a step of one sequence: cos, sin [T, d/2], None without
    RoPE; where its tokens are and the states before them, where layers keep some."""

    cos: Tensor | None
    sin: Tensor | None
    spans: Spans | None = None
    states: Tensor | None = None

    def still(self) -> Rotation:
        assert self.cos is not None
        ones, zeros = torch.ones_like(self.cos), torch.zeros_like(self.cos)
        return self._replace(cos=ones, sin=zeros)


class Captured(NamedTuple):
    """``hidden`` [T, D] after the layer; ``q`` [T, Hq, d], ``k`` [T, H, d] after RoPE,
    canonical; ``v`` [T, H, dv]; ``o`` [T, Hq, dv], what attention gives. No heads where
    the layer has no attention."""

    hidden: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor


class FullAttention(nn.Module):
    """PlainAttention in a layer's place. Its rows are (q, k, v) as a cache would see
    them, and o."""

    def __init__(
        self, spec: DecoderSpec, layer: int, attention: PlainAttention
    ) -> None:
        super().__init__()
        self.head_dim = spec.heads(layer).head_dim
        self.value_dim = spec.shape.value_dim(layer)
        self.turns = spec.rope is not None
        self.attention = attention

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, step: Rotation
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
        q = q.unflatten(-1, (-1, self.head_dim))  # [T, heads, d]
        k = k.unflatten(-1, (-1, self.head_dim))
        v = v.unflatten(-1, (-1, self.value_dim))
        if self.turns and step.cos is not None and step.sin is not None:
            q = _rotate(q, step.cos, step.sin)
            k = _rotate(k, step.cos, step.sin)
        by_head = [x.transpose(0, 1) for x in (q, k, v)]
        by_token = self.attention(*by_head).transpose(0, 1)
        return by_token.flatten(1), (q, k, v, by_token)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, d], cos and sin [T, d/2]."""
    a, b = x.chunk(2, -1)
    cos = cos[:, None]
    sin = sin[:, None]
    turned_a = a * cos - b * sin
    turned_b = b * cos + a * sin
    return torch.cat([turned_a, turned_b], -1)


class LayerRunner:
    """Runs one layer of the original model and shows its q, k and v. Only that layer's
    weights are in memory (float32, on the checkpoint's device).

    x = embed(checkpoint, ids, positions)
    for i in range(spec.layers): x, q, k, v, o = LayerRunner(checkpoint, i)(x, positions)
    """

    def __init__(self, checkpoint: Checkpoint, layer: int) -> None:
        spec = checkpoint.spec
        self.layer = layer
        prefix = f"layers.{layer}."
        sinks = None
        if checkpoint.has(f"{prefix}attend.sinks"):
            sinks = checkpoint.weight(f"{prefix}attend.sinks").flatten()
        self.attention = PlainAttention.of(spec, layer, sinks)
        attention = None
        if spec.attends(layer):
            attention = FullAttention(spec, layer, self.attention)
        self._numbers = sum(spec.shape.states)
        with torch.device("meta"):
            self._layer = DecoderLayer(
                spec, layer, Widths.whole(spec, layer), attention, torch.float32
            )
        for name, empty in self._layer.state_dict().items():
            tensor = torch.zeros(empty.shape, device=checkpoint.device)
            if checkpoint.has(prefix + name):
                tensor = checkpoint.weight(prefix + name)
            self._layer.load_state_dict({name: tensor}, strict=False, assign=True)
        self._temperature = spec.family.temperature
        self._places = (layer,)
        self._rope = rotator(spec, checkpoint.device)
        self._rope_of = spec.rope_of[layer] if spec.ropes else 0

    @property
    def w_v(self) -> Tensor | None:
        """[D, all heads]; None in a layer that reads another's cache."""
        made_by = self._layer.v or self._layer.k  # a value may be what a key is made of
        return None if made_by is None else made_by.weight

    @property
    def w_o(self) -> Tensor:
        """[all query heads, D]"""
        return self._layer.o.weight

    @property
    def bytes(self) -> int:
        """Bytes of the layer's weights."""
        return sum(x.nbytes for x in self._layer.state_dict().values())

    @torch.inference_mode()
    def __call__(
        self,
        hidden: Tensor,
        positions: Tensor,
        rows: Tensor | None = None,
        beside: Beside | None = None,
    ) -> Captured:
        """hidden [T, D] of one sequence (its tokens see one another causally),
        positions [T] of any offset, all where the weights are. With ``rows`` [R], the
        hidden states after the layer are those of these tokens alone. ``beside``: of
        the sequence, the same for all layers."""
        return self.run(hidden, positions, rows, beside)

    def run(
        self,
        hidden: Tensor,
        positions: Tensor,
        rows: Tensor | None = None,
        beside: Beside | None = None,
    ) -> Captured:
        """The same, where gradients may be taken; of none of the weights."""
        rotation = Rotation(None, None)
        if self._rope is not None:
            angles = self._rope(positions, hidden.dtype)
            rotation = Rotation(*angles[self._rope_of])
        rotation = rotation._replace(**first_states(hidden, self._numbers))
        (factors,) = query_factors(self._temperature, positions, self._places)
        given = hidden, rotation, None, rows, factors, beside
        after, *more = self._layer(*given)
        if self._layer.attend is None:
            return Captured(after, *[hidden.new_zeros(len(hidden), 0, 0)] * 4)
        return Captured(after, *more[0])


class FirstStates(TypedDict):
    """Places of the tokens of a step, and states before them."""

    spans: Spans | None
    states: Tensor | None


def first_states(hidden: Tensor, numbers: int) -> FirstStates:
    """Those of one whole sequence, hidden [T, D]: states are zeros."""
    if not numbers:
        return {"spans": None, "states": None}
    tokens, device = len(hidden), hidden.device
    ends = torch.tensor([0, tokens], device=device)
    return {
        "spans": Spans.of(ends, torch.arange(tokens, device=device), tokens, 1),
        "states": hidden.new_zeros(1, numbers),
    }


def rotator(spec: DecoderSpec, device: torch.device = CPU) -> Rotator | None:
    if not spec.ropes:
        return None
    turn = Rotator(spec.planes)
    for name, numbers in rope_state(spec).items():
        setattr(turn, name, torch.tensor(numbers, device=device))
    return turn


def embed(checkpoint: Checkpoint, input_ids: Tensor, positions: Tensor) -> Tensor:
    """[T, D] float32, of N streams [T, N * D]: what the first layer reads."""
    x = checkpoint.rows("embed.weight", input_ids)
    if maps := stream_products(checkpoint, "in"):
        return widened(x, maps)
    if not checkpoint.spec.has_positions:
        return x
    return x + checkpoint.rows("positions.weight", positions)


def stream_products(checkpoint: Checkpoint, way: str) -> list[RowMap]:
    """Maps [T, D] -> [T, D] to further streams ("in") or from them ("out")."""
    roles = stream_maps(checkpoint.spec, way)
    weights = [checkpoint.weight(f"{role}.weight") for role in roles]
    return [partial(F.linear, weight=weight.T) for weight in weights]


def as_one(x: Tensor, maps: Sequence[RowMap]) -> Tensor:
    """x [R, D] of what leaves the last layer, where ``maps`` are of streams."""
    return narrowed(x, maps) if maps else x


def beside(checkpoint: Checkpoint, input_ids: Tensor, embedded: Tensor) -> Beside:
    """Compute what layers are given beside ``embedded`` [T, D], which the first reads."""
    spec, family = checkpoint.spec, checkpoint.spec.family
    if not family.layer_inputs:
        return Beside()
    ids = in_table(input_ids, family.input_rows or spec.vocab_size, spec.vocab_size)
    norm = checkpoint.weight("inputs_norm.weight")
    inputs = layer_inputs(
        checkpoint.rows("inputs_embed.weight", ids),
        embedded[:, : spec.hidden_size] @ checkpoint.weight("inputs_project.weight"),
        lambda x: ROWS.rms_norm(x, norm, family.norm_eps),
        spec.layers,
    )
    return Beside(inputs)

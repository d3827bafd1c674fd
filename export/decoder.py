"""Decoder: the one definition of the model. The accuracy search runs it, torch.onnx exports it, fold fills it.

Sizes: T packed tokens of a step, R logit rows, D hidden size, d head dim, Hq query heads, H KV heads, V vocabulary,
W = sum of rank_k + rank_v over all lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlathe.activations import ACTIVATIONS
from kvlathe.export.attend import AttendLayer, StepTensors
from kvlathe.export.blocks import Linear, Norm, Rotator, Table
from kvlathe.export.checkpoint import Checkpoint
from kvlathe.export.plan import CompressionPlan
from kvlathe.export.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Widths:
    """Columns of a layer's q, k and v (all lanes side by side) and rows of its W_O."""

    q: int
    k: int
    v: int
    o: int

    @classmethod
    def folded(cls, plan: CompressionPlan, layer: int) -> Widths:
        lanes, group = plan.active(layer), plan.model.group_size
        k, v = sum(lane.input_dim for lane in lanes), sum(lane.rank_v for lane in lanes)
        return cls(q=group * k, k=k, v=v, o=group * v)

    @classmethod
    def whole(cls, spec: DecoderSpec) -> Widths:
        q, kv = spec.query_heads * spec.head_dim, spec.kv_heads * spec.head_dim
        return cls(q=q, k=kv, v=kv, o=q)


class DecoderLayer(nn.Module):
    """One layer around ``attend``, which maps (q, k, v, step) to o and more: AttendLayer, or FullAttention to observe.

    v and o always have a bias (centring leaves constants there), k has one wherever no RoPE follows it.
    """

    def __init__(self, spec: DecoderSpec, widths: Widths, attend: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        family, hidden = spec.family, spec.hidden_size

        def norm(role: str, size: int) -> Norm | None:
            return Norm(family.norm, size, family.norm_eps, dtype) if role in family.names else None

        self.head_dim, self.parallel = spec.head_dim, family.parallel
        self.attn_norm = Norm(family.norm, hidden, family.norm_eps, dtype)
        self.q = Linear(hidden, widths.q, family.qkv_bias, dtype)
        self.k = Linear(hidden, widths.k, family.qkv_bias or spec.rope is None, dtype)
        self.v = Linear(hidden, widths.v, True, dtype)
        self.q_norm, self.k_norm = norm("q_norm", spec.head_dim), norm("k_norm", spec.head_dim)
        self.attend = attend
        self.o = Linear(widths.o, hidden, True, dtype)
        self.mlp_norm = norm("mlp_norm", hidden)
        inner, gated = family.intermediate_size, bool({"gate", "gate_up"} & family.names.keys())
        self.gate = Linear(hidden, inner, family.mlp_bias, dtype) if gated else None
        self.up = Linear(hidden, inner, family.mlp_bias, dtype)
        self.down = Linear(inner, hidden, family.mlp_bias, dtype)
        self.act = ACTIVATIONS[family.activation]

    def forward(self, x: Tensor, step: StepTensors | Rotation) -> tuple[Tensor, ...]:
        """x [T, D] -> (next x [T, D], all that ``attend`` hands on beside o)."""
        normed = self.attn_norm(x)
        q, k, v = self.q(normed), self.k(normed), self.v(normed)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._by_head(self.q_norm, q), self._by_head(self.k_norm, k)
        o, *handed_on = self.attend(q, k, v, step)
        attended = x + self.o(o)
        read = x if self.parallel else attended
        return attended + self._mlp(normed if self.mlp_norm is None else self.mlp_norm(read)), *handed_on

    def _mlp(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(self.act(up) if self.gate is None else self.act(self.gate(x)) * up)

    def _by_head(self, norm: Norm, x: Tensor) -> Tensor:
        return norm(x.unflatten(-1, (-1, self.head_dim))).flatten(-2)


class Decoder(nn.Module):
    """The folded model over a packed step (docs/attend.md gives every input).

    State names are those of ``fold``: ``embed.weight`` [V, D], ``positions.weight``, ``layers.<i>.<role>.weight``
    [in, out], ``layers.<i>.attend.proj_q`` ..., ``norm.weight``, ``head.weight`` [D, V] (absent when tied). ``rope.*``
    stay float32 whatever ``dtype`` is: a half cannot hold a frequency. With ``stage`` only that stage of the plan: its
    layers under their own names, reading and giving hidden states where the model does not begin or end.
    """

    def __init__(
        self, spec: DecoderSpec, plan: CompressionPlan, dtype: torch.dtype = torch.float32, stage: int | None = None
    ) -> None:
        super().__init__()
        part = plan if stage is None else plan.part(stage)
        layers = range(spec.layers) if stage is None else plan.layers_of(stage)
        self.spec, self.plan, self.dtype = spec, part, dtype
        self.first, self.last = layers[0] == 0, layers[-1] == spec.layers - 1
        tied = self.last and spec.tied_head
        self.embed = Table(spec.vocab_size, spec.hidden_size, dtype) if self.first or tied else None
        learned = self.first and spec.rope is None
        self.positions = Table(spec.max_positions, spec.hidden_size, dtype) if learned else None
        self.rope = Rotator(spec.head_dim // 2) if spec.rope else None
        self.layers = nn.ModuleDict(
            {
                str(layer): DecoderLayer(
                    spec, Widths.folded(part, i), AttendLayer(part, i, spec.scale(layer), dtype), dtype
                )
                for i, layer in enumerate(layers)
            }
        )
        self.norm = Norm(spec.family.norm, spec.hidden_size, spec.family.norm_eps, dtype) if self.last else None
        self.head = Linear(spec.hidden_size, spec.vocab_size, False, dtype) if self.last and not tied else None

    def forward(
        self,
        source: Tensor,
        positions: Tensor,
        query_starts: Tensor,
        query_offsets: Tensor,
        lengths: Tensor,
        page_tables: Sequence[Tensor],
        pools: dict[str, Tensor],
        logit_rows: Tensor,
        probe_weights: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """source: input_ids [T] or, past the first stage, hidden [T, D]; positions [T], logit_rows [R]
        -> (logits [R, V] float32 or, before the last stage, hidden [T, D]; rows [T, W] to append), and mass [B, lanes
        of all layers, N] where the plan has a probe.
        """
        x = self.embed(source) if self.first and self.embed is not None else source
        if self.positions is not None:
            x = x + self.positions(positions)
        cos, sin = self.rope(positions, self.dtype) if self.rope else (None, None)
        step = StepTensors(cos, sin, query_starts, query_offsets, lengths, list(page_tables), pools, probe_weights)
        handed_on = []
        for layer in self.layers.values():
            x, *more = layer(x, step)
            handed_on.append(more)
        rows, *mass = zip(*handed_on, strict=True)
        x = self._logits(x, logit_rows) if self.last else x
        return x, torch.cat(rows, -1), *(torch.cat(of_layer, 1) for of_layer in mass)

    def _logits(self, x: Tensor, logit_rows: Tensor) -> Tensor:
        assert self.norm is not None
        x = self.norm(x.index_select(0, logit_rows))
        if self.head is not None:
            return self.head(x).float()
        assert self.embed is not None
        return F.linear(x, self.embed.weight).float()

    @torch.inference_mode()
    def logits(self, input_ids: Sequence[int], rows: Sequence[int]) -> Tensor:
        """[len(rows), V] float32: next-token logits of one sequence, prefilled at once with nothing cached."""
        return self.read(input_ids, rows)

    def read(self, input_ids: Sequence[int], rows: Sequence[int]) -> Tensor:
        """The same, where gradients may be taken."""
        count = len(input_ids)
        return self(
            torch.tensor(input_ids, dtype=torch.int32),
            torch.arange(count, dtype=torch.int32),
            torch.tensor([0, count], dtype=torch.int32),
            torch.arange(count, dtype=torch.int32),
            torch.zeros(1, len(self.plan.buckets), dtype=torch.int32),
            [],
            {},
            torch.tensor(rows, dtype=torch.int32),
        )[0]


# -- observing one layer ---------------------------------------------------------------------------------------------


class Rotation(NamedTuple):
    """All that FullAttention needs of a step: cos, sin [T, d/2], None without RoPE."""

    cos: Tensor | None
    sin: Tensor | None


class Captured(NamedTuple):
    """``hidden`` [T, D] after the layer; ``q`` [T, Hq, d], ``k`` [T, H, d] after RoPE, canonical; ``v`` [T, H, d]."""

    hidden: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


class FullAttention(nn.Module):
    """Plain causal attention over one whole sequence at full rank. Its rows are (q, k, v) as a cache would see them."""

    def __init__(self, spec: DecoderSpec, layer: int) -> None:
        super().__init__()
        self.head_dim, self.scale = spec.head_dim, spec.scale(layer)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, step: Rotation) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if step.cos is not None and step.sin is not None:
            q, k = _rotate(q, step.cos, step.sin), _rotate(k, step.cos, step.sin)
        qs, ks, vs = (x.transpose(0, 1)[None] for x in (q, k, v))
        o = F.scaled_dot_product_attention(qs, ks, vs, is_causal=True, scale=self.scale, enable_gqa=True)
        return o[0].transpose(0, 1).flatten(1), (q, k, v)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, d], cos and sin [T, d/2]."""
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class LayerRunner:
    """Runs one layer of the original model and shows its q, k and v. Only that layer's weights are in memory (float32).

    x = embed(checkpoint, ids, positions)
    for i in range(spec.layers): x, q, k, v = LayerRunner(checkpoint, i)(x, positions)
    """

    def __init__(self, checkpoint: Checkpoint, layer: int) -> None:
        spec, prefix = checkpoint.spec, f"layers.{layer}."
        with torch.device("meta"):
            self._layer = DecoderLayer(spec, Widths.whole(spec), FullAttention(spec, layer), torch.float32)
        for name, empty in self._layer.state_dict().items():
            known = checkpoint.has(prefix + name)
            tensor = checkpoint.weight(prefix + name) if known else torch.zeros(empty.shape)
            self._layer.load_state_dict({name: tensor}, strict=False, assign=True)
        self._rope = rotator(spec)

    @torch.inference_mode()
    def __call__(self, hidden: Tensor, positions: Tensor) -> Captured:
        """hidden [T, D] of one sequence (its tokens see one another causally), positions [T] of any offset."""
        rotation = Rotation(*(self._rope(positions, torch.float32) if self._rope else (None, None)))
        after, (q, k, v) = self._layer(hidden, rotation)
        return Captured(after, q, k, v)


def rotator(spec: DecoderSpec) -> Rotator | None:
    if spec.rope is None:
        return None
    turn = Rotator(spec.head_dim // 2)
    turn.inv_freq, turn.amplitude = torch.tensor(spec.rope.inv_freq), torch.tensor(spec.rope.amplitude)
    return turn


def embed(checkpoint: Checkpoint, input_ids: Tensor, positions: Tensor) -> Tensor:
    """[T, D] float32: what the first layer reads."""
    x = checkpoint.rows("embed.weight", input_ids)
    return x + checkpoint.rows("positions.weight", positions) if checkpoint.spec.rope is None else x

"""DecoderLayer: the weights of one layer, one tensor a role, around an attention
module.

How they are wired is kvlathe/layers/decoder.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from kvlathe.export.model.blocks import (
    ROWS,
    AnyLinear,
    Curve,
    ExpertBlock,
    HeadOutputBlock,
    Linear,
    MixerBlock,
    Norm,
    ValueMap,
    fixed,
    linear,
)
from kvlathe.export.model.spec import DecoderSpec
from kvlathe.export.model.tensors import FUSED, has_bias, qk_norm_width
from kvlathe.layers.beside import Beside
from kvlathe.layers.decoder import OwnParts, run_layer
from kvlathe.layers.gated import HeadPlaces
from kvlathe.layers.latent import keys_of_values, latent_rows, turned_queries
from kvlathe.layers.mixers import Spans
from kvlathe.layers.rows import Rows
from kvlathe.layers.streams import Streams, with_laurel
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.weight_formats import WeightFormat


@dataclass(frozen=True, slots=True)
class Widths:
    """Columns of a layer's q, k and v (all lanes side by side) and rows of its W_O.
    ``outputs``: where heads lie in what attention gives, where it is turned back into
    the model's dims before W_O. ``ranks``: of the values of each lane that it attends;
    empty where they are whole. ``turned``: where keys are made of values, so many of
    their dims are turned."""

    q: int
    k: int
    v: int
    o: int
    outputs: HeadPlaces = ()
    ranks: tuple[int, ...] = ()
    turned: int = 0

    @classmethod
    def folded(cls, spec: DecoderSpec, plan: CompressionPlan, layer: int) -> Widths:
        """Widths of a layer whose plan is folded into its weights."""
        lanes = plan.index.active(plan.model.source(layer))
        group = plan.model.group(layer)
        heads = plan.model.heads(layer)
        v = sum(lane.rank_v for lane in lanes)
        if heads.turned and lanes[0].values_in_keys:
            k = len(lanes) * heads.head_dim
            return cls(q=group * k, k=k, v=v, o=group * v, turned=heads.turned)
        k = sum(lane.input_dim for lane in lanes)
        ranks = tuple(lane.rank_v for lane in lanes)
        folded = cls(q=group * k, k=k, v=v, o=group * v, ranks=ranks)
        if not spec.has_out_gates:
            return folded
        o = plan.model.query_heads * plan.model.value_dim(layer)
        return replace(folded, o=o, outputs=head_places(plan, layer))

    @classmethod
    def whole(cls, spec: DecoderSpec, layer: int) -> Widths:
        """Widths of a layer as the checkpoint has it."""
        heads = spec.heads(layer)
        v = spec.shape.value_dim(layer)
        return cls(
            q=spec.query_heads * heads.head_dim,
            k=heads.kv_heads * heads.head_dim,
            v=heads.kv_heads * v,
            o=spec.query_heads * v,
        )


def head_places(plan: CompressionPlan, layer: int) -> HeadPlaces:
    """The place of each KV head of the model in what attention gives; a removed one lies
    where the head that fills it does."""
    firsts: dict[int, int] = {}
    at = 0
    for lane in plan.index.active(layer):
        firsts[lane.head] = at
        at += plan.model.group(layer) * lane.rank_v
    places: list[tuple[int, int]] = []
    for head in range(plan.model.heads(layer).kv_heads):
        filled = plan.index.lane(layer, head).fill_from
        source = head if filled is None else filled
        places.append((firsts[source], plan.index.lane(layer, source).rank_v))
    return tuple(places)


BESIDE_NORMS = (
    *("dense_norm", "experts_norm", "inputs_out_norm"),
    *("laurel_norm", "stream_norm", "attn_sum_norm", "mlp_sum_norm"),
)
"""Roles of norms that few families have."""


class Turning(Protocol):
    """The part of a step that a layer reads: cos and sin [T, planes] of its rotation;
    None without RoPE. ``states`` [B, numbers of all layers], and where the tokens of
    each sequence are: None where no layer keeps a state."""

    @property
    def cos(self) -> Tensor | None: ...
    @property
    def sin(self) -> Tensor | None: ...
    @property
    def spans(self) -> Spans | None: ...
    @property
    def states(self) -> Tensor | None: ...

    def still(self) -> Self:
        """The same with angles that turn nothing."""
        ...


class Making(NamedTuple):
    """A layer that is being made: of which model, which one, how wide, and the numbers
    and codes of its maps."""

    spec: DecoderSpec
    layer: int
    widths: Widths
    dtype: torch.dtype
    form: WeightFormat | None


class DecoderLayer(nn.Module):
    """One layer around ``attend``, which maps (q, k, v, step) to o and more:
    AttendLayer, or FullAttention to observe; None where the layer has no attention. A
    layer that keeps a state has a ``mixer``, and hands on the state after the step last.

    v and o always have a bias (centring leaves constants there), k has one wherever no
    RoPE follows it. Where heads share a latent, v is the latent itself. Where values
    pass a norm, what a plan makes of them comes after it (``v_map``). ``form``: of the
    weights of its linear maps (None: ``dtype``).
    """

    rows: Rows = ROWS
    q: AnyLinear
    k: AnyLinear | None
    v: AnyLinear | None
    v_map: ValueMap | None
    o: AnyLinear
    q_norm: Norm | None
    k_norm: Norm | None
    out_gate: AnyLinear | None
    lift: HeadOutputBlock | None
    dense_norm: Norm | None
    experts_norm: Norm | None
    inputs_out_norm: Norm | None
    laurel_norm: Norm | None
    stream_norm: Norm | None
    attn_sum_norm: Norm | None
    mlp_sum_norm: Norm | None

    def __init__(
        self,
        spec: DecoderSpec,
        layer: int,
        widths: Widths,
        attend: nn.Module | None,
        dtype: torch.dtype,
        form: WeightFormat | None = None,
    ) -> None:
        super().__init__()
        family = spec.family
        hidden = spec.hidden_size
        roles = family.roles(layer).keys()

        def norm(role: str, size: int) -> Norm | None:
            if role not in roles:
                return None
            return Norm(family.norm, size, family.norm_eps, dtype)

        self.index, self.source = layer, spec.shape.source(layer)
        self.is_read = spec.shape.readers(layer) > 1
        self.head_dim, self.activation = spec.heads(layer).head_dim, family.activation
        self.parallel, self.wide_qk_norm = family.parallel, family.wide_qk_norm
        self.norm_after_rope = family.norm_after_rope
        self.soft_gates = family.soft_gates
        self.attn_norm = norm("attn_norm", hidden)
        self.latent, self.value_width = family.latent, widths.v
        self.attend, self.v_map = attend, None
        self.caches = attend is not None and self.source == layer
        if attend is not None:
            self._add_attention(Making(spec, layer, widths, dtype, form))
        mixer, self.first_number = (
            family.mixer_of(layer),
            spec.shape.states_before(layer),
        )
        self.mixer = mixer and MixerBlock(mixer, hidden, dtype, form)
        self.attn_out_norm = norm("attn_out_norm", hidden)
        self.mlp_norm = norm("mlp_norm", hidden)
        self.mlp_out_norm = norm("mlp_out_norm", hidden)
        self._add_mlp(spec, layer, dtype, form)

    def _add_attention(self, made: Making) -> None:
        spec, layer, widths, dtype, form = made
        family, hidden = spec.family, spec.hidden_size
        roles = family.roles(layer).keys()

        def norm(role: str) -> Norm | None:
            if role not in roles:
                return None
            width = qk_norm_width(spec, role, layer)
            return Norm(family.qk_norm, width, family.norm_eps, dtype)

        apart = self.latent is None
        inputs = hidden if apart else self._add_latents(spec, dtype, form)
        biased_k = family.qkv_bias or (spec.rope is None and apart)
        self.q = linear(inputs, widths.q, family.qkv_bias and apart, dtype, form)
        self.k = self.v = None
        self.turned, self.value_width = widths.turned, widths.v
        if self.source == layer:
            self.k = linear(hidden, widths.k, biased_k, dtype, form)
            self._add_values(made)
        self.q_norm, self.k_norm = norm("q_norm"), norm("k_norm")
        self._add_gates(made)
        self.o = linear(widths.o, hidden, True, dtype, form)

    def _add_gates(self, made: Making) -> None:
        """Gates of attention's output, and what turns it back into the model's dims."""
        spec, layer, widths, dtype, form = made
        self.out_gate = self.lift = None
        if spec.has_out_gates:
            biased = has_bias(spec, "out_gate")
            self.out_gate = linear(
                spec.hidden_size, spec.out_gates, biased, dtype, form
            )
        if widths.outputs:
            self.lift = HeadOutputBlock(
                widths.outputs, spec.shape.value_dim(layer), dtype
            )

    def whole_heads(self, o: Tensor) -> Tensor:
        return o if self.lift is None else self.lift(o)

    def _add_values(self, made: Making) -> None:
        """Add what makes values of the layer's input, or of what keys are made of."""
        spec, layer, widths, dtype, form = made
        family, hidden = spec.family, spec.hidden_size
        if family.latent is not None:
            return
        if not family.value_norm:
            self.v = linear(hidden, widths.v, True, dtype, form)
            return
        dims = self.head_dim
        heads = len(widths.ranks) or spec.shape.lanes(layer)
        if "v" in family.roles(layer):
            self.v = linear(hidden, heads * dims, family.qkv_bias, dtype, form)
        self.v_map = ValueMap(heads, dims, widths.ranks, family.norm_eps, dtype)

    def _add_latents(
        self, spec: DecoderSpec, dtype: torch.dtype, form: WeightFormat | None
    ) -> int:
        """Norms of latents and, where queries have one, its map. Returns the inputs of
        queries."""
        own, hidden = spec.family.latent, spec.hidden_size
        assert own is not None
        self.latent_norm = Norm("rms", own.rank, own.norm_eps, dtype)
        if not own.query_rank:
            return hidden
        biased = spec.family.qkv_bias
        self.q_latent = linear(hidden, own.query_rank, biased, dtype, form)
        self.q_latent_norm = Norm("rms", own.query_rank, own.norm_eps, dtype)
        return own.query_rank

    def _add_mlp(
        self,
        spec: DecoderSpec,
        layer: int,
        dtype: torch.dtype,
        form: WeightFormat | None,
    ) -> None:
        family = spec.family
        hidden, inner = spec.hidden_size, family.inner(layer)
        roles = family.roles(layer).keys()

        def of_mlp(role: str, inputs: int, outputs: int) -> AnyLinear | None:
            if not {role, *FUSED.get(role, ())} & roles:
                return None
            return linear(inputs, outputs, family.mlp_bias, dtype, form)

        self.gate = of_mlp("gate", hidden, inner)
        self.up = of_mlp("up", hidden, inner)
        self.down = of_mlp("down", inner, hidden)
        self.shared_gate = None
        if "shared_gate" in roles:
            self.shared_gate = Linear(hidden, 1, family.mlp_bias, dtype)
        experts, made = family.experts_of(layer), (hidden, self.activation, dtype)
        self.experts = experts and ExpertBlock(experts, *made, form)
        self.curve = Curve() if "curve" in roles else None
        self.bound = family.bounds[layer] if family.bounds else None
        self._add_beside(spec, layer, dtype)

    def _add_beside(self, spec: DecoderSpec, layer: int, dtype: torch.dtype) -> None:
        """Norms of an MLP and of experts beside it, and what the layer's own embeddings
        of tokens pass."""
        family, hidden, eps = spec.family, spec.hidden_size, spec.family.norm_eps
        roles = family.roles(layer).keys()
        self.norm_eps = eps
        for role in BESIDE_NORMS:
            norm = Norm(family.norm, hidden, eps, dtype) if role in roles else None
            setattr(self, role, norm)
        self.inputs_gate = self.inputs_out = self.scalar = None
        if family.layer_inputs:
            dims = family.layer_inputs
            self.inputs_gate = Linear(hidden, dims, False, dtype)
            self.inputs_out = Linear(dims, hidden, False, dtype)
        if "scalar" in roles:
            self.scalar = fixed(torch.empty(1, dtype=dtype))
        self.laurel_left = self.laurel_right = None
        if "laurel_left" in roles:
            self.laurel_left = Linear(hidden, family.laurel, False, dtype)
            self.laurel_right = Linear(family.laurel, hidden, False, dtype)
        self.streams = self.stream_scale = None
        if family.streams:
            self._add_streams(family.streams, hidden, dtype)
        if "stream_scale" in roles:
            self.stream_scale = fixed(torch.empty(hidden, dtype=dtype))

    def _add_streams(self, count: int, hidden: int, dtype: torch.dtype) -> None:
        """Add what predicts and corrects several hidden states of a token."""
        self.stream_router = Linear(hidden, count, False, dtype)
        self.stream_predict = Linear(count, count**2, False, dtype)
        self.stream_correct = Linear(count, count, False, dtype)
        assert self.stream_norm is not None
        maps = self.stream_router, self.stream_predict, self.stream_correct
        self.streams = Streams(count, self.stream_norm, *maps)

    def forward(
        self,
        x: Tensor,
        step: Turning,
        places: Tensor | None = None,
        rows: Tensor | None = None,
        query_factors: Tensor | None = None,
        beside: Beside | None = None,
    ) -> tuple[Tensor, ...]:
        """x [T, D], or [T, N * D] of N streams -> (next x, all that ``attend`` hands on
        beside o). With
        ``query_factors`` [T, 1], queries times theirs. With
        ``rows`` [R], next x of these tokens alone. With ``places`` [R], which ``step``
        then has as well, no others are attended, either. ``beside``: what layers before
        it left there, and where it leaves keys and values that others read."""
        handed_on: list[Tensor] = []
        states: list[Tensor] = []
        beside = beside or Beside()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            assert self.attend is not None
            if self.is_read:
                beside.shared[self.index] = k, v
            if self.turned and step.cos is not None and step.sin is not None:
                q, k = self._with_turned(q, k, v, step.cos, step.sin)
            if not self.caches:
                k, v = beside.shared[self.source]
            o, *more = self.attend(q, k, v, step)
            handed_on.extend(more)
            return o if rows is None else o.index_select(0, rows)

        def mix(x: Tensor) -> Tensor:
            assert self.mixer and step.spans is not None and step.states is not None
            own = step.states.narrow(-1, self.first_number, self.mixer.numbers)
            y, after = self.mixer(x, step.spans, own)
            states.append(after)
            return y

        wanted = places if rows is None else rows
        angles = None
        turns = self.latent is not None or self.norm_after_rope
        if turns and step.cos is not None and step.sin is not None:
            angles = step.cos, step.sin
        if self.norm_after_rope:
            step = step.still()
        mixing = None if self.mixer is None else mix
        attention = None if self.attend is None else attend
        predicted = None
        if self.streams is not None:
            predicted = self.streams.predicted(x)
            x = predicted[:, 0]
        own = self._own_parts(beside, wanted, predicted)
        given = wanted, query_factors, angles, mixing, own
        return run_layer(self, x, attention, *given), *handed_on, *states

    def _own_parts(
        self, beside: Beside, wanted: Tensor | None, predicted: Tensor | None
    ) -> OwnParts:
        """``predicted`` [T, N, D]: streams, where there are some."""
        experts, end, inputs = None, None, None
        if self.dense_norm is not None:
            experts = self._beside_mlp
        if self.scalar is not None or self.inputs_gate is not None:
            inputs = None if beside.inputs is None else beside.inputs[:, self.index]
            if inputs is not None and wanted is not None:
                inputs = inputs.index_select(0, wanted)
            end = partial(self._end, inputs)
        if predicted is not None:
            if wanted is not None:
                predicted = predicted.index_select(0, wanted)
            end = partial(self._end_of_streams, inputs, predicted)
        if self.mlp_sum_norm is not None:
            end = self.mlp_sum_norm
        middle = None
        if self.laurel_left is not None or self.attn_sum_norm is not None:
            middle = self._middle
        return OwnParts(self.v_map, self.dense_norm, experts, middle, end)

    def _with_turned(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """q and k of heads whose keys begin with their values."""
        assert self.k_norm is not None
        form = (self.head_dim, self.turned), (cos, sin)
        return turned_queries(q, self.k_norm.weight, *form), keys_of_values(k, v, *form)

    def _beside_mlp(self, x: Tensor) -> Tensor:
        """Run experts on what the MLP reads before its norm."""
        assert self.experts is not None and self.experts_norm is not None
        return self.experts_norm(self.experts(self.rows.unit_norm(x, self.norm_eps)))

    def _end(self, inputs: Tensor | None, x: Tensor) -> Tensor:
        """x [T, D] with the layer's own ``inputs`` [T, P] of the tokens, scaled."""
        if inputs is not None:
            x = x + self._given(inputs, x)
        return x if self.scalar is None else x * self.scalar

    def _given(self, inputs: Tensor, x: Tensor) -> Tensor:
        """Read the layer's own inputs by gates of x [T, D]."""
        assert self.inputs_gate is not None
        assert self.inputs_out is not None and self.inputs_out_norm is not None
        gated = self.rows.gated(self.activation, self.inputs_gate(x), inputs)
        return self.inputs_out_norm(self.inputs_out(gated))

    def _end_of_streams(
        self, inputs: Tensor | None, predicted: Tensor, x: Tensor
    ) -> Tensor:
        """predicted [T, N, D] and what the layer gives, x [T, D] -> [T, N * D]."""
        assert self.streams is not None and inputs is not None
        given = partial(self._given, inputs)
        return self.streams.ended(predicted, x, self.stream_scale, given)

    def _middle(self, attended: Tensor, normed: Tensor) -> Tensor:
        if self.attn_sum_norm is not None:
            return self.attn_sum_norm(attended)
        assert self.laurel_left is not None and self.laurel_right is not None
        assert self.laurel_norm is not None
        given = self.laurel_norm(self.laurel_right(self.laurel_left(normed)))
        return with_laurel(attended, normed + given)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.k is None:
            return self.q(x), x, x  # in whose place are those of another layer
        if self.latent is None:
            k = self.k(x)
            return self.q(x), k, k if self.v is None else self.v(x)
        form = self.latent_norm, self.latent.rank, self.value_width
        rows = latent_rows(self.k(x), *form)
        if self.latent.query_rank:
            x = self.q_latent_norm(self.q_latent(x))
        return self.q(x), *rows

    def gate_up(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        assert self.up is not None
        up = self.up(x)
        return None if self.gate is None else self.gate(x), up

    def add_o(self, x: Tensor, o: Tensor) -> Tensor:
        return x + self.o(o)

    def add_down(self, x: Tensor, inner: Tensor) -> Tensor:
        assert self.down is not None
        return x + self.down(inner)

    def add_experts(self, x: Tensor, read: Tensor) -> Tensor:
        assert self.experts is not None
        return x + self.experts(read)

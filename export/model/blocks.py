"""The weights of a decoder beside attention, as modules: linear maps, norms, tables,
the angles of RoPE. What a norm computes is said in kvlathe/layers."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlathe.export.families import Experts
from kvlathe.export.families.family import Mixer
from kvlathe.export.model.coded_blocks import CodedExperts, CodedLinear, CodedTable
from kvlathe.export.model.recurrence import recur
from kvlathe.export.model.stacked import CURVE_PARTS
from kvlathe.layers.decoder import rope_angles, rope_names, tied_head
from kvlathe.layers.experts import (
    ExpertWeights,
    choose_experts,
    given_by_experts,
    read_by_experts,
    run_experts,
)
from kvlathe.layers.gated import HeadOutputs, HeadPlaces
from kvlathe.layers.mixers import MixerParts, Spans, SpreadMemory, mix
from kvlathe.layers.routing import Routing
from kvlathe.layers.rows import Rows, xielu
from kvlathe.layers.values import ValueMaps
from kvlathe.plan.weight_formats import WeightFormat

ROWS = Rows()
"""The definition itself: what is exported is plain torch."""


def fixed(values: Tensor) -> nn.Parameter:
    """A parameter that is not trained."""
    return nn.Parameter(values, requires_grad=False)


class Linear(nn.Module):
    """y = x @ weight (+ bias); weight [in, out]. Biases start as zeros, weights as
    whatever the memory held."""

    def __init__(
        self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = fixed(torch.empty(inputs, outputs, dtype=dtype))
        self.bias = fixed(torch.zeros(outputs, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


AnyLinear = Linear | CodedLinear


def linear(
    inputs: int,
    outputs: int,
    bias: bool,
    dtype: torch.dtype,
    form: WeightFormat | None,
) -> AnyLinear:
    """A linear map in ``dtype``, or with weights in ``form``."""
    if form is None:
        return Linear(inputs, outputs, bias, dtype)
    return CodedLinear(inputs, outputs, bias, dtype, form)


class HeadOutputBlock(nn.Module):
    """Maps of attention's output back into the model's dims, [H, Rv, dv] and [H, 1, dv]
    (kvlathe/layers/gated.py)."""

    def __init__(self, places: HeadPlaces, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.places = places
        widest = max(rank for _, rank in places)
        self.weight = fixed(torch.empty(len(places), widest, size, dtype=dtype))
        self.bias = fixed(torch.zeros(len(places), 1, size, dtype=dtype))

    def forward(self, o: Tensor) -> Tensor:
        return HeadOutputs(self.places, self.weight, self.bias)(o)


class MixerBlock(nn.Module):
    """The maps of a layer that keeps a state, and its numbers, which are float32: decays
    of a half are too coarse (kvlathe/layers/mixers.py). Weights start as whatever the
    memory held."""

    def __init__(
        self, mixer: Mixer, hidden: int, dtype: torch.dtype, form: WeightFormat | None
    ) -> None:
        super().__init__()
        self.mixing = own = mixer.mixing
        inputs = own.channels + own.inner if own.heads else 3 * own.channels
        self.project = linear(hidden, inputs, mixer.bias, dtype, form)
        taps = [fixed(torch.empty(own.channels)) for _ in range(own.taps)]
        self.taps = nn.ParameterList(taps)
        self.conv_bias = self.gates = self.norm = None
        self.decay = self.step_bias = self.skip = None
        if mixer.conv_bias:
            self.conv_bias = fixed(torch.empty(own.channels))
        if own.heads:
            is_delta = own.kind == "delta"
            count = 2 * own.heads if is_delta else own.heads
            self.gates = Linear(hidden, count, mixer.bias, dtype)
            self.decay = fixed(torch.empty(own.heads))
            self.step_bias = fixed(torch.empty(own.heads))
            self.skip = None if is_delta else fixed(torch.empty(own.heads, 1))
            if own.norm != "none":
                width = own.value_dim if is_delta else own.inner
                self.norm = fixed(torch.empty(width, dtype=dtype))
        self.out = linear(own.inner, hidden, mixer.bias, dtype, form)

    @property
    def numbers(self) -> int:
        """Numbers of the state of one sequence."""
        return self.mixing.numbers

    def forward(self, x: Tensor, spans: Spans, states: Tensor) -> tuple[Tensor, Tensor]:
        """As ``mix``: y, and states after the step."""
        parts = MixerParts(
            project=self.project,
            out=self.out,
            taps=list(self.taps),
            conv_bias=self.conv_bias,
            gates=self.gates,
            decay=self.decay,
            step_bias=self.step_bias,
            skip=self.skip,
            norm=self.norm,
        )
        memory = SpreadMemory(self.mixing, spans, states, recur)
        return mix(self.mixing, parts, x, memory), memory.after


class ExpertBlock(nn.Module):
    """The experts of a layer (kvlathe/layers/experts.py), in ``dtype`` or in ``form``.
    Weights start as whatever the memory held."""

    def __init__(
        self,
        experts: Experts,
        hidden: int,
        activation: str,
        dtype: torch.dtype,
        form: WeightFormat | None = None,
    ) -> None:
        super().__init__()
        count, inner = experts.count, experts.intermediate_size
        reads = experts.latent or hidden
        self.activation = activation
        self.routing = routing_of(experts)
        self.router = fixed(torch.empty(hidden, count, dtype=dtype))
        sizes = {
            "gate": (reads, inner),
            "up": (reads, inner),
            "down": (inner, reads),
        }
        if experts.latent:
            self.into = fixed(torch.empty(hidden, reads, dtype=dtype))
            self.back = fixed(torch.empty(reads, hidden, dtype=dtype))
        for role, size in sizes.items():
            if role == "gate" and not experts.gated:
                continue
            if form is not None:
                own = CodedExperts(count, *size, form, dtype)
            else:
                own = fixed(torch.empty(count, *size, dtype=dtype))
            setattr(self, role, own)
        biases = {
            "router": (count,),
            "gate": (count, 1, inner),
            "up": (count, 1, inner),
            "down": (count, reads),
        }
        for name, shape in biases.items() if experts.biased else ():
            setattr(self, f"{name}_bias", fixed(torch.empty(shape, dtype=dtype)))
        if experts.corrected:  # steps of a half are wider than what parts experts
            self.correction = fixed(torch.empty(count, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights(x.dtype)
        # Only CPUs run graphs of float32: there a loop over what is chosen pays.
        if torch.compiler.is_exporting() and x.dtype == torch.float32:
            return self._node(x, weights)
        return run_experts(x, weights, self.routing, self.activation)

    def weights(self, dtype: torch.dtype) -> ExpertWeights:
        """Codes are the numbers in ``dtype`` that they stand for."""
        parts = dict(self.named_parameters(recurse=False))
        coded = {
            role: one.maps().to(dtype)
            for role, one in self.named_children()
            if isinstance(one, CodedExperts)
        }
        return ExpertWeights(**parts, **coded)

    def _node(self, x: Tensor, weights: ExpertWeights) -> Tensor:
        """A node whose meaning is export/onnx/experts.py."""
        chosen = choose_experts(x, weights, self.routing)
        own = read_by_experts(x, weights)
        given = torch.onnx.ops.symbolic(
            f"kvlathe::{experts_op(self.routing)}",
            [own, *chosen, *weights.parts],
            dtype=x.dtype,
            shape=tuple(own.shape),
            version=1,
        )
        return given_by_experts(given, weights)


def experts_op(routing: Routing) -> str:
    """The operator of such experts: layers may have unlike bounds.

    >>> experts_op(Routing(2, True)), experts_op(Routing(2, True, limit=0.5))
    ('Experts', 'Experts_0_5')
    """
    bound = f"_{routing.limit:g}" if routing.limit else ""
    return "Experts" + re.sub(r"\W", "_", bound)


def routing_of(experts: Experts) -> Routing:
    return Routing(
        chosen=experts.chosen,
        normalized=experts.normalized,
        alpha=experts.alpha,
        limit=experts.limit,
        scores=experts.scores,
        groups=experts.groups,
        kept_groups=experts.kept_groups,
        group_best=experts.group_best,
        jitter=experts.jitter,
        before=experts.before,
        by_logits=experts.by_logits,
    )


class Curve(nn.Module):
    """A learned activation (kvlathe/layers/rows.py). Its numbers are apart: what is
    computed of weights alone would be folded when a graph is traced."""

    def __init__(self) -> None:
        super().__init__()
        for part in CURVE_PARTS:
            setattr(self, part, fixed(torch.empty(1)))

    def forward(self, x: Tensor) -> Tensor:
        return xielu(x, **dict(self.named_parameters()))


class Norm(nn.Module):
    """RMS or layer norm over the last axis (kvlathe/layers/rows.py)."""

    def __init__(self, kind: str, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = fixed(torch.empty(size, dtype=dtype))
        self.bias = fixed(torch.empty(size, dtype=dtype)) if kind == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        return ROWS.norm(x, self.weight, self.bias, self.eps)


class ValueMap(nn.Module):
    """Values of H heads: each head's norm without weights, then its lane's map, where
    there are any (kvlathe/layers/values.py)."""

    def __init__(
        self,
        heads: int,
        dims: int,
        widths: tuple[int, ...],
        eps: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.heads, self.widths, self.eps = heads, widths, eps
        if widths:
            self.maps = fixed(torch.empty(heads, dims, max(widths), dtype=dtype))
            self.bias = fixed(torch.empty(sum(widths), dtype=dtype))

    def forward(self, v: Tensor) -> Tensor:
        """v [T, H * d] -> [T, sum of ``widths``]"""
        normed = ROWS.unit_norm(v.unflatten(-1, (self.heads, -1)), self.eps)
        if not self.widths:
            return normed.flatten(-2)
        return ValueMaps(self.maps, self.bias, self.widths)(normed)


class Table(nn.Module):
    """weight [rows, width]; picks rows."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = fixed(torch.empty(rows, width, dtype=dtype))

    def forward(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.weight)

    def product(self, x: Tensor) -> Tensor:
        """x [R, width] -> [R, rows]: as the head of a model that ties them."""
        return tied_head(self.weight)(x)


def table(
    rows: int, width: int, dtype: torch.dtype, form: WeightFormat | None
) -> Table | CodedTable:
    """A table in ``dtype``, or in ``form``."""
    if form is None:
        return Table(rows, width, dtype)
    return CodedTable(rows, width, dtype, form)


class Rotator(nn.Module):
    """cos and sin of every position and plane, computed in float32 as transformers
    does, for each of the model's rotations. State: ``inv_freq`` and ``amplitude`` [d/2]
    of the first, ``inv_freq_1`` ... of the others (kvlathe/layers/decoder.py).
    ``planes``: of each of them."""

    def __init__(self, planes: Sequence[int]) -> None:
        super().__init__()
        self.ropes = len(planes)
        for rope, count in enumerate(planes):
            for name in rope_names(rope):
                self.register_buffer(name, torch.empty(count, dtype=torch.float32))

    def forward(
        self, positions: Tensor, dtype: torch.dtype
    ) -> list[tuple[Tensor, Tensor]]:
        """positions [T] -> cos, sin [T, d/2] of each rotation."""
        angles: list[tuple[Tensor, Tensor]] = []
        for rope in range(self.ropes):
            inv_freq, amplitude = (self.get_buffer(x) for x in rope_names(rope))
            cos, sin = rope_angles(positions, inv_freq, amplitude)
            angles.append((cos.to(dtype), sin.to(dtype)))
        return angles

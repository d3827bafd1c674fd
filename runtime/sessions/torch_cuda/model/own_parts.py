"""Parts of a layer that few families have, Gemma 3n and 4 above all (OwnParts of kvlathe/layers/decoder.py),
and the embeddings of tokens that each of their layers is given.

Sizes: T packed tokens, R of them that leave a layer, D hidden size, L layers, P dims of a
layer's embedding, d dims of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from kvlathe.layers.beside import in_table, layer_inputs
from kvlathe.layers.decoder import NO_PARTS, OwnParts, RowMap
from kvlathe.layers.rows import Rows
from kvlathe.layers.streams import Streams, with_laurel
from kvlathe.layers.values import ValueMaps
from kvlathe.layers.wiring import LayerWiring, Wiring

GivenInputs = Callable[[Tensor, Tensor], Tensor]
"""Tokens [T] and what the first layer reads [T, D] -> what each layer is given [T, L,
P]."""


def inputs_of(
    wiring: Wiring, rows: Rows, tensors: dict[str, Tensor]
) -> GivenInputs | None:
    """Take the tables and maps of it out of ``tensors``; None where layers are given
    nothing."""
    if "inputs_embed.weight" not in tensors:
        return None
    taken = ("inputs_embed", "inputs_project", "inputs_norm")
    embed, project, norm = (tensors.pop(f"{name}.weight") for name in taken)
    words = len(tensors["embed.weight"])

    def normed(x: Tensor) -> Tensor:
        return rows.rms_norm(x, norm, wiring.norm_eps)

    def given(input_ids: Tensor, x: Tensor) -> Tensor:
        ids = in_table(input_ids, len(embed), words)
        own = x[:, : len(project)] @ project  # of N streams, the first
        return layer_inputs(F.embedding(ids, embed), own, normed, len(wiring.scales))

    return given


class LayerParts:
    """Parts of one layer. ``tensors`` by role, which are taken; ``norm`` takes a norm, and
    gives None for one that the layer lacks."""

    def __init__(
        self,
        wiring: Wiring,
        own: LayerWiring,
        rows: Rows,
        tensors: dict[str, Tensor],
        norm: Callable[[str], RowMap | None],
    ) -> None:
        self.rows, self.eps, self.activation = rows, wiring.norm_eps, wiring.activation
        self.head_dim = own.head_dim
        self.value_maps: RowMap | None = None
        if "v_map.maps" in tensors:
            maps, bias = (tensors.pop(f"v_map.{name}") for name in ("maps", "bias"))
            self.value_maps = ValueMaps(maps, bias, own.ranks)
        # Values of a layer that reads another's cache are normed there.
        self.norms_values = self.value_maps is not None or own.turned > 0
        self.dense_norm = norm("dense_norm")
        self.experts_norm = norm("experts_norm")
        self.inputs_out_norm = norm("inputs_out_norm")
        self.gate = tensors.pop("inputs_gate.weight", None)
        self.out = tensors.pop("inputs_out.weight", None)
        self.scalar = tensors.pop("scalar", None)
        self.laurel_norm = norm("laurel_norm")
        self.attn_sum_norm = norm("attn_sum_norm")
        self.mlp_sum_norm = norm("mlp_sum_norm")
        self.laurel = [
            tensors.pop(f"laurel_{side}.weight", None) for side in ("left", "right")
        ]
        self.streams = _streams(wiring.streams, norm("stream_norm"), tensors)
        self.stream_scale = tensors.pop("stream_scale", None)

    def of_step(
        self,
        inputs: Tensor | None,
        rows: Tensor | None,
        experts: RowMap | None,
        predicted: Tensor | None = None,
    ) -> OwnParts:
        """The parts in a step. ``inputs`` [T, P]: what the layer is given of its tokens, of
        which ``rows`` [R] leave the layer (None: all). ``predicted`` [T, N, D]: streams,
        where there are some."""
        if inputs is not None and rows is not None:
            inputs = inputs.index_select(0, rows)
        values = self._values if self.norms_values else None
        beside, end = None, None
        if self.dense_norm is not None and experts is not None:
            beside = partial(self._experts, experts)
        if self.scalar is not None or inputs is not None:
            end = partial(self._end, inputs)
        if predicted is not None:
            if rows is not None:
                predicted = predicted.index_select(0, rows)
            end = partial(self._end_of_streams, inputs, predicted)
        if self.mlp_sum_norm is not None:
            end = self.mlp_sum_norm
        middle = None
        if self.laurel_norm is not None or self.attn_sum_norm is not None:
            middle = self._middle
        if values is beside is middle is end is None:
            return NO_PARTS
        return OwnParts(values, self.dense_norm, beside, middle, end)

    def _values(self, v: Tensor) -> Tensor:
        """v [T, heads * d] -> as Attend takes it."""
        normed = self.rows.unit_norm(v.unflatten(-1, (-1, self.head_dim)), self.eps)
        return (
            normed.flatten(-2) if self.value_maps is None else self.value_maps(normed)
        )

    def _experts(self, experts: RowMap, x: Tensor) -> Tensor:
        """Experts of x [T, D], which has no norm yet, and the norm of what they give."""
        assert self.experts_norm is not None
        return self.experts_norm(experts(self.rows.unit_norm(x, self.eps)))

    def _end(self, inputs: Tensor | None, x: Tensor) -> Tensor:
        """x [T, D] with the layer's own ``inputs`` [T, P] of the tokens, scaled."""
        if inputs is not None:
            x = x + self._given(inputs, x)
        return x if self.scalar is None else x * self.scalar

    def _given(self, inputs: Tensor, x: Tensor) -> Tensor:
        """Read the layer's own inputs by gates of x [T, D]."""
        assert self.gate is not None and self.out is not None
        assert self.inputs_out_norm is not None
        gated = self.rows.gated(self.activation, x @ self.gate, inputs)
        return self.inputs_out_norm(gated @ self.out)

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
        left, right = self.laurel
        assert left is not None and right is not None and self.laurel_norm is not None
        given = self.laurel_norm(normed @ left @ right)
        return with_laurel(attended, normed + given)


def _streams(
    count: int, norm: RowMap | None, tensors: dict[str, Tensor]
) -> Streams | None:
    """Take what predicts and corrects streams out of a layer's ``tensors``."""
    if norm is None:
        return None
    roles = ("router", "predict", "correct")
    weights = [tensors.pop(f"stream_{role}.weight") for role in roles]
    return Streams(count, norm, *products(weights))


def products(weights: Sequence[Tensor]) -> list[RowMap]:
    """Maps by weights [in, out]."""
    return [partial(F.linear, weight=weight.T) for weight in weights]

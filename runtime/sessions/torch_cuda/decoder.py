"""The decoder of the cuda backend: the folded model in torch, with as few kernels a
layer as plain torch allows.

What a layer computes is defined in kvlathe/layers/decoder.py, for this backend and for
the exporter. Here are its products: q, k and v are one, so are gate and up, and the
products add to the residual themselves. The tensors have the exporter's names; how
layers are wired comes with them in decoder.json (export/model/weights_file.py).

Sizes: T packed tokens of a step, R logit rows, D hidden size, d head dim, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.layers.decoder import (
    RowMap,
    logits,
    rope_angles,
    rope_names,
    run_layer,
    tied_head,
)
from kvlathe.layers.rows import Rows
from kvlathe.layers.wiring import Wiring
from kvlathe.runtime.sessions.torch_cuda.rows import FusedRows

Angles = tuple[Tensor, Tensor]
Attend = Callable[
    [int, Tensor, Tensor, Tensor, Angles | None, Mapping[str, Tensor]], Tensor
]
"""(layer, q, k, v, (cos, sin), proj_q, proj_k, centre_k by name) -> o; K and V are in
the cache afterwards."""

ALIGNMENT = 8
"""Elements: rows of q, k and v begin at multiples of 16 bytes."""


def read_decoder(
    folder: Path, index: str, device: str
) -> tuple[Wiring, dict[str, Tensor]]:
    """What decoder.json (``index``) describes: the wiring, and the weights on
    ``device``, read one at a time."""
    raw: dict[str, Any] = json.loads((folder / index).read_text("utf-8"))
    path = folder / raw["weights"]
    mapped = torch.from_file(
        str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8
    )

    def tensor(dtype: str, shape: list[int], offset: int) -> Tensor:
        kind = getattr(torch, dtype)
        size = kind.itemsize * torch.Size(shape).numel()
        return (
            mapped[offset : offset + size].view(kind).view(shape).to(device, copy=True)
        )

    wiring = Wiring.from_json(raw["wiring"])
    return wiring, {name: tensor(**entry) for name, entry in raw["tensors"].items()}


class TorchDecoder:
    """Runs a packed step. ``tensors`` is emptied while the layers take theirs: a large
    model exists once."""

    def __init__(
        self, wiring: Wiring, tensors: dict[str, Tensor], rows: Rows | None = None
    ) -> None:
        """``rows``: norms and gated activations, torch's where it is not given."""
        rows = rows or FusedRows()
        self.wiring = wiring
        self.layers = [
            _Layer(wiring, rows, _taken(tensors, f"layers.{i}."))
            for i in range(len(wiring.scales))
        ]
        self.embed = tensors["embed.weight"]
        self.positions = tensors.get("positions.weight")
        head = tensors.get("head.weight")
        bias = tensors.get("head.bias")
        self.head = tied_head(self.embed) if head is None else _Linear(head, bias)
        self.norm = _norm(wiring, rows, _taken(tensors, "norm."))
        self.ropes = _ropes(_taken(tensors, "rope."))

    @torch.inference_mode()
    def __call__(
        self, input_ids: Tensor, positions: Tensor, logit_rows: Tensor, attend: Attend
    ) -> Tensor:
        """input_ids, positions [T], logit_rows [R] int32 -> logits [R, V]."""
        x = F.embedding(input_ids, self.embed)
        if self.positions is not None:
            x = x + F.embedding(positions, self.positions)
        angles = self._angles(positions, x.dtype)
        ropes = self.wiring.ropes or (0,) * len(self.layers)
        for i, layer in enumerate(self.layers):
            x = layer(x, partial(attend, i), angles[ropes[i]])
        softcap = self.wiring.logit_softcap
        return logits(x, logit_rows, self.norm, self.head, softcap)

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> list[Angles | None]:
        """Of each rotation."""
        found: list[Angles | None] = []
        for rope in self.ropes:
            cos, sin = rope_angles(positions, *rope)
            found.append((cos.to(dtype), sin.to(dtype)))
        return found or [None]


def _ropes(tensors: dict[str, Tensor]) -> list[Angles]:
    """Frequencies and amplitudes of each rotation."""
    found: list[Angles] = []
    while (names := rope_names(len(found)))[0] in tensors:
        inv_freq, amplitude = (tensors[name] for name in names)
        found.append((inv_freq, amplitude))
    return found


class _Linear:
    """y = x @ weight (+ bias); biases of zeros are left out."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias if bias is not None and bool(bias.any()) else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return x @ self.weight
        return torch.addmm(self.bias, x, self.weight)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual += x @ weight + bias, by the product itself."""
        residual.addmm_(x, self.weight)
        return residual if self.bias is None else residual.add_(self.bias)


class _Layer:
    """One layer; ``tensors`` by role."""

    def __init__(self, wiring: Wiring, rows: Rows, tensors: dict[str, Tensor]) -> None:
        self.parallel = wiring.parallel
        self.head_dim = wiring.head_dim
        self.activation = wiring.activation
        self.rows = rows

        def norm(role: str) -> RowMap | None:
            if f"{role}.weight" not in tensors:
                return None
            return _norm(wiring, rows, _taken(tensors, f"{role}."))

        self.wide_qk_norm = wiring.wide_qk_norm
        self.attn_norm = norm("attn_norm")
        self.attn_out_norm = norm("attn_out_norm")
        self.mlp_norm = norm("mlp_norm")
        self.mlp_out_norm = norm("mlp_out_norm")
        self.q_norm = norm("q_norm")
        self.k_norm = norm("k_norm")
        self.is_gated = "gate.weight" in tensors
        gate_up_roles = ["gate", "up"] if self.is_gated else ["up"]
        self.qkv_map, self.qkv_widths = _beside(tensors, ["v", "q", "k"], ALIGNMENT)
        self.gate_up_map, self.gate_up_widths = _beside(tensors, gate_up_roles, 1)
        self.o = _Linear(tensors.pop("o.weight"), tensors.pop("o.bias", None))
        self.down = _Linear(tensors.pop("down.weight"), tensors.pop("down.bias", None))
        self.projections = _taken(tensors, "attend.")

    def __call__(
        self, x: Tensor, attend: Callable[..., Tensor], angles: Angles | None
    ) -> Tensor:
        """x [T, D] becomes the next layer's, in place."""

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, angles, self.projections)

        return run_layer(self, x, attention)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        v, q, k, _ = self.qkv_map(x).split_with_sizes(self.qkv_widths, -1)
        return q, k, v

    def gate_up(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        both = self.gate_up_map(x)
        if not self.is_gated:
            return None, both
        gate, up, _ = both.split_with_sizes(self.gate_up_widths, -1)
        return gate, up

    def add_o(self, x: Tensor, o: Tensor) -> Tensor:
        return self.o.add_to(x, o)

    def add_down(self, x: Tensor, inner: Tensor) -> Tensor:
        return self.down.add_to(x, inner)


def _norm(wiring: Wiring, rows: Rows, tensors: dict[str, Tensor]) -> RowMap:
    weight = tensors["weight"]
    bias = tensors.get("bias")
    eps = wiring.norm_eps
    return lambda x: rows.norm(x, weight, bias, eps)


def _beside(
    tensors: dict[str, Tensor], roles: list[str], multiple: int
) -> tuple[_Linear, list[int]]:
    """The linear maps ``roles`` as one, padded to a ``multiple`` of columns, and their
    widths; that of the padding comes last."""
    weights = [tensors.pop(f"{role}.weight") for role in roles]
    biases = [tensors.pop(f"{role}.bias", None) for role in roles]
    widths = [weight.shape[1] for weight in weights]
    pad = -sum(widths) % multiple
    first = weights[0]
    columns = [*weights, first.new_zeros(len(first), pad)]
    shifts = [
        first.new_zeros(width) if bias is None else bias
        for width, bias in zip(widths, biases, strict=True)
    ]
    shifts.append(first.new_zeros(pad))
    whole = _Linear(torch.cat(columns, 1), torch.cat(shifts))
    return whole, [*widths, pad]


def _taken(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose names begin with ``prefix``, without it, taken out of ``tensors``."""
    names = [name for name in tensors if name.startswith(prefix)]
    taken: dict[str, Tensor] = {}
    for name in names:
        taken[name.removeprefix(prefix)] = tensors.pop(name)
    return taken

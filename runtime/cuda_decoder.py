"""The decoder of the cuda backend: the folded model in torch, with as few kernels a layer as plain torch allows.

It computes what export/decoder.py defines, from the tensors of the same names; how layers are wired comes with them in
decoder.json (engines/cuda.py). q, k and v are one product, so are gate and up; residuals are added by the products.

Sizes: T packed tokens of a step, R logit rows, D hidden size, d head dim, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.activations import ACTIVATIONS
from kvlathe.runtime.cuda_rows import Rows

Attend = Callable[[int, Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None, Mapping[str, Tensor]], Tensor]
"""(layer, q, k, v, (cos, sin), proj_q, proj_k, centre_k by name) -> o; K and V are in the cache afterwards."""

ROW = 8
"""Elements: rows of q, k and v begin at multiples of 16 bytes."""


@dataclass(frozen=True)
class Wiring:
    """What tensors do not say: ``norm`` rms or layer, ``scales`` of each layer's scores, ``parallel`` as in Family."""

    norm: str
    norm_eps: float
    activation: str
    parallel: bool
    head_dim: int
    scales: tuple[float, ...]


def read_decoder(folder: Path, index: str, device: str) -> tuple[Wiring, dict[str, Tensor]]:
    """What decoder.json (``index``) describes: the wiring, and the weights on ``device``, read one at a time."""
    raw: dict[str, Any] = json.loads((folder / index).read_text("utf-8"))
    path = folder / raw["weights"]
    mapped = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)

    def tensor(dtype: str, shape: list[int], offset: int) -> Tensor:
        kind = getattr(torch, dtype)
        size = kind.itemsize * torch.Size(shape).numel()
        return mapped[offset : offset + size].view(kind).view(shape).to(device, copy=True)

    wiring = Wiring(**{**raw["wiring"], "scales": tuple(raw["wiring"]["scales"])})
    return wiring, {name: tensor(**entry) for name, entry in raw["tensors"].items()}


class TorchDecoder:
    """Runs a packed step. ``tensors`` is emptied while the layers take theirs: a large model exists once."""

    def __init__(self, wiring: Wiring, tensors: dict[str, Tensor], rows: Rows | None = None) -> None:
        """``rows``: norms and gated activations, in torch if it is not given."""
        self.wiring, rows = wiring, rows or Rows()
        self.layers = [_Layer(wiring, rows, _taken(tensors, f"layers.{i}.")) for i in range(len(wiring.scales))]
        self.embed, self.positions = tensors["embed.weight"], tensors.get("positions.weight")
        self.head = tensors.get("head.weight")
        self.norm = _norm(wiring, rows, _taken(tensors, "norm."))
        self.rope = (tensors["rope.inv_freq"], tensors["rope.amplitude"]) if "rope.inv_freq" in tensors else None

    @torch.inference_mode()
    def __call__(self, input_ids: Tensor, positions: Tensor, logit_rows: Tensor, attend: Attend) -> Tensor:
        """input_ids, positions [T], logit_rows [R] int32 -> logits [R, V]."""
        x = F.embedding(input_ids, self.embed)
        if self.positions is not None:
            x = x + F.embedding(positions, self.positions)
        angles = self._angles(positions, x.dtype)
        for i, layer in enumerate(self.layers):
            layer(x, partial(attend, i), angles)
        x = self.norm(x.index_select(0, logit_rows))
        return F.linear(x, self.embed) if self.head is None else x @ self.head

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """cos, sin [T, d/2]; turned in float32."""
        if self.rope is None:
            return None
        turns = positions.float().unsqueeze(-1) * self.rope[0]
        return (turns.cos() * self.rope[1]).to(dtype), (turns.sin() * self.rope[1]).to(dtype)


class _Linear:
    """y = x @ weight (+ bias); biases of zeros are left out."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias if bias is not None and bool(bias.any()) else None

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """residual += x @ weight + bias, by the product itself."""
        residual.addmm_(x, self.weight)
        if self.bias is not None:
            residual.add_(self.bias)


class _Layer:
    """One layer; ``tensors`` by role."""

    def __init__(self, wiring: Wiring, rows: Rows, tensors: dict[str, Tensor]) -> None:
        self.parallel, self.head_dim = wiring.parallel, wiring.head_dim
        self.rows, self.activation = rows, wiring.activation
        self.qkv, self.widths = _beside(tensors, ["v", "q", "k"], ROW)
        self.gated = "gate.weight" in tensors
        self.up, (self.inner, *_) = _beside(tensors, ["gate", "up"] if self.gated else ["up"], 1)
        self.o = _Linear(tensors.pop("o.weight"), tensors.pop("o.bias", None))
        self.down = _Linear(tensors.pop("down.weight"), tensors.pop("down.bias", None))
        self.norms = {
            name: _norm(wiring, rows, _taken(tensors, f"{name}."))
            for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm")
            if f"{name}.weight" in tensors
        }
        self.projections = _taken(tensors, "attend.")

    def __call__(self, x: Tensor, attend: Callable[..., Tensor], angles: tuple[Tensor, Tensor] | None) -> None:
        """x [T, D] becomes the next layer's, in place."""
        normed = self.norms["attn_norm"](x)
        read = self._read(x, normed) if self.parallel else None
        v, q, k, _ = self.qkv(normed).split_with_sizes(self.widths, -1)
        if "q_norm" in self.norms:
            q, k = self._by_head("q_norm", q), self._by_head("k_norm", k)
        self.o.add_to(x, attend(q, k, v, angles, self.projections))
        self.down.add_to(x, self._inner(self._read(x, normed) if read is None else read))

    def _read(self, x: Tensor, normed: Tensor) -> Tensor:
        return self.norms["mlp_norm"](x) if "mlp_norm" in self.norms else normed

    def _inner(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.rows.gated(self.activation, up, self.inner) if self.gated else ACTIVATIONS[self.activation](up)

    def _by_head(self, name: str, x: Tensor) -> Tensor:
        return self.norms[name](x.unflatten(-1, (-1, self.head_dim))).flatten(-2)


def _norm(wiring: Wiring, rows: Rows, tensors: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    weight, bias = tensors["weight"], tensors.get("bias")
    if wiring.norm == "rms":
        return lambda x: rows.rms_norm(x, weight, wiring.norm_eps)
    return lambda x: F.layer_norm(x, weight.shape, weight, bias, wiring.norm_eps)


def _beside(tensors: dict[str, Tensor], roles: list[str], multiple: int) -> tuple[_Linear, tuple[int, ...]]:
    """The linear maps ``roles`` as one, padded to a multiple of columns, and their widths; the padding's comes last."""
    weights = [tensors.pop(f"{role}.weight") for role in roles]
    biases = [tensors.pop(f"{role}.bias", None) for role in roles]
    widths = [w.shape[1] for w in weights]
    pad = -sum(widths) % multiple
    whole = torch.cat([*weights, weights[0].new_zeros(len(weights[0]), pad)], 1)
    parts = [w.new_zeros(w.shape[1]) if b is None else b for w, b in zip(weights, biases, strict=True)]
    return _Linear(whole, torch.cat([*parts, weights[0].new_zeros(pad)])), (*widths, pad)


def _taken(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose names begin with ``prefix``, without it, taken out of ``tensors``."""
    return {name.removeprefix(prefix): tensors.pop(name) for name in [n for n in tensors if n.startswith(prefix)]}

"""Experts of which only the chosen ones compute, by products that read no others. Sizes are
those of a step, whatever was chosen, and nothing is read back, so that steps may be captured.

Sizes: T packed tokens, C experts that each passes, P = T * C pairs, E experts, D hidden
size, I columns of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.base.console import log
from kvlathe.base.errors import KvlatheError
from kvlathe.layers.experts import (
    ExpertWeights,
    given_by_experts,
    read_by_experts,
    run_experts,
)
from kvlathe.layers.routing import Routing
from kvlathe.layers.rows import ACTIVATIONS
from kvlathe.runtime.sessions.torch_cuda.model.expert_maps import (
    ExpertMap,
    taken_map,
)
from kvlathe.runtime.sessions.torch_cuda.model.routed_pairs import RoutedPairs

KERNELS = "kvlathe.runtime.sessions.torch_cuda.model.expert_kernels"
HALVES = (torch.float16, torch.bfloat16)
SOME = 256
"""Columns of a program that adds what a token's experts give."""


@dataclass(frozen=True)
class Tuning:
    """``columns`` of outputs and ``inputs`` at a time, by so many ``warps``, and loads that
    are ``stages`` ahead."""

    columns: int
    inputs: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tile:
    """``rows`` of one expert that are multiplied at once, where experts have up to ``mean``
    rows on average: the first product, and the second."""

    rows: int
    mean: float
    inner: Tuning
    outer: Tuning


TILES = (
    Tile(16, 16, Tuning(64, 128, 4, 3), Tuning(128, 64, 4, 4)),
    Tile(64, 96, Tuning(128, 64, 4, 3), Tuning(128, 64, 4, 4)),
    Tile(128, torch.inf, Tuning(128, 64, 8, 3), Tuning(256, 64, 8, 3)),
)


@dataclass(frozen=True)
class GroupedWeights:
    """As ExpertWeights, with maps of experts as kernels read them."""

    router: Tensor
    up: ExpertMap
    down: ExpertMap
    gate: ExpertMap | None = None
    router_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    correction: Tensor | None = None
    into: Tensor | None = None
    back: Tensor | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> GroupedWeights:
        """``tensors`` by role: those of ExpertWeights, or codes of its maps."""
        left = dict(tensors)
        up, down = taken_map(left, "up"), taken_map(left, "down")
        assert up is not None and down is not None
        gate = taken_map(left, "gate")
        return cls(up=up, down=down, gate=gate, **left)


def experts_map(
    tensors: Mapping[str, Tensor], routing: Routing, activation: str
) -> Callable[[Tensor], Tensor]:
    """x [T, D] -> [T, D]: the experts of a layer, ``tensors`` by role. All of them compute,
    as ``run_experts``, where the kernels for chosen ones cannot run: the log says why.
    Raises KvlatheError where their weights are codes, which those kernels alone read."""
    dtype = tensors["router"].dtype
    try:
        reason = "" if dtype in HALVES else f"they compute in {dtype}, not in 16 bits"
        if not reason:
            grouped = GroupedExperts(GroupedWeights.of(tensors), routing, activation)
            grouped.try_out()
            return grouped
    except Exception as error:  # Triton's, its compilers', and the driver's
        reason = repr(error).partition("\n")[0]
    if "up" not in tensors:
        raise KvlatheError(
            "the experts of this engine cannot run: their weights are codes",
            reason,
            "build it without --weights",
        )
    tell(reason)
    weights = ExpertWeights(**tensors)
    return partial(run_experts, weights=weights, routing=routing, activation=activation)


@cache
def tell(reason: str) -> None:
    """Once, not for each layer."""
    log.warning("every expert computes every token: %s", reason)


class GroupedExperts:
    """x [T, D] -> [T, D], as ``run_experts``. Raises ImportError where Triton is
    missing."""

    def __init__(
        self, weights: GroupedWeights, routing: Routing, activation: str
    ) -> None:
        self.weights, self.routing = weights, routing
        self.activation = ACTIVATION_NAMES[ACTIVATIONS[activation]]
        self.kernels: ModuleType = import_module(KERNELS)
        self.count = weights.router.shape[1]
        self.read, self.columns = weights.down.outputs, weights.up.outputs
        self.pairs = RoutedPairs(weights, routing, self.kernels)
        self.tiles = TILES

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``residual`` [T, D] is added."""
        mean = len(x) * self.routing.chosen / self.count
        able = (tile for tile in self.tiles if mean <= tile.mean)
        return self.run(x, next(able, self.tiles[-1]), residual)

    def run(self, x: Tensor, tile: Tile, residual: Tensor | None = None) -> Tensor:
        """The same in tiles of one form."""
        if not len(x):
            return x.clone()
        x, own = x.contiguous(), self.weights
        shares, rows, owners = self.pairs.routed(x, tile.rows)
        x = read_by_experts(x, own)
        inner = self._inner(x, shares, rows, owners, tile)
        parts = self._outer(inner, shares, rows, owners, tile)
        if own.back is None:
            return self._summed(parts, residual)
        found = given_by_experts(self._summed(parts, None), own)
        return found if residual is None else residual + found

    def try_out(self) -> None:
        """Compile and run the kernels once, in tiles of every form: ``tiles`` are then those
        that fit this GPU. Raises what keeps all of them from it."""
        router = self.weights.router
        x, fault, fit = router.new_zeros(1, len(router)), None, list[Tile]()
        for tile in TILES:
            try:
                self.run(x, tile).sum().item()
            except Exception as error:  # Triton's, its compilers', and the driver's
                fault = error
            else:
                fit.append(tile)
        if fault and not fit:
            raise fault
        self.tiles = tuple(fit)

    def _inner(
        self, x: Tensor, shares: Tensor, rows: Tensor, owners: Tensor, tile: Tile
    ) -> Tensor:
        """[B * tile, I], of rows that are none, too."""
        own, how = self.weights, tile.inner
        out = x.new_empty(len(rows), self.columns)
        programs = len(owners) * -(-self.columns // how.columns)
        self.kernels.inner[(programs,)](
            x,
            *_arguments(own.gate or own.up, own.gate_bias),
            *_arguments(own.up, own.up_bias),
            out,
            shares,
            rows,
            owners,
            self.routing.alpha,
            self.routing.limit,
            self.routing.chosen,
            self.read,
            own.up.wide,
            self.columns,
            own.up.bits,
            own.up.group,
            own.up.zeros is not None,
            own.gate is not None,
            own.up_bias is not None,
            self.activation,
            self.routing.limit > 0,
            self.routing.alpha > 0,
            self.routing.before,
            tile.rows,
            how.columns,
            own.up.step(how.inputs),
            num_warps=how.warps,
            num_stages=how.stages,
        )
        return out

    def _outer(
        self, inner: Tensor, shares: Tensor, rows: Tensor, owners: Tensor, tile: Tile
    ) -> Tensor:
        """[P, D], of each pair."""
        down, bias, how = self.weights.down, self.weights.down_bias, tile.outer
        out = inner.new_empty(shares.numel(), self.read)
        programs = len(owners) * -(-self.read // how.columns)
        self.kernels.outer[(programs,)](
            inner,
            *_arguments(down, bias),
            shares,
            out,
            rows,
            owners,
            self.columns,
            down.wide,
            self.read,
            down.bits,
            down.group,
            down.zeros is not None,
            bias is not None,
            not self.routing.before,
            tile.rows,
            how.columns,
            down.step(how.inputs),
            num_warps=how.warps,
            num_stages=how.stages,
        )
        return out

    def _summed(self, parts: Tensor, residual: Tensor | None) -> Tensor:
        """parts [P, D] -> [T, D]"""
        chosen = self.routing.chosen
        total = parts.new_empty(len(parts) // chosen, self.read)
        grid = len(total), -(-self.read // SOME)
        before = parts if residual is None else residual.contiguous()
        added = residual is not None
        self.kernels.summed[grid](
            parts, before, total, chosen, self.read, SOME, added, num_warps=1
        )
        return total


def _arguments(own: ExpertMap, bias: Tensor | None) -> list[Tensor]:
    """Weights, scales, zeros and biases; the weights in place of what there is not, which
    is not read."""
    parts = (own.weights, own.scales, own.zeros, bias)
    return [own.weights if part is None else part for part in parts]


ACTIVATION_NAMES: Mapping[object, str] = {
    F.silu: "silu",
    F.relu: "relu",
    ACTIVATIONS["relu2"]: "relu2",
    F.gelu: "gelu",
    ACTIVATIONS["gelu_new"]: "tanh gelu",
}
"""The kernels' names of activations."""

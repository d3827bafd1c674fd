"""Pairs of a token and an expert that it passes, put together by expert. Sizes are those of a
step, whatever was chosen, and nothing is read back.

Sizes: T packed tokens, C experts that each passes, P = T * C pairs, E experts, D hidden
size, B tiles.
"""

from __future__ import annotations

import math
import os
from types import ModuleType

import torch
from torch import Tensor

from kvlathe.layers.experts import Router, router_logits
from kvlathe.layers.routing import LEAST, Routing, choose
from kvlathe.plan.kernel_forms import UNPROVEN

MANY, FEW, SCORES = 64, 128, 4096
"""Pairs, or tiles, of a program that puts them in order. Pairs that each looks through where
they are few; so many, and so many scores of experts, has a step that one kernel routes."""


class RoutedPairs:
    """The routing of a layer. ``kernels``: expert_kernels.py."""

    def __init__(self, weights: Router, routing: Routing, kernels: ModuleType) -> None:
        self.weights, self.routing, self.kernels = weights, routing, kernels
        self.count = weights.router.shape[1]
        of_groups = routing.kept_groups < routing.groups
        self.is_plain = not (routing.jitter or of_groups or routing.by_logits)
        few = min(FEW // routing.chosen, SCORES // _power(self.count))
        self.few = 1 << few.bit_length() >> 1
        if os.environ.get(UNPROVEN) != "1":  # as mended, no GPU has run that kernel
            self.few = 0

    def routed(self, x: Tensor, tile: int) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, D] -> what each pair counts [T, C] float32, and as ``grouped``."""
        if not self.is_plain or len(x) > self.few:
            shares, experts = self.chosen(x)
            return shares, *self.grouped(experts, tile)
        logits = router_logits(x, self.weights, self.routing).contiguous()
        size = (len(x), self.routing.chosen)
        tiles = self._tiles(math.prod(size), tile)
        shares = torch.empty(size, dtype=torch.float32, device=x.device)
        rows = torch.empty(tiles * tile, dtype=torch.int32, device=x.device)
        owners = rows.new_empty(tiles)
        correction = self.weights.correction
        self.kernels.route[(tiles,)](
            logits,
            shares if correction is None else correction,
            shares,
            rows,
            owners,
            LEAST,
            len(x),
            *self._form_of_routing(),
            tile,
            self.few,
            num_warps=8,
        )
        return shares, rows, owners

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shares of pairs [T, C] float32, and their experts [T, C] int32."""
        routing, correction = self.routing, self.weights.correction
        logits = router_logits(x, self.weights, routing)
        if not self.is_plain:
            shares, experts = choose(logits, correction, routing)
            return shares.contiguous(), experts.to(torch.int32)
        size = (len(x), routing.chosen)
        shares = torch.empty(size, dtype=torch.float32, device=x.device)
        experts = torch.empty(size, dtype=torch.int32, device=x.device)
        self.kernels.choose[(len(x),)](
            logits.contiguous(),
            shares if correction is None else correction,
            shares,
            experts,
            LEAST,
            *self._form_of_routing(),
            num_warps=1,
        )
        return shares, experts

    def _form_of_routing(self) -> tuple[int, int, int, int, bool, bool, bool]:
        """Constants of kernels that choose experts."""
        routing, corrected = self.routing, self.weights.correction is not None
        sizes = self.count, _power(self.count), routing.chosen, _power(routing.chosen)
        return *sizes, routing.scores == "sigmoid", routing.normalized, corrected

    def _tiles(self, pairs: int, tile: int) -> int:
        """The most tiles of ``tile`` rows that there can be."""
        return (pairs + min(self.count, pairs) * (tile - 1)) // tile

    def grouped(self, experts: Tensor, tile: int) -> tuple[Tensor, Tensor]:
        """experts [T, C] int32 -> rows [B, tile]: one more than the pair of each row, 0 where
        there is none; owners [B]: each tile's expert, or -1. B: as many tiles of ``tile`` rows
        as there can be."""
        pairs = experts.numel()
        tiles = self._tiles(pairs, tile)
        if pairs <= FEW:
            return self._few_grouped(experts, tiles, tile)
        zeros = experts.new_zeros(tiles * tile + self.count)
        rows, counts = zeros.split_with_sizes([tiles * tile, self.count])
        ranks, owners = experts.new_empty(pairs), experts.new_empty(tiles)
        programs = -(-pairs // MANY)
        self.kernels.rank[(programs,)](experts, counts, ranks, pairs, MANY, num_warps=2)
        self.kernels.place[(max(programs, -(-tiles // MANY)),)](
            experts,
            counts,
            ranks,
            rows,
            owners,
            pairs,
            tiles,
            self.count,
            _power(self.count),
            tile,
            MANY,
            num_warps=4,
        )
        return rows, owners

    def _few_grouped(
        self, experts: Tensor, tiles: int, tile: int
    ) -> tuple[Tensor, Tensor]:
        rows, owners = experts.new_empty(tiles * tile), experts.new_empty(tiles)
        self.kernels.place_few[(tiles,)](
            experts,
            rows,
            owners,
            experts.numel(),
            self.count,
            _power(self.count),
            tile,
            FEW,
            num_warps=1,
        )
        return rows, owners


def _power(count: int) -> int:
    """The least power of two that is not less."""
    return 1 << (count - 1).bit_length()

"""Which tokens are the most salient, by torch where their scores are: as
runtime/cache/token_ranking.py, which says what each number means, to the bit but for
logarithms of noise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.plan.moves import Target
from kvlathe.plan.observation import ObservationWindow

LARGEST = torch.finfo(torch.float32).max
LEAST = torch.finfo(torch.float32).tiny
WORD = 0xFFFFFFFF
"""Hashes are numbers of 32 bits."""
STEP = 0x9E3779B9


def saliency(
    observation: ObservationWindow,
    attention: Tensor,
    position: Tensor | None,
    seen: Tensor | None,
    keys: Tensor | None,
) -> Tensor:
    """float32 [lanes, n]. ``attention`` float32 and ``position`` int32, both [lanes, n]:
    scores of n tokens; ``seen`` [tokens]: observed rows at or after each position;
    ``keys`` int64 [lanes]: of the noise. None where ``observation`` needs none."""
    salient = attention
    if observation.normalized:
        assert seen is not None
        assert position is not None
        rows = seen[position.long()]
        means = salient.double() / rows.clamp(min=1)
        means = means.float()
        salient = means.masked_fill(rows == 0, LARGEST)
    if observation.pooling > 1:
        width = observation.pooling
        salient = F.max_pool1d(
            salient,
            width,
            stride=1,
            padding=width // 2,
        )
    if observation.noise:
        assert keys is not None
        assert position is not None
        positive = salient.clamp(min=LEAST)
        logs = positive.double().log()
        lots = gumbel(keys, position)
        salient = logs + observation.noise * lots
    return salient.float()


def gumbel(keys: Tensor, position: Tensor) -> Tensor:
    """A Gumbel variate for each token, float64 [lanes, n]: of plan/codec.py's noise of
    its lane's key and its position."""
    token = position.long() & WORD
    mixed = _mixed((token ^ keys[:, None]) + STEP)
    mixed = _mixed(mixed + STEP)  # channel 0
    uniform = (mixed >> 8) * 2.0**-24
    uniform = uniform.double()
    uniform = uniform.clamp(2.0**-25, 1 - 2.0**-25)
    return -torch.log(-torch.log(uniform))


def _mixed(x: Tensor) -> Tensor:
    """As mixed of plan/codec.py, of the last 32 bits."""
    x = x & WORD
    x = (x ^ (x >> 16)) * 0x85EBCA6B & WORD
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & WORD
    return x ^ (x >> 16)


def ranked(salient: Tensor, newest: int) -> Tensor:
    """Places [lanes, n], the most salient first (of equals the older); the ``newest``
    places before all others."""
    first = salient.clone()
    known = first.shape[1] - newest
    first[:, known:] = torch.inf
    return torch.argsort(
        first,
        descending=True,
        stable=True,
    )


def selected(target: Target, order: Tensor) -> Tensor:
    """The places int32 [lanes, n] that a target gets, ascending."""
    parts = [order[:, first:stop] for first, stop in target.spans]
    places = torch.cat(parts, 1).int()
    return places.sort(1).values

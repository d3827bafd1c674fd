"""Which tokens are the most salient, by torch where their scores are: as
runtime/sessions/host/saliency.py, which says what each number means, to the bit but for
logarithms of noise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.plan.moves import Target
from kvlathe.plan.noise import UNIT, drawn
from kvlathe.plan.token_score import ObservationWindow

LARGEST = torch.finfo(torch.float32).max
LEAST = torch.finfo(torch.float32).tiny


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
    """A Gumbel variate for each token, float64 [lanes, n]: of kvlathe/plan/noise.py's
    noise of its lane's key and its position, in channel 0."""
    token = position.long()
    uniform = drawn(keys[:, None], token, torch.zeros_like(token)).double() * UNIT
    uniform = uniform.clamp(2.0**-25, 1 - 2.0**-25)
    return -torch.log(-torch.log(uniform))


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

"""The end of a model, from hidden states to logits, some rows and a slice of the
vocabulary at a time: weights stay in the file's own dtype, and logits of a whole
sequence are never in memory.

Sizes: R rows, D hidden size, V vocabulary, S scores of the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlathe.export.model.blocks import Norm
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.layer_runner import as_one, stream_products
from kvlathe.export.model.tensors import apply_factor

LOGITS_AT_ONCE = 1 << 25
"""Logits in memory at a time. A few arrays of this size are, while gradients are
taken."""
WEIGHTS_AT_ONCE = 1 << 23
"""Weights of the head that are widened at a time."""


@dataclass(frozen=True)
class Slopes:
    """Gradients of S scores by the logits of R rows: ``weights`` [S, R, M] at ``tokens``
    [S, R, M], and less ``shares`` [R, V] everywhere, the same for all scores (None: 0).
    """

    tokens: Tensor
    weights: Tensor
    shares: Tensor | None = None


SlopesOf = Callable[[Tensor, slice], Slopes]
"""Logits [R, V] of these rows, lost afterwards -> the gradients of the scores by
them."""


class SlicedHead:
    """The last norm and the head of ``checkpoint``."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        spec = checkpoint.spec
        self._spec = spec
        self._name = "embed.weight" if spec.tied_head else "head.weight"
        stored = checkpoint.as_stored(self._name)
        self._table = stored if spec.tied_head else stored.T  # [V, D]
        self._bias = None
        if checkpoint.has("head.bias"):
            self._bias = checkpoint.weight("head.bias")
        with torch.device("meta"):
            family = spec.family
            norm = Norm(family.norm, spec.hidden_size, family.norm_eps, torch.float32)
        for name in norm.state_dict():
            tensor = checkpoint.weight(f"norm.{name}")
            norm.load_state_dict({name: tensor}, strict=False, assign=True)
        self._last_norm = norm
        self._streams = stream_products(checkpoint, "out")
        self._cap = spec.family.logit_softcap

    def _norm(self, hidden: Tensor) -> Tensor:
        return self._last_norm(as_one(hidden, self._streams))

    def rows(self, count: int) -> Iterator[slice]:
        """``count`` rows in blocks whose logits are LOGITS_AT_ONCE at most."""
        size = max(1, LOGITS_AT_ONCE // len(self._table))
        return (slice(at, min(at + size, count)) for at in range(0, count, size))

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, D], as the last layer gives it -> [R, V]."""
        return self._logits(self._norm(hidden))

    def pulls(self, hidden: Tensor, slopes_of: SlopesOf) -> Tensor:
        """The gradients [S, R, D] of the scores by ``hidden`` [R, D]."""
        parts: list[Tensor] = []
        for rows in self.rows(len(hidden)):
            own = hidden[rows].clone().requires_grad_()
            normed = self._norm(own)
            with torch.no_grad():
                logits = self._logits(normed)
                given = logits.clone() if self._cap else logits
                by_normed = self._by_normed(logits, slopes_of(given, rows))
            by_score = [
                torch.autograd.grad(normed, own, one, retain_graph=True)[0]
                for one in by_normed
            ]
            parts.append(torch.stack(by_score))
        return torch.cat(parts, 1)

    def _logits(self, normed: Tensor) -> Tensor:
        logits = normed.new_empty((len(normed), len(self._table)))
        for words, weights in self._slices(normed.dtype):
            logits[:, words] = normed @ weights.T
        if self._bias is not None:
            logits += self._bias
        if self._cap:
            logits.div_(self._cap).tanh_().mul_(self._cap)
        return logits

    def _by_normed(self, logits: Tensor, slopes: Slopes) -> Tensor:
        """Gradients [S, R, D] by what the head reads, from those by its logits."""
        scores = len(slopes.tokens)
        weights = slopes.weights.to(logits.dtype)
        if self._cap:
            reached = logits.expand(scores, -1, -1).gather(-1, slopes.tokens)
            weights = weights * (1 - (reached / self._cap).square())
        chosen = self._widened(self._table[slopes.tokens], logits.dtype)
        found = torch.einsum("srm,srmd->srd", weights, chosen)
        if slopes.shares is None:
            return found
        shares = slopes.shares
        if self._cap:
            shares *= 1 - logits.div_(self._cap).square_()
        for words, part in self._slices(logits.dtype):
            found -= shares[:, words] @ part
        return found

    def _slices(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """(words, weights [words, D]), slice by slice of the vocabulary."""
        words, hidden = self._table.shape
        size = max(1, WEIGHTS_AT_ONCE // hidden)
        for start in range(0, words, size):
            own = slice(start, min(start + size, words))
            yield own, self._widened(self._table[own], dtype)

    def _widened(self, weights: Tensor, dtype: torch.dtype) -> Tensor:
        return apply_factor(self._spec, self._name, weights.to(dtype))

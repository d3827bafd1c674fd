"""Sampling where the logits are: runtime/text/sampler.py with torch.

Only what the rows ask for leaves the GPU: a token a row, and the log-probabilities that
were asked for. Every step is the host sampler's, in the same numbers: weights in
float32, their sums in float64. So both draw the same token from the same logits, but
where a random number falls within the rounding of a sum.

Nothing here waits for the GPU until somebody asks for the result: the next step is
queued in the meantime.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlathe.runtime.sessions.torch_cuda.sampling.counts import TokenCounts, copied_to
from kvlathe.runtime.text.masks import WORD, Masks
from kvlathe.runtime.text.sampler import (
    NO_TOKEN,
    Changes,
    Sampled,
    SamplingRows,
)

Numbers = npt.NDArray[np.floating]
Wait = Callable[[torch.cuda.Event], None]


class Sampling:
    """A choice of tokens on its way: ``tokens`` [R] int64, where the logits are."""

    def __init__(
        self,
        tokens: Tensor,
        rows: SamplingRows,
        logprobs: list[Tensor],
        vocab: int,
        wait: Wait = torch.cuda.Event.synchronize,
    ) -> None:
        """``logprobs``: as ``logprobs_of`` gives them. ``wait``: until an event has
        come."""
        self.tokens = tokens
        self._rows, self._most = rows, most_logprobs(rows, vocab)
        self._asked = np.flatnonzero(rows.logprobs >= 0)
        # One copy to the host: a float64 holds every token id exactly.
        numbers = [tokens.double(), *logprobs]
        self._arrived = to_host(torch.cat(numbers), wait)

    def result(self) -> Sampled:
        """Waits for the GPU."""
        count, asked = len(self._rows.logprobs), self._asked
        numbers = self._arrived()
        tokens = numbers[:count].astype(np.int64)
        chosen = np.zeros(count)
        top_tokens = np.zeros((count, self._most), np.int64)
        top_logprobs = np.zeros((count, self._most))
        rest = numbers[count:]
        valid = tokens[asked] != NO_TOKEN
        chosen[asked] = np.where(valid, rest[: len(asked)], 0)
        values, names = rest[len(asked) :].reshape(2, len(asked), self._most)
        for i, row in enumerate(asked.tolist()):
            wanted = min(int(self._rows.logprobs[row]), self._most) if valid[i] else 0
            top_logprobs[row, :wanted] = values[i, :wanted]
            top_tokens[row, :wanted] = names[i, :wanted]
        return Sampled(tokens, chosen, top_tokens, top_logprobs)


def most_logprobs(rows: SamplingRows, vocab: int) -> int:
    """How many tokens any row wants reported."""
    return min(max(0, rows.most_logprobs), vocab)


def logprobs_of(logits: Tensor, tokens: Tensor, rows: SamplingRows) -> list[Tensor]:
    """Those of the rows that asked: of their tokens, and the best with their tokens."""
    asked = np.flatnonzero(rows.logprobs >= 0)
    if not len(asked):
        return []
    places = copied_to(asked, logits.device)
    wide = logits[places].double()
    scores = wide - wide.logsumexp(dim=1, keepdim=True)
    own_ids = tokens[places].clamp(min=0)
    own = scores.gather(1, own_ids[:, None])[:, 0]
    best, ids = scores.topk(most_logprobs(rows, logits.shape[1]), dim=1)
    return [own, best.flatten(), ids.double().flatten()]


def to_host(
    numbers: Tensor, wait: Wait = torch.cuda.Event.synchronize
) -> Callable[[], Numbers]:
    """Queue a copy of numbers to the host: a function that waits for it."""
    if not numbers.is_cuda:
        return numbers.numpy
    pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    pinned.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def arrived() -> Numbers:
        wait(copied)
        return pinned.numpy()

    return arrived


@torch.inference_mode()
def sample(
    logits: Tensor, rows: SamplingRows, counts: TokenCounts | None = None
) -> Sampling:
    """Queue the choice of a token for each row of ``logits`` [R, vocab], which stay as
    they are; in order on the current stream. ``counts``: of rows with penalties."""
    device = logits.device
    vocab = logits.shape[1]
    if not len(logits):
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return Sampling(none, rows, [], vocab)
    exact = logits.float()
    changed = exact if rows.changes is None else changed_by(exact, rows.changes)
    if rows.penalties is not None:
        assert counts is not None, "penalties are counted somewhere"
        changed = counts.penalized(changed, rows.penalties)
    if rows.masks is not None:
        changed = masked_by(changed, rows.masks)
    highest, tokens = changed.max(dim=1)
    random = np.flatnonzero(rows.temperature > 0)
    if len(random):
        places = copied_to(random, device)
        tokens[places] = _drawn(changed[places], highest[places], rows)
    tokens = torch.where(highest.isfinite(), tokens, NO_TOKEN)
    if rows.penalties is not None and counts is not None:
        counts.add(tokens, rows.penalties)
    return Sampling(tokens, rows, logprobs_of(exact, tokens, rows), vocab)


def changed_by(logits: Tensor, changes: Changes) -> Tensor:
    device = logits.device
    places = (
        copied_to(changes.rows, device),
        copied_to(changes.tokens, device),
    )
    penalty = copied_to(changes.penalty, device)
    added = copied_to(changes.added, device)
    old = logits[places]
    changed = logits.clone()
    changed[places] = torch.where(old > 0, old / penalty, old * penalty) + added
    return changed


def masked_by(logits: Tensor, masks: Masks, first: int = 0) -> Tensor:
    """The logits, of the tokens from ``first`` on, with -inf for tokens that may not
    follow. Masks cross packed."""
    device, width = logits.device, logits.shape[1]
    word, skipped = divmod(first, WORD)
    end = (first + width - 1) // WORD + 1
    own = np.ascontiguousarray(masks.bits[:, word:end])
    rows, bits = copied_to(masks.rows, device), copied_to(own, device)
    places = torch.arange(WORD, dtype=torch.int32, device=device)
    wide = (bits[:, :, None] >> places) & 1
    allowed = wide.flatten(1)[:, skipped : skipped + width] != 0
    result = logits.clone()
    result[rows] = torch.where(allowed, logits[rows], -torch.inf)
    return result


def _drawn(logits: Tensor, highest: Tensor, rows: SamplingRows) -> Tensor:
    """A token for each row that is not greedy."""
    asked = np.flatnonzero(rows.temperature > 0)
    device = logits.device
    temperature = copied_to(rows.temperature[asked], device)
    draws = copied_to(rows.draws[asked], device)
    scaled = (logits - highest[:, None]) / temperature[:, None]
    weights = scaled.exp()
    top_k = rows.top_k[asked]
    cut = np.flatnonzero(
        ((top_k > 0) & (top_k < logits.shape[1])) | (rows.top_p[asked] < 1)
    )
    if len(cut):
        places = copied_to(cut, device)
        weights[places] = _cut(weights[places], top_k[cut], rows.top_p[asked][cut])
    if (rows.min_p[asked] > 0).any():
        least = copied_to(rows.min_p[asked], device)
        weights = torch.where(weights >= least[:, None], weights, 0)
    cumulative = weights.cumsum(dim=1, dtype=torch.float64)
    target = draws * cumulative[:, -1]
    place = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return torch.minimum(place, last_drawable(weights))


def last_drawable(weights: Tensor) -> Tensor:
    """The last place of each row whose weight is not 0."""
    places = torch.arange(weights.shape[1], device=weights.device)
    drawable = torch.where(weights > 0, places, 0)
    return drawable.amax(dim=1)


def _cut(weights: Tensor, top_k: np.ndarray, top_p: np.ndarray) -> Tensor:
    """Weights with 0 for what top-k and top-p leave out. Of equal weights a nucleus
    takes the first ones; top-k takes all that equal its last one."""
    device, width = weights.device, weights.shape[1]
    counts = np.where((top_k > 0) & (top_k < width), top_k, width)
    ordered, order = weights.sort(dim=1, descending=True, stable=True)
    least = ordered.gather(1, copied_to(counts - 1, device)[:, None])
    ordered = torch.where(ordered >= least, ordered, 0)
    share = copied_to(top_p.astype(np.float64), device)[:, None]
    running = ordered.cumsum(dim=1, dtype=torch.float64)
    before = running - ordered
    inside = (before < share * running[:, -1:]) | (share >= 1)
    inside[:, 0] = True  # also where the share is too small a number
    ordered = torch.where(inside, ordered, 0)
    return torch.zeros_like(weights).scatter_(1, order, ordered)

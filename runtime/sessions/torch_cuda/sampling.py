"""Sampling where the logits are: runtime/text/sampler.py with torch.

Only what the rows ask for leaves the GPU: a token a row, and the log-probabilities that
were asked for. Every step is the host sampler's, in the same numbers: weights in
float32, their sums in float64. So both draw the same token from the same logits, but
where a random number falls within the rounding of a sum.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvlathe.runtime.text.sampler import (
    NO_TOKEN,
    Changes,
    Sampled,
    SamplingRows,
)


@torch.inference_mode()
def sample(logits: Tensor, rows: SamplingRows) -> Sampled:
    """A token for each row of ``logits`` [R, vocab], which stay as they are; in order on
    the current stream. Waits for the result."""
    device = logits.device
    exact = logits.float()
    changed = exact if rows.changes is None else _apply(exact, rows.changes)
    highest, tokens = changed.max(dim=1)
    random = torch.from_numpy(np.flatnonzero(rows.temperature > 0)).to(device)
    if len(random):
        tokens[random] = _drawn(changed[random], highest[random], rows)
    tokens = torch.where(highest.isfinite(), tokens, NO_TOKEN)
    return _reported(exact, tokens, rows)


def _apply(logits: Tensor, changes: Changes) -> Tensor:
    device = logits.device
    places = (
        torch.from_numpy(changes.rows).to(device),
        torch.from_numpy(changes.tokens).to(device),
    )
    penalty = torch.from_numpy(changes.penalty).to(device)
    added = torch.from_numpy(changes.added).to(device)
    old = logits[places]
    changed = logits.clone()
    changed[places] = torch.where(old > 0, old / penalty, old * penalty) + added
    return changed


def _drawn(logits: Tensor, highest: Tensor, rows: SamplingRows) -> Tensor:
    """A token for each row that is not greedy."""
    asked = np.flatnonzero(rows.temperature > 0)
    device = logits.device
    temperature = torch.from_numpy(rows.temperature[asked]).to(device)
    draws = torch.from_numpy(rows.draws[asked]).to(device)
    scaled = (logits - highest[:, None]) / temperature[:, None]
    weights = scaled.exp()
    top_k = rows.top_k[asked]
    cut = np.flatnonzero(
        ((top_k > 0) & (top_k < logits.shape[1])) | (rows.top_p[asked] < 1)
    )
    if len(cut):
        places = torch.from_numpy(cut).to(device)
        weights[places] = _cut(weights[places], top_k[cut], rows.top_p[asked][cut])
    if (rows.min_p[asked] > 0).any():
        least = torch.from_numpy(rows.min_p[asked]).to(device)
        weights = torch.where(weights >= least[:, None], weights, 0)
    cumulative = weights.cumsum(dim=1, dtype=torch.float64)
    target = draws * cumulative[:, -1]
    place = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return torch.minimum(place, _last(weights))


def _last(weights: Tensor) -> Tensor:
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
    least = ordered.gather(1, torch.from_numpy(counts - 1).to(device)[:, None])
    ordered = torch.where(ordered >= least, ordered, 0)
    share = torch.from_numpy(top_p.astype(np.float64)).to(device)[:, None]
    running = ordered.cumsum(dim=1, dtype=torch.float64)
    before = running - ordered
    inside = (before < share * running[:, -1:]) | (share >= 1)
    inside[:, 0] = True  # also where the share is too small a number
    ordered = torch.where(inside, ordered, 0)
    return torch.zeros_like(weights).scatter_(1, order, ordered)


def _reported(logits: Tensor, tokens: Tensor, rows: SamplingRows) -> Sampled:
    """The tokens, on the host, with the log-probabilities that were asked for."""
    count, vocab = len(rows.logprobs), logits.shape[1]
    most = min(max(0, rows.most_logprobs), vocab)
    chosen = np.zeros(count)
    top_tokens = np.zeros((count, most), np.int64)
    top_logprobs = np.zeros((count, most))
    asked = np.flatnonzero(rows.logprobs >= 0)
    if not len(asked):
        return Sampled(tokens.cpu().numpy(), chosen, top_tokens, top_logprobs)
    places = torch.from_numpy(asked).to(logits.device)
    wide = logits[places].double()
    scores = wide - wide.logsumexp(dim=1, keepdim=True)
    own_ids = tokens[places].clamp(min=0)
    own = scores.gather(1, own_ids[:, None])[:, 0]
    best, ids = scores.topk(most, dim=1)
    # One copy to the host: a float64 holds every token id exactly.
    numbers = [tokens.double(), own, best.flatten(), ids.double().flatten()]
    sent = torch.cat(numbers).cpu().numpy()
    host_tokens = sent[:count].astype(np.int64)
    rest = sent[count:]
    valid = host_tokens[asked] != NO_TOKEN
    chosen[asked] = np.where(valid, rest[: len(asked)], 0)
    values, names = rest[len(asked) :].reshape(2, len(asked), -1)
    for i, row in enumerate(asked.tolist()):
        wanted = min(int(rows.logprobs[row]), values.shape[1]) if valid[i] else 0
        top_logprobs[row, :wanted] = values[i, :wanted]
        top_tokens[row, :wanted] = names[i, :wanted]
    return Sampled(host_tokens, chosen, top_tokens, top_logprobs)

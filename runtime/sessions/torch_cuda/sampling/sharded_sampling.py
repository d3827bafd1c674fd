"""Sampling by several shards, each with the logits of its part of the vocabulary.

Every row's token is that of sampling.py on all logits, but for the rounding of sums.
Shards exchange a few numbers a row and never their logits: the highest one, sums of
weights, and for top-k and top-p sums in bins. The bins are of the weights' bits, ten at
a time: three rounds find the least weight that stays (a radix select).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvlathe.runtime.sessions.torch_cuda.model.shard_group import ShardGroup
from kvlathe.runtime.sessions.torch_cuda.sampling.sampling import (
    Sampling,
    Wait,
    changed_by,
    copied_to,
    last_drawable,
    masked_by,
    most_logprobs,
)
from kvlathe.runtime.text.sampler import NO_TOKEN, Changes, SamplingRows

BIN_BITS = 10
BINS = 1 << BIN_BITS
SHIFTS = (20, 10, 0)
"""A weight is in [0, 1], so its float32 has 30 bits that matter; they are ordered as
weights are."""
LEAST = 1e-300
"""Of a mass that is wanted: above 0."""


class ShardedSampler:
    """Samples with the other shards of ``group``. ``first``: this shard's first token;
    ``vocab``: tokens of all. ``wait``: until an event has come."""

    def __init__(self, group: ShardGroup, first: int, vocab: int, wait: Wait) -> None:
        self.group = group
        self.first = first
        self.vocab = vocab
        self.wait = wait

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: SamplingRows) -> Sampling:
        """As ``sampling.sample``; ``logits`` [R, own tokens]."""
        if not len(logits):
            none = torch.zeros(0, dtype=torch.int64, device=logits.device)
            return Sampling(none, rows, [], self.vocab, self.wait)
        exact = logits.float()
        changed = exact
        if rows.changes is not None:
            changed = self._changed(exact, rows.changes)
        if rows.masks is not None:
            changed = masked_by(changed, rows.masks, self.first)
        own_highest, places = changed.max(dim=1)
        every = self.group.gather(own_highest)
        highest, owner = every.max(dim=0)
        tokens = self._from(owner, places)
        random = np.flatnonzero(rows.temperature > 0)
        if len(random):
            drawn = copied_to(random, logits.device)
            tokens[drawn] = self._drawn(changed[drawn], highest[drawn], rows)
        tokens = torch.where(highest.isfinite(), tokens, NO_TOKEN)
        logprobs = self._logprobs(exact, tokens, rows)
        return Sampling(tokens, rows, logprobs, self.vocab, self.wait)

    def _from(self, owner: Tensor, places: Tensor) -> Tensor:
        """The token of each row, from the shard ``owner`` [R], whose ``places`` [R] says
        it."""
        every = self.group.gather(places + self.first)
        return every.gather(0, owner[None])[0]

    def _changed(self, logits: Tensor, changes: Changes) -> Tensor:
        """Logits with the changes of own tokens."""
        places = changes.tokens - self.first
        count = logits.shape[1]
        own = np.flatnonzero((places >= 0) & (places < count))
        if not len(own):
            return logits
        kept = Changes(
            changes.rows[own], places[own], changes.penalty[own], changes.added[own]
        )
        return changed_by(logits, kept)

    # -- random rows -------------------------------------------------------------------
    def _drawn(self, logits: Tensor, highest: Tensor, rows: SamplingRows) -> Tensor:
        asked = np.flatnonzero(rows.temperature > 0)
        device = logits.device
        temperature = copied_to(rows.temperature[asked], device)
        draws = copied_to(rows.draws[asked], device)
        weights = ((logits - highest[:, None]) / temperature[:, None]).exp()
        top_k, top_p = rows.top_k[asked], rows.top_p[asked]
        cut = np.flatnonzero(((top_k > 0) & (top_k < self.vocab)) | (top_p < 1))
        if len(cut):
            places = copied_to(cut, device)
            weights[places] = self._cut(weights[places], top_k[cut], top_p[cut])
        if (rows.min_p[asked] > 0).any():
            least = copied_to(rows.min_p[asked], device)
            weights = torch.where(weights >= least[:, None], weights, 0)
        return self._placed(weights, draws)

    def _placed(self, weights: Tensor, draws: Tensor) -> Tensor:
        """The token where the cumulative weight passes each row's random number."""
        cumulative = weights.cumsum(dim=1, dtype=torch.float64)
        totals = self.group.gather(cumulative[:, -1])
        ends = totals.cumsum(dim=0)
        target = draws * ends[-1]
        shards = torch.arange(len(totals), device=weights.device)
        last = torch.where(totals > 0, shards[:, None], 0).amax(dim=0)
        owner = torch.minimum((ends <= target).sum(dim=0), last)
        shard = self.group.shard
        rest = target - (ends[shard] - totals[shard])
        place = torch.searchsorted(cumulative, rest[:, None], right=True)[:, 0]
        return self._from(owner, torch.minimum(place, last_drawable(weights)))

    # -- top-k and top-p ---------------------------------------------------------------
    def _cut(self, weights: Tensor, top_k: np.ndarray, top_p: np.ndarray) -> Tensor:
        """Weights with 0 for what top-k and top-p leave out."""
        device = weights.device
        counts = np.where((top_k > 0) & (top_k < self.vocab), top_k, self.vocab)
        wanted = copied_to(counts.astype(np.float64), device)
        least, _ = self._least(weights, torch.ones_like(weights), wanted)
        weights = torch.where(weights >= least[:, None], weights, 0)
        share = copied_to(top_p.astype(np.float64), device)
        total = self.group.sum(weights.sum(dim=1, dtype=torch.float64))
        wanted = (share * total).clamp(min=LEAST)  # someone stays
        least, above = self._least(weights, weights, wanted)
        inside = weights > least[:, None]
        inside |= self._first_ties(weights == least[:, None], least, wanted - above)
        inside |= (share >= 1)[:, None]
        return torch.where(inside, weights, 0)

    def _first_ties(self, ties: Tensor, least: Tensor, missing: Tensor) -> Tensor:
        """Of tokens with the weight ``least``, the first ones that together reach what
        is ``missing``."""
        counts = ties.cumsum(dim=1)
        before = self.group.gather(counts[:, -1])[: self.group.shard].sum(dim=0)
        place = counts - 1 + before[:, None]
        return ties & (place * least.double()[:, None] < missing[:, None])

    def _least(
        self, weights: Tensor, masses: Tensor, wanted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of each row, the least weight above which there is less mass than ``wanted``
        [R] float64; and how much there is."""
        bits = weights.contiguous().view(torch.int32).long()
        heavy = masses.double()
        above = torch.zeros_like(wanted)
        prefix = torch.zeros(len(weights), dtype=torch.int64, device=weights.device)
        for shift in SHIFTS:
            same = bits >> (shift + BIN_BITS) == prefix[:, None]
            places = bits >> shift & (BINS - 1)
            bins = heavy.new_zeros(len(weights), BINS)
            bins.scatter_add_(1, places, torch.where(same, heavy, 0))
            bins = self.group.sum(bins)
            down = bins.flip(1).cumsum(dim=1).flip(1)
            higher = above[:, None] + (down - bins)
            stays = (bins > 0) & (higher < wanted[:, None])
            chosen = stays.int().argmax(dim=1)
            above = higher.gather(1, chosen[:, None])[:, 0]
            prefix = prefix << BIN_BITS | chosen
        return prefix.int().view(torch.float32), above

    # -- log-probabilities -------------------------------------------------------------
    def _logprobs(
        self, logits: Tensor, tokens: Tensor, rows: SamplingRows
    ) -> list[Tensor]:
        """As ``sampling.logprobs_of``."""
        asked = np.flatnonzero(rows.logprobs >= 0)
        if not len(asked):
            return []
        places = copied_to(asked, logits.device)
        wide = logits[places].double()
        total = self.group.gather(wide.logsumexp(dim=1)).logsumexp(dim=0)
        local = tokens[places] - self.first
        foreign = (local < 0) | (local >= wide.shape[1])
        values = wide.gather(1, local.masked_fill(foreign, 0)[:, None])[:, 0]
        own = self.group.sum(values.masked_fill_(foreign, 0)) - total
        best, ids = self._best(wide, most_logprobs(rows, self.vocab))
        scores = best - total[:, None]
        return [own, scores.flatten(), ids.double().flatten()]

    def _best(self, wide: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """The highest logits of each row with their tokens, best first."""
        here = min(most, wide.shape[1])
        values, ids = wide.topk(here, dim=1)
        offers = wide.new_full((len(wide), most), -torch.inf)
        names = ids.new_zeros(len(wide), most)
        offers[:, :here] = values
        names[:, :here] = ids + self.first
        every = self.group.gather(offers).transpose(0, 1).flatten(1)
        named = self.group.gather(names).transpose(0, 1).flatten(1)
        best, order = every.topk(most, dim=1)
        return best, named.gather(1, order)

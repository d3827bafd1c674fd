"""Sampling of a batch: one token for each row of logits, whatever each row asks for.

The host samples with numpy here; a session on a GPU computes the same with its own
arrays (runtime/sessions/torch_cuda/sampling/sampling.py) and sends only tokens back.
Both draw the same token from the same logits: the random numbers are made here, one for
each row, and do not depend on the logits.

The order is that of transformers' generate: repetition penalty, presence and frequency
penalties and the logit bias, the mask of what may follow, temperature, top-k, top-p,
min-p. Then the token is where
the cumulative weight, in the order of token ids, passes the row's random number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.text.masks import Masks, apply_masks
from kvlathe.runtime.text.penalties import (
    Changes,
    Penalties,
    Request,
    Sampler,
    changes_of,
    has_changes,
    penalties_of,
)
from kvlathe.runtime.text.philox import uniform
from kvlathe.runtime.text.sampling_params import SamplingParams

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

BLOCK = 128
"""Tokens whose weights are summed, or compared, together first."""
MOST_LIKELY = 256
"""Tokens among which a nucleus is looked for before the whole vocabulary is sorted."""
NO_TOKEN = -1
"""Stands in the place of a token where a row's logits are not numbers."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of R rows, one array a field [R]. ``temperature`` 0 is
    greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. ``draws``: each row's
    random number in [0, 1).

    ``logprobs``: how many of the most likely tokens to report; -1 for none, not even
    the chosen one.
    """

    temperature: Float32
    top_k: Int64
    top_p: Float32
    min_p: Float32
    draws: Float64
    logprobs: Int64
    changes: Changes | None = None
    masks: Masks | None = None
    penalties: Penalties | None = None

    @property
    def most_logprobs(self) -> int:
        return int(self.logprobs.max(initial=-1))


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens [R], NO_TOKEN where a row's logits are not numbers.

    Where a row asked for them: the log-probability of its token [R], and the most
    likely tokens with theirs [R, n], best first. Log-probabilities are the model's own,
    before any change.
    """

    tokens: Int64
    logprobs: Float64
    top_tokens: Int64
    top_logprobs: Float64

    def token(self, row: int) -> int:
        """Raises KvlatheError where a logit was not a number."""
        token = int(self.tokens[row])
        if token == NO_TOKEN:
            raise KvlatheError(
                "the model's output is not a number",
                "a logit is NaN or infinite",
                "check the engine",
            )
        return token

    def logprob(self, row: int, top: int) -> TokenLogprob:
        """Report the row's token and its ``top`` most likely ones."""
        best = zip(
            self.top_tokens[row, :top].tolist(),
            self.top_logprobs[row, :top].tolist(),
            strict=True,
        )
        return TokenLogprob(
            int(self.tokens[row]), float(self.logprobs[row]), tuple(best)
        )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Logs of the model's own probabilities, before any change. ``top``: (token id,
    logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def rows_of(requests: Sequence[Request], masks: Masks | None = None) -> SamplingRows:
    """The requests side by side, with the masks of their guides."""
    asked = _asked([request.sampler.params for request in requests])
    return replace(
        asked,
        draws=_draws(requests, asked.temperature),
        changes=changes_of(requests),
        masks=masks,
    )


def _asked(params: Sequence[SamplingParams]) -> SamplingRows:
    """Rows from the parameters alone: nothing is drawn yet."""
    logprobs = [-1 if p.logprobs is None else p.logprobs for p in params]
    temperature = [p.temperature for p in params]
    top_k = [p.top_k for p in params]
    top_p = [p.top_p for p in params]
    min_p = [p.min_p for p in params]
    return SamplingRows(
        temperature=np.array(temperature, np.float32),
        top_k=np.array(top_k, np.int64),
        top_p=np.array(top_p, np.float32),
        min_p=np.array(min_p, np.float32),
        draws=np.zeros(len(params)),
        logprobs=np.array(logprobs, np.int64),
    )


class StepRows:
    """``rows_of``, step after step: what the same requests ask for is not made
    again."""

    def __init__(self) -> None:
        self._params: list[SamplingParams] = []
        self._rows = _asked([])
        self._changing = False

    def of(
        self, requests: Sequence[Request], masks: Masks | None, counted: bool = False
    ) -> SamplingRows:
        """``counted``: the tokens of answers are counted where the logits are."""
        params = [request.sampler.params for request in requests]
        if params != self._params:
            self._params, self._rows = params, _asked(params)
            self._changing = any(map(has_changes, params))
        draws = _draws(requests, self._rows.temperature)
        changes, penalties = None, None
        if self._changing:
            changes = changes_of(requests, counted)
            penalties = penalties_of(requests) if counted else None
        return replace(
            self._rows,
            draws=draws,
            changes=changes,
            masks=masks,
            penalties=penalties,
        )


def _draws(requests: Sequence[Request], temperature: Float32) -> Float64:
    """Each row's random number; 0 for greedy rows, which use none."""
    draws = np.zeros(len(requests))
    random = np.flatnonzero(temperature)
    if len(random):
        drawing = [requests[row] for row in random.tolist()]
        samplers: list[Sampler] = [one.sampler for one in drawing]
        numbers = [one.sampler.drawn + one.ahead for one in drawing]
        seeds = np.array([sampler.seed for sampler in samplers], np.uint64)
        draws[random] = uniform(seeds, np.array(numbers, np.uint64))
    return draws


# -- one pass over the rows ------------------------------------------------------------
def sample(logits: Float32, rows: SamplingRows) -> Sampled:
    """A token for each row of ``logits`` [R, vocab] float32, which stay as they are. A
    row whose logits are not numbers gets NO_TOKEN."""
    final = logits if rows.changes is None else apply_changes(logits, rows.changes)
    if rows.masks is not None:
        final = apply_masks(final, rows.masks)
    best = final.argmax(axis=1)  # [R]
    tokens = best.astype(np.int64)
    highest = final[np.arange(len(best)), best]
    valid = np.isfinite(highest)
    for row in np.flatnonzero((rows.temperature > 0) & valid).tolist():
        tokens[row] = _draw(final[row], highest[row], rows, row)
    tokens[~valid] = NO_TOKEN
    return _reported(logits, tokens, rows)


def apply_changes(logits: Float32, changes: Changes) -> Float32:
    """The logits [R, vocab] after penalties and biases."""
    result = logits.copy()
    places = (changes.rows, changes.tokens)
    old = result[places]
    penalized = np.where(old > 0, old / changes.penalty, old * changes.penalty)
    result[places] = penalized + changes.added
    return result


def _draw(logits: Float32, highest: np.float32, rows: SamplingRows, row: int) -> int:
    """One token by the row's random number."""
    tokens, weights = kept(
        logits,
        highest,
        rows.temperature[row],
        int(rows.top_k[row]),
        rows.top_p[row],
        rows.min_p[row],
    )
    place = _place(weights, float(rows.draws[row]))
    return place if tokens is None else int(tokens[place])


def _place(weights: Float32, draw: float) -> int:
    """Find where the cumulative weight passes the share ``draw`` of its end. The sums
    of blocks are searched first: a running sum of a whole vocabulary takes longer."""
    ends = np.cumsum(_block_sums(weights))  # cumulative weight at each block's end
    target = draw * ends[-1]
    block = min(int(np.searchsorted(ends, target, "right")), len(ends) - 1)
    start = block * BLOCK
    before = ends[block - 1] if block else 0.0
    own = weights[start : start + BLOCK]
    # the same at each token of the block
    inside = before + np.cumsum(own, dtype=np.float64)
    last = int(np.flatnonzero(own)[-1])  # a token of weight 0 is never drawn
    return start + min(int(np.searchsorted(inside, target, "right")), last)


def _block_sums(weights: Float32) -> Float64:
    """Sums of each BLOCK weights."""
    starts = np.arange(0, len(weights), BLOCK)
    return np.add.reduceat(weights.astype(np.float64), starts)


def kept(
    logits: Float32,
    highest: np.float32,
    temperature: np.float32,
    top_k: int,
    top_p: np.float32,
    min_p: np.float32,
) -> tuple[npt.NDArray[np.intp] | None, Float32]:
    """The tokens that top-k, top-p and min-p leave, ascending (None for all), and their
    weights: the likeliest of all has 1."""
    tokens: npt.NDArray[np.intp] | None = None
    if 0 < top_k < len(logits):
        tokens = at_least(logits, top_k)
    weights = _weights(
        logits if tokens is None else logits[tokens], highest, temperature
    )
    if top_p < 1:
        inside = _nucleus(weights, float(top_p))
        tokens = inside if tokens is None else tokens[inside]
        weights = weights[inside]
    if min_p > 0:
        inside = np.flatnonzero(weights >= min_p)
        tokens = inside if tokens is None else tokens[inside]
        weights = weights[inside]
    return tokens, weights


def _weights(logits: Float32, highest: np.float32, temperature: np.float32) -> Float32:
    with np.errstate(over="ignore"):  # -inf is right: such a token has the weight 0
        scaled = (logits - highest) / temperature
    return np.exp(scaled)


def at_least(values: Float32, count: int) -> npt.NDArray[np.intp]:
    """Places, ascending, of the values that are at least the ``count``-th largest one.

    The largest values of blocks bound that one from below, so few places are sorted.
    """
    blocks = len(values) // BLOCK
    places = np.arange(len(values))
    if count <= blocks // 2:
        largest = values[: blocks * BLOCK].reshape(blocks, BLOCK).max(axis=1)
        bound = np.partition(largest, blocks - count)[blocks - count]
        places = np.flatnonzero(values >= bound)
    least = np.partition(values[places], len(places) - count)[len(places) - count]
    return places[values[places] >= least]


def _nucleus(weights: Float32, top_p: float) -> npt.NDArray[np.intp]:
    """Places, ascending, of the fewest largest weights that reach the share ``top_p``
    of their sum: one is among them if those before it have less. Of equal weights the
    first come first."""
    wanted = top_p * _block_sums(weights).sum()
    places = np.arange(len(weights))
    if len(weights) > 2 * MOST_LIKELY * BLOCK:
        likely = at_least(weights, MOST_LIKELY)
        if weights[likely].sum(dtype=np.float64) > wanted:
            places = likely
    order = places[np.argsort(-weights[places], kind="stable")]
    before = np.concatenate([[0.0], np.cumsum(weights[order], dtype=np.float64)[:-1]])
    inside = before < wanted
    inside[0] = True  # also where the share is too small a number
    return np.sort(order[inside])


def _reported(logits: Float32, tokens: Int64, rows: SamplingRows) -> Sampled:
    """The tokens with the log-probabilities that were asked for."""
    width = min(max(0, rows.most_logprobs), logits.shape[1])
    chosen = np.zeros(len(tokens))
    top_tokens = np.zeros((len(tokens), width), np.int64)
    top_logprobs = np.zeros((len(tokens), width))
    if rows.most_logprobs < 0:
        return Sampled(tokens, chosen, top_tokens, top_logprobs)
    for row in np.flatnonzero((rows.logprobs >= 0) & (tokens != NO_TOKEN)).tolist():
        wanted = logprob(logits[row], int(tokens[row]), int(rows.logprobs[row]))
        chosen[row] = wanted.logprob
        for place, (token, score) in enumerate(wanted.top):
            top_tokens[row, place] = token
            top_logprobs[row, place] = score
    return Sampled(tokens, chosen, top_tokens, top_logprobs)


def logprob(logits: Float32, token: int, top: int) -> TokenLogprob:
    """Log-probabilities of ``token`` and of the ``top`` most likely tokens in
    ``logits`` [vocab]."""
    shifted = logits.astype(np.float64) - logits.max()
    scores = shifted - np.log(np.exp(shifted).sum())
    best = np.argpartition(-scores, min(top, len(scores) - 1))[:top]
    best = best[np.argsort(-scores[best], kind="stable")]
    return TokenLogprob(
        token, float(scores[token]), tuple((int(i), float(scores[i])) for i in best)
    )

"""The bytes that a server needs, as plain rows: for ``kvlathe inspect``, for a build's
result and for the report."""

from __future__ import annotations

from kvlathe.plan.demand import PageDemand
from kvlathe.plan.layout import CacheLayout

LENGTHS = (1024, 4096)
"""Tokens of the rows, beside the longest sequence."""
HOST_BYTES = 4
"""Bytes of an element of the hidden states that wait on the host."""


def bytes_left(layout: CacheLayout, tokens: int) -> float:
    """The share of the uncompressed cache in 16 bit that is left at ``tokens`` tokens:
    scales, padding and hot page counted, the mean over where in its last page the
    sequence stands."""
    model, page = layout.plan.model, layout.plan.page_tokens
    a_token = 2 * model.numbers  # two bytes a number
    lengths = range(max(1, tokens - page), max(2, tokens))
    held = [layout.bytes_for(length) / (a_token * length) for length in lengths]
    return sum(held) / len(held)


def lengths_up_to(most: int) -> list[int]:
    """Numbers of tokens that bytes are said of: the longest sequence, and shorter
    ones."""
    return sorted({n for n in LENGTHS if n < most} | {most})


def uncompressed_pages(tokens: int, page: int, per_token: float) -> float:
    """Bytes of the pages of ``tokens`` tokens in a cache that holds each in
    ``per_token`` bytes: what bytes of pages are compared with."""
    return -(-tokens // page) * page * per_token


def states_room(layout: CacheLayout, max_batch_size: int) -> int:
    """Bytes of the states of a full batch before a step and after it, and of as many that
    are kept with prefixes; 0 where no layer keeps a state."""
    return 3 * max_batch_size * layout.plan.model.state_bytes


def memory_table(
    layout: CacheLayout, max_seq_len: int, max_batch_size: int, weights: int = 0
) -> list[dict[str, int]]:
    """A row for each length. All but the length and the batch in bytes:

    ``steady``: pages that one sequence of ``tokens`` tokens holds, and its ``state``,
    where layers keep one. ``peak``: the most that it needs at one time where nearly all
    of it is a prompt; a step has states before and after it. ``batch_steady`` and
    ``batch_peak``: of ``batch`` such sequences, all at their peak at once.
    ``uncompressed``: the model's K and V of one sequence in 16 bit, and its state. ``together``:
    ``batch_peak`` and the ``weights``, which are bytes. ``host``: hidden states that
    one prompt leaves on the host between its stages. The cuda backend keeps them on the
    GPU, in half as many.
    """
    rows = [
        _row(layout, tokens, max_batch_size) for tokens in lengths_up_to(max_seq_len)
    ]
    return [{**row, "together": weights + row["batch_peak"]} for row in rows]


def _row(layout: CacheLayout, tokens: int, batch: int) -> dict[str, int]:
    demand, model = PageDemand(layout), layout.plan.model
    state = model.state_bytes
    steady = layout.bytes_for(tokens) + state
    peak = max(demand.bytes(pages) for pages in demand.moments(tokens)) + 2 * state
    staged = len(layout.plan.index.passes(tokens)) > 1
    return {
        "tokens": tokens,
        "batch": batch,
        "steady": steady,
        "peak": peak,
        "batch_steady": batch * steady,
        "batch_peak": batch * peak,
        "uncompressed": 2 * model.numbers * tokens + state,
        "state": state,
        "host": tokens * model.hidden_size * HOST_BYTES if staged else 0,
    }

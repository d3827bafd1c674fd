"""Fused attention of one lane: a token sees its own page as it is and earlier ones as
they are sealed, behind a window or not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvlathe.export.attention.windows import LaneWindows
from kvlathe.export.search import fused

PAGE = 4
Pair = tuple[Tensor, Tensor]
"""K and V."""


def plain(q: Tensor, tiers: list[Pair], young: int, first: int) -> Tensor:
    """The output of one query at ``first`` .. its own place: [G, Rv], token by
    token. ``tiers``: tokens as old ones are read, as the ``young`` newest sealed ones, and
    as they are up to its own."""
    old, newest, fresh = tiers
    place = len(fresh[0]) - 1
    of_page = place // PAGE * PAGE
    of_young = max(0, of_page - young)
    k, v = (
        torch.cat([a[:of_young], b[of_young:of_page], c[of_page:]])
        for a, b, c in zip(old, newest, fresh, strict=True)
    )
    seen = [token for token in range(place + 1) if token < PAGE or token >= first]
    shares = (q @ k[seen].T).softmax(-1)
    return shares @ v[seen]


@given(
    tokens=st.integers(1, 40),
    recent=st.sampled_from([None, 4, 8]),
    exact=st.sampled_from([1 << 20, 6]),
    young=st.sampled_from([0, 4, 12]),
    ranks=st.sampled_from([(3, 5), (5, 3)]),
    queries=st.sampled_from([1, 8, 512]),
    seed=st.integers(0, 99),
)
def test_every_query_sees_its_page_and_sealed_ones(
    tokens: int,
    recent: int | None,
    exact: int,
    young: int,
    ranks: tuple[int, int],
    queries: int,
    seed: int,
) -> None:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    rank_k, rank_v = ranks
    k, v, q = normal(tokens, rank_k), normal(tokens, rank_v), normal(2, tokens, rank_k)
    whole = (tokens - 1) // PAGE * PAGE
    old = normal(whole, rank_k), normal(whole, rank_v)
    newest = normal(whole, rank_k), normal(whole, rank_v)
    window = None
    if recent is not None:
        numbers = torch.tensor([PAGE, recent, exact]).view(3, 1, 1)
        window = LaneWindows(numbers[0], numbers[1], numbers[2], PAGE)
    lane = fused.LaneTokens(k, v, *old, PAGE, window, *newest, young)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "QUERIES", queries)
        out = lane.attended(q)
    for place in range(tokens):
        first = 0
        if recent is not None:
            first = max(place // PAGE * PAGE - recent, place - exact + 1)
        tiers = [old, newest, (k[: place + 1], v[: place + 1])]
        expected = plain(q[:, place], tiers, young, first)
        torch.testing.assert_close(out[:, place], expected)

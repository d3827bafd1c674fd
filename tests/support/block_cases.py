"""Plans whose layers have unlike blocks, for hosts with a block table of their own."""

from __future__ import annotations

from collections.abc import Sequence

from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.lives import KEEP, SEAL, Window
from kvlathe.plan.plan import CompressionPlan

HOT = Tier(16, 16)
CODES = Tier(4, 4, "rank", "rank", 16, 16)


def plan_of(
    page: int, sealed: bool = True, layers: int = 2, windows: Sequence[Window] = ()
) -> CompressionPlan:
    """Four KV heads of 32 dimensions, two query heads each. Ranks differ by head and
    layer, and head 2 is answered by head 0. Where pages are sealed, heads 0 and 1 go to 8
    and 4 bits, and head 3 stays in 16. ``windows``: of heads 1 and 3, else all see
    all."""
    shape = ModelShape(layers, 8, 4, 32, 64, 100, 1024)
    lanes: list[Lane] = []
    for layer in range(layers):
        for head in range(4):
            rank_k, rank_v = ((16, 32), (32, 16))[(layer + head) % 2]
            if head == 2:
                removed = Lane(layer, head, 32, 0, 0, rope="none", fill_from=0)
                lanes.append(removed)
                continue
            lanes.append(Lane(layer, head, 32, rank_k, rank_v, "none", (), True))
    of_head = {h: tuple(4 * layer + h for layer in range(layers)) for h in range(4)}
    kept = tuple(sorted(of_head[0] + of_head[1] + of_head[3]))
    groups = (Group(kept, HOT),)
    if windows:
        first, second = windows
        groups = (
            Group(of_head[0], HOT),
            Group(of_head[1], HOT, life=first),
            Group(of_head[3], HOT, life=second),
        )
    if sealed:
        groups = (
            Group(of_head[0], HOT, (Tier(8, 8, group_v=16),), SEAL),
            Group(of_head[3], HOT, life=windows[1] if windows else KEEP),
            Group(of_head[1], HOT, (CODES,), windows[0] if windows else SEAL),
        )
    return CompressionPlan(shape, tuple(lanes), groups, page, page)

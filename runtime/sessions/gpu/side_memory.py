"""Memory that a session of the cuda backend keeps on the GPU beside weights and pages:
room for 16-bit copies of sealed pages, hidden states of prompts that pass stages,
scratch pages, slots of states that are no sequence's, and what steps take that observe a prefix which is compacted."""

from __future__ import annotations

from kvlathe.plan.kernel_forms import is_wide, most_group
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.sessions.gpu.states import OWN_SLOTS

COPY_OWNER, COPY_HEADER = 8, 1 << 16
"""Bytes that a copied page takes beside itself, and those of the tables in front
(prompt_copies.cu)."""
LEAST_SHARE = 64
"""Copies take this part of a GPU's memory at most. What finds no room is converted
where it is attended, which is slower."""
STAGED_PROMPTS, STAGED_COPIES, HALF = 2, 2, 2
"""Prompts between stages at a time, what each keeps there while rows leave, and bytes
of a number."""
SCRATCH_PAGES = 8
"""Pages of tokens that are gathered at once before they are sealed."""
TILE, TILES, SCORE = 1 << 24, 4, 4
"""Scores of an observed step that exist at a time, copies of them while their sum is
taken, and bytes of one."""
KEY = HALF + SCORE
"""Bytes of a number of a lane's keys: as gathered, and in float32."""


def side_bytes(
    plan: CompressionPlan, limits: Limits, total: int, copies: bool = True
) -> int:
    """All of it on a GPU of ``total`` bytes. ``copies``: whether its kernels read
    any."""
    staged = 0
    if len(plan.index.passes(limits.max_seq_len)) > 1:
        rows = STAGED_PROMPTS * STAGED_COPIES * limits.max_seq_len
        staged = rows * plan.model.hidden_size * HALF
    own = staged
    own += scratch_bytes(plan)
    own += observing_bytes(plan, limits)
    own += OWN_SLOTS * plan.model.state_bytes
    if copies:
        own += room_for_copies(plan, limits, total)
    return own


def scratch_bytes(plan: CompressionPlan) -> int:
    """Memory behind the pages of a plan: the tokens that change their format meet
    there."""
    strides = CacheLayout(plan).page_stride
    compacts = plan.index.compaction is not None
    largest = 0
    for bucket in plan.index.buckets:
        if not bucket.is_hot and (bucket.life.by_saliency or compacts):
            largest = max(largest, strides[bucket.hot])
    return (SCRATCH_PAGES + 1) * largest


def observing_bytes(plan: CompressionPlan, limits: Limits) -> int:
    """Bytes that the largest step that observes a prefix takes beside other steps
    (torch_cuda/attention/observing.py): tiles of scores, the keys of a lane, and what
    each token is given. 0 where no prefix is compacted."""
    if plan.index.compaction is None:
        return 0
    page = plan.page_tokens
    rows = limits.max_num_tokens
    keys = -(-limits.max_seq_len // page) * page
    a_row = most_group(plan) * keys
    tile = min(TILE, rows * a_row)
    tile = max(a_row, tile)
    scores = TILES * tile * SCORE
    of_a_lane = keys * plan.model.head_dim * KEY
    places = rows
    for bucket in plan.index.buckets:
        places += keys if bucket.is_hot else page
    return scores + of_a_lane + len(plan.lanes) * places * SCORE


def room_for_copies(plan: CompressionPlan, limits: Limits, total: int) -> int:
    """Bytes for the copies of as many sequences as a step has whole chunks, each as
    long as any may be; less on a GPU of few ``total`` bytes. Sequences with shorter
    chunks may be more, and some of them find none."""
    chunks = max(1, limits.max_num_tokens // plan.prefill_chunk)
    sequences = min(chunks, limits.max_batch_size)
    return within_share(copies_bytes(plan, limits.max_seq_len, sequences), total)


def within_share(size: int, total: int) -> int:
    """``size`` bytes of copies, or as many as a GPU of ``total`` bytes has for them."""
    return min(size, total // LEAST_SHARE + COPY_HEADER)


def copies_bytes(plan: CompressionPlan, tokens: int, sequences: int = 1) -> int:
    """Bytes of 16-bit copies of as many ``sequences`` of ``tokens`` sealed tokens in
    the layer whose copies are largest; 0 where no page is coded (prompt_copies.cu), or
    no kernel reads copies: of wide ranks."""
    if is_wide(plan):
        return 0
    page = plan.page_tokens
    layers: list[int] = [0] * plan.model.layers
    for part in plan.index.parts:
        if not plan.index.buckets[part.bucket].tier.is_coded:
            continue
        held = min(tokens, part.sight.most + page) if part.sees_less else tokens
        pages = -(-held // page)
        for layer in {plan.lanes[lane].layer for lane in part.lanes}:
            layers[layer] += pages
    size = 0
    for layer, copied in enumerate(layers):
        width = 0
        for lane in plan.index.active(layer):
            width += lane.rank_k
            width += lane.rank_v
        a_page = HALF * page * width
        a_page += COPY_OWNER
        size = max(size, sequences * copied * a_page)
    if not size:
        return 0
    return size + COPY_HEADER

"""Decode attention in Triton over the same pages as ours: what decode_baselines.py
compares with. Needs triton.

``attend`` runs a work list (work_lists.py): a program takes its spans in turn, a span
is some pages of one (sequence, head). A span that is a whole pair writes o'; the others
leave a partial result, and ``join`` adds those of a pair up, with its 16-bit tail.
Tokens lie on M, query heads on N (8 columns for up to 8 heads), as the tensor cores
waste least.

FORM says what a page holds and how it is multiplied:
  rows        16 bit
  rebuilt     K and V in low rank, K before RoPE: every column of K is rebuilt and turned, as Palu does. By the place in
              the tile only: the query is turned back by the tile's first position, so
              no sine is computed here
  dequantized codes become 16-bit numbers in registers: HACK without integer arithmetic
  integer     products of codes (Eq. 4 of HACK) with SUMS: none (q symmetric, weights from zero: no term needs a sum),
              stored (beside the page's metadata) or recomputed (HACK without summation
              elimination)

Sizes: G query heads a lane, GP of them with padding, P tokens a page, BN a tile, DK and
DV dims with padding.
"""

# ruff: noqa: ANN001, ANN201, ANN202 (Triton: only constants have types, a branch ends where its else ends)
from __future__ import annotations

import triton.language as tl

from benchmarks.support.triton_codes import LANES, dequantized_span, integer_span
from benchmarks.support.triton_rows import WIDEST, leave, rebuilt_span, rows_span
from kvlathe.runtime.sessions.torch_cuda.model.triton_jit import jit

LANE = ("rank_k", "rank_v", "k", "k_meta", "v", "v_meta", "groups_k", "first_group", "q_at", "o_at", "k_sums", "v_sums",
        "tail_k", "tail_v")  # fmt: skip
"""Columns of the lane table, int32. Offsets in bytes from the page's start, q_at and
o_at in elements of a row."""
SPAN: tl.constexpr = tl.constexpr(5)


@jit
def _span(pool, pages, page_stride, row, rank_k, rank_v, q, basis, places, turns, first, last, length, scale, slot, out,
          partial, states, FORM: tl.constexpr, BITS: tl.constexpr, SUMS: tl.constexpr, G: tl.constexpr,
          GP: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr):  # fmt: skip
    """One span at dims that fit its ranks."""
    k, v = tl.multiple_of(tl.load(row + 2), 128), tl.multiple_of(tl.load(row + 4), 128)
    k_meta, v_meta = (
        tl.multiple_of(tl.load(row + 3), 128),
        tl.multiple_of(tl.load(row + 5), 128),
    )
    groups, first_group = tl.load(row + 6), tl.multiple_of(tl.load(row + 7), 16)
    if FORM == "rows":
        acc, top, total = rows_span(pool, pages, page_stride, k, v, rank_k, rank_v, q, first, last, length, scale, G,
                                     GP, P, BN, DK, DV)  # fmt: skip
    elif FORM == "rebuilt":
        acc, top, total = rebuilt_span(pool, pages, page_stride, k, v, rank_k, rank_v, q, basis, places, turns, first,
                                        last, length, scale, G, GP, P, BN, DK, DV)  # fmt: skip
    elif FORM == "dequantized":
        acc, top, total = dequantized_span(pool, pages, page_stride, k, k_meta, v, v_meta, rank_k, rank_v, groups,
                                            first_group, q, first, last, length, scale, BITS, G, GP, P, DK,
                                            DV)  # fmt: skip
    else:
        k_sums, v_sums = tl.load(row + 10), tl.load(row + 11)
        acc, top, total = integer_span(pool, pages, page_stride, k, k_meta, k_sums, v, v_meta, v_sums, rank_k, rank_v,
                                        groups, first_group, q, first, last, length, scale, BITS, SUMS, G, GP, P, DK,
                                        DV)  # fmt: skip
    leave(acc, top, total, slot, out, partial, states, rank_v, G, GP, DV)


@jit(do_not_specialize=["table_width", "length_stride", "q_stride", "o_stride"],
            do_not_specialize_on_alignment=["lengths"])  # fmt: skip
def attend(pool, page_table, lengths, lanes, spans, starts, q, o, basis, places, turns, partial, states, page_stride,
           table_width, length_stride, q_stride, o_stride, scale, FORM: tl.constexpr, BITS: tl.constexpr,
           SUMS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
           P: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Grid: programs; program i takes spans starts[i] to starts[i + 1]. spans [n,
    SPAN]: sequence, head, first page, pages, slot of the partial result or -1. DK, DV:
    64 or 128, or 0: chosen for each span."""
    program = tl.program_id(0)
    for i in range(tl.load(starts + program), tl.load(starts + program + 1)):
        span = spans + i * SPAN
        sequence, head, slot = (
            tl.load(span).to(tl.int64),
            tl.load(span + 1),
            tl.load(span + 4),
        )
        first = tl.load(span + 2) * P
        last = first + tl.load(span + 3) * P
        length = tl.load(lengths + sequence * length_stride)
        row, pages = lanes + head * LANES, page_table + sequence * table_width
        rank_k, rank_v = (
            tl.multiple_of(tl.load(row), 16),
            tl.multiple_of(tl.load(row + 1), 16),
        )
        if FORM == "rebuilt":
            queries = q + sequence * q_stride + head * G * WIDEST
        else:
            queries = q + sequence * q_stride + tl.load(row + 8)
        out, base = (
            o + sequence * o_stride + tl.load(row + 9),
            basis + head * WIDEST * WIDEST,
        )
        if DK:
            _span(pool, pages, page_stride, row, rank_k, rank_v, queries, base, places, turns, first, last, length,
                  scale, slot, out, partial, states, FORM, BITS, SUMS, G, GP, P, BN, DK, DV)  # fmt: skip
        elif rank_k <= 64:
            if rank_v <= 64:
                _span(pool, pages, page_stride, row, rank_k, rank_v, queries, base, places, turns, first, last, length,
                      scale, slot, out, partial, states, FORM, BITS, SUMS, G, GP, P, BN, 64, 64)  # fmt: skip
            else:
                _span(pool, pages, page_stride, row, rank_k, rank_v, queries, base, places, turns, first, last, length,
                      scale, slot, out, partial, states, FORM, BITS, SUMS, G, GP, P, BN, 64, 128)  # fmt: skip
        elif rank_v <= 64:
            _span(pool, pages, page_stride, row, rank_k, rank_v, queries, base, places, turns, first, last, length,
                  scale, slot, out, partial, states, FORM, BITS, SUMS, G, GP, P, BN, 128, 64)  # fmt: skip
        else:
            _span(pool, pages, page_stride, row, rank_k, rank_v, queries, base, places, turns, first, last, length,
                  scale, slot, out, partial, states, FORM, BITS, SUMS, G, GP, P, BN, 128, 128)  # fmt: skip


@jit(do_not_specialize=["tail_width", "length_stride", "q_stride", "o_stride"])
def join(pool, tail_table, tail_lengths, lanes, slots, q, o, partial, states, tail_stride, tail_width, length_stride,
         q_stride, o_stride, scale, TAIL: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
         P: tl.constexpr):  # fmt: skip
    """Grid (sequences, heads). slots [pairs, 2]: a pair's first partial result and
    their end. TAIL: a 16-bit page."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, pair = lanes + head * LANES, tl.program_id(0) * tl.num_programs(1) + head
    rank_k, rank_v = (
        tl.multiple_of(tl.load(row), 16),
        tl.multiple_of(tl.load(row + 1), 16),
    )
    g, dims = tl.arange(0, GP), tl.arange(0, WIDEST)
    live = (dims < rank_v)[:, None] & (g < G)[None, :]
    acc, top, total = (
        tl.zeros([WIDEST, GP], tl.float32),
        tl.full([GP], -1e30, tl.float32),
        tl.zeros([GP], tl.float32),
    )
    if TAIL:
        length = tl.load(tail_lengths + sequence * length_stride)
        if length > 0:
            k, v = (
                tl.multiple_of(tl.load(row + 12), 128),
                tl.multiple_of(tl.load(row + 13), 128),
            )
            acc, top, total = rows_span(pool, tail_table + sequence * tail_width, tail_stride, k, v, rank_k, rank_v,
                                         q + sequence * q_stride + tl.load(row + 8), 0, P, length, scale, G, GP, P, P,
                                         WIDEST, WIDEST)  # fmt: skip
    for slot in range(tl.load(slots + 2 * pair), tl.load(slots + 2 * pair + 1)):
        its_top = tl.load(states + slot * 2 * G + g, mask=g < G, other=0.0)
        its_total = tl.load(states + slot * 2 * G + G + g, mask=g < G, other=1.0)
        its = tl.load(
            partial + slot * G * WIDEST + g[None, :] * WIDEST + dims[:, None],
            mask=live,
            other=0.0,
        )
        new = tl.maximum(top, its_top)
        acc = acc * tl.exp2(top - new)[None, :] + its * tl.exp2(its_top - new)[None, :]
        total = total * tl.exp2(top - new) + its_total * tl.exp2(its_top - new)
        top = new
    out = o + sequence * o_stride + tl.load(row + 9)
    live = (
        live & (total > 0)[None, :]
    )  # a pair that no span left in part has its answer
    tl.store(
        out + g[None, :] * rank_v + dims[:, None],
        (acc / total[None, :]).to(tl.float16),
        mask=live,
    )

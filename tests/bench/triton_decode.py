"""Decode attention in Triton over the same pages as ours: what decode_baselines.py compares with. Needs triton.

``attend`` runs a work list (work_lists.py): a program takes its spans in turn, a span is some pages of one (sequence,
head). A span that is a whole pair writes o'; the others leave a partial result, and ``join`` adds those of a pair up,
with its 16-bit tail. Tokens lie on M, query heads on N (8 columns for up to 8 heads), as the tensor cores waste least.

FORM says what a page holds and how it is multiplied:
  rows        16 bit
  rebuilt     K and V in low rank, K before RoPE: every column of K is rebuilt and turned, as Palu does. By the place in
              the tile only: the query is turned back by the tile's first position, so no sine is computed here
  dequantized codes become 16-bit numbers in registers: HACK without integer arithmetic
  integer     products of codes (Eq. 4 of HACK) with SUMS: none (q symmetric, weights from zero: no term needs a sum),
              stored (beside the page's metadata) or recomputed (HACK without summation elimination)

Sizes: G query heads a lane, GP of them with padding, P tokens a page, BN a tile, DK and DV dims with padding.
"""

# ruff: noqa: ANN001, ANN201, ANN202, RET505 (Triton: only constants have types, a branch ends where its else ends)
from __future__ import annotations

import triton
import triton.language as tl

LANE = ("rank_k", "rank_v", "k", "k_meta", "v", "v_meta", "groups_k", "first_group", "q_at", "o_at", "k_sums", "v_sums",
        "tail_k", "tail_v")  # fmt: skip
"""Columns of the lane table, int32. Offsets in bytes from the page's start, q_at and o_at in elements of a row."""
LANES: tl.constexpr = tl.constexpr(len(LANE))
SPAN: tl.constexpr = tl.constexpr(5)
WIDEST: tl.constexpr = tl.constexpr(128)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _halves(pointer):
    return pointer.to(tl.pointer_type(tl.float16))


@triton.jit
def _rows(pool, pages, page_stride, at, tokens, length, rank, D: tl.constexpr, P: tl.constexpr):
    """[tokens, D] rows of a 16-bit slab; zeros past the length and the rank."""
    dims = tl.arange(0, D)
    page = tl.load(pages + tokens // P, mask=tokens < length, other=0).to(tl.int64)
    row = _halves(pool + page * page_stride + at) + tokens % P * rank
    return tl.load(row[:, None] + dims[None, :], mask=(tokens < length)[:, None] & (dims < rank)[None, :], other=0.0)


@triton.jit
def _queries(q, rank, first, size, STEP: tl.constexpr, D: tl.constexpr, G: tl.constexpr, GP: tl.constexpr):
    """[D, GP]: every STEP-th dim of q [G, rank] from ``first`` on, ``size`` dims before stepping."""
    dim, g = tl.arange(0, D) * STEP, tl.arange(0, GP)
    live = (dim < size)[:, None] & (g < G)[None, :]
    return tl.load(q + g[None, :] * rank + first + dim[:, None], mask=live, other=0.0)


@triton.jit
def _leave(acc, top, total, slot, out, partial, states, rank_v, G: tl.constexpr, GP: tl.constexpr, DV: tl.constexpr):
    g, dims = tl.arange(0, GP), tl.arange(0, DV)
    live = (dims < rank_v)[:, None] & (g < G)[None, :]
    if slot < 0:
        tl.store(out + g[None, :] * rank_v + dims[:, None], (acc / total[None, :]).to(tl.float16), mask=live)
    else:
        tl.store(partial + slot * G * WIDEST + g[None, :] * WIDEST + dims[:, None], acc, mask=live)
        tl.store(states + slot * 2 * G + g, top, mask=g < G)
        tl.store(states + slot * 2 * G + G + g, total, mask=g < G)


@triton.jit
def _weights(scores, top, tokens, length):
    """New maximum [GP], factor of the old sums [GP], weights [BN, GP]; scores in powers of two."""
    scores = tl.where((tokens < length)[:, None], scores, float("-inf"))
    new = tl.maximum(top, tl.max(scores, 0))
    return new, tl.exp2(top - new), tl.exp2(scores - new[None, :])


@triton.jit
def _rows_span(pool, pages, page_stride, k, v, rank_k, rank_v, q, first, last, length, scale, G: tl.constexpr,
               GP: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr):  # fmt: skip
    queries = _queries(q, rank_k, 0, rank_k, 1, DK, G, GP)
    top, total = tl.full([GP], float("-inf"), tl.float32), tl.zeros([BN, GP], tl.float32)
    acc = tl.zeros([DV, GP], tl.float32)
    for start in range(first, last, BN):
        tokens = start + tl.arange(0, BN)
        keys = _rows(pool, pages, page_stride, k, tokens, last, rank_k, DK, P)
        top, keep, weights = _weights(tl.dot(keys, queries) * scale, top, tokens, tl.minimum(last, length))
        values = _rows(pool, pages, page_stride, v, tokens, last, rank_v, DV, P)
        total = total * keep[None, :] + weights
        acc = tl.dot(tl.trans(values), weights.to(tl.float16), acc * keep[None, :])
    return acc, top, tl.sum(total, 0)


@triton.jit
def _rebuilt_span(pool, pages, page_stride, k, v, rank_k, rank_v, q, basis, places, turns, first, last, length, scale,
                  G: tl.constexpr, GP: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, DK: tl.constexpr,
                  DV: tl.constexpr):  # fmt: skip
    H: tl.constexpr = WIDEST // 2
    half, dims = tl.arange(0, H), tl.arange(0, DK)
    left = _queries(q, WIDEST, 0, H, 1, H, G, GP).to(tl.float32)
    right = _queries(q, WIDEST, H, H, 1, H, G, GP).to(tl.float32)
    column = basis + dims[:, None] * WIDEST + half[None, :]
    basis_left = tl.load(column, mask=(dims < rank_k)[:, None], other=0.0)
    basis_right = tl.load(column + H, mask=(dims < rank_k)[:, None], other=0.0)
    place = places + tl.arange(0, BN)[:, None] * WIDEST + half[None, :]
    cos, sin = tl.load(place), tl.load(place + H)
    top, total = tl.full([GP], float("-inf"), tl.float32), tl.zeros([BN, GP], tl.float32)
    acc = tl.zeros([DV, GP], tl.float32)
    for start in range(first, last, BN):
        tokens = start + tl.arange(0, BN)
        latent = _rows(pool, pages, page_stride, k, tokens, last, rank_k, DK, P)
        a, b = tl.dot(latent, basis_left), tl.dot(latent, basis_right)
        c, s = tl.load(turns + start // BN * WIDEST + half), tl.load(turns + start // BN * WIDEST + H + half)
        scores = tl.dot((a * cos - b * sin).to(tl.float16), (left * c[:, None] + right * s[:, None]).to(tl.float16))
        back = (right * c[:, None] - left * s[:, None]).to(tl.float16)
        scores = tl.dot((b * cos + a * sin).to(tl.float16), back, scores) * scale
        top, keep, weights = _weights(scores, top, tokens, tl.minimum(last, length))
        values = _rows(pool, pages, page_stride, v, tokens, last, rank_v, DV, P)
        total = total * keep[None, :] + weights
        acc = tl.dot(tl.trans(values), weights.to(tl.float16), acc * keep[None, :])
    return acc, top, tl.sum(total, 0)


@triton.jit
def _meta(at):
    """(scale, minimum) of groups in float32."""
    both = tl.load(at.to(tl.pointer_type(tl.uint32)))
    scale = (both & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return scale.to(tl.float32), (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _number(codes, scale, least):
    """scale * code + least in 16 bit, the code made a half without a conversion: 1024 + code has it as low bits."""
    half = (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0
    return half * scale.to(tl.float16) + least.to(tl.float16)


@triton.jit
def _token_parts(weights, PACK: tl.constexpr, GP: tl.constexpr, P: tl.constexpr):
    """[P, GP] as PACK tensors [P / PACK, GP]: part i has tokens i, i + PACK, ..."""
    if PACK == 1:
        return (weights,)
    else:
        even, odd = tl.split(tl.permute(tl.reshape(weights, [P // 2, 2, GP]), (0, 2, 1)))
        if PACK == 2:
            return even, odd
        else:
            a, c = tl.split(tl.permute(tl.reshape(even, [P // 4, 2, GP]), (0, 2, 1)))
            b, d = tl.split(tl.permute(tl.reshape(odd, [P // 4, 2, GP]), (0, 2, 1)))
            return a, b, c, d


@triton.jit
def _query_parts(q, rank, PACK: tl.constexpr, D: tl.constexpr, G: tl.constexpr, GP: tl.constexpr):
    """q [G, rank] as PACK tensors [D, GP]: part i has dims i, i + PACK, ..."""
    a = _queries(q, rank, 0, rank, PACK, D, G, GP)
    if PACK == 1:
        return (a,)
    else:
        b = _queries(q, rank, 1, rank - 1, PACK, D, G, GP)
        if PACK == 2:
            return a, b
        else:
            c, d = _queries(q, rank, 2, rank - 2, PACK, D, G, GP), _queries(q, rank, 3, rank - 3, PACK, D, G, GP)
            return a, b, c, d


@triton.jit
def _dequantized_span(pool, pages, page_stride, k, k_meta, v, v_meta, rank_k, rank_v, groups, first_group, q, first,
                      last, length, scale, BITS: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, P: tl.constexpr,
                      DK: tl.constexpr, DV: tl.constexpr):  # fmt: skip
    PACK: tl.constexpr = 8 // BITS
    MASK: tl.constexpr = (1 << BITS) - 1
    KB: tl.constexpr = max(DK // PACK, 16)
    queries = _query_parts(q, rank_k, PACK, KB, G, GP)
    place, column = tl.arange(0, P), tl.arange(0, KB)
    channel, byte = tl.arange(0, DV), tl.arange(0, P // PACK)
    top, total = tl.full([GP], float("-inf"), tl.float32), tl.zeros([P, GP], tl.float32)
    acc = tl.zeros([DV, GP], tl.float32)
    for start in range(first, last, P):
        page = pool + tl.load(pages + start // P).to(tl.int64) * page_stride
        packed = tl.load(page + k + place[:, None] * (rank_k // PACK) + column[None, :],
                         mask=(column < rank_k // PACK)[None, :], other=0)  # fmt: skip
        step, least = _meta(page + k_meta + place * groups * 4)
        step, least = step[:, None], least[:, None]
        if DK > 64:
            step_b, least_b = _meta(page + k_meta + (place * groups + groups - 1) * 4)
            here = (column < first_group // PACK)[None, :]
            step, least = tl.where(here, step, step_b[:, None]), tl.where(here, least, least_b[:, None])
        scores = tl.zeros([P, GP], tl.float32)
        for i in tl.static_range(PACK):
            scores = tl.dot(_number(packed >> i * BITS & MASK, step, least), queries[i], scores)
        top, keep, weights = _weights(scores * scale, top, start + place, length)
        total = total * keep[None, :] + weights
        packed = tl.load(page + v + channel[:, None] * (P // PACK) + byte[None, :],
                         mask=(channel < rank_v)[:, None], other=0)  # fmt: skip
        step, least = _meta(page + v_meta + tl.minimum(channel, rank_v - 1) * 4)
        parts = _token_parts(weights.to(tl.float16), PACK, GP, P)
        acc = acc * keep[None, :]
        for i in tl.static_range(PACK):
            acc = tl.dot(_number(packed >> i * BITS & MASK, step[:, None], least[:, None]), parts[i], acc)
    return acc, top, tl.sum(total, 0)


@triton.jit
def _unpacked(packed, BITS: tl.constexpr):
    """[R, C] bytes as [R, 8 C / BITS] signed codes (8 bit: 128 less)."""
    if BITS == 8:
        return (packed ^ 0x80).to(tl.int8, bitcast=True)
    elif BITS == 4:
        return tl.interleave(packed & 15, packed >> 4).to(tl.int8)
    else:
        even, odd = tl.interleave(packed & 3, packed >> 4 & 3), tl.interleave(packed >> 2 & 3, packed >> 6)
        return tl.interleave(even, odd).to(tl.int8)


@triton.jit
def _coded(x, live, AXIS: tl.constexpr, SYMMETRIC: tl.constexpr):
    """Codes int8 of x along AXIS, with x = scale * code + offset; and the sum of the codes."""
    if SYMMETRIC:
        scale = tl.maximum(tl.max(tl.abs(x), AXIS), 1e-28) / 127
        offset = tl.zeros_like(scale)
        codes = tl.floor(x / tl.expand_dims(scale, AXIS) + 0.5)
    else:
        least = tl.min(tl.where(live, x, float("inf")), AXIS)
        scale = tl.maximum(tl.max(tl.where(live, x, float("-inf")), AXIS) - least, 1e-28) / 255
        codes = tl.floor((x - tl.expand_dims(least, AXIS)) / tl.expand_dims(scale, AXIS) + 0.5) - 128
        offset = least + 128 * scale
    codes = tl.where(live, codes, 0.0)
    return codes.to(tl.int8), scale, offset, tl.sum(codes, AXIS)


@triton.jit
def _sums(at, packed, codes, shape, SUMS: tl.constexpr, BITS: tl.constexpr):
    """Sums of the codes [rows] as int8 holds them, ``shape`` codes a row."""
    if SUMS == "recomputed":
        return tl.sum(codes.to(tl.int32), 1).to(tl.float32) + (128 * (codes.shape[1] - shape) if BITS == 8 else 0)
    elif BITS == 2:
        return tl.load(at).to(tl.float32)
    else:
        return tl.load(at.to(tl.pointer_type(tl.uint16))).to(tl.float32) - (128 * shape if BITS == 8 else 0)


@triton.jit
def _group_scores(page, k, k_meta, k_sums, group, groups, first, size, rank_k, queries, q_scale, q_offset, q_sum,
                  BITS: tl.constexpr, SUMS: tl.constexpr, P: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """What the channels of one group add to the scores [P, GP]."""
    PACK: tl.constexpr = 8 // BITS
    place, column = tl.arange(0, P), tl.arange(0, D // PACK)
    packed = tl.load(page + k + (place[:, None] * rank_k + first) // PACK + column[None, :],
                     mask=(column < size // PACK)[None, :], other=0)  # fmt: skip
    codes = _unpacked(packed, BITS)
    scale, offset = _meta(page + k_meta + (place * groups + group) * 4)
    if BITS == 8:
        offset += 128 * scale
    scores = scale[:, None] * (tl.dot(codes, queries).to(tl.float32) * q_scale[None, :])
    scores += offset[:, None] * (q_scale * q_sum + size * q_offset)[None, :]
    if SUMS != "none":
        width: tl.constexpr = 1 if BITS == 2 else 2
        sums = _sums(page + k_sums + (place * groups + group) * width, packed, codes, size, SUMS, BITS)
        scores += (scale * sums)[:, None] * q_offset[None, :]
    return scores


@triton.jit
def _integer_span(pool, pages, page_stride, k, k_meta, k_sums, v, v_meta, v_sums, rank_k, rank_v, groups, first_group,
                  q, first, last, length, scale, BITS: tl.constexpr, SUMS: tl.constexpr, G: tl.constexpr,
                  GP: tl.constexpr, P: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr):  # fmt: skip
    PACK: tl.constexpr = 8 // BITS
    D: tl.constexpr = min(DK, 64)
    dim, place, channel, byte = tl.arange(0, D), tl.arange(0, P), tl.arange(0, DV), tl.arange(0, P // PACK)
    live = (dim < first_group)[:, None]
    raw = _queries(q, rank_k, 0, first_group, 1, D, G, GP).to(tl.float32)
    queries, q_scale, q_offset, q_sum = _coded(raw, live, 0, SUMS == "none")
    if DK > 64:
        live = (dim < rank_k - first_group)[:, None]
        raw = _queries(q, rank_k, first_group, rank_k - first_group, 1, D, G, GP).to(tl.float32)
        queries_b, q_scale_b, q_offset_b, q_sum_b = _coded(raw, live, 0, SUMS == "none")
    top, total = tl.full([GP], float("-inf"), tl.float32), tl.zeros([GP], tl.float32)
    acc = tl.zeros([DV, GP], tl.float32)
    for start in range(first, last, P):
        page = pool + tl.load(pages + start // P).to(tl.int64) * page_stride
        scores = _group_scores(page, k, k_meta, k_sums, 0, groups, 0, first_group, rank_k, queries, q_scale, q_offset,
                               q_sum, BITS, SUMS, P, D)  # fmt: skip
        if DK > 64:
            scores += _group_scores(page, k, k_meta, k_sums, 1, groups, first_group, rank_k - first_group, rank_k,
                                    queries_b, q_scale_b, q_offset_b, q_sum_b, BITS, SUMS, P, D)  # fmt: skip
        top, keep, weights = _weights(scores * scale, top, start + place, length)
        if SUMS == "none":
            p_scale = tl.max(weights, 0) / 127
            numbers = tl.floor(weights / tl.maximum(p_scale, 1e-28)[None, :] + 0.5)
            p_codes, p_offset, p_sum = numbers.to(tl.int8), tl.zeros_like(p_scale), tl.sum(numbers, 0)
        else:
            p_codes, p_scale, p_offset, p_sum = _coded(weights, (place >= 0)[:, None], 0, False)
        total = total * keep + p_scale * p_sum + P * p_offset
        packed = tl.load(page + v + channel[:, None] * (P // PACK) + byte[None, :],
                         mask=(channel < rank_v)[:, None], other=0)  # fmt: skip
        codes = _unpacked(packed, BITS)
        step, least = _meta(page + v_meta + tl.minimum(channel, rank_v - 1) * 4)
        if BITS == 8:
            least += 128 * step
        acc = acc * keep[None, :] + step[:, None] * (tl.dot(codes, p_codes).to(tl.float32) * p_scale[None, :])
        acc += least[:, None] * (p_scale * p_sum + P * p_offset)[None, :]
        if SUMS != "none":
            width: tl.constexpr = 1 if BITS == 2 else 2
            sums = _sums(page + v_sums + tl.minimum(channel, rank_v - 1) * width, packed, codes, P, SUMS, BITS)
            acc += (step * sums)[:, None] * p_offset[None, :]
    return acc, top, total


@triton.jit
def _span(pool, pages, page_stride, row, rank_k, rank_v, q, basis, places, turns, first, last, length, scale, slot, out,
          partial, states, FORM: tl.constexpr, BITS: tl.constexpr, SUMS: tl.constexpr, G: tl.constexpr,
          GP: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr):  # fmt: skip
    """One span at dims that fit its ranks."""
    k, v = tl.multiple_of(tl.load(row + 2), 128), tl.multiple_of(tl.load(row + 4), 128)
    k_meta, v_meta = tl.multiple_of(tl.load(row + 3), 128), tl.multiple_of(tl.load(row + 5), 128)
    groups, first_group = tl.load(row + 6), tl.multiple_of(tl.load(row + 7), 16)
    if FORM == "rows":
        acc, top, total = _rows_span(pool, pages, page_stride, k, v, rank_k, rank_v, q, first, last, length, scale, G,
                                     GP, P, BN, DK, DV)  # fmt: skip
    elif FORM == "rebuilt":
        acc, top, total = _rebuilt_span(pool, pages, page_stride, k, v, rank_k, rank_v, q, basis, places, turns, first,
                                        last, length, scale, G, GP, P, BN, DK, DV)  # fmt: skip
    elif FORM == "dequantized":
        acc, top, total = _dequantized_span(pool, pages, page_stride, k, k_meta, v, v_meta, rank_k, rank_v, groups,
                                            first_group, q, first, last, length, scale, BITS, G, GP, P, DK,
                                            DV)  # fmt: skip
    else:
        k_sums, v_sums = tl.load(row + 10), tl.load(row + 11)
        acc, top, total = _integer_span(pool, pages, page_stride, k, k_meta, k_sums, v, v_meta, v_sums, rank_k, rank_v,
                                        groups, first_group, q, first, last, length, scale, BITS, SUMS, G, GP, P, DK,
                                        DV)  # fmt: skip
    _leave(acc, top, total, slot, out, partial, states, rank_v, G, GP, DV)


@triton.jit(do_not_specialize=["table_width", "length_stride", "q_stride", "o_stride"],
            do_not_specialize_on_alignment=["lengths"])  # fmt: skip
def attend(pool, page_table, lengths, lanes, spans, starts, q, o, basis, places, turns, partial, states, page_stride,
           table_width, length_stride, q_stride, o_stride, scale, FORM: tl.constexpr, BITS: tl.constexpr,
           SUMS: tl.constexpr, WIDE: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, P: tl.constexpr,
           BN: tl.constexpr):  # fmt: skip
    """Grid: programs; program i takes spans starts[i] to starts[i + 1]. spans [n, SPAN]: sequence, head, first page,
    pages, slot of the partial result or -1. WIDE: whether a rank is above 64."""
    program = tl.program_id(0)
    for i in range(tl.load(starts + program), tl.load(starts + program + 1)):
        span = spans + i * SPAN
        sequence, head, slot = tl.load(span).to(tl.int64), tl.load(span + 1), tl.load(span + 4)
        first = tl.load(span + 2) * P
        last = first + tl.load(span + 3) * P
        length = tl.load(lengths + sequence * length_stride)
        row, pages = lanes + head * LANES, page_table + sequence * table_width
        rank_k, rank_v = tl.multiple_of(tl.load(row), 16), tl.multiple_of(tl.load(row + 1), 16)
        if FORM == "rebuilt":
            queries = q + sequence * q_stride + head * G * WIDEST
        else:
            queries = q + sequence * q_stride + tl.load(row + 8)
        out, base = o + sequence * o_stride + tl.load(row + 9), basis + head * WIDEST * WIDEST
        if not WIDE:
            _span(pool, pages, page_stride, row, rank_k, rank_v, queries, base, places, turns, first, last, length,
                  scale, slot, out, partial, states, FORM, BITS, SUMS, G, GP, P, BN, 64, 64)  # fmt: skip
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


@triton.jit(do_not_specialize=["tail_width", "length_stride", "q_stride", "o_stride"])
def join(pool, tail_table, tail_lengths, lanes, slots, q, o, partial, states, tail_stride, tail_width, length_stride,
         q_stride, o_stride, scale, TAIL: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
         P: tl.constexpr):  # fmt: skip
    """Grid (sequences, heads). slots [pairs + 1]: the partial results of a pair; TAIL: at most one 16-bit page."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, pair = lanes + head * LANES, tl.program_id(0) * tl.num_programs(1) + head
    rank_k, rank_v = tl.multiple_of(tl.load(row), 16), tl.multiple_of(tl.load(row + 1), 16)
    g, dims = tl.arange(0, GP), tl.arange(0, WIDEST)
    live = (dims < rank_v)[:, None] & (g < G)[None, :]
    acc, top, total = tl.zeros([WIDEST, GP], tl.float32), tl.full([GP], -1e30, tl.float32), tl.zeros([GP], tl.float32)
    if TAIL:
        length = tl.load(tail_lengths + sequence * length_stride)
        if length > 0:
            k, v = tl.multiple_of(tl.load(row + 12), 128), tl.multiple_of(tl.load(row + 13), 128)
            acc, top, total = _rows_span(pool, tail_table + sequence * tail_width, tail_stride, k, v, rank_k, rank_v,
                                         q + sequence * q_stride + tl.load(row + 8), 0, P, length, scale, G, GP, P, P,
                                         WIDEST, WIDEST)  # fmt: skip
    for slot in range(tl.load(slots + pair), tl.load(slots + pair + 1)):
        its_top = tl.load(states + slot * 2 * G + g, mask=g < G, other=0.0)
        its_total = tl.load(states + slot * 2 * G + G + g, mask=g < G, other=1.0)
        its = tl.load(partial + slot * G * WIDEST + g[None, :] * WIDEST + dims[:, None], mask=live, other=0.0)
        new = tl.maximum(top, its_top)
        acc = acc * tl.exp2(top - new)[None, :] + its * tl.exp2(its_top - new)[None, :]
        total = total * tl.exp2(top - new) + its_total * tl.exp2(its_top - new)
        top = new
    out = o + sequence * o_stride + tl.load(row + 9)
    live = live & (total > 0)[None, :]  # a pair that no span left in part has its answer
    tl.store(out + g[None, :] * rank_v + dims[:, None], (acc / total[None, :]).to(tl.float16), mask=live)


@triton.jit(do_not_specialize=["table_width", "length_stride"])
def unpack(pool, page_table, lengths, lanes, to, page_stride, to_stride, table_width, length_stride,
           BITS: tl.constexpr, P: tl.constexpr):  # fmt: skip
    """Dequantize-then-attend's first half. Grid (pages of the longest, sequences, heads): sealed page i of sequence b
    becomes 16-bit page b * table_width + i of ``to``, laid out as the 16-bit bucket's (tail_k, tail_v)."""
    PACK: tl.constexpr = 8 // BITS
    MASK: tl.constexpr = (1 << BITS) - 1
    i, sequence, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if i * P < tl.load(lengths + sequence * length_stride):
        row = lanes + head * LANES
        rank_k, rank_v = tl.multiple_of(tl.load(row), 16), tl.multiple_of(tl.load(row + 1), 16)
        groups, first_group = tl.load(row + 6), tl.load(row + 7)
        page = pool + tl.load(page_table + sequence * table_width + i).to(tl.int64) * page_stride
        out = to + (sequence * table_width + i).to(tl.int64) * to_stride
        place, column = tl.arange(0, P), tl.arange(0, WIDEST)
        live = (column < rank_k)[None, :]
        at = page + tl.multiple_of(tl.load(row + 2), 128) + place[:, None] * (rank_k // PACK) + column[None, :] // PACK
        codes = tl.load(at, mask=live, other=0) >> (column % PACK * BITS)[None, :].to(tl.uint8) & MASK
        group = tl.where(column < first_group, 0, groups - 1)
        step, least = _meta(page + tl.load(row + 3) + (place[:, None] * groups + group[None, :]) * 4)
        rows = _halves(out + tl.multiple_of(tl.load(row + 12), 128)) + place[:, None] * rank_k + column[None, :]
        tl.store(rows, _number(codes, step, least), mask=live)
        live = (column < rank_v)[:, None]
        at = page + tl.multiple_of(tl.load(row + 4), 128) + column[:, None] * (P // PACK) + place[None, :] // PACK
        codes = tl.load(at, mask=live, other=0) >> (place % PACK * BITS)[None, :].to(tl.uint8) & MASK
        step, least = _meta(page + tl.load(row + 5) + tl.minimum(column, rank_v - 1) * 4)
        rows = _halves(out + tl.multiple_of(tl.load(row + 13), 128)) + place[:, None] * rank_v + column[None, :]
        numbers = _number(codes, step[:, None], least[:, None])
        tl.store(rows, tl.trans(numbers), mask=tl.trans(live))

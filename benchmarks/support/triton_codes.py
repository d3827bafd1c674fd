"""Triton: pages of codes, dequantized in registers, multiplied as codes or unpacked.
See triton_decode.py."""

# Constants of a kernel decide which of its names are bound.
# pyright: reportPossiblyUnboundVariable=false
# ruff: noqa: ANN001, ANN201, ANN202, RET505 (Triton: only constants have types, a branch ends where its else ends)
from __future__ import annotations

import triton.language as tl

from benchmarks.support.triton_rows import WIDEST, halves, load_queries, next_weights
from kvlathe.runtime.sessions.torch_cuda.model.triton_jit import jit

LANES: tl.constexpr = tl.constexpr(14)
"""Columns of the lane table (triton_decode.LANE)."""


@jit
def meta_of(at):
    """(scale, minimum) of groups in float32."""
    both = tl.load(at.to(tl.pointer_type(tl.uint32)))
    scale = (both & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return scale.to(tl.float32), (both >> 16).to(tl.uint16).to(
        tl.float16, bitcast=True
    ).to(tl.float32)


@jit
def number(codes, scale, least):
    """scale * code + least in 16 bit, the code made a half without a conversion: 1024 +
    code has it as low bits."""
    half = (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0
    return half * scale.to(tl.float16) + least.to(tl.float16)


@jit
def _token_parts(weights, PACK: tl.constexpr, GP: tl.constexpr, P: tl.constexpr):
    """[P, GP] as PACK tensors [P / PACK, GP]: part i has tokens i, i + PACK, ..."""
    if PACK == 1:
        return (weights,)
    else:
        even, odd = tl.split(
            tl.permute(tl.reshape(weights, [P // 2, 2, GP]), (0, 2, 1))
        )
        if PACK == 2:
            return even, odd
        else:
            a, c = tl.split(tl.permute(tl.reshape(even, [P // 4, 2, GP]), (0, 2, 1)))
            b, d = tl.split(tl.permute(tl.reshape(odd, [P // 4, 2, GP]), (0, 2, 1)))
            return a, b, c, d


@jit
def _query_parts(
    q, rank, PACK: tl.constexpr, D: tl.constexpr, G: tl.constexpr, GP: tl.constexpr
):
    """q [G, rank] as PACK tensors [D, GP]: part i has dims i, i + PACK, ..."""
    a = load_queries(q, rank, 0, rank, PACK, D, G, GP)
    if PACK == 1:
        return (a,)
    else:
        b = load_queries(q, rank, 1, rank - 1, PACK, D, G, GP)
        if PACK == 2:
            return a, b
        else:
            c, d = (
                load_queries(q, rank, 2, rank - 2, PACK, D, G, GP),
                load_queries(q, rank, 3, rank - 3, PACK, D, G, GP),
            )
            return a, b, c, d


@jit
def dequantized_span(pool, pages, page_stride, k, k_meta, v, v_meta, rank_k, rank_v, groups, first_group, q, first,
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
        step, least = meta_of(page + k_meta + place * groups * 4)
        step, least = step[:, None], least[:, None]
        if DK > 64:
            step_b, least_b = meta_of(page + k_meta + (place * groups + groups - 1) * 4)
            here = (column < first_group // PACK)[None, :]
            step, least = (
                tl.where(here, step, step_b[:, None]),
                tl.where(here, least, least_b[:, None]),
            )
        scores = tl.zeros([P, GP], tl.float32)
        for i in tl.static_range(PACK):
            scores = tl.dot(
                number(packed >> i * BITS & MASK, step, least), queries[i], scores
            )
        top, keep, weights = next_weights(scores * scale, top, start + place, length)
        total = total * keep[None, :] + weights
        packed = tl.load(page + v + channel[:, None] * (P // PACK) + byte[None, :],
                         mask=(channel < rank_v)[:, None], other=0)  # fmt: skip
        step, least = meta_of(page + v_meta + tl.minimum(channel, rank_v - 1) * 4)
        parts = _token_parts(weights.to(tl.float16), PACK, GP, P)
        acc = acc * keep[None, :]
        for i in tl.static_range(PACK):
            acc = tl.dot(
                number(packed >> i * BITS & MASK, step[:, None], least[:, None]),
                parts[i],
                acc,
            )
    return acc, top, tl.sum(total, 0)


@jit
def _spread(packed, BITS: tl.constexpr):
    """[R, C] bytes as [R, 8 C / BITS] codes."""
    if BITS == 8:
        return packed
    elif BITS == 4:
        return tl.interleave(packed & 15, packed >> 4)
    else:
        even, odd = (
            tl.interleave(packed & 3, packed >> 4 & 3),
            tl.interleave(packed >> 2 & 3, packed >> 6),
        )
        return tl.interleave(even, odd)


@jit
def _unpacked(packed, BITS: tl.constexpr):
    """The same as int8; 8-bit codes less 128."""
    if BITS == 8:
        return (packed ^ 0x80).to(tl.int8, bitcast=True)
    else:
        return _spread(packed, BITS).to(tl.int8)


@jit
def coded(x, live, AXIS: tl.constexpr, SYMMETRIC: tl.constexpr):
    """Codes int8 of x along AXIS, with x = scale * code + offset; and the sum of the
    codes."""
    if SYMMETRIC:
        scale = tl.maximum(tl.max(tl.abs(x), AXIS), 1e-28) / 127
        offset = tl.zeros_like(scale)
        codes = tl.floor(x / tl.expand_dims(scale, AXIS) + 0.5)
    else:
        least = tl.min(tl.where(live, x, float("inf")), AXIS)
        scale = (
            tl.maximum(tl.max(tl.where(live, x, float("-inf")), AXIS) - least, 1e-28)
            / 255
        )
        codes = (
            tl.floor(
                (x - tl.expand_dims(least, AXIS)) / tl.expand_dims(scale, AXIS) + 0.5
            )
            - 128
        )
        offset = least + 128 * scale
    codes = tl.where(live, codes, 0.0)
    return codes.to(tl.int8), scale, offset, tl.sum(codes, AXIS)


@jit
def _sums(at, packed, codes, shape, SUMS: tl.constexpr, BITS: tl.constexpr):
    """Sums of the codes [rows] as int8 holds them, ``shape`` codes a row."""
    if SUMS == "recomputed":
        return tl.sum(codes.to(tl.int32), 1).to(tl.float32) + (
            128 * (codes.shape[1] - shape) if BITS == 8 else 0
        )
    elif BITS == 2:
        return tl.load(at).to(tl.float32)
    else:
        return tl.load(at.to(tl.pointer_type(tl.uint16))).to(tl.float32) - (
            128 * shape if BITS == 8 else 0
        )


@jit
def _group_scores(page, k, k_meta, k_sums, group, groups, first, size, rank_k, queries, q_scale, q_offset, q_sum,
                  BITS: tl.constexpr, SUMS: tl.constexpr, P: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Terms that the channels of one group add to the scores [P, GP]."""
    PACK: tl.constexpr = 8 // BITS
    place, column = tl.arange(0, P), tl.arange(0, D // PACK)
    packed = tl.load(page + k + (place[:, None] * rank_k + first) // PACK + column[None, :],
                     mask=(column < size // PACK)[None, :], other=0)  # fmt: skip
    codes = _unpacked(packed, BITS)
    scale, offset = meta_of(page + k_meta + (place * groups + group) * 4)
    if BITS == 8:
        offset += 128 * scale
    scores = scale[:, None] * (tl.dot(codes, queries).to(tl.float32) * q_scale[None, :])
    scores += offset[:, None] * (q_scale * q_sum + size * q_offset)[None, :]
    if SUMS != "none":
        width: tl.constexpr = 1 if BITS == 2 else 2
        sums = _sums(
            page + k_sums + (place * groups + group) * width,
            packed,
            codes,
            size,
            SUMS,
            BITS,
        )
        scores += (scale * sums)[:, None] * q_offset[None, :]
    return scores


@jit
def integer_span(pool, pages, page_stride, k, k_meta, k_sums, v, v_meta, v_sums, rank_k, rank_v, groups, first_group,
                  q, first, last, length, scale, BITS: tl.constexpr, SUMS: tl.constexpr, G: tl.constexpr,
                  GP: tl.constexpr, P: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr):  # fmt: skip
    PACK: tl.constexpr = 8 // BITS
    D: tl.constexpr = min(DK, 64)
    dim, place, channel, byte = (
        tl.arange(0, D),
        tl.arange(0, P),
        tl.arange(0, DV),
        tl.arange(0, P // PACK),
    )
    live = (dim < first_group)[:, None]
    raw = load_queries(q, rank_k, 0, first_group, 1, D, G, GP).to(tl.float32)
    queries, q_scale, q_offset, q_sum = coded(raw, live, 0, SUMS == "none")
    if DK > 64:
        live = (dim < rank_k - first_group)[:, None]
        raw = load_queries(
            q, rank_k, first_group, rank_k - first_group, 1, D, G, GP
        ).to(tl.float32)
        queries_b, q_scale_b, q_offset_b, q_sum_b = coded(raw, live, 0, SUMS == "none")
    top, total = tl.full([GP], float("-inf"), tl.float32), tl.zeros([GP], tl.float32)
    acc = tl.zeros([DV, GP], tl.float32)
    for start in range(first, last, P):
        page = pool + tl.load(pages + start // P).to(tl.int64) * page_stride
        scores = _group_scores(page, k, k_meta, k_sums, 0, groups, 0, first_group, rank_k, queries, q_scale, q_offset,
                               q_sum, BITS, SUMS, P, D)  # fmt: skip
        if DK > 64:
            scores += _group_scores(page, k, k_meta, k_sums, 1, groups, first_group, rank_k - first_group, rank_k,
                                    queries_b, q_scale_b, q_offset_b, q_sum_b, BITS, SUMS, P, D)  # fmt: skip
        top, keep, weights = next_weights(scores * scale, top, start + place, length)
        if SUMS == "none":
            p_scale = tl.max(weights, 0) / 127
            numbers = tl.floor(weights / tl.maximum(p_scale, 1e-28)[None, :] + 0.5)
            p_codes, p_offset, p_sum = (
                numbers.to(tl.int8),
                tl.zeros_like(p_scale),
                tl.sum(numbers, 0),
            )
        else:
            p_codes, p_scale, p_offset, p_sum = coded(
                weights, (place >= 0)[:, None], 0, False
            )
        total = total * keep + p_scale * p_sum + P * p_offset
        packed = tl.load(page + v + channel[:, None] * (P // PACK) + byte[None, :],
                         mask=(channel < rank_v)[:, None], other=0)  # fmt: skip
        codes = _unpacked(packed, BITS)
        step, least = meta_of(page + v_meta + tl.minimum(channel, rank_v - 1) * 4)
        if BITS == 8:
            least += 128 * step
        acc = acc * keep[None, :] + step[:, None] * (
            tl.dot(codes, p_codes).to(tl.float32) * p_scale[None, :]
        )
        acc += least[:, None] * (p_scale * p_sum + P * p_offset)[None, :]
        if SUMS != "none":
            width: tl.constexpr = 1 if BITS == 2 else 2
            sums = _sums(
                page + v_sums + tl.minimum(channel, rank_v - 1) * width,
                packed,
                codes,
                P,
                SUMS,
                BITS,
            )
            acc += (step * sums)[:, None] * p_offset[None, :]
    return acc, top, total


@jit(do_not_specialize=["table_width", "length_stride"])
def unpack(pool, page_table, lengths, lanes, to, page_stride, to_stride, table_width, length_stride,
           BITS: tl.constexpr, P: tl.constexpr):  # fmt: skip
    """Dequantize-then-attend's first half. Grid (pages of the longest, sequences,
    heads): sealed page i of sequence b becomes 16-bit page b * table_width + i of
    ``to``, laid out as the 16-bit bucket's (tail_k, tail_v)."""
    PACK: tl.constexpr = 8 // BITS
    i, sequence, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if i * P < tl.load(lengths + sequence * length_stride):
        row = lanes + head * LANES
        rank_k, rank_v = (
            tl.multiple_of(tl.load(row), 16),
            tl.multiple_of(tl.load(row + 1), 16),
        )
        groups, first_group = tl.load(row + 6), tl.load(row + 7)
        page = (
            pool
            + tl.load(page_table + sequence * table_width + i).to(tl.int64)
            * page_stride
        )
        out = to + (sequence * table_width + i).to(tl.int64) * to_stride
        place, column = tl.arange(0, P), tl.arange(0, WIDEST)
        byte = tl.arange(0, WIDEST // PACK)
        packed = tl.load(page + tl.multiple_of(tl.load(row + 2), 128) + place[:, None] * (rank_k // PACK)
                         + byte[None, :], mask=(byte < rank_k // PACK)[None, :], other=0)  # fmt: skip
        meta, here = (
            page + tl.load(row + 3) + place * groups * 4,
            (column < first_group)[None, :],
        )
        step, least = meta_of(meta)
        step_b, least_b = meta_of(meta + (groups - 1) * 4)
        step, least = (
            tl.where(here, step[:, None], step_b[:, None]),
            tl.where(here, least[:, None], least_b[:, None]),
        )
        rows = (
            halves(out + tl.multiple_of(tl.load(row + 12), 128))
            + place[:, None] * rank_k
            + column[None, :]
        )
        tl.store(
            rows,
            number(_spread(packed, BITS), step, least),
            mask=(column < rank_k)[None, :],
        )
        byte = tl.arange(0, P // PACK)
        packed = tl.load(page + tl.multiple_of(tl.load(row + 4), 128) + column[:, None] * (P // PACK) + byte[None, :],
                         mask=(column < rank_v)[:, None], other=0)  # fmt: skip
        step, least = meta_of(
            page + tl.load(row + 5) + tl.minimum(column, rank_v - 1) * 4
        )
        numbers = tl.trans(number(_spread(packed, BITS), step[:, None], least[:, None]))
        rows = (
            halves(out + tl.multiple_of(tl.load(row + 13), 128))
            + place[:, None] * rank_v
            + column[None, :]
        )
        tl.store(rows, numbers, mask=(column < rank_v)[None, :])

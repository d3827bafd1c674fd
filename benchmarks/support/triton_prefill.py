"""Causal prefill on products of 8-bit codes in Triton: what prefill_integer.py times.
Needs triton.

Eq. 4 of HACK: with q = a q' + c, k = s k' + m in groups along the rank,
  q k = a s (q' k') + a m (sum q') + c (s (sum k') + size m);
with p = b p' + e, v = r v' + n in groups of 64 tokens, p v = b r (p' v') + b n (sum p')
+ e (r (sum v') + 64 n). Only q' k' and p' v' are matrix products. ``attend`` does BM
rows of one query head; FORM:
  half         the same loop with 16-bit numbers: what this compiler makes of plain attention
  products     both integer products alone: p' are bytes of the scores, nothing is scaled
  uncorrected  with scales, softmax and 8-bit weights, without the terms that m, n, c and e add
  symmetric    q and p from zero (c = e = 0): sums of k' and v' are not needed. What our pages are made for
  asymmetric   the paper's form: q and p have a minimum too, and sums of k' and v' are read
Codes are signed bytes (less 128; the minima changed to match). Ranks are padded with
zeros: K to KG groups of KD channels, V to a block of DV channels and one of DW. Scales
and minima are halves, sums float32.
"""

# Constants of a kernel decide which of its names are bound.
# pyright: reportPossiblyUnboundVariable=false
# ruff: noqa: ANN001, ANN201, ANN202, SIM108 (Triton: only constants have types)
from __future__ import annotations

import triton.language as tl

from benchmarks.support.triton_codes import coded
from kvlathe.runtime.sessions.torch_cuda.model.triton_jit import jit

HEAD = ("rank_k", "rank_v", "q_at", "k_at", "v_at", "o_at", "first", "dim_k")
"""Columns of the table of heads, int32: ranks; columns of q, k, v and o; K's first
group; one, padded."""
COLUMNS: tl.constexpr = tl.constexpr(8)
WIDEST: tl.constexpr = tl.constexpr(128)
"""Channels of codes that every head has room for."""
N: tl.constexpr = tl.constexpr(64)
"""Tokens of a tile, and of a group of V."""
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)
LOG127: tl.constexpr = tl.constexpr(6.988684686772166)
MAGIC: tl.constexpr = tl.constexpr(0x4B400000)
"""The bits of 1.5 * 2^23, to which float32 adds integers of 22 bits exactly:
conversions have a quarter of the rate."""
SHIFT: tl.constexpr = tl.constexpr(12582912.0)


@jit
def shifted(numbers):
    """int32 of 22 bits as float32, plus SHIFT: a multiplication with what follows it
    takes it off again."""
    return (numbers + MAGIC).to(tl.float32, bitcast=True)


@jit
def rounded(x):
    """Bytes of x [BM, N] in 0..127, and their sums."""
    bits = (x + SHIFT).to(tl.int32, bitcast=True)
    return bits.to(tl.int8), tl.sum(bits - MAGIC, 1).to(tl.float32)


@jit
def _multiple(at):
    """A number of the table: of 16, so that accesses may be wide."""
    return tl.multiple_of(tl.load(at), 16)


@jit
def _packed(scale, offset):
    """A scale and an offset as halves of one int32."""
    low, high = (
        scale.to(tl.float16).to(tl.uint16, bitcast=True),
        offset.to(tl.float16).to(tl.uint16, bitcast=True),
    )
    return (low.to(tl.uint32) | high.to(tl.uint32) << 16).to(tl.int32, bitcast=True)


@jit
def _unpacked(both):
    low, high = (
        (both & 0xFFFF).to(tl.uint16),
        (both.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16),
    )
    return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(
        tl.float16, bitcast=True
    ).to(tl.float32)


@jit
def quantize_rows(x, stride, heads, codes, meta, sums, tokens, G: tl.constexpr, QUERY: tl.constexpr,
                  SYMMETRIC: tl.constexpr):  # fmt: skip
    """q (G rows a head) or k (G = 1), in groups along the rank. Grid (tokens / 64,
    heads * G). ``codes``: a row's groups [tokens, dim_k], one after the other.
    ``meta``, ``sums``: [rows, 2, tokens]; sums are of q', of k's numbers (what c is
    multiplied by)."""
    pair = tl.program_id(1)
    row, g = heads + pair // G * COLUMNS, pair % G
    rank, first, dims = _multiple(row), _multiple(row + 6), _multiple(row + 7)
    token, dim = tl.program_id(0) * 64 + tl.arange(0, 64), tl.arange(0, 64)
    column = _multiple(row + (2 if QUERY else 3)) + g * rank
    out = codes + pair.to(tl.int64) * WIDEST * tokens
    for group in range(tl.where(rank > 64, 2, 1)):
        size = tl.where(group == 0, first, rank - first)
        live = (dim < size)[None, :]
        here = (
            x
            + token.to(tl.int64)[:, None] * stride
            + column
            + group * first
            + dim[None, :]
        )
        code, scale, offset, total = coded(
            tl.load(here, mask=live, other=0.0).to(tl.float32), live, 1, SYMMETRIC
        )
        tl.store(
            out + (group * tokens + token)[:, None] * dims + dim[None, :],
            code,
            mask=(dim < dims)[None, :],
        )
        at = (pair * 2 + group) * tokens + token
        tl.store(meta + at, _packed(scale, offset))
        tl.store(sums + at, total if QUERY else scale * total + size * offset)


@jit
def quantize_columns(x, stride, heads, codes, meta, sums, tokens):
    """v in groups of 64 tokens. Grid (tokens / 64, heads). ``codes``: [heads, 128,
    tokens]; ``meta``, ``sums`` (of v's numbers): [heads, tokens / 64, 128]."""
    block, head = tl.program_id(0), tl.program_id(1)
    row = heads + head * COLUMNS
    rank, dim, token = (
        _multiple(row + 1),
        tl.arange(0, 128),
        block * 64 + tl.arange(0, 64),
    )
    live = (dim < rank)[None, :]
    here = x + token.to(tl.int64)[:, None] * stride + _multiple(row + 4) + dim[None, :]
    code, scale, offset, total = coded(
        tl.load(here, mask=live, other=0.0).to(tl.float32), live, 0, False
    )
    out = codes + head.to(tl.int64) * WIDEST * tokens
    tl.store(
        out + dim[:, None] * tokens + token[None, :],
        tl.trans(code),
        mask=(dim < rank)[:, None],
    )
    at = (head * tl.num_programs(0) + block) * WIDEST + dim
    tl.store(meta + at, _packed(scale, offset), mask=dim < rank)
    tl.store(sums + at, scale * total + 64 * offset, mask=dim < rank)


@jit
def _scores(q, k, total_q, c, s, m, t, FORM: tl.constexpr):
    """[BM, N] of one group, to be multiplied by a."""
    product = tl.dot(q, tl.trans(k))
    if FORM == "half":
        scores = product
    elif FORM == "uncorrected":
        scores = s[None, :] * shifted(product) - (s * SHIFT)[None, :]
    else:
        scores = s[None, :] * shifted(product) + (
            m[None, :] * total_q[:, None] - (s * SHIFT)[None, :]
        )
        if FORM == "asymmetric":
            scores += c[:, None] * t[None, :]
    return scores


@jit
def _weigh(scores, unit, top, FORM: tl.constexpr):
    """The softmax of a tile of scores / ``unit``: the next maximum, what was before
    times, p (16 bit or codes), b, e, sum of p'."""
    mine = tl.maximum(tl.max(scores, 1) * unit, LOWEST)
    new = tl.maximum(top, mine)
    keep = tl.exp2(top - new)
    if FORM == "half":
        p = tl.exp2(scores * unit[:, None] - new[:, None])
        codes, b, e, total = p.to(tl.float16), keep, keep, tl.sum(p, 1)
    elif FORM == "asymmetric":
        p = tl.exp2(scores * unit[:, None] - new[:, None])
        e = tl.min(p, 1)
        b = tl.maximum(tl.exp2(mine - new) - e, 1e-28) / 127
        codes, total = rounded(p * (1 / b)[:, None] - (e / b)[:, None])
    else:
        codes, total = rounded(
            tl.exp2(scores * unit[:, None] - (mine - LOG127)[:, None])
        )
        b, e = tl.exp2(mine - new), keep
    return new, keep, codes, b, e, total


@jit
def _gather(acc, p, v, keep, b, e, total, r, n, u, FORM: tl.constexpr):
    """acc [BM, D] with a tile's values."""
    if FORM == "half":
        acc = tl.dot(p, tl.trans(v), acc * keep[:, None])
    else:
        x = shifted(tl.dot(p, tl.trans(v)))
        if FORM == "uncorrected":
            values = r[None, :] * x - (r * SHIFT)[None, :]
        else:
            values = r[None, :] * x + (
                n[None, :] * total[:, None] - (r * SHIFT)[None, :]
            )
        acc = acc * keep[:, None] + b[:, None] * values
        if FORM == "asymmetric":
            acc += e[:, None] * u[None, :]
    return acc


@jit
def _three(meta, sums, row, column, D: tl.constexpr, FORM: tl.constexpr):
    """A tile's scales, offsets and, in the one form that needs them, sums."""
    scales, offsets = _unpacked(meta.load([row, column]).reshape(D))
    if FORM == "asymmetric":
        totals = sums.load([row, column]).reshape(D)
    else:
        totals = offsets
    return scales, offsets, totals


@jit
def _rows(q, meta, sums, at, places, KD: tl.constexpr):
    """Codes of one group of a query head's rows: codes, a, the sums and c / a."""
    a, c = _unpacked(tl.load(meta + places))
    return (
        tl.load(q + at[:, None] * KD + tl.arange(0, KD)[None, :]),
        a,
        tl.load(sums + places),
        c / a,
    )


@jit
def attend(q, k, v, w, q_meta, k_meta, v_meta, w_meta, q_sums, k_sums, v_sums, w_sums, out, stride, heads, which,
           tokens, scale, FORM: tl.constexpr, KG: tl.constexpr, KD: tl.constexpr, DV: tl.constexpr,
           DW: tl.constexpr, BM: tl.constexpr, G: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Grid (tokens / BM, heads of one class * G): the last tiles, which are the
    longest, first. ``which``: the class's heads. k, v, w, their meta and sums are
    tensor descriptors; v and w: V's blocks of DV and of DW channels."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    head, g = tl.load(which + tl.program_id(1) // G), tl.program_id(1) % G
    row, pair = heads + head * COLUMNS, head * G + g
    rows, places = first + tl.arange(0, BM), tl.arange(0, N)
    q += pair.to(tl.int64) * WIDEST * tokens
    k_row, v_row = head * (WIDEST // KD) * tokens, head * (tokens // N)
    q_0, a, total_0, c_0 = _rows(q, q_meta, q_sums, rows, pair * 2 * tokens + rows, KD)
    unit = a * scale
    if KG == 2:
        q_1, other, total_1, c_1 = _rows(
            q, q_meta, q_sums, tokens + rows, (pair * 2 + 1) * tokens + rows, KD
        )
        ratio = other / a
    if FORM == "half":
        unit = tl.full([BM], 1.0, tl.float32) * scale
        ratio = tl.full([BM], 1.0, tl.float32)
    kind: tl.constexpr = tl.int32 if FORM == "products" else tl.float32
    acc, rest = tl.zeros([BM, DV], kind), tl.zeros([BM, max(DW, 16)], kind)
    top, sums = tl.full([BM], LOWEST, tl.float32), tl.zeros([BM], tl.float32)
    for masked in tl.static_range(2):  # what all rows see, then what they see in part
        for start in tl.range(
            masked * first, first + masked * BM, N, num_stages=STAGES
        ):
            k_0 = k.load([k_row + start, 0])
            v_0 = v.load([head * WIDEST, start])
            if KG == 2:
                k_1 = k.load([k_row + tokens + start, 0])
            if DW:
                v_1 = w.load([head * WIDEST + DV, start])
            if FORM == "products":
                product = tl.dot(q_0, tl.trans(k_0))
                if KG == 2:
                    product = tl.dot(q_1, tl.trans(k_1), product, out_dtype=tl.int32)
                p = (product >> 13).to(tl.int8)
                acc = tl.dot(p, tl.trans(v_0), acc, out_dtype=tl.int32)
                if DW:
                    rest = tl.dot(p, tl.trans(v_1), rest, out_dtype=tl.int32)
            else:
                s, m, t = _three(k_meta, k_sums, head * 2, start, N, FORM)
                scores = _scores(q_0, k_0, total_0, c_0, s, m, t, FORM)
                if KG == 2:
                    s, m, t = _three(k_meta, k_sums, head * 2 + 1, start, N, FORM)
                    scores += ratio[:, None] * _scores(
                        q_1, k_1, total_1, c_1, s, m, t, FORM
                    )
                if masked:
                    scores = tl.where(
                        (start + places)[None, :] <= rows[:, None],
                        scores,
                        float("-inf"),
                    )
                top, keep, p, b, e, total = _weigh(scores, unit, top, FORM)
                sums = sums * keep + (
                    total
                    if FORM == "half"
                    else b * total + (N * e if FORM == "asymmetric" else 0.0)
                )
                r, n, u = _three(v_meta, v_sums, v_row + start // N, 0, DV, FORM)
                acc = _gather(acc, p, v_0, keep, b, e, total, r, n, u, FORM)
                if DW:
                    r, n, u = _three(w_meta, w_sums, v_row + start // N, DV, DW, FORM)
                    rest = _gather(rest, p, v_1, keep, b, e, total, r, n, u, FORM)
    rank, dims = _multiple(row + 1), tl.arange(0, DV)
    to = out + rows.to(tl.int64)[:, None] * stride + _multiple(row + 5) + g * rank
    over = (
        1 / sums
        if FORM != "products"
        else tl.full([BM], 1 / N, tl.float32) / (first + BM)
    )
    tl.store(
        to + dims[None, :],
        (acc.to(tl.float32) * over[:, None]).to(tl.float16),
        mask=(dims < rank)[None, :],
    )
    if DW:
        dims = DV + tl.arange(0, DW)
        tl.store(
            to + dims[None, :],
            (rest.to(tl.float32) * over[:, None]).to(tl.float16),
            mask=(dims < rank)[None, :],
        )

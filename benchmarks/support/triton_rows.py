"""Triton: pages of 16 bit, attended as they are or with K rebuilt from low rank. See
triton_decode.py."""

# ruff: noqa: ANN001, ANN201 (Triton: only constants have types, a branch ends where its else ends)
from __future__ import annotations

import triton.language as tl

from kvlathe.runtime.sessions.torch_cuda.model.triton_jit import jit

WIDEST: tl.constexpr = tl.constexpr(128)


@jit
def halves(pointer):
    return pointer.to(tl.pointer_type(tl.float16))


@jit
def load_rows(
    pool, pages, page_stride, at, tokens, length, rank, D: tl.constexpr, P: tl.constexpr
):
    """[tokens, D] rows of a 16-bit slab; zeros past the length and the rank."""
    dims = tl.arange(0, D)
    page = tl.load(pages + tokens // P, mask=tokens < length, other=0).to(tl.int64)
    row = halves(pool + page * page_stride + at) + tokens % P * rank
    return tl.load(
        row[:, None] + dims[None, :],
        mask=(tokens < length)[:, None] & (dims < rank)[None, :],
        other=0.0,
    )


@jit
def load_queries(
    q,
    rank,
    first,
    size,
    STEP: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
):
    """[D, GP]: every STEP-th dim of q [G, rank] from ``first`` on, ``size`` dims before
    stepping."""
    dim, g = tl.arange(0, D) * STEP, tl.arange(0, GP)
    live = (dim < size)[:, None] & (g < G)[None, :]
    return tl.load(q + g[None, :] * rank + first + dim[:, None], mask=live, other=0.0)


@jit
def leave(
    acc,
    top,
    total,
    slot,
    out,
    partial,
    states,
    rank_v,
    G: tl.constexpr,
    GP: tl.constexpr,
    DV: tl.constexpr,
):
    g, dims = tl.arange(0, GP), tl.arange(0, DV)
    live = (dims < rank_v)[:, None] & (g < G)[None, :]
    if slot < 0:
        tl.store(
            out + g[None, :] * rank_v + dims[:, None],
            (acc / total[None, :]).to(tl.float16),
            mask=live,
        )
    else:
        tl.store(
            partial + slot * G * WIDEST + g[None, :] * WIDEST + dims[:, None],
            acc,
            mask=live,
        )
        tl.store(states + slot * 2 * G + g, top, mask=g < G)
        tl.store(states + slot * 2 * G + G + g, total, mask=g < G)


@jit
def next_weights(scores, top, tokens, length):
    """New maximum [GP], factor of the old sums [GP], weights [BN, GP]; scores in powers
    of two."""
    scores = tl.where((tokens < length)[:, None], scores, float("-inf"))
    new = tl.maximum(top, tl.max(scores, 0))
    return new, tl.exp2(top - new), tl.exp2(scores - new[None, :])


@jit
def rows_span(pool, pages, page_stride, k, v, rank_k, rank_v, q, first, last, length, scale, G: tl.constexpr,
               GP: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr):  # fmt: skip
    queries = load_queries(q, rank_k, 0, rank_k, 1, DK, G, GP)
    top, total = (
        tl.full([GP], float("-inf"), tl.float32),
        tl.zeros([BN, GP], tl.float32),
    )
    acc = tl.zeros([DV, GP], tl.float32)
    for start in range(first, last, BN):
        tokens = start + tl.arange(0, BN)
        keys = load_rows(pool, pages, page_stride, k, tokens, last, rank_k, DK, P)
        top, keep, weights = next_weights(
            tl.dot(keys, queries) * scale, top, tokens, tl.minimum(last, length)
        )
        values = load_rows(pool, pages, page_stride, v, tokens, last, rank_v, DV, P)
        total = total * keep[None, :] + weights
        acc = tl.dot(tl.trans(values), weights.to(tl.float16), acc * keep[None, :])
    return acc, top, tl.sum(total, 0)


@jit
def rebuilt_span(pool, pages, page_stride, k, v, rank_k, rank_v, q, basis, places, turns, first, last, length, scale,
                  G: tl.constexpr, GP: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, DK: tl.constexpr,
                  DV: tl.constexpr):  # fmt: skip
    H: tl.constexpr = WIDEST // 2
    half, dims = tl.arange(0, H), tl.arange(0, DK)
    left = load_queries(q, WIDEST, 0, H, 1, H, G, GP).to(tl.float32)
    right = load_queries(q, WIDEST, H, H, 1, H, G, GP).to(tl.float32)
    column = basis + dims[:, None] * WIDEST + half[None, :]
    basis_left = tl.load(column, mask=(dims < rank_k)[:, None], other=0.0)
    basis_right = tl.load(column + H, mask=(dims < rank_k)[:, None], other=0.0)
    place = places + tl.arange(0, BN)[:, None] * WIDEST + half[None, :]
    cos, sin = tl.load(place), tl.load(place + H)
    top, total = (
        tl.full([GP], float("-inf"), tl.float32),
        tl.zeros([BN, GP], tl.float32),
    )
    acc = tl.zeros([DV, GP], tl.float32)
    for start in range(first, last, BN):
        tokens = start + tl.arange(0, BN)
        latent = load_rows(pool, pages, page_stride, k, tokens, last, rank_k, DK, P)
        a, b = tl.dot(latent, basis_left), tl.dot(latent, basis_right)
        c, s = (
            tl.load(turns + start // P * WIDEST + half),
            tl.load(turns + start // P * WIDEST + H + half),
        )
        scores = tl.dot(
            (a * cos - b * sin).to(tl.float16),
            (left * c[:, None] + right * s[:, None]).to(tl.float16),
        )
        back = (right * c[:, None] - left * s[:, None]).to(tl.float16)
        scores = tl.dot((b * cos + a * sin).to(tl.float16), back, scores) * scale
        top, keep, weights = next_weights(scores, top, tokens, tl.minimum(last, length))
        values = load_rows(pool, pages, page_stride, v, tokens, last, rank_v, DV, P)
        total = total * keep[None, :] + weights
        acc = tl.dot(tl.trans(values), weights.to(tl.float16), acc * keep[None, :])
    return acc, top, tl.sum(total, 0)

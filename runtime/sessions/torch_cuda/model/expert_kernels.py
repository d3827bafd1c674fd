"""Triton: experts of which each token passes a few. Pairs of a token and one of its
experts are put into tiles, each of one expert, and products read the weights of experts
that own a tile.

Sizes: T tokens, C experts that each passes, P = T * C pairs, E experts, B tiles of M rows
at most, D hidden size, I columns of an expert. ``K`` inputs and ``N`` outputs of a product. Weights have 16
``BITS``, 8 (e4m3, a scale for each output) or 4 (a scale for each ``GROUP`` of inputs).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvlathe.runtime.sessions.torch_cuda.model.triton_jit import jit

tl = import_module("triton.language")
if TYPE_CHECKING:
    from torch import Tensor

    constexpr = int  # a number, a flag or a name
else:  # Triton reads annotations, and knows no others
    Tensor, constexpr = tl.tensor, tl.constexpr


# fmt: off
@jit
def choose(logits: Tensor, correction: Tensor, weights: Tensor, experts: Tensor,
           least: float, E: constexpr, WIDE: constexpr, C: constexpr, SLOTS: constexpr,
           IS_SIGMOID: constexpr, IS_NORMALIZED: constexpr, IS_CORRECTED: constexpr) -> None:
    """One token a program, as ``choose`` in kvlathe/layers/routing.py without groups:
    logits [T, E], correction [E] -> weights [T, C] float32, experts [T, C] int32. ``WIDE``
    and ``SLOTS``: E and C up to powers of two."""
    token = tl.program_id(0)
    every, slots = tl.arange(0, WIDE), tl.arange(0, SLOTS)
    real = every < E
    x = tl.load(logits + token * E + every, mask=real, other=float("-inf")).to(tl.float32)
    if IS_SIGMOID:
        scores = tl.sigmoid(x)
    else:
        scores = tl.exp(x - tl.max(x, 0))
        scores = scores / tl.sum(scores, 0)
    ranked = scores
    if IS_CORRECTED:
        ranked = scores + tl.load(correction + every, mask=real, other=0.0)
    ranked = tl.where(real, ranked, float("-inf"))
    own = tl.zeros([SLOTS], tl.float32)
    places = tl.zeros([SLOTS], tl.int32)
    for slot in range(C):
        # Among numbers that are none, any expert: but one that there is.
        best = tl.minimum(tl.argmax(ranked, 0), E - 1)
        weight = tl.sum(tl.where(every == best, scores, 0.0), 0)
        own = tl.where(slots == slot, weight, own)
        places = tl.where(slots == slot, best, places)
        ranked = tl.where(every == best, float("-inf"), ranked)
    if IS_NORMALIZED:
        own = own / (tl.sum(own, 0) + least)
    tl.store(weights + token * C + slots, own, mask=slots < C)
    tl.store(experts + token * C + slots, places, mask=slots < C)


@jit(do_not_specialize=["pairs"])
def rank(experts: Tensor, counts: Tensor, ranks: Tensor, pairs: int, MANY: constexpr) -> None:
    """experts [P] -> counts [E], which are 0 before, and each pair's place among those of
    its expert, ranks [P]. Which is first does not matter: rows do not touch."""
    pair = tl.program_id(0) * MANY + tl.arange(0, MANY)
    is_pair = pair < pairs
    expert = tl.load(experts + pair, mask=is_pair, other=0)
    found = tl.atomic_add(counts + expert, 1, mask=is_pair, sem="relaxed")
    tl.store(ranks + pair, found, mask=is_pair)


@jit(do_not_specialize=["pairs", "tiles"])
def place(experts: Tensor, counts: Tensor, ranks: Tensor, rows: Tensor, owners: Tensor,
          pairs: int, tiles: int, E: constexpr, WIDE: constexpr, M: constexpr,
          MANY: constexpr) -> None:
    """counts [E], and experts and ranks [P] -> owners [B]: the expert of each tile, -1 where
    a tile has none; rows [B, M], which are 0 before: one more than the pair of each row."""
    every = tl.arange(0, WIDE)
    count = tl.load(counts + every, mask=every < E, other=0)
    needs = (count + M - 1) // M
    ends = tl.cumsum(needs, 0)
    some = tl.program_id(0) * MANY + tl.arange(0, MANY)
    owner = tl.sum((ends[None, :] <= some[:, None]).to(tl.int32), 1)
    tl.store(owners + some, tl.where(owner < E, owner, -1), mask=some < tiles)
    is_pair = some < pairs
    expert = tl.load(experts + some, mask=is_pair, other=0)
    is_own = expert[:, None] == every[None, :]
    first = tl.sum(tl.where(is_own, (ends - needs)[None, :], 0), 1)
    at = first * M + tl.load(ranks + some, mask=is_pair, other=0)
    tl.store(rows + at, some + 1, mask=is_pair)


@jit(do_not_specialize=["pairs"])
def place_few(experts: Tensor, rows: Tensor, owners: Tensor, pairs: int, E: constexpr,
              WIDE: constexpr, M: constexpr, ALL: constexpr) -> None:
    """What ``rank`` and ``place`` do, a tile a program, in the order of the pairs: experts [P]
    -> rows [B, M] and owners [B], which hold anything before. ``ALL``: no less than P."""
    tile, every, pair = tl.program_id(0), tl.arange(0, WIDE), tl.arange(0, ALL)
    is_pair = pair < pairs
    expert = tl.load(experts + pair, mask=is_pair, other=-1)
    needs = (tl.histogram(tl.maximum(expert, 0), WIDE, is_pair) + M - 1) // M
    owner = tl.sum((tl.cumsum(needs, 0) <= tile).to(tl.int32), 0)
    tl.store(owners + tile, tl.where(owner < E, owner, -1))
    is_own = (expert == owner).to(tl.int32)
    first = tile - tl.sum(tl.where(every < owner, needs, 0), 0)
    at = tl.cumsum(is_own, 0) - 1 - first * M
    is_here = (is_own > 0) & (at >= 0) & (at < M)
    tl.store(rows + tile * M + at, pair + 1, mask=is_here)
    row = tl.arange(0, M)
    is_left = row >= tl.sum(is_here.to(tl.int32), 0)
    tl.store(rows + tile * M + row, tl.zeros([M], tl.int32), mask=is_left)


@jit(do_not_specialize=["tokens"])
def route(logits: Tensor, correction: Tensor, shares: Tensor, rows: Tensor, owners: Tensor,
          least: float, tokens: int, E: constexpr, WIDE: constexpr, C: constexpr,
          SLOTS: constexpr, IS_SIGMOID: constexpr, IS_NORMALIZED: constexpr,
          IS_CORRECTED: constexpr, M: constexpr, ALL: constexpr) -> None:
    """Does for few tokens what ``choose``, ``rank`` and ``place`` do, a tile a program: each
    chooses for all of them, and looks for its own. logits [T, E] -> shares [T, C], rows [B,
    M] and owners [B], which hold anything before. ``ALL``: no less than T."""
    tile, token, every = tl.program_id(0), tl.arange(0, ALL), tl.arange(0, WIDE)
    is_token, slots = token < tokens, tl.arange(0, SLOTS)
    real = is_token[:, None] & (every < E)[None, :]
    x = tl.load(logits + token[:, None] * E + every[None, :], mask=real, other=float("-inf"))
    x = tl.where(is_token[:, None], x.to(tl.float32), 0.0)
    if IS_SIGMOID:
        scores = tl.sigmoid(x)
    else:
        scores = tl.exp(x - tl.max(x, 1)[:, None])
        scores = scores / tl.sum(scores, 1)[:, None]
    ranked = scores
    if IS_CORRECTED:
        ranked = scores + tl.load(correction + every, mask=every < E, other=0.0)[None, :]
    # Of numbers that are none, all are alike and least: each pair has an expert of its own.
    ranked = tl.where(ranked == ranked, ranked, -3.0e38)
    ranked = tl.where((every < E)[None, :], ranked, float("-inf"))
    own = tl.zeros([ALL, SLOTS], tl.float32)
    slot_of = tl.full([ALL, WIDE], -1, tl.int32)
    for slot in range(C):
        best = tl.minimum(tl.argmax(ranked, 1), E - 1)
        is_best = every[None, :] == best[:, None]
        weight = tl.sum(tl.where(is_best, scores, 0.0), 1)
        own = tl.where((slots == slot)[None, :], weight[:, None], own)
        slot_of = tl.where(is_best & is_token[:, None], slot, slot_of)
        ranked = tl.where(is_best, float("-inf"), ranked)
    if IS_NORMALIZED:
        own = own / (tl.sum(own, 1)[:, None] + least)
    is_slot = is_token[:, None] & (slots < C)[None, :]
    tl.store(shares + token[:, None] * C + slots[None, :], own, mask=is_slot & (tile == 0))
    needs = (tl.sum((slot_of >= 0).to(tl.int32), 0) + M - 1) // M
    owner = tl.sum((tl.cumsum(needs, 0) <= tile).to(tl.int32), 0)
    tl.store(owners + tile, tl.where(owner < E, owner, -1))
    first = (tile - tl.sum(tl.where(every < owner, needs, 0), 0)) * M
    found = tl.max(tl.where((every == owner)[None, :], slot_of, -1), 1)
    is_own = (found >= 0).to(tl.int32)
    at = tl.cumsum(is_own, 0) - 1 - first
    is_here = (is_own > 0) & (at >= 0) & (at < M)
    tl.store(rows + tile * M + at, token * C + found + 1, mask=is_here)
    row = tl.arange(0, M)
    is_left = row >= tl.sum(is_here.to(tl.int32), 0)
    tl.store(rows + tile * M + row, tl.zeros([M], tl.int32), mask=is_left)


@jit
def activated(x: Tensor, ACTIVATION: constexpr) -> Tensor:
    """As ACTIVATIONS in kvlathe/layers/rows.py."""
    if ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "relu":
        y = tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "tanh gelu")
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y


@jit
def combined(gate: Tensor, up: Tensor, alpha: float, limit: float, ACTIVATION: constexpr,
             IS_GATED: constexpr, IS_BOUNDED: constexpr, HAS_ALPHA: constexpr) -> Tensor:
    """As ``_inner`` in kvlathe/layers/experts.py, or a plain MLP's activation of up."""
    if IS_BOUNDED:
        up = tl.minimum(tl.maximum(up, -limit), limit)
        if HAS_ALPHA:
            gate = tl.minimum(gate, limit)
            found = gate * tl.sigmoid(alpha * gate) * (up + 1)
        else:
            found = tl.minimum(activated(gate, ACTIVATION), limit) * up
    elif IS_GATED:
        found = activated(gate, ACTIVATION) * up
    else:
        found = activated(up, ACTIVATION)
    return found


@jit
def inputs_at(rows: Tensor, real: Tensor, first: int, K: constexpr, WIDE: constexpr,
              KS: constexpr) -> Tensor:
    """[M, KS] of the K inputs that ``rows`` [M] point to; zeros for rows that are not
    ``real``, and past the end, where ``WIDE`` inputs are asked for."""
    k = first + tl.arange(0, KS)
    at = rows[:, None] + k[None, :]
    is_in = real[:, None]
    if WIDE % KS or WIDE > K:
        is_in = is_in & (k < K)[None, :]
    return tl.load(at, mask=is_in, other=0.0)


@jit
def tile_at(numbers: Tensor, first: int, n: Tensor, K: constexpr, N: constexpr,
            KS: constexpr, NS: constexpr) -> Tensor:
    """[KS, NS] of numbers [K, N]; zeros past its ends."""
    k = first + tl.arange(0, KS)
    at = numbers + k[:, None] * N + n[None, :]
    if K % KS == 0 and N % NS == 0:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
    return found


@jit
def group_at(numbers: Tensor, group: int, n: Tensor, N: constexpr) -> Tensor:
    """[1, NS] of numbers [G, N]."""
    return tl.load(numbers + group * N + n, mask=n < N, other=0)[None, :].to(tl.float16)


@jit
def of_nibbles(codes: Tensor, scales: Tensor, zeros: Tensor, group: int, n: Tensor,
               N: constexpr, HAS_ZEROS: constexpr) -> Tensor:
    """The weights of codes [KS, NS] of one group. The bits of a code are those of 1024 + the
    code where they end a half of 1024: an addition is faster than a conversion."""
    zero = group_at(zeros, group, n, N) if HAS_ZEROS else 8
    more = tl.cast(codes.to(tl.int16) | 0x6400, tl.float16, bitcast=True)
    return (more - (zero + 1024)) * group_at(scales, group, n, N)


@jit
def added(total: Tensor, rows: Tensor, more: Tensor, weights: Tensor, scales: Tensor,
          zeros: Tensor, first: int, n: Tensor, K: constexpr, N: constexpr, BITS: constexpr,
          GROUP: constexpr, HAS_ZEROS: constexpr, KS: constexpr, NS: constexpr) -> Tensor:
    """total [M, NS] and what the inputs from ``first`` on add: ``rows`` [M, KS], times the
    weights [K, N] of one expert. Of 4 bits a byte has the codes of two inputs, KS / 2 apart:
    those of ``rows`` and of ``more``, [M, KS / 2] each."""
    if BITS == 4:
        H: constexpr = KS // 2
        codes = tile_at(weights, first // 2, n, K // 2, N, H, NS)
        low = of_nibbles(codes & 15, scales, zeros, first // GROUP, n, N, HAS_ZEROS)
        high = of_nibbles(codes >> 4, scales, zeros, (first + H) // GROUP, n, N, HAS_ZEROS)
        total = tl.dot(more, high, tl.dot(rows, low, total))
    else:
        numbers = tile_at(weights, first, n, K, N, KS, NS)
        total = tl.dot(rows, numbers.to(rows.dtype), total)
    return total


@jit
def finished(total: Tensor, scales: Tensor, bias: Tensor, n: Tensor, N: constexpr,
             BITS: constexpr, IS_BIASED: constexpr) -> Tensor:
    """total [M, NS] with the scales of outputs, which e4m3 has, and the bias."""
    if BITS == 8:
        total *= tl.load(scales + n, mask=n < N, other=0.0)[None, :]
    if IS_BIASED:
        total += tl.load(bias + n, mask=n < N, other=0.0)[None, :].to(tl.float32)
    return total


@jit
def inner(x: Tensor, gate: Tensor, gate_scales: Tensor, gate_zeros: Tensor, gate_bias: Tensor,
          up: Tensor, up_scales: Tensor, up_zeros: Tensor, up_bias: Tensor, out: Tensor,
          shares: Tensor, rows: Tensor, owners: Tensor, alpha: float, limit: float, C: constexpr,
          K: constexpr, WIDE: constexpr, N: constexpr, BITS: constexpr, GROUP: constexpr,
          HAS_ZEROS: constexpr, IS_GATED: constexpr, IS_BIASED: constexpr, ACTIVATION: constexpr,
          IS_BOUNDED: constexpr, HAS_ALPHA: constexpr, IS_SHARED: constexpr, M: constexpr,
          NS: constexpr, KS: constexpr) -> None:
    """x [T, D], maps gate and up, biases [E, I] -> what the second product reads, out
    [B * M, I]: of one tile, NS columns. Where ``IS_SHARED``, rows of x are times their
    pair's share, of ``shares`` [P]. A map has weights [E, WIDE, I], scales [E, WIDE /
    GROUP, I] and zeros alike; ``WIDE``: K with what fills it up."""
    tile, columns = tl.program_id(0) // tl.cdiv(N, NS), tl.program_id(0) % tl.cdiv(N, NS)
    owner = tl.load(owners + tile).to(tl.int64)
    if owner < 0:
        return
    at = tile * M + tl.arange(0, M)
    pair = tl.load(rows + at) - 1
    real = pair >= 0
    x_rows = x + (pair // C).to(tl.int64) * K
    n = columns * NS + tl.arange(0, NS)
    ups = tl.zeros([M, NS], tl.float32)
    gates = tl.zeros([M, NS], tl.float32)
    HALVES: constexpr = 2 if BITS == 4 else 1
    own, many = owner * (WIDE // HALVES * N), owner * (WIDE // GROUP * N)
    for first in range(0, WIDE, KS):
        some = inputs_at(x_rows, real, first, K, WIDE, KS // HALVES)
        more = some
        if BITS == 4:
            more = inputs_at(x_rows, real, first + KS // 2, K, WIDE, KS // 2)
        ups = added(ups, some, more, up + own, up_scales + many, up_zeros + many, first, n, WIDE,
                    N, BITS, GROUP, HAS_ZEROS, KS, NS)
        if IS_GATED:
            gates = added(gates, some, more, gate + own, gate_scales + many, gate_zeros + many,
                          first, n, WIDE, N, BITS, GROUP, HAS_ZEROS, KS, NS)
    if IS_SHARED:
        share = tl.load(shares + pair, mask=real, other=0.0)[:, None]
        ups *= share
        gates *= share
    ups = finished(ups, up_scales + many, up_bias + owner * N, n, N, BITS, IS_BIASED)
    if IS_GATED:
        gates = finished(gates, gate_scales + many, gate_bias + owner * N, n, N, BITS, IS_BIASED)
    found = combined(gates, ups, alpha, limit, ACTIVATION, IS_GATED, IS_BOUNDED, HAS_ALPHA)
    to = out + at[:, None].to(tl.int64) * N + n[None, :]
    tl.store(to, found, mask=(n < N)[None, :])


@jit
def outer(inputs: Tensor, down: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor,
          shares: Tensor, out: Tensor, rows: Tensor, owners: Tensor, K: constexpr,
          WIDE: constexpr, N: constexpr, BITS: constexpr, GROUP: constexpr, HAS_ZEROS: constexpr,
          IS_BIASED: constexpr, IS_SHARED: constexpr, M: constexpr, NS: constexpr,
          KS: constexpr) -> None:
    """inputs [B * M, I], the map down to [D], bias [E, D], shares [P] -> out [P, D]: of each
    pair what its expert gives, times its share where ``IS_SHARED``."""
    tile, columns = tl.program_id(0) // tl.cdiv(N, NS), tl.program_id(0) % tl.cdiv(N, NS)
    owner = tl.load(owners + tile).to(tl.int64)
    if owner < 0:
        return
    at = tile * M + tl.arange(0, M)
    pair = tl.load(rows + at) - 1
    real = pair >= 0
    own_rows = inputs + at.to(tl.int64) * K
    n = columns * NS + tl.arange(0, NS)
    found = tl.zeros([M, NS], tl.float32)
    HALVES: constexpr = 2 if BITS == 4 else 1
    own, many = owner * (WIDE // HALVES * N), owner * (WIDE // GROUP * N)
    for first in range(0, WIDE, KS):
        some = inputs_at(own_rows, real, first, K, WIDE, KS // HALVES)
        more = some
        if BITS == 4:
            more = inputs_at(own_rows, real, first + KS // 2, K, WIDE, KS // 2)
        found = added(found, some, more, down + own, scales + many, zeros + many, first, n, WIDE,
                      N, BITS, GROUP, HAS_ZEROS, KS, NS)
    found = finished(found, scales + many, bias + owner * N, n, N, BITS, IS_BIASED)
    if IS_SHARED:
        found *= tl.load(shares + pair, mask=real, other=0.0)[:, None]
    to = out + pair[:, None].to(tl.int64) * N + n[None, :]
    tl.store(to, found, mask=real[:, None] & (n < N)[None, :])


@jit
def summed(parts: Tensor, before: Tensor, out: Tensor, C: constexpr, D: constexpr,
           SOME: constexpr, IS_ADDED: constexpr) -> None:
    """parts [T, C, D] -> out [T, D]: SOME columns of a token a program. Where ``IS_ADDED``,
    ``before`` [T, D] and their sum as a half, as if one kernel had followed another."""
    token, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * SOME + tl.arange(0, SOME)
    total = tl.zeros([SOME], tl.float32)
    for part in range(C):
        at = parts + (token * C + part) * D + n
        total += tl.load(at, mask=n < D, other=0.0).to(tl.float32)
    if IS_ADDED:
        own = tl.load(before + token * D + n, mask=n < D, other=0.0)
        total = total.to(own.dtype).to(tl.float32) + own.to(tl.float32)
    tl.store(out + token * D + n, total, mask=n < D)
# fmt: on

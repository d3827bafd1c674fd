"""Triton kernels of layers that keep a state: what kvlathe/layers/mixers.py says, in as
few kernels as it takes: the convolution and its activation, a token of each head, chunks
of tokens, and the norm with its gate. Triton comes with torch for GPUs.

Sizes: T tokens of B sequences, K taps, C channels, H heads, dk and dv dims of a key and
of a value.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from kvlathe.layers.mixers import LEAST_NORM, HeadRows, MixerParts, Mixing
from kvlathe.layers.recurrence import CHUNK
from kvlathe.runtime.sessions.torch_cuda.model.triton_jit import jit

triton, tl = import_module("triton"), import_module("triton.language")
if TYPE_CHECKING:
    from torch import Tensor

    constexpr = int  # a number, a flag or a type
else:  # Triton reads annotations, and knows no others
    Tensor, constexpr = tl.tensor, tl.constexpr

CHANNELS, VALUES, COLUMNS = 512, 32, 64
"""Channels, dims of a value, and columns of a chunk's products, of one program."""
LEAST = 16
"""Dims that a product of matrices has at least."""
PRECISION = "bf16x3"
"""Products of a chunk's float32 matrices take numbers as three bfloat16 parts."""
WARPS, STAGES = 4, 2
"""Warps of a program; chunks that are read at a time."""
TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}


@jit
def _convolve(
    x: Tensor,
    x_stride: int,
    y: Tensor,
    taps: Tensor,
    bias: Tensor,
    memory: Tensor,
    slot_stride: int,
    before: Tensor,
    after: Tensor,
    sequence_of: Tensor,
    starts: Tensor,
    channels: int,
    K: constexpr,
    HAS_BIAS: constexpr,
    SILU: constexpr,
    ALONE: constexpr,
    TYPE: constexpr,
    BLOCK: constexpr,
) -> None:
    """Row t, some channels. The last row of a sequence leaves the newest inputs."""
    t = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = c < channels
    b, start, last = t, t, t
    if not ALONE:
        b = tl.load(sequence_of + t)
        start = tl.load(starts + b)
        last = tl.load(starts + b + 1) - 1
    own = memory + tl.load(before + b) * slot_stride + c
    left = memory + tl.load(after + b) * slot_stride + c
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        total = tl.load(bias + c, mask=here, other=0.0)
    for tap in tl.static_range(K):
        place = t - (K - 1) + tap
        fresh = place >= start
        value = tl.load(x + place * x_stride + c, mask=here & fresh, other=0.0)
        kept = own + (K - 1 + place - start) * channels
        value = value.to(tl.float32) + tl.load(kept, mask=here & ~fresh, other=0.0)
        total += value * tl.load(taps + tap * channels + c, mask=here, other=0.0)
        if tap > 0:
            tl.store(left + (tap - 1) * channels, value, mask=here & (t == last))
    out = total.to(TYPE)
    if SILU:
        wide = out.to(tl.float32)
        out = (wide * tl.sigmoid(wide)).to(TYPE)
    tl.store(y + t * channels + c, out, mask=here)


@jit
def _softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), as torch's; by its series where e^x is small."""
    e = tl.exp(tl.minimum(x, 20.0))
    small = e * (1.0 - e * (0.5 - e * (1.0 / 3.0)))
    return tl.where(x > 20.0, x, tl.where(e < 0.01, small, tl.log(1.0 + e)))


@jit
def _row(at: Tensor, i: Tensor, inside: Tensor) -> Tensor:
    return tl.load(at + i, mask=inside, other=0.0).to(tl.float32)


@jit
def _unit(x: Tensor, least_norm: float) -> Tensor:
    return x / tl.sqrt(tl.sum(x * x, 0) + least_norm)


# fmt: off
@jit
def _head_step(channels: Tensor, channel_stride: int, gates: Tensor, gate_stride: int,
               decay: Tensor, step_bias: Tensor, skip: Tensor, y: Tensor, memory: Tensor,
               slot_stride: int, before: Tensor, after: Tensor, sequences: Tensor,
               rows: Tensor, least_step: float, most_step: float, strength: float,
               query_scale: float, least_norm: float, H: constexpr, GROUPS: constexpr,
               DK: constexpr, DV: constexpr, IS_DELTA: constexpr, ALL: constexpr,
               KEYS: constexpr, BLOCK: constexpr) -> None:
    """A token of one sequence, one head, some dims of its values."""
    b, h = tl.program_id(0), tl.program_id(1)
    row = b
    if not ALL:
        row = tl.load(rows + b)
        b = tl.load(sequences + b)
    i, j = tl.arange(0, KEYS), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    in_key, in_value = i < DK, j < DV
    own = channels + row * channel_stride
    of_group = own + h // (H // GROUPS) * DK
    gate = gates + row * gate_stride + h
    q_at = of_group + (0 if IS_DELTA else H * DV + GROUPS * DK)
    k_at = of_group + (GROUPS * DK if IS_DELTA else H * DV)
    v_at = own + (2 * GROUPS * DK if IS_DELTA else 0) + h * DV
    q, k = _row(q_at, i, in_key), _row(k_at, i, in_key)
    value = _row(v_at, j, in_value)
    step = tl.load(gate + (H if IS_DELTA else 0)).to(tl.float32)
    step = _softplus(step + tl.load(step_bias + h))
    if IS_DELTA:
        q, k = _unit(q, least_norm) * query_scale, _unit(k, least_norm)
        added = value
    else:
        step = tl.minimum(tl.maximum(step, least_step), most_step)
        added = value * step
    tile = (h * DK + i)[:, None] * DV + j[None, :]
    inside = in_key[:, None] & in_value[None, :]
    source = memory + tl.load(before + b) * slot_stride
    state = tl.load(source + tile, mask=inside, other=0.0)
    state = state * tl.exp(step * tl.load(decay + h))
    if IS_DELTA:
        share = tl.sigmoid(tl.load(gate).to(tl.float32)) * strength
        added = (added - tl.sum(state * k[:, None], 0)) * share
    state += k[:, None] * added[None, :]
    read = tl.sum(state * q[:, None], 0)
    if not IS_DELTA:
        read += value * tl.load(skip + h)
    target = memory + tl.load(after + b) * slot_stride
    tl.store(target + tile, state, mask=inside)
    tl.store(y + (row * H + h) * DV + j, read, mask=in_value)
# fmt: on


@jit
def _inverse(
    system: Tensor, C: constexpr, N: constexpr, PART: constexpr, PRECISION: constexpr
) -> Tensor:
    """system [C, C], 0 from the diagonal on -> the inverse of 1 + system: N parts on its
    diagonal row by row, and the rest, of which N products are 0, by products."""
    i, part, t = tl.arange(0, PART), tl.arange(0, N), tl.arange(0, C)
    row = i[None, :, None]
    own = part[:, None, None, None] == part[None, None, :, None]
    parts = tl.reshape(system, [N, PART, N, PART])
    solved = -tl.sum(tl.where(own, parts, 0.0), 2)
    for r in range(1, PART):
        line = tl.sum(tl.where(row == r, solved, 0.0), 1)
        line += tl.sum(line[:, :, None] * solved, 1)
        solved = tl.where(row == r, line[:, None, :], solved)
    solved += tl.where(row == i[None, None, :], 1.0, 0.0)
    whole = tl.where(own, solved[:, :, None, :], 0.0)
    whole = tl.reshape(whole, [C, C])
    rest = tl.where(t[:, None] // PART == t[None, :] // PART, 0.0, system)
    rest = tl.dot(whole, rest, input_precision=PRECISION)
    twice = tl.dot(rest, rest, input_precision=PRECISION)
    whole += tl.dot(twice, whole, input_precision=PRECISION)
    return whole - tl.dot(rest, whole, input_precision=PRECISION)


# fmt: off
@jit
def _chunk_products(q: Tensor, q_stride: int, k: Tensor, k_stride: int, v: Tensor,
                    v_stride: int, decays: Tensor, strengths: Tensor, rows: Tensor,
                    tokens: int, totals: Tensor, own: Tensor, values: Tensor,
                    replaced: Tensor, H: constexpr, GROUPS: constexpr, C: constexpr,
                    DK: constexpr, DV: constexpr, IS_DELTA: constexpr, BLOCK: constexpr,
                    PART: constexpr, PRECISION: constexpr) -> None:
    """All of one chunk and one head that no state is needed for: as ``chunk_products``,
    but ``totals`` in place of what they scale."""
    n, h = tl.program_id(0), tl.program_id(1)
    t, of_group = tl.arange(0, C), h // (H // GROUPS) * DK
    row = tl.load(rows + n * C + t)
    here = row < tokens
    total = tl.cumsum(tl.load(decays + row * H + h, mask=here, other=0.0), 0)
    at = (n * H + h) * C + t
    tl.store(totals + at, total)
    among = tl.zeros([C, C], tl.float32)
    system = tl.zeros([C, C], tl.float32)
    for first in tl.static_range(0, DK, BLOCK):
        i = first + tl.arange(0, BLOCK)[None, :]
        inside = here[:, None] & (i < DK)
        given = q + row[:, None] * q_stride + of_group + i
        query = tl.load(given, mask=inside, other=0.0)
        given = k + row[:, None] * k_stride + of_group + i
        key = tl.load(given, mask=inside, other=0.0)
        among += tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if IS_DELTA:
            system += tl.dot(key, tl.trans(key), input_precision=PRECISION)
    left = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
    before = t[:, None] > t[None, :]
    among = tl.where(before | (t[:, None] == t[None, :]), among * left, 0.0)
    tl.store(own + at[:, None] * C + t[None, :], among)
    if IS_DELTA:
        share = tl.load(strengths + row * H + h, mask=here, other=0.0)
        system = tl.where(before, system * left * share[:, None], 0.0)
        solved = _inverse(system, C, C // PART, PART, PRECISION)
        for first in tl.static_range(0, DV, BLOCK):
            j = first + tl.arange(0, BLOCK)[None, :]
            given = v + row[:, None] * v_stride + h * DV + j
            value = tl.load(given, mask=here[:, None] & (j < DV), other=0.0)
            value = tl.dot(solved, value * share[:, None], input_precision=PRECISION)
            tl.store(values + at[:, None] * DV + j, value, mask=j < DV)
        share *= tl.exp(total)
        for first in tl.static_range(0, DK, BLOCK):
            i = first + tl.arange(0, BLOCK)[None, :]
            given = k + row[:, None] * k_stride + of_group + i
            key = tl.load(given, mask=here[:, None] & (i < DK), other=0.0)
            gone = tl.dot(solved, key * share[:, None], input_precision=PRECISION)
            tl.store(replaced + at[:, None] * DK + i, gone, mask=i < DK)


@jit
def _chunk_steps(q: Tensor, q_stride: int, k: Tensor, k_stride: int, values: Tensor,
                 v_stride: int, rows: Tensor, tokens: int, totals: Tensor, own: Tensor,
                 replaced: Tensor, y: Tensor, memory: Tensor, slot_stride: int,
                 before: Tensor, after: Tensor, firsts: Tensor, counts: Tensor,
                 H: constexpr, GROUPS: constexpr, C: constexpr, DK: constexpr,
                 DV: constexpr, IS_DELTA: constexpr, KEYS: constexpr,
                 BLOCK: constexpr, PRECISION: constexpr) -> None:
    """The chunks of one sequence, one head, some dims of its values, one after the other:
    as ``ChunkProducts.run``."""
    s, h = tl.program_id(0), tl.program_id(1)
    i, t = tl.arange(0, KEYS)[None, :], tl.arange(0, C)
    j = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)[None, :]
    in_key, in_value = i < DK, j < DV
    of_group = h // (H // GROUPS) * DK + i
    down = tl.arange(0, KEYS)[:, None]
    tile = (h * DK + down) * DV + j
    in_state = (down < DK) & in_value
    source = memory + tl.load(before + s) * slot_stride
    state = tl.load(source + tile, mask=in_state, other=0.0)
    count = tl.load(counts + s)
    for step in range(count):
        n = tl.load(firsts + step) + s
        row = tl.load(rows + n * C + t)
        here = (row < tokens)[:, None]
        at = (n * H + h) * C + t
        total = tl.load(totals + at)
        whole = tl.load(totals + (n * H + h) * C + C - 1)
        if IS_DELTA:
            value = tl.load(values + at[:, None] * DV + j, mask=in_value, other=0.0)
            gone = tl.load(replaced + at[:, None] * DK + i, mask=in_key, other=0.0)
            value -= tl.dot(gone, state, input_precision=PRECISION)
        else:
            given = values + row[:, None] * v_stride + h * DV + j
            value = tl.load(given, mask=here & in_value, other=0.0)
        of_query = q + row[:, None] * q_stride + of_group
        query = tl.load(of_query, mask=here & in_key, other=0.0)
        query *= tl.exp(total)[:, None]
        out = tl.dot(query, state, input_precision=PRECISION)
        among = tl.load(own + at[:, None] * C + t[None, :])
        out += tl.dot(among, value, input_precision=PRECISION)
        tl.store(y + (row[:, None] * H + h) * DV + j, out, mask=here & in_value)
        of_key = k + row[:, None] * k_stride + of_group
        key = tl.load(of_key, mask=here & in_key, other=0.0)
        key *= tl.exp(whole - total)[:, None]
        state *= tl.exp(whole)
        state += tl.dot(tl.trans(key), value, input_precision=PRECISION)
    target = memory + tl.load(after + s) * slot_stride
    tl.store(target + tile, state, mask=in_state)
# fmt: on


@jit
def _gate_norm(
    y: Tensor,
    gate: Tensor,
    gate_stride: int,
    weight: Tensor,
    out: Tensor,
    eps: float,
    columns: int,
    width: int,
    IS_DELTA: constexpr,
    NORM: constexpr,
    TYPE: constexpr,
    BLOCK: constexpr,
) -> None:
    """One part of a row that is normalized by itself. NORM: 0 none, 1 before the gate, 2
    after it."""
    row = tl.program_id(0)
    first = tl.program_id(1) * columns
    c = tl.arange(0, BLOCK)
    here = c < columns
    x = tl.load(y + row * width + first + c, mask=here, other=0.0)
    given = tl.load(gate + row * gate_stride + first + c, mask=here, other=0.0)
    opened = given.to(tl.float32)
    opened = opened * tl.sigmoid(opened)
    if NORM == 2:
        x = x * opened
    if NORM > 0:
        x = x / tl.sqrt(tl.sum(x * x, 0) / columns + eps)
        of_row = c
        if not IS_DELTA:
            of_row = first + c
        scale = tl.load(weight + of_row, mask=here, other=0.0)
        x = (x.to(TYPE) * scale).to(TYPE)
        x = x.to(tl.float32)
    if NORM < 2:
        x = x * opened
    x = x.to(TYPE)
    tl.store(out + row * width + first + c, x, mask=here)


@cache
def obstacle() -> str:
    """Why Triton compiles no kernel here; empty if it does."""
    try:
        x = torch.zeros(1, 16, device="cuda")
        slots = torch.zeros(1, dtype=torch.int64, device="cuda")
        parts = MixerParts(_same, _same, list(torch.zeros(2, 16, device="cuda")), None)
        convolve(
            parts, x, torch.zeros(1, 16, device="cuda"), (slots, slots), None, True
        )
    except Exception as error:  # a compiler is missing, or a folder to write to
        return repr(error).partition("\n")[0]
    return ""


def _same(x: Tensor) -> Tensor:
    return x


def convolve(
    parts: MixerParts,
    x: Tensor,
    memory: Tensor,
    slots: tuple[Tensor, Tensor],
    places: tuple[Tensor, Tensor] | None,
    silu: bool,
) -> Tensor:
    """x [T, C], whose columns lie side by side -> the convolution [T, C], with its
    activation where ``silu``. ``memory``: the layer's inputs [slots, (K - 1) C], a view.
    ``slots`` int64 [B], before and after. ``places``: the sequence of each row [T], and
    where those begin [B + 1]; None: row b is of sequence b. ``parts.taps`` are rows of
    one matrix."""
    count, channels = x.shape
    y = torch.empty(count, channels, dtype=x.dtype, device=x.device)
    block = min(CHANNELS, triton.next_power_of_2(channels))
    bias = parts.conv_bias
    own, starts = slots if places is None else places
    _convolve[(count, triton.cdiv(channels, block))](
        *(x, x.stride(0), y, parts.taps[0], y if bias is None else bias),
        *(memory, memory.stride(0), *slots, own, starts, channels),
        K=len(parts.taps),
        HAS_BIAS=bias is not None,
        SILU=silu,
        ALONE=places is None,
        TYPE=TYPES[x.dtype],
        BLOCK=block,
        num_warps=WARPS,
    )
    return y


def head_step(
    mixing: Mixing,
    parts: MixerParts,
    channels: Tensor,
    gates: Tensor,
    y: Tensor,
    memory: Tensor,
    slots: tuple[Tensor, Tensor],
    chosen: tuple[Tensor, Tensor] | None,
) -> None:
    """A token of each of some sequences: channels [T, C] after their activation, gates
    [T, n] -> y [T, H, dv] float32, what skips the matrices added. ``memory``: the layer's
    matrices [slots, H dk dv], a view. ``chosen`` int64: the sequences, and their rows;
    None: row b is of sequence b."""
    sequences, rows = slots if chosen is None else chosen
    count = len(channels) if chosen is None else len(rows)
    block = min(VALUES, triton.next_power_of_2(mixing.value_dim))
    skip = parts.decay if parts.skip is None else parts.skip
    _head_step[(count, mixing.heads, triton.cdiv(mixing.value_dim, block))](
        *(channels, channels.stride(0), gates, gates.stride(0)),
        *(parts.decay, parts.step_bias, skip, y),
        *(memory, memory.stride(0), *slots, sequences, rows),
        *(mixing.least_step, mixing.most_step, mixing.strength),
        *(mixing.key_dim**-0.5, LEAST_NORM),
        H=mixing.heads,
        GROUPS=mixing.groups,
        DK=mixing.key_dim,
        DV=mixing.value_dim,
        IS_DELTA=mixing.kind == "delta",
        ALL=chosen is None,
        KEYS=triton.next_power_of_2(mixing.key_dim),
        BLOCK=block,
        num_warps=WARPS,
    )


def gate_norm(mixing: Mixing, parts: MixerParts, y: Tensor, gate: Tensor) -> Tensor:
    """y [T, H, dv] float32, gate [T, H dv], whose columns lie side by side -> [T, H dv]
    as the gate."""
    count, width = gate.shape
    is_delta = mixing.kind == "delta"
    columns = width // (mixing.heads if is_delta else mixing.norm_groups)
    out = torch.empty(count, width, dtype=gate.dtype, device=gate.device)
    block = triton.next_power_of_2(columns)
    _gate_norm[(count, width // columns)](
        *(y, gate, gate.stride(0), gate if parts.norm is None else parts.norm, out),
        *(mixing.norm_eps, columns, width),
        IS_DELTA=is_delta,
        TYPE=TYPES[gate.dtype],
        NORM=("none", "before", "after").index(mixing.norm),
        BLOCK=block,
        num_warps=min(16, max(1, block // 256)),
    )
    return out


def chunk_steps(
    mixing: Mixing,
    rows: HeadRows,
    y: Tensor,
    memory: Tensor,
    slots: tuple[Tensor, Tensor],
    places: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Run the chunks of S sequences: y [T, H, dv] float32 at their rows is what queries
    read. ``memory``: the layer's matrices [slots, H dk dv], a view. ``slots`` int64 [S],
    before and after. ``places``: a piece of StepPlaces."""
    (chunk_rows, firsts, counts), (tokens, heads, value_dim) = places, rows.v.shape
    count = len(chunk_rows) // CHUNK
    is_delta = rows.strengths is not None
    draw = memory.new_empty
    totals, own = draw(count, heads, CHUNK), draw(count, heads, CHUNK, CHUNK)
    values, replaced, strengths = rows.v, totals, rows.decays
    if rows.strengths is not None:
        values = draw(count, heads, CHUNK, value_dim)
        replaced = draw(count, heads, CHUNK, mixing.key_dim)
        strengths = rows.strengths.contiguous()
    q, k, v, decays = rows.q, rows.k, rows.v, rows.decays.contiguous()
    sizes = {
        "H": heads,
        "GROUPS": mixing.groups,
        "C": CHUNK,
        "DK": mixing.key_dim,
        "DV": value_dim,
        "IS_DELTA": is_delta,
        "PRECISION": PRECISION,
    }
    _chunk_products[(count, heads)](
        *(q, q.stride(0), k, k.stride(0), v, v.stride(0), decays, strengths),
        *(chunk_rows, tokens, totals, own, values, replaced),
        **sizes,
        BLOCK=COLUMNS,
        PART=LEAST,
        num_warps=WARPS,
    )
    _chunk_steps[(len(counts), heads, triton.cdiv(value_dim, VALUES))](
        *(q, q.stride(0), k, k.stride(0), values, v.stride(0), chunk_rows, tokens),
        *(totals, own, replaced, y, memory, memory.stride(0), *slots),
        *(firsts, counts),
        **sizes,
        KEYS=max(LEAST, triton.next_power_of_2(mixing.key_dim)),
        BLOCK=VALUES,
        num_warps=WARPS,
        num_stages=STAGES,
    )

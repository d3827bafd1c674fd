"""The body of ``kvlathe::Attend`` in standard ONNX operators: the reference semantics for every ONNX runtime.

One function serves every layer of a plan: what differs between layers is in the index arrays (export/tables.py) and in
the shapes of the weights. docs/attend.md says what is computed; the names of sizes are its. The order of axes is
[H, G, B, Q or N, rank] throughout, so that a gather delivers K and V as the matrix products want them, and one decode
query is a matrix-vector product for each query head.

Everything that only depends on the step (token numbers, page ids, masks) is computed from inputs that all layers share,
by the same nodes in every layer: ONNX Runtime's common-subexpression elimination keeps one copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import FunctionProto, helper

from kvlathe.export import onnx_integer
from kvlathe.export.attend import ATTRIBUTES, node_inputs
from kvlathe.export.layout import CacheLayout, sum_bytes
from kvlathe.export.onnx_body import FLOAT, HALF, INT32, Body
from kvlathe.export.plan import CompressionPlan
from kvlathe.export.tables import Form, pool_name

DOMAIN, NAME, OPSET = "kvlathe", "Attend", 21
NEVER = -1e30
"""A score that no softmax sees. Finite: rows of nobody must not make NaN out of infinities."""


@dataclass(frozen=True)
class State:
    """A softmax state: ``mass`` float [H, G, B, Q, 1], log of the sum of exp; ``out`` float [H, G, B, Q, Rv].

    ``shares`` float [Hs, G, B, Q, N]: the softmax over this part alone, of its own lanes; anything where it is empty.
    """

    mass: str
    out: str
    shares: str


def output_names(plan: CompressionPlan) -> list[str]:
    return ["o", "rows"] + (["mass"] if plan.probe is not None else [])


def attend_function(plan: CompressionPlan, dtype: int = FLOAT, opset: int = OPSET) -> FunctionProto:
    """The function for a plan; ``dtype`` is that of q, k, v, o (onnx FLOAT or FLOAT16). Same plan, same bytes."""
    writer = _Writer(plan, dtype)
    writer.write()
    return helper.make_function(
        DOMAIN,
        NAME,
        node_inputs(plan, 0),
        output_names(plan),
        writer.body.nodes,
        [helper.make_opsetid("", opset)],
        attributes=["layer", "scale", "layout", *ATTRIBUTES],
    )


class _Writer:
    def __init__(self, plan: CompressionPlan, dtype: int) -> None:
        self.plan, self.dtype, self.form, self.body = plan, dtype, Form(plan), Body()
        self.strides = CacheLayout(plan).page_stride
        self.empty: list[str] = []  # for each bucket: which sequences have nothing there, [B, 1]

    def write(self) -> None:
        b = self.body
        self.step()
        q = b.transpose(self.rotated("q", self.plan.model.group_size), 1, 2, 0, 3)  # [H, G, T, W]
        k = b.transpose(b.reshape(self.rotated("k", 1), 0, 0, -1), 1, 0, 2)  # [H, T, W]
        q = b.op("Mul", q, b.cast(b.attribute("scale"), self.dtype))
        if self.plan.projected:
            q = b.op("MatMul", q, b.unsqueeze("proj_q", 1))
            k = b.op("Sub", b.op("MatMul", k, "proj_k"), b.unsqueeze("centre_k", 1))
        k, v = self.hot(k, 0), self.hot("v", 1)
        self.rows(k, v)
        q = b.gather(q, self.own_rows, 2)
        k, v = self.fresh(b.cast(k, self.dtype), b.cast(v, self.dtype))
        states = [self.state(self.scores(q, k), self.weighted(v), self.causal)]
        states += [self.cached(q, bucket) for bucket in range(len(self.plan.buckets))]
        parts = self.parts(states)
        self.pack(self.merged(states, parts))
        if self.plan.probe is not None:
            self.mass(states, parts)

    # -- the step: shared by all layers ----------------------------------------------------------------------------
    def step(self) -> None:
        """Which packed row is query i of sequence b, and back; the causal mask of fresh tokens."""
        b = self.body
        self.starts, ends = b.slice("query_starts", 0, -1), b.slice("query_starts", 1, np.iinfo(np.int32).max)
        rows = b.op("Add", b.unsqueeze(self.starts, 1), "query_offsets")
        last = b.op("Max", b.op("Sub", b.unsqueeze(ends, 1), b.int32(1)), b.int32(0))
        self.own_rows = b.op("Min", rows, last)  # [B, Q]; queries past a sequence's end repeat its last row
        ahead = b.op("Less", b.unsqueeze("query_offsets", 1), "query_offsets")
        self.causal = b.op("Where", ahead, b.float(NEVER), b.float(0))  # [Q, Q]
        tokens = b.arange(b.op("Squeeze", b.op("Shape", "cos" if self.form.rope else "q", start=0, end=1)))
        before = b.cast(b.op("LessOrEqual", ends, b.unsqueeze(tokens, 1)), INT32)  # [T, B]
        last = b.op("Squeeze", b.op("Sub", b.cast(b.op("Shape", ends), INT32), b.int32([1])))
        sequence = b.op("Min", b.op("ReduceSum", before, b.const([1]), keepdims=0), last)
        queries = b.cast(b.op("Shape", "query_offsets"), INT32)
        offset = b.op("Sub", tokens, b.gather(self.starts, sequence, 0))
        offset = b.op("Min", offset, b.op("Sub", queries, b.int32([1])))
        self.places = b.op("Add", b.op("Mul", sequence, queries), offset)  # [T] among B * Q
        self.count = b.op("Shape", b.reshape(self.own_rows, -1))  # [1]: B * Q

    # -- fresh tokens ----------------------------------------------------------------------------------------------
    def rotated(self, x: str, heads: int) -> str:
        """Packed rows -> [T, H, heads, W] after RoPE."""
        return self.even(x, heads) if self.form.even else self.uneven(x)

    def even(self, x: str, heads: int) -> str:
        b, lane = self.body, next(lane for lane in self.plan.lanes if not lane.removed)
        width = lane.input_dim
        if self.form.rope:
            x = b.reshape(x, 0, -1, 2, width // 2)
            cos, sin = b.unsqueeze("cos", 1, 2), b.unsqueeze("sin", 1)
            sin = b.unsqueeze(b.op("Concat", b.op("Neg", sin), sin, axis=1), 1)
            x = b.op("Add", b.op("Mul", x, cos), b.op("Mul", b.gather(x, b.const([1, 0]), 2), sin))
        x = b.reshape(x, 0, -1, heads, width)
        if self.plan.projected or width == lane.rank_k:
            return x
        return b.op("Pad", x, b.const([0] * 7 + [lane.rank_k - width]))

    def uneven(self, x: str) -> str:
        b, grain = self.body, self.form.grain
        padded = b.reshape(b.op("Pad", x, b.const([0, 0, 0, grain])), 0, -1, grain)
        own = b.reshape(b.gather(padded, f"{x}_columns", 1), 0, 0, 0, -1)
        if not self.form.rope:
            return own
        partner = b.reshape(b.gather(padded, f"{x}_partners", 1), 0, 0, 0, -1)
        one = b.cast(b.float(1), self.dtype)
        cos = b.gather(b.op("Pad", "cos", b.const([0, 0, 0, 1]), one), "cos_columns", 1)
        sin = b.op("Pad", b.op("Concat", b.op("Neg", "sin"), "sin", axis=1), b.const([0, 0, 0, 1]))
        return b.op("Add", b.op("Mul", own, cos), b.op("Mul", partner, b.gather(sin, "sin_columns", 1)))

    def hot(self, x: str, part: int) -> str:
        return self.body.cast(x, _float_type(self.form.hot_bits[part]))

    def rows(self, k: str, v: str) -> None:
        """The output ``rows`` from k' [H, T, Rk] and packed v'."""
        b, wide = self.body, _float_type(max(self.form.hot_bits))
        packed = b.reshape(b.transpose(k, 1, 0, 2), 0, -1, self.plan.unit)
        packed = b.reshape(b.gather(packed, "row_units", 1), 0, -1)
        b.output("rows", b.op("Concat", b.cast(packed, wide), b.cast(v, wide), axis=1))

    def fresh(self, k: str, v: str) -> tuple[str, str]:
        """k' [H, T, Rk] and packed v' -> K, V [H, 1, B, Q, R] of each sequence's own tokens."""
        b = self.body
        v = b.gather(b.reshape(v, 0, -1, self.plan.unit), "v_units", 1)  # [T, H, Rv/u, u]
        v = b.reshape(b.transpose(v, 1, 0, 2, 3), 0, 0, -1)
        return tuple(b.unsqueeze(b.gather(x, self.own_rows, 1), 1) for x in (k, v))  # type: ignore[return-value]

    # -- attention -------------------------------------------------------------------------------------------------
    def scores(self, q: str, k: str) -> str:
        """q [H, G, B, Q, R] times k [H, 1, B, N, R]."""
        return self.body.op("MatMul", q, self.body.transpose(k, 0, 1, 2, 4, 3))

    def weighted(self, v: str) -> Callable[[str], str]:
        """From shares [H, G, B, Q, N] to the mean of v [H, 1, B, N, R]."""
        return lambda shares: self.body.op("MatMul", self.body.cast(shares, self.dtype), v)

    def state(self, scores: str, output: Callable[[str], str], mask: str) -> State:
        """scores [H, G, B, Q, N], additive float mask. Softmax in single precision."""
        b = self.body
        scores = b.op("Add", b.cast(scores, FLOAT), mask)
        shares = b.op("Softmax", scores, axis=-1)
        top, share = (b.op("ReduceMax", x, b.const([-1])) for x in (scores, shares))
        return State(b.op("Sub", top, b.op("Log", share)), b.cast(output(shares), FLOAT), shares)

    def cached(self, q: str, bucket: int) -> State:
        """Attention over one bucket; empty where the lane or the sequence has no token there."""
        b = self.body
        if not self.form.shared:
            q = b.gather(q, f"lanes_{bucket}", 0)
        tokens = _Tokens(self, bucket)
        self.empty.append(tokens.none)
        state = self.state(self.cached_scores(q, tokens), self.cached_output(tokens), tokens.mask)
        empty = tokens.empty
        if not self.form.shared:
            place = b.op("Max", f"places_{bucket}", b.int32(0))
            state = State(b.gather(state.mass, place, 0), b.gather(state.out, place, 0), state.shares)
            empty = b.op("Or", empty, b.unsqueeze(self.absent(bucket), 2, 3, 4))
        mass, out = b.op("Where", empty, b.float(NEVER), state.mass), b.op("Where", empty, b.float(0), state.out)
        return State(mass, out, state.shares)

    def absent(self, bucket: int) -> str:
        """Whether a bucket lacks each lane, [H, 1]."""
        return self.body.unsqueeze(self.body.op("Less", f"places_{bucket}", self.body.int32(0)), 1)

    def cached_scores(self, q: str, tokens: _Tokens) -> str:
        if not self.form.integer(tokens.bucket)[0]:
            return self.scores(q, self.read("k", tokens))
        coded = self.coded("k", tokens)
        return onnx_integer.scores(self.body, self.body.cast(q, FLOAT), coded, f"k_groups_{tokens.bucket}")

    def cached_output(self, tokens: _Tokens) -> Callable[[str], str]:
        if not self.form.integer(tokens.bucket)[1]:
            return self.weighted(self.read("v", tokens))
        coded, tier, page = self.coded("v", tokens), self.form.tier(tokens.bucket), self.plan.page_tokens
        if tier.axis_v == "token":
            return lambda shares: onnx_integer.outputs(self.body, shares, coded, tier.group_v)
        groups = f"v_groups_{tokens.bucket}"
        return lambda shares: onnx_integer.outputs_by_rank(self.body, shares, coded, groups, page)

    def read(self, x: str, tokens: _Tokens) -> str:
        """K or V of a bucket [Hs, 1, B, N, R] in the op's type."""
        b, bucket, tier = self.body, tokens.bucket, self.form.tier(tokens.bucket)
        bits = tier.bits_k if x == "k" else tier.bits_v
        if bits >= 16:
            first = b.op("Add", b.op("Mul", b.unsqueeze(tokens.place, 2), f"{x}_steps_{bucket}"), tokens.base(bits))
            rows = b.op("Add", first, f"{x}_units_{bucket}")
            return b.cast(b.reshape(b.gather(pool_name(bits), rows, 0), 0, 0, 0, 0, -1), self.dtype)
        coded = self.coded(x, tokens)
        codes, scale, minimum = b.cast(coded.codes, FLOAT), coded.scale, coded.minimum
        if self.form.axis(bucket, x) == "rank":
            member = b.unsqueeze(b.cast(f"{x}_groups_{bucket}", FLOAT), 1, 2)  # [Hs, 1, 1, g, R]
            scale, minimum = (b.op("MatMul", part, member) for part in (scale, minimum))
            return b.cast(b.op("Add", b.op("Mul", codes, scale), minimum), self.dtype)
        parts = (
            b.op("Shape", scale, start=0, end=4),
            b.const([self.form.steps(bucket, x)]),
            b.op("Shape", scale, start=4),
        )
        codes = b.op("Reshape", codes, b.op("Concat", *parts, axis=0))  # [Hs, 1, B, N/n, n, R]
        scale, minimum = (b.unsqueeze(part, 4) for part in (scale, minimum))
        return b.cast(self.joined(b.op("Add", b.op("Mul", codes, scale), minimum)), self.dtype)

    def joined(self, x: str) -> str:
        """[Hs, 1, B, i, j, R] -> [Hs, 1, B, i * j, R]."""
        b = self.body
        sizes = (b.op("Shape", x, start=0, end=3), b.const([-1]), b.op("Shape", x, start=5))
        return b.op("Reshape", x, b.op("Concat", *sizes, axis=0))

    def coded(self, x: str, tokens: _Tokens) -> onnx_integer.Coded:
        """K or V of a bucket as it is stored: codes [Hs, 1, B, N, R], metadata one number a group."""
        b, bucket, tier = self.body, tokens.bucket, self.form.tier(tokens.bucket)
        meta, steps = self.per_page("pool_f16", f"{x}_meta_{bucket}", 16, tokens), self.form.steps(bucket, x)
        scale_at = tokens.elements(meta, f"{x}_meta_at_{bucket}", steps)
        scale = b.gather(b.reshape(meta, -1), scale_at, 0)
        minimum = b.gather(b.reshape(meta, -1), b.op("Add", scale_at, b.int32(1)), 0)
        sums = self.sums(x, tokens, steps) if tier.sums else None
        return onnx_integer.Coded(self.codes(x, tokens), b.cast(scale, FLOAT), b.cast(minimum, FLOAT), sums)

    def codes(self, x: str, tokens: _Tokens) -> str:
        """Codes of a bucket uint8 [Hs, 1, B, N, R]: runs of ``unit`` codes of a token, or of P codes of a channel."""
        b, bucket, tier = self.body, tokens.bucket, self.form.tier(tokens.bucket)
        unpacked, places = self.unpacked(x, tier.bits_k if x == "k" else tier.bits_v, tokens), f"{x}_code_at_{bucket}"
        of_rank, page = self.form.axis(bucket, x) == "rank", self.plan.page_tokens
        size = self.plan.unit if of_rank else page
        at = tokens.elements(b.reshape(unpacked, 0, 0, -1, size), places, 1 if of_rank else page)
        runs = b.gather(b.reshape(unpacked, -1, size), at, 0)
        if of_rank:
            return b.reshape(runs, 0, 0, 0, 0, -1)
        return self.joined(b.transpose(runs, 0, 1, 2, 3, 5, 4))

    def sums(self, x: str, tokens: _Tokens, group: int) -> str:
        """The stored sums of the groups' codes, float, in the places of their metadata."""
        b, tier = self.body, self.form.tier(tokens.bucket)
        width = sum_bytes(tier.bits_k, tier.group_k) if x == "k" else sum_bytes(tier.bits_v, tier.group_v)
        data = self.per_page("pool_u8", f"{x}_sums_{tokens.bucket}", 8, tokens)
        at = tokens.elements(data, f"{x}_sums_at_{tokens.bucket}", group)
        places = [at, *(b.op("Add", at, b.int32(i)) for i in range(1, width))]
        parts = [b.cast(b.gather(b.reshape(data, -1), place, 0), FLOAT) for place in places]
        total = parts[0]
        for i, part in enumerate(parts[1:], 1):
            total = b.op("Add", total, b.op("Mul", part, b.float(256**i)))
        return total

    def unpacked(self, x: str, bits: int, tokens: _Tokens) -> str:
        """All codes of the pages, uint8 [B, M, codes of a page]. A byte's codes are looked up: shifting it by each of
        their places is ten times slower in ONNX Runtime."""
        b = self.body
        packed = self.per_page("pool_u8", f"{x}_codes_{tokens.bucket}", 8, tokens)
        if bits == 8:
            return packed
        codes = np.arange(256)[:, None] >> np.arange(0, 8, bits) & (1 << bits) - 1
        return b.reshape(b.gather(b.const(codes, np.uint8), b.cast(packed, INT32), 0), 0, 0, -1)

    def per_page(self, pool: str, rows: str, bits: int, tokens: _Tokens) -> str:
        """One kind of data of all pages of the table: [B, M, elements of a page]."""
        b = self.body
        at = b.op("Add", b.unsqueeze(tokens.page_base(bits), 2), rows)
        return b.reshape(b.gather(pool, at, 0), 0, 0, -1)

    def parts(self, states: list[State]) -> list[str]:
        """The share [H, G, B, Q, 1] of each state in the one softmax over all of them."""
        b = self.body
        weights = b.op("Softmax", b.op("Concat", *[state.mass for state in states], axis=-1), axis=-1)
        return b.ops("Split", len(states), weights, axis=-1, num_outputs=len(states))

    def merged(self, states: list[State], parts: list[str]) -> str:
        """The output of the one softmax: [H, G, B, Q, Rv]."""
        b = self.body
        total = b.op("Mul", states[0].out, parts[0])
        for state, part in zip(states[1:], parts[1:], strict=True):
            total = b.op("Add", total, b.op("Mul", state.out, part))
        return b.cast(total, self.dtype)

    def mass(self, states: list[State], parts: list[str]) -> None:
        """The output ``mass``: what the observed rows attend, summed over them and the query heads."""
        b = self.body
        weights = b.gather("probe_weights", self.own_rows, 0)  # [B, Q]
        counts = b.op("Sub", b.slice("query_starts", 1, np.iinfo(np.int32).max), self.starts)
        real = b.op("Less", "query_offsets", b.unsqueeze(counts, 1))
        weights = b.unsqueeze(b.op("Where", real, weights, b.float(0)), 2)  # [B, Q, 1]
        fresh, *cached = [b.transpose(b.op("Mul", part, weights), 0, 1, 2, 4, 3) for part in parts]  # [H, G, B, 1, Q]
        found = [
            self.cached_mass(x, state.shares, bucket)
            for bucket, (x, state) in enumerate(zip(cached, states[1:], strict=True))
        ]
        found.append(self.observed(fresh, states[0].shares))
        b.output("mass", b.transpose(b.op("Concat", *found, axis=2), 1, 0, 2))

    def cached_mass(self, weights: str, shares: str, bucket: int) -> str:
        """[H, B, M * P]; zeros where a bucket lacks the lane or the sequence has nothing there."""
        b, empty = self.body, self.empty[bucket]  # [B, 1]
        if self.form.shared:
            found = self.observed(weights, shares)
        else:
            found = self.observed(b.gather(weights, f"lanes_{bucket}", 0), shares)
            found = b.gather(found, b.op("Max", f"places_{bucket}", b.int32(0)), 0)
            empty = b.op("Or", empty, b.unsqueeze(self.absent(bucket), 2))
        return b.op("Where", empty, b.float(0), found)

    def observed(self, weights: str, shares: str) -> str:
        """weights [H, G, B, 1, Q], shares [H, G, B, Q, N] -> [H, B, N]."""
        return self.body.op("ReduceSum", self.body.op("MatMul", weights, shares), self.body.const([1, 3]), keepdims=0)

    def pack(self, out: str) -> None:
        """[H, G, B, Q, Rv] -> the output ``o``."""
        b, u = self.body, self.plan.unit
        shape = b.op("Concat", b.const([0, 0]), self.count, b.const([-1, u]), axis=0)
        out = b.gather(b.op("Reshape", out, shape), self.places, 2)  # [H, G, T, Rv/u, u]
        out = b.reshape(b.transpose(out, 2, 0, 1, 3, 4), 0, -1, u)
        b.output("o", b.reshape(b.gather(out, "o_units", 1), 0, -1))


class _Tokens:
    """The cached tokens of every sequence in one bucket: N = M * P places, those past the length repeat the last."""

    def __init__(self, writer: _Writer, bucket: int) -> None:
        b, p = writer.body, writer.plan.page_tokens
        self.writer, self.bucket, self.table = writer, bucket, f"page_table_{bucket}"
        length = b.gather("lengths", b.int32([bucket]), 1)  # [B, 1]
        pages = b.op("Shape", self.table, start=1, end=2)
        every = b.arange(b.op("Squeeze", b.op("Mul", pages, b.const([p]))))  # [N]
        token = b.op("Min", every, b.op("Max", b.op("Sub", length, b.int32(1)), b.int32(0)))  # [B, N]
        self.page, self.place = b.op("Div", token, b.int32(p)), b.op("Mod", token, b.int32(p))
        past = b.op("LessOrEqual", length, every)
        self.mask = b.unsqueeze(b.op("Where", past, b.float(NEVER), b.float(0)), 1)  # [B, 1, N]
        self.none = b.op("LessOrEqual", length, b.int32(0))  # [B, 1]
        self.empty = b.unsqueeze(self.none, 1)  # [B, 1, 1]

    def _stride(self, bits: int) -> str:
        return self.writer.body.int32(self.writer.strides[self.bucket] * 8 // bits // self.writer.plan.unit)

    def base(self, bits: int) -> str:
        """First unit row of each token's page, [B, N, 1]."""
        b = self.writer.body
        first = b.op("Mul", b.op("GatherElements", self.table, self.page, axis=1), self._stride(bits))
        return b.unsqueeze(first, 2)

    def page_base(self, bits: int) -> str:
        """First unit row of each page, [B, M]."""
        return self.writer.body.op("Mul", self.table, self._stride(bits))

    def elements(self, data: str, places: str, group: int) -> str:
        """Flat places in data [B, M, E] of the elements of every ``group``-th token: [Hs, 1, B, N / group, R]."""
        b = self.writer.body
        shape = b.cast(b.op("Shape", data), INT32)
        pages, size = b.slice(shape, 1, 2), b.slice(shape, 2, 3)
        sequence = b.unsqueeze(b.arange(b.op("Squeeze", b.op("Shape", "lengths", start=0, end=1))), 1)
        page, place = self.page, self.place
        if group > 1:
            steps = (b.const([0]), b.const([np.iinfo(np.int64).max]), b.const([1]), b.const([group]))
            page, place = (b.op("Slice", x, *steps) for x in (page, place))
            place = b.op("Div", place, b.int32(group))
        first = b.op("Mul", b.op("Add", b.op("Mul", sequence, pages), page), size)
        return b.op("Add", b.gather(places, place, 2), b.unsqueeze(first, 2))


def _float_type(bits: int) -> int:
    return HALF if bits == 16 else FLOAT

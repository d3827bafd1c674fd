"""The body of ``kvlathe::Attend`` in standard ONNX operators: the reference semantics
for every ONNX runtime.

One function serves every layer of a plan: what differs between layers is in the index
arrays (export/attention/tables.py) and in the shapes of the weights. docs/attend.md
says what is computed; the names of sizes are its. The order of axes is [H, G, B, Q or
N, rank] throughout, so that a gather delivers K and V as the matrix products want them,
and one decode query is a matrix-vector product for each query head.

Everything that only depends on the step (token numbers, page ids, masks) is computed
from inputs that all layers share, by the same nodes in every layer: ONNX Runtime's
common-subexpression elimination keeps one copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import FunctionProto, helper

from kvlathe.export.attention.node import ATTRIBUTES, node_inputs, scoring
from kvlathe.export.attention.tables import PlanFacts
from kvlathe.export.onnx import integer as onnx_integer
from kvlathe.export.onnx.body import FLOAT, HALF, INT32, Body
from kvlathe.export.onnx.pages import NEVER, PageReader, Places
from kvlathe.export.onnx.windows import WindowMasks
from kvlathe.plan.plan import CompressionPlan

DOMAIN, NAME, OPSET = "kvlathe", "Attend", 21
FLOATS = {16: HALF, 32: FLOAT}
"""The onnx type of hot numbers, by their bits."""


@dataclass(frozen=True)
class SoftmaxState:
    """As in export/attention/softmax_state.py: ``lse`` float [H, G, B, Q, 1], log of
    the sum of exp; ``out`` float [H, G, B, Q, Rv].

    ``shares`` float [Hs, G, B, Q, N]: the softmax over this part alone, of its own
    lanes; anything where it is empty.
    """

    lse: str
    out: str
    shares: str


def output_names(plan: CompressionPlan) -> list[str]:
    names = ["o", "rows"]
    if plan.index.observes:
        names.append("mass")
    return names


def attend_function(
    plan: CompressionPlan, dtype: int = FLOAT, opset: int = OPSET
) -> FunctionProto:
    """The function for a plan; ``dtype`` is that of q, k, v, o (onnx FLOAT or FLOAT16).
    Same plan, same bytes."""
    writer = _Writer(plan, dtype)
    writer.write()
    return helper.make_function(
        DOMAIN,
        NAME,
        node_inputs(plan, attending(plan)),
        output_names(plan),
        writer.body.nodes,
        [helper.make_opsetid("", opset)],
        attributes=["layer", "scale", "layout", *scoring(plan), *ATTRIBUTES],
    )


def attending(plan: CompressionPlan) -> int:
    """The first layer with attention: inputs are the same for all."""
    return plan.lanes[0].layer


class _Writer:
    def __init__(self, plan: CompressionPlan, dtype: int) -> None:
        self.plan = plan
        self.dtype = dtype
        self.facts = PlanFacts(plan)
        self.body = Body()
        self.reader = PageReader(plan, dtype, self.facts, self.body)
        # For each bucket: which sequences have nothing there, [B, 1].
        self.empty: list[str] = []
        self.windows = (
            WindowMasks(self.body, plan, self.facts) if plan.index.sees_less else None
        )

    def write(self) -> None:
        b = self.body
        self.step()
        q = b.transpose(
            self.rotated("q", self.plan.model.group(attending(self.plan))), 1, 2, 0, 3
        )  # [H, G, T, W]
        k = b.transpose(b.reshape(self.rotated("k", 1), 0, 0, -1), 1, 0, 2)  # [H, T, W]
        q = b.op("Mul", q, b.cast(b.attribute("scale"), self.dtype))
        if self.plan.index.projected:
            q = b.op("MatMul", q, b.unsqueeze("proj_q", 1))
            k = b.op("Sub", b.op("MatMul", k, "proj_k"), b.unsqueeze("centre_k", 1))
        k, v = self.hot(k, 0), self.hot("v", 1)
        self.rows(k, v)
        q = b.gather(q, self.own_rows, 2)
        k, v = self.fresh(b.cast(k, self.dtype), b.cast(v, self.dtype))
        causal = (
            self.causal if self.windows is None else self.windows.fresh(self.causal)
        )
        states = [self.state(self.scores(q, k), self.weighted(v), causal)]
        states += [
            self.cached(q, bucket) for bucket in range(len(self.plan.index.buckets))
        ]
        parts = self.parts(states)
        self.pack(self.merged(states, parts))
        if self.plan.index.observes:
            self.mass(states, parts)

    # -- the step: shared by all layers ------------------------------------------------
    def step(self) -> None:
        """Write which packed row is query i of sequence b, and back; the causal mask of
        fresh tokens."""
        b = self.body
        self.starts, ends = (
            b.slice("cu_seqlens_q", 0, -1),
            b.slice("cu_seqlens_q", 1, np.iinfo(np.int32).max),
        )
        rows = b.op("Add", b.unsqueeze(self.starts, 1), "query_offsets")
        last = b.op("Max", b.op("Sub", b.unsqueeze(ends, 1), b.int32(1)), b.int32(0))
        self.own_rows = b.op(
            "Min", rows, last
        )  # [B, Q]; queries past a sequence's end repeat its last row
        ahead = b.op("Less", b.unsqueeze("query_offsets", 1), "query_offsets")
        self.causal = b.op("Where", ahead, b.float(NEVER), b.float(0))  # [Q, Q]
        tokens = b.arange(
            b.op(
                "Squeeze",
                b.op("Shape", "cos" if self.facts.rope else "q", start=0, end=1),
            )
        )
        before = b.cast(
            b.op("LessOrEqual", ends, b.unsqueeze(tokens, 1)), INT32
        )  # [T, B]
        last = b.op(
            "Squeeze", b.op("Sub", b.cast(b.op("Shape", ends), INT32), b.int32([1]))
        )
        sequence = b.op(
            "Min", b.op("ReduceSum", before, b.const([1]), keepdims=0), last
        )
        queries = b.cast(b.op("Shape", "query_offsets"), INT32)
        offset = b.op("Sub", tokens, b.gather(self.starts, sequence, 0))
        offset = b.op("Min", offset, b.op("Sub", queries, b.int32([1])))
        self.places = b.op(
            "Add", b.op("Mul", sequence, queries), offset
        )  # [T] among B * Q
        self.count = b.op("Shape", b.reshape(self.own_rows, -1))  # [1]: B * Q

    # -- fresh tokens ------------------------------------------------------------------
    def rotated(self, x: str, heads: int) -> str:
        """Packed rows -> [T, H, heads, W] after RoPE."""
        return self.even(x, heads) if self.facts.even else self.uneven(x)

    def even(self, x: str, heads: int) -> str:
        b, lane = self.body, next(lane for lane in self.plan.lanes if not lane.removed)
        width = lane.input_dim
        if self.facts.rope:
            x = b.reshape(x, 0, -1, 2, width // 2)
            cos, sin = b.unsqueeze("cos", 1, 2), b.unsqueeze("sin", 1)
            sin = b.unsqueeze(b.op("Concat", b.op("Neg", sin), sin, axis=1), 1)
            x = b.op(
                "Add",
                b.op("Mul", x, cos),
                b.op("Mul", b.gather(x, b.const([1, 0]), 2), sin),
            )
        x = b.reshape(x, 0, -1, heads, width)
        if self.plan.index.projected or width == lane.rank_k:
            return x
        return b.op("Pad", x, b.const([0] * 7 + [lane.rank_k - width]))

    def uneven(self, x: str) -> str:
        b, grain = self.body, self.facts.grain
        padded = b.reshape(b.op("Pad", x, b.const([0, 0, 0, grain])), 0, -1, grain)
        own = b.reshape(b.gather(padded, f"{x}_columns", 1), 0, 0, 0, -1)
        if not self.facts.rope:
            return own
        partner = b.reshape(b.gather(padded, f"{x}_partners", 1), 0, 0, 0, -1)
        one = b.cast(b.float(1), self.dtype)
        cos = b.gather(b.op("Pad", "cos", b.const([0, 0, 0, 1]), one), "cos_columns", 1)
        sin = b.op(
            "Pad",
            b.op("Concat", b.op("Neg", "sin"), "sin", axis=1),
            b.const([0, 0, 0, 1]),
        )
        return b.op(
            "Add",
            b.op("Mul", own, cos),
            b.op("Mul", partner, b.gather(sin, "sin_columns", 1)),
        )

    def hot(self, x: str, part: int) -> str:
        return self.body.cast(x, FLOATS[self.facts.hot_bits[part]])

    def rows(self, k: str, v: str) -> None:
        """The output ``rows`` from k' [H, T, Rk] and packed v'."""
        b = self.body
        wide = FLOATS[max(self.facts.hot_bits)]
        by_token = b.transpose(k, 1, 0, 2)  # [N, H, Rk]
        units = b.reshape(by_token, 0, -1, self.plan.index.unit)
        if self.plan.index.some_in_keys:
            of_v = b.reshape(b.cast(v, wide), 0, -1, self.plan.index.unit)
            units = b.op("Concat", b.cast(units, wide), of_v, axis=1)
        rows = b.cast(b.reshape(b.gather(units, "row_units", 1), 0, -1), wide)
        if not (self.plan.index.values_in_keys or self.plan.index.some_in_keys):
            rows = b.op("Concat", rows, b.cast(v, wide), axis=1)
        b.output("rows", rows)

    def fresh(self, k: str, v: str) -> tuple[str, str]:
        """k' [H, T, Rk] and packed v' -> K, V [H, 1, B, Q, R] of each sequence's own
        tokens."""
        b = self.body
        v = b.gather(
            b.reshape(v, 0, -1, self.plan.index.unit), "v_units", 1
        )  # [T, H, Rv/u, u]
        v = b.reshape(b.transpose(v, 1, 0, 2, 3), 0, 0, -1)
        return tuple(b.unsqueeze(b.gather(x, self.own_rows, 1), 1) for x in (k, v))  # type: ignore[return-value]

    # -- attention ---------------------------------------------------------------------
    def scores(self, q: str, k: str) -> str:
        """q [H, G, B, Q, R] times k [H, 1, B, N, R]."""
        return self.body.op("MatMul", q, self.body.transpose(k, 0, 1, 2, 4, 3))

    def weighted(self, v: str) -> Callable[[str], str]:
        """From shares [H, G, B, Q, N] to the mean of v [H, 1, B, N, R]."""
        return lambda shares: self.body.op(
            "MatMul", self.body.cast(shares, self.dtype), v
        )

    def state(
        self, scores: str, output: Callable[[str], str], mask: str
    ) -> SoftmaxState:
        """scores [H, G, B, Q, N], additive float mask. Softmax in single precision."""
        b = self.body
        scores = b.op("Add", self.capped(b.cast(scores, FLOAT)), mask)
        shares = b.op("Softmax", scores, axis=-1)
        top, share = (b.op("ReduceMax", x, b.const([-1])) for x in (scores, shares))
        return SoftmaxState(
            b.op("Sub", top, b.op("Log", share)), b.cast(output(shares), FLOAT), shares
        )

    def capped(self, scores: str) -> str:
        """Within the model's bound, where it has one."""
        b = self.body
        if not self.plan.model.softcap:
            return scores
        bound = b.float(self.plan.model.softcap)
        return b.op("Mul", b.op("Tanh", b.op("Div", scores, bound)), bound)

    def cached(self, q: str, bucket: int) -> SoftmaxState:
        """Attention over one bucket; empty where the lane or the sequence has no token
        there."""
        b = self.body
        if not self.facts.shared:
            q = b.gather(q, f"lanes_{bucket}", 0)
        tokens = Places(self.body, self.plan, bucket)
        self.empty.append(tokens.none)
        mask = tokens.mask if self.windows is None else self.windows.cached(tokens)
        state = self.state(
            self.cached_scores(q, tokens), self.cached_output(tokens), mask
        )
        empty = tokens.empty
        if not self.facts.shared:
            place = b.op("Max", f"places_{bucket}", b.int32(0))
            state = SoftmaxState(
                b.gather(state.lse, place, 0),
                b.gather(state.out, place, 0),
                state.shares,
            )
            empty = b.op("Or", empty, b.unsqueeze(self.absent(bucket), 2, 3, 4))
        lse = b.op("Where", empty, b.float(NEVER), state.lse)
        out = b.op("Where", empty, b.float(0), state.out)
        return SoftmaxState(lse, out, state.shares)

    def absent(self, bucket: int) -> str:
        """Whether a bucket lacks each lane, [H, 1]."""
        return self.body.unsqueeze(
            self.body.op("Less", f"places_{bucket}", self.body.int32(0)), 1
        )

    def cached_scores(self, q: str, tokens: Places) -> str:
        if not self.facts.integer(tokens.bucket)[0]:
            return self.scores(q, self.reader.read("k", tokens))
        coded = self.reader.coded("k", tokens)
        return onnx_integer.scores(
            self.body, self.body.cast(q, FLOAT), coded, f"k_groups_{tokens.bucket}"
        )

    def cached_output(self, tokens: Places) -> Callable[[str], str]:
        if not self.facts.integer(tokens.bucket)[1]:
            return self.weighted(self.reader.read("v", tokens))
        coded, tier, page = (
            self.reader.coded("v", tokens),
            self.facts.tier(tokens.bucket),
            self.plan.page_tokens,
        )
        if tier.v.along_tokens:
            return lambda shares: onnx_integer.outputs(
                self.body, shares, coded, tier.group_v
            )
        groups = f"v_groups_{tokens.bucket}"
        return lambda shares: onnx_integer.outputs_by_rank(
            self.body, shares, coded, groups, page
        )

    def parts(self, states: list[SoftmaxState]) -> list[str]:
        """The share [H, G, B, Q, 1] of each state in the one softmax over all of them,
        and over the model's sinks."""
        b = self.body
        terms = [state.lse for state in states]
        if self.plan.model.sinks:
            sinks = b.unsqueeze("sinks", 2, 3, 4)
            terms.append(b.op("Expand", sinks, b.op("Shape", terms[0])))
        count = len(terms)
        weights = b.op("Softmax", b.op("Concat", *terms, axis=-1), axis=-1)
        return b.ops("Split", count, weights, axis=-1, num_outputs=count)[: len(states)]

    def merged(self, states: list[SoftmaxState], parts: list[str]) -> str:
        """The output of the one softmax: [H, G, B, Q, Rv]."""
        b = self.body
        total = b.op("Mul", states[0].out, parts[0])
        for state, part in zip(states[1:], parts[1:], strict=True):
            total = b.op("Add", total, b.op("Mul", state.out, part))
        return b.cast(total, self.dtype)

    def mass(self, states: list[SoftmaxState], parts: list[str]) -> None:
        """The output ``mass``: what the observed rows attend, summed over them and the
        query heads."""
        b = self.body
        weights = b.gather("observation_weights", self.own_rows, 0)  # [B, Q]
        counts = b.op(
            "Sub", b.slice("cu_seqlens_q", 1, np.iinfo(np.int32).max), self.starts
        )
        real = b.op("Less", "query_offsets", b.unsqueeze(counts, 1))
        weights = b.unsqueeze(b.op("Where", real, weights, b.float(0)), 2)  # [B, Q, 1]
        fresh, *cached = [
            b.transpose(b.op("Mul", part, weights), 0, 1, 2, 4, 3) for part in parts
        ]  # [H, G, B, 1, Q]
        masses = [
            self.cached_mass(x, state.shares, bucket)
            for bucket, (x, state) in enumerate(zip(cached, states[1:], strict=True))
        ]
        masses.append(self.observed(fresh, states[0].shares))
        b.output("mass", b.transpose(b.op("Concat", *masses, axis=2), 1, 0, 2))

    def cached_mass(self, weights: str, shares: str, bucket: int) -> str:
        """[H, B, M * P]; zeros where a bucket lacks the lane or the sequence has
        nothing there."""
        b, empty = self.body, self.empty[bucket]  # [B, 1]
        if self.facts.shared:
            mass = self.observed(weights, shares)
        else:
            mass = self.observed(b.gather(weights, f"lanes_{bucket}", 0), shares)
            mass = b.gather(mass, b.op("Max", f"places_{bucket}", b.int32(0)), 0)
            empty = b.op("Or", empty, b.unsqueeze(self.absent(bucket), 2))
        return b.op("Where", empty, b.float(0), mass)

    def observed(self, weights: str, shares: str) -> str:
        """weights [H, G, B, 1, Q], shares [H, G, B, Q, N] -> [H, B, N]: the sum or,
        where prefixes are compacted, the largest (of weights below 0)."""
        b = self.body
        if self.plan.index.compaction:
            each = b.op("Neg", b.transpose(weights, 0, 1, 2, 4, 3))
            return b.op(
                "ReduceMax", b.op("Mul", each, shares), b.const([1, 3]), keepdims=0
            )
        return self.body.op(
            "ReduceSum",
            self.body.op("MatMul", weights, shares),
            self.body.const([1, 3]),
            keepdims=0,
        )

    def pack(self, out: str) -> None:
        """[H, G, B, Q, Rv] -> the output ``o``."""
        b, u = self.body, self.plan.index.unit
        shape = b.op("Concat", b.const([0, 0]), self.count, b.const([-1, u]), axis=0)
        out = b.gather(
            b.op("Reshape", out, shape), self.places, 2
        )  # [H, G, T, Rv/u, u]
        out = b.reshape(b.transpose(out, 2, 0, 1, 3, 4), 0, -1, u)
        b.output("o", b.reshape(b.gather(out, "o_units", 1), 0, -1))

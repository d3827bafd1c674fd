"""Pages hold the codes of ONNX Runtime's quantized GroupQueryAttention where the
formats coincide, and attend alike.

GroupQueryAttention has one symmetric scale a channel: x ~ s q, q = clip(rint(x / s)) in
-2^(b-1) .. 2^(b-1) - 1, two 4-bit codes a byte, channel 2 i in the low half, each plus
8. A page with one group a channel over its tokens has x ~ s c + m. The two coincide
where a channel reaches both ends of the symmetric range: then m = -2^(b-1) s and c = q
+ 2^(b-1).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

from kvlathe.export.attention.eager import AttendLayer
from kvlathe.export.attention.step import StepTensors
from kvlathe.plan.codec import unpack
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import SEAL
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.sessions.host.pages import HostPages
from kvlathe.runtime.sessions.page_moves import FullPage
from tests.export.onnx.test_onnx import session
from tests.support.format_cases import bits_of

Array = np.ndarray
HEADS, GROUP, WIDTH, PAGE, SCALE = 2, 2, 32, 64, 0.2
COLD = 40  # a sealed page, past the bytes of the hot page 0


def on_both_ends(rng: np.random.Generator, steps: Array, bits: int) -> Array:
    """[HEADS, PAGE, WIDTH] of any numbers, each channel reaching the ends of its
    symmetric range in ``steps``."""
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    x = rng.uniform(low, high, (HEADS, PAGE, WIDTH)).astype(np.float32)
    for channel in np.ndindex(HEADS, WIDTH):
        first, second = rng.choice(PAGE, 2, replace=False)
        x[channel[0], [first, second], channel[1]] = low, high
    return x * steps[:, None]


class Gqa:
    """The operator with a cache of ``bits``; ``scales`` of K and of V [HEADS,
    WIDTH]."""

    def __init__(self, bits: int, scales: list[Array]) -> None:
        self.bits, self.kind = (
            bits,
            TensorProto.INT8 if bits == 8 else TensorProto.UINT8,
        )
        floats = {"query": GROUP, "key": 1, "value": 1}
        inputs = [
            helper.make_tensor_value_info(
                n, TensorProto.FLOAT, [1, "S", HEADS * m * WIDTH]
            )
            for n, m in floats.items()
        ]
        inputs += [
            helper.make_tensor_value_info(n, self.kind, [1, HEADS, "P", None])
            for n in ("past_k", "past_v")
        ]
        inputs += [helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, [1])]
        inputs += [helper.make_tensor_value_info("total", TensorProto.INT32, [])]
        names = [value.name for value in inputs] + [""] * 5 + ["k_scale", "v_scale"]
        kind: dict[str, Any] = {
            "k_quant_type": "PER_CHANNEL",
            "v_quant_type": "PER_CHANNEL",
            "kv_cache_bit_width": bits,
        }
        sizes: dict[str, Any] = {
            "num_heads": HEADS * GROUP,
            "kv_num_heads": HEADS,
            "scale": SCALE,
        }
        outputs = ["out", "present_k", "present_v"]
        node = helper.make_node(
            "GroupQueryAttention",
            names,
            outputs,
            domain="com.microsoft",
            **sizes,
            **kind,
        )
        shown = [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)]
        shown += [
            helper.make_tensor_value_info(n, self.kind, None) for n in outputs[1:]
        ]
        fixed = [
            helper.make_tensor(n, TensorProto.FLOAT, (1, HEADS, 1, WIDTH), x.ravel())
            for n, x in zip(("k_scale", "v_scale"), scales, strict=True)
        ]
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        graph = helper.make_graph([node], "gqa", inputs, shown, fixed)
        self.session = session(
            helper.make_model(
                graph, opset_imports=opsets, ir_version=10
            ).SerializeToString()
        )
        packed = np.int8 if bits == 8 else np.uint8
        self.past = [np.zeros((1, HEADS, 0, WIDTH * bits // 8), packed)] * 2

    def __call__(self, q: Array, k: Array, v: Array) -> Array:
        """q [heads, S, WIDTH], k and v [HEADS, S, WIDTH]: attends and appends them; out
        [heads, WIDTH] of the last."""
        rows = (x.transpose(1, 0, 2).reshape(1, x.shape[1], -1) for x in (q, k, v))
        total = np.array(self.past[0].shape[2] + q.shape[1], np.int32)
        feeds = dict(zip(("query", "key", "value"), rows, strict=True)) | {
            "total": total,
            "seqlens_k": total[None] - 1,
        }
        out, *self.past = map(
            np.asarray,
            self.session.run(
                None, feeds | dict(zip(("past_k", "past_v"), self.past, strict=True))
            ),
        )
        return out[0, -1].reshape(-1, WIDTH)

    def codes(self, side: int) -> Array:
        """Codes of K (0) or V (1), from 0 up: [HEADS, tokens, WIDTH]."""
        found = self.past[side][0]
        if self.bits == 8:
            return found.astype(np.int16) + 128
        return np.stack([found & 15, found >> 4], -1).reshape(*found.shape[:2], WIDTH)


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_and_attention_are_those_of_quantized_group_query_attention(
    bits: int,
) -> None:
    rng = np.random.default_rng(bits)
    steps = [
        2.0 ** rng.integers(-8, -4, (HEADS, WIDTH)).astype(np.float32) for _ in "kv"
    ]  # exact in half
    k, v = (on_both_ends(rng, x, bits) for x in steps)
    queries = rng.normal(size=(HEADS * GROUP, PAGE + 1, WIDTH)).astype(np.float32)
    fresh = [
        (rng.integers(-5, 6, (HEADS, 1, WIDTH)) * x[:, None]).astype(np.float32)
        for x in steps
    ]  # whole steps
    gqa = Gqa(bits, steps)
    gqa(queries[:, :PAGE], k, v)
    codes = [gqa.codes(side) for side in (0, 1)]

    shape = ModelShape(1, HEADS * GROUP, HEADS, WIDTH, 64, 97, 256)
    lanes = tuple(Lane(0, h, WIDTH, WIDTH, WIDTH, "none") for h in range(HEADS))
    tier = Tier(bits_of(bits), bits_of(bits), "token", "token", PAGE, PAGE)
    plan = CompressionPlan(
        shape,
        lanes,
        (Group((0, 1), Tier(32, 32), (tier,), SEAL),),
        page_tokens=PAGE,
        prefill_chunk=PAGE,
    )
    host = HostPages(CacheLayout(plan), 1 << 20)
    for h, pair in host.matrices[0].items():
        for part, x in zip(pair, (k, v), strict=True):
            part.write(host.rows[0][0], x[h])
    host.seal([FullPage(0, 0, (COLD,), 0)])
    for h, pair in host.matrices[1].items():
        for part, theirs in zip(pair, codes, strict=True):
            data = host.rows[1][COLD][
                part.data : part.data + WIDTH * PAGE * bits // 8
            ].reshape(WIDTH, -1)
            np.testing.assert_array_equal(unpack(data, part.format).T, theirs[h])

    layer = AttendLayer(plan, 0, SCALE)
    step = StepTensors(
        None,
        None,
        torch.tensor([0, 1], dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        torch.tensor([[0, PAGE]], dtype=torch.int32),
        [
            torch.zeros(1, 1, dtype=torch.int32),
            torch.full((1, 1), COLD, dtype=torch.int32),
        ],
        {name: torch.from_numpy(view) for name, view in host.views.items()},
    )
    rows = [
        torch.from_numpy(np.ascontiguousarray(x[:, -1].reshape(1, -1)))
        for x in (queries, *fresh)
    ]
    out, _ = layer(*rows, step)
    np.testing.assert_allclose(
        out.numpy().reshape(-1, WIDTH),
        gqa(queries[:, PAGE:], *fresh),
        rtol=1e-5,
        atol=2e-6,
    )

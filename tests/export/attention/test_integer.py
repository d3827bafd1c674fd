"""Laws of integer attention: it is the product of the dequantized codes, and nothing is
ever dequantized for it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from kvlathe.export.attention import integer
from kvlathe.export.attention.tables import PlanFacts
from kvlathe.export.onnx import integer as onnx_integer
from kvlathe.export.onnx.attend import OPSET
from kvlathe.export.onnx.body import FLOAT, HALF, Body
from tests.export.attention.test_attend import eager, observed_mass
from tests.export.onnx.test_onnx import session, through_onnx
from tests.support.attend_cases import Case, cases

Array = np.ndarray


def coded(
    rng: np.random.Generator, lanes: int, tokens: int, rank: int, groups: int, bits: int
) -> tuple[Array, ...]:
    """Codes [H, N, R] with scales and minima of ``groups`` [H, N, g] (or transposed by
    the caller), all random."""
    codes = rng.integers(0, 1 << bits, (lanes, tokens, rank)).astype(np.uint8)
    return (
        codes,
        rng.uniform(0, 1, (lanes, tokens, groups)),
        rng.normal(size=(lanes, tokens, groups)),
    )


class Products:
    """Random ragged inputs of both products, and what they are in float64 on the
    dequantized codes.

    ``k`` and ``v``: codes, scale, minimum and the sums of each group's codes, which
    only the ``stored`` form reads.
    """

    def __init__(
        self,
        seed: int,
        ranks: list[int],
        heads: int,
        queries: int,
        pages: int,
        bits: int,
        stored: bool,
    ) -> None:
        rng, group = np.random.default_rng(seed), 32
        self.tokens, lanes, widest, page, self.stored = (
            16,
            len(ranks),
            max(ranks),
            32,
            stored,
        )
        n = pages * page
        counts = [-(-rank // group) for rank in ranks]
        self.member = np.zeros((lanes, max(counts), widest), np.int32)
        for h, rank in enumerate(ranks):
            for c in range(rank):
                self.member[h, c * counts[h] // rank, c] = 1
        self.q = rng.normal(size=(lanes, heads, queries, widest)).astype(np.float32)
        self.q[:, :, :, ranks[0] // 2 :] *= rng.choice([0, 1e-6, 30])
        self.k = [
            x.astype(t)
            for x, t in zip(
                coded(rng, lanes, n, widest, max(counts), bits),
                (np.uint8, *2 * (np.float32,)),
                strict=True,
            )
        ]
        spread = rng.exponential(size=(lanes, heads, queries, n)) ** rng.choice([1, 8])
        spread *= rng.random((1, 1, 1, n)) < 0.8
        self.shares = (spread / spread.sum(-1, keepdims=True).clip(1e-30)).astype(
            np.float32
        )
        codes, scale, low = coded(rng, lanes, n, widest, widest, bits)
        self.v = [
            codes,
            *(x[:, :: self.tokens].astype(np.float32) for x in (scale, low)),
        ]
        self.k.append(
            (self.k[0].astype(np.float32) @ self.member.transpose(0, 2, 1)).astype(
                np.float32
            )
        )
        self.v.append(
            codes.reshape(lanes, -1, self.tokens, widest).sum(2).astype(np.float32)
        )

    def coded(self, side: list[Array], stored: bool) -> integer.Coded:
        codes, scale, low, sums = map(torch.from_numpy, side)
        return integer.Coded(codes, scale, low, sums if stored else None)

    def rounded(self, x: torch.Tensor, member: torch.Tensor, levels: int) -> Array:
        """x as 8-bit numbers hold it, in float64."""
        if self.stored:
            found = integer.Rounded.asymmetric(x, member)
            assert found.low is not None
            return torch.where(
                member, found.whole.double() * found.step + found.low, 0
            ).numpy()
        found = integer.Rounded.symmetric(x, levels)
        return (found.whole.double() * found.step).numpy()

    @property
    def scores(self) -> tuple[Array, Array]:
        """Dequantized product of the same codes, and the sum of its terms' sizes."""
        codes, scale, low, _ = (x.astype(np.float64) for x in self.k)
        values = codes * (scale @ self.member) + low @ self.member
        member = torch.from_numpy(self.member[:, :, None, None] > 0)
        split = torch.where(member, torch.from_numpy(self.q[:, None]), 0.0)
        q = self.rounded(split, member.expand_as(split), integer.LEVELS_Q).sum(1)
        sizes = codes * (np.abs(scale) @ self.member) + np.abs(low) @ self.member
        return q @ values[:, None].mT, np.abs(q) @ sizes[:, None].mT

    @property
    def outputs(self) -> tuple[Array, Array]:
        codes, scale, low, _ = (x.astype(np.float64) for x in self.v)
        values = codes * scale.repeat(self.tokens, 1) + low.repeat(self.tokens, 1)
        split = torch.from_numpy(self.shares).unflatten(-1, (-1, self.tokens))
        p = self.rounded(
            split, torch.ones_like(split, dtype=torch.bool), integer.LEVELS
        ).reshape(self.shares.shape)
        mass = p.sum(-1, keepdims=True).clip(1e-30)
        sizes = codes * np.abs(scale).repeat(self.tokens, 1) + np.abs(low).repeat(
            self.tokens, 1
        )
        return p @ values[:, None] / mass, p @ sizes[:, None] / mass

    @property
    def by_rank(self) -> tuple[Array, Array]:
        """Outputs of values with the codes and groups of the keys: dequantized, the
        shares times their scales as 8 bits."""
        codes, low = (self.k[i].astype(np.float64) for i in (0, 2))
        scaled = torch.from_numpy(
            self.shares[:, None] * self.k[1].transpose(0, 2, 1)[:, :, None, None]
        )
        rounded = integer.Rounded.symmetric(
            scaled.unflatten(-1, (-1, self.tokens)), integer.LEVELS
        )
        p = (
            (rounded.whole.double() * rounded.step).flatten(-2).numpy()
        )  # [H, g, G, Q, N]
        member = self.member[:, :, None, None]
        values, lows = (
            codes[:, None, None],
            (self.shares @ low[:, None]),
        )  # [H, 1, 1, N, R], [H, G, Q, g]
        found = ((p @ values) * member).sum(1) + lows @ self.member[:, None]
        sizes = ((p @ values) * member).sum(1) + (
            self.shares @ np.abs(low)[:, None]
        ) @ self.member[:, None]
        return found, sizes


products = st.builds(
    Products,
    st.integers(0, 2**32 - 1),
    st.lists(st.sampled_from([16, 32, 48, 80, 128]), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([2, 4, 8]),
    st.booleans(),
)


def same(found: Array, expected: tuple[Array, Array]) -> None:
    """To 1e-5 of the sum of the sizes of its terms."""
    exact, size = expected
    assert (np.abs(found - exact) <= 1e-5 * size + 1e-12).all()


@settings(max_examples=60)
@given(products)
def test_integer_products_are_the_dequantized_products_of_the_same_codes(
    x: Products,
) -> None:
    tensor = torch.from_numpy
    same(
        integer.scores(tensor(x.q), x.coded(x.k, x.stored), tensor(x.member)).numpy(),
        x.scores,
    )
    same(integer.outputs(tensor(x.shares), x.coded(x.v, x.stored)).numpy(), x.outputs)
    by_rank = integer.outputs_by_rank(
        tensor(x.shares), x.coded(x.k, False), tensor(x.member), x.tokens
    )
    same(by_rank.numpy(), x.by_rank)


@settings(max_examples=40)
@given(products)
def test_integer_products_with_and_without_sums_err_by_half_a_step(
    x: Products,
) -> None:
    """So they differ by two half steps at most: the stored sums buy nothing but the
    finer step of a one-sided range."""
    member, q = torch.from_numpy(x.member), torch.from_numpy(x.q)
    codes, scale, low, _ = (torch.from_numpy(y).double() for y in x.k)
    keys = codes * (scale @ member.double()) + low @ member.double()
    exact = (q.double() @ keys.unsqueeze(1).mT).numpy()
    spread = (
        torch.where(member[:, :, None, None].bool(), q.unsqueeze(1), 0.0).abs().amax(-1)
    )  # [H, g, G, Q]
    sizes = (keys.abs().unsqueeze(1) * member[:, :, None]).sum(-1)  # [H, g, N]
    # a range of 2 max |q| in 255 steps, or of max |q| in 127: half a step either way is
    # at most max |q| / 254
    allowed = (
        torch.einsum("hcgq,hcn->hgqn", spread.double(), sizes).numpy() / 254 * 1.001
        + 1e-5 * np.abs(exact)
        + 1e-6
    )
    forms = [
        integer.scores(q, x.coded(x.k, stored), member).numpy()
        for stored in (False, True)
    ]
    for form in forms:
        assert (np.abs(form - exact) <= allowed).all()
    assert (np.abs(forms[0] - forms[1]) <= 2 * allowed).all()
    shares = torch.from_numpy(x.shares)
    codes, scale, low, _ = (torch.from_numpy(y).double() for y in x.v)
    values = codes * scale.repeat_interleave(x.tokens, 1) + low.repeat_interleave(
        x.tokens, 1
    )
    exact = (shares.double() @ values.unsqueeze(1)).numpy()
    spread = shares.unflatten(-1, (-1, x.tokens)).amax(-1)  # [H, G, Q, N/n]
    sizes = values.abs().unflatten(1, (-1, x.tokens)).sum(2)  # [H, N/n, R]
    allowed = torch.einsum("hgqp,hpr->hgqr", spread.double(), sizes).numpy() / 510
    moved = (
        x.tokens * spread.double().sum(-1, keepdim=True).numpy() / 510
    )  # of the sum of the shares
    allowed = (
        1.1 * (allowed + moved * (np.abs(exact) + allowed)) / np.maximum(1 - moved, 0.1)
        + 1e-4
    )
    empty = x.shares.sum(-1, keepdims=True) == 0
    for stored in (False, True):
        form = integer.outputs(shares, x.coded(x.v, stored)).numpy()
        assert (empty | (np.abs(form - exact) <= allowed)).all()
    exact = (shares.double() @ keys.unsqueeze(1)).numpy()
    scaled = (
        (shares.unsqueeze(1) * torch.from_numpy(x.k[1]).mT[:, :, None, None])
        .unflatten(-1, (-1, x.tokens))
        .amax(-1)
    )
    sizes = (
        torch.from_numpy(x.k[0]).double().unflatten(1, (-1, x.tokens)).sum(2)
    )  # [H, N/n, R]
    allowed = (
        torch.einsum(
            "hcgqp,hpr,hcr->hgqr", scaled.double(), sizes, member.double()
        ).numpy()
        / 510
        * 1.001
        + 1e-4
    )
    form = integer.outputs_by_rank(
        shares, x.coded(x.k, False), member, x.tokens
    ).numpy()
    assert (np.abs(form - exact) <= allowed).all()


@settings(max_examples=15)
@given(products)
def test_integer_products_of_the_graph_are_too(x: Products) -> None:
    b = Body()
    names = ("codes", "scale", "minimum", "sums")[: 4 if x.stored else 3]
    k, v = (onnx_integer.Coded(*(f"{side}_{part}" for part in names)) for side in "kv")
    b.output("scores", onnx_integer.scores(b, "q", k, "member"))
    b.output("outputs", onnx_integer.outputs(b, "shares", v, x.tokens))
    by_rank = onnx_integer.Coded(k.codes, k.scale, k.minimum)
    b.output(
        "by_rank",
        onnx_integer.outputs_by_rank(b, "shares", by_rank, "member", x.tokens),
    )
    feeds = {"q": x.q[:, :, None], "shares": x.shares[:, :, None], "member": x.member}
    for side, values in (("k", x.k), ("v", x.v)):
        feeds |= {
            f"{side}_{part}": y[:, None, None]
            for part, y in zip(names, values, strict=False)
        }
    inputs = [
        helper.make_tensor_value_info(
            n, helper.np_dtype_to_tensor_dtype(y.dtype), y.shape
        )
        for n, y in feeds.items()
    ]
    outputs = [
        helper.make_tensor_value_info(n, FLOAT, None)
        for n in ("scores", "outputs", "by_rank")
    ]
    graph = helper.make_graph(b.nodes, "products", inputs, outputs)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10
    )
    scores, means, by_rank = map(
        np.asarray, session(model.SerializeToString()).run(None, feeds)
    )
    same(scores[:, :, 0], x.scores)
    same(means[:, :, 0], x.outputs)
    same(by_rank[:, :, 0], x.by_rank)


@settings(max_examples=40)
@given(cases("int"))
def test_attention_on_codes_is_softmax_attention_within_their_steps(case: Case) -> None:
    """Rounding Q moves a score by at most half a step for each channel, rounding P an
    output by half a step."""
    out, rows = eager(case)
    expected_out, expected_rows = case.expected()
    np.testing.assert_allclose(rows, expected_rows, rtol=2e-3, atol=2e-3)
    assert np.sqrt(((out - expected_out) ** 2).mean()) < 0.05


@settings(max_examples=30)
@given(cases("int"))
def test_the_function_is_the_eager_op(case: Case) -> None:
    """A number on the border of two codes may fall to either side."""
    out, rows, *mass = through_onnx(case)
    eager_out, eager_rows = eager(case)
    close = 1e-5 if PlanFacts(case.plan).hot_bits[0] == 32 else 2e-3
    np.testing.assert_allclose(rows, eager_rows, rtol=close, atol=close)
    far = np.abs(out - eager_out)
    assert np.median(far) < 1e-3 and far.max() < 0.1
    for found in mass:
        wrong = np.abs(found - observed_mass(case))
        assert np.median(wrong) < 1e-4 and wrong.max() < 0.1
        assert np.abs(found - case.expected_mass()).max() < 0.2


@settings(max_examples=10)
@given(cases("int"))
def test_half_precision_function_is_attention(case: Case) -> None:
    out, *_ = through_onnx(case, HALF)
    assert np.sqrt(((out - case.expected()[0]) ** 2).mean()) < 0.06

"""Laws of formulas: numpy and torch give the same numbers, which are those of an
independent reference, and nothing that is no arithmetic is read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.plan import formula

KEY_DIFF = "-dot(unit(keys), unit(mean(unit(keys))))"
KEY_NORM = "-norm(keys)"


@st.composite
def lanes(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """Keys and values of one lane, of any number of tokens and any ranks."""
    tokens, rank_k, rank_v, seed = (
        draw(st.integers(low, high))
        for low, high in ((1, 40), (1, 64), (1, 64), (0, 9))
    )
    rng = np.random.default_rng(seed)
    return {
        "keys": rng.normal(size=(tokens, rank_k)),
        "values": rng.normal(size=(tokens, rank_v)),
    }


@given(
    lanes(), st.sampled_from([KEY_DIFF, KEY_NORM, "norm(values) * exp(-norm(keys))"])
)
@settings(deadline=None, max_examples=60)
def test_torch_and_numpy_give_each_token_the_same_number(
    lane: dict[str, np.ndarray], text: str
) -> None:
    formula.check(text)
    there = {name: torch.from_numpy(x) for name, x in lane.items()}
    ours = formula.evaluate(text, lane)
    assert ours.shape == (len(lane["keys"]),)
    assert np.allclose(ours, formula.evaluate(text, there).numpy())


@given(lanes())
@settings(deadline=None, max_examples=30)
def test_key_difference_is_the_cosine_to_the_mean_direction(
    lane: dict[str, np.ndarray],
) -> None:
    """The reference is torch's own cosine similarity, in float64."""
    keys = torch.from_numpy(lane["keys"])
    anchor = F.normalize(keys, dim=-1).mean(0, keepdim=True)
    wanted = -F.cosine_similarity(keys, anchor, dim=-1)
    assert np.allclose(formula.evaluate(KEY_DIFF, lane), wanted.numpy(), atol=1e-9)


@given(lanes())
@settings(deadline=None, max_examples=30)
def test_the_key_norm_is_the_length_of_the_key(lane: dict[str, np.ndarray]) -> None:
    wanted = -np.linalg.norm(lane["keys"], axis=-1)
    assert np.allclose(formula.evaluate(KEY_NORM, lane), wanted)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "keys",
        "norm(mean(keys))",
        "mean(norm(keys))",
        "norm(norm(keys))",
        "dot(keys, values)",
        "norm(keys) + keys",
        "norm(keys, keys)",
        "norm(x=keys)",
        "keys.sum(-1)",
        "__import__('os')",
        "norm(keys) if 1 else 2",
        "[x for x in keys]",
        "norm(keys) ** 2",
        "lambda: keys",
        "keys[0]",
        "'norm(keys)'",
        "True",
        "-" * 400 + "norm(keys)" + "-" * 400,
    ],
)
def test_text_that_gives_no_number_a_token_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        formula.check(text)


def test_a_formula_says_what_it_reads() -> None:
    assert formula.inputs_of(KEY_DIFF) == {"keys"}
    assert formula.inputs_of("norm(values) / norm(keys)") == {"keys", "values"}

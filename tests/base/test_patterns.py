"""Expressions of strangers are matched as Python matches them, or not at all."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlathe.base.limited import LimitError
from kvlathe.base.patterns import fullmatch

EXPRESSIONS = (r".*\.q_proj", r"a(b|c)*d", r"[^.]+\.\d{1,2}\.x", r"(?!a).*", "ä+")


@given(st.sampled_from(EXPRESSIONS), st.text("abcdx.1q_proj\nä", max_size=12))
def test_matches_are_those_of_python(expression: str, text: str) -> None:
    expected = re.fullmatch(expression, text) is not None
    assert fullmatch(expression, text) is expected


def test_an_expression_that_never_ends_is_refused_and_others_go_on() -> None:
    with pytest.raises(LimitError, match="takes more than 2 s"):
        fullmatch("(((a|.)*)*)*!", "model.layers.0.self_attn.q_proj")
    assert fullmatch("a*", "aaa")
    for wrong in ("(", "a{4294967296}", "(?P<x>a)(?P<x>b)"):
        with pytest.raises(LimitError):
            fullmatch(wrong, "a")

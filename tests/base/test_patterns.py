"""Expressions of strangers are matched as Python matches them, or not at all."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlathe.base.patterns import SECONDS, PatternError, Patterns

PATTERNS = Patterns()
EXPRESSIONS = (r".*\.q_proj", r"a(b|c)*d", r"[^.]+\.\d{1,2}\.x", r"(?!a).*", "ä+")


@given(st.sampled_from(EXPRESSIONS), st.text("abcdx.1q_proj\nä", max_size=12))
def test_matches_are_those_of_python(expression: str, text: str) -> None:
    expected = re.fullmatch(expression, text) is not None
    assert PATTERNS.fullmatch(expression, text) == expected


def test_an_expression_that_never_ends_is_refused_and_others_go_on() -> None:
    patterns, began = Patterns(), time.monotonic()
    with pytest.raises(PatternError, match="takes more than"):
        patterns.fullmatch("(((a|.)*)*)*!", "model.layers.0.self_attn.q_proj")
    assert time.monotonic() - began < SECONDS + 5
    assert patterns.fullmatch("a*", "aaa")
    for wrong in ("(", "a{4294967296}", "(?P<x>a)(?P<x>b)"):
        with pytest.raises(PatternError):
            patterns.fullmatch(wrong, "a")

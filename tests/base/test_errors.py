"""A refusal reads as one fact with its reason, then what to do."""

from __future__ import annotations

import pytest

from kvlathe.base.errors import KvlatheError


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("it is so", "it must", "mend it"), "it is so: it must. Mend it."),
        (("it is so.", "it must.", "mend it."), "it is so: it must. Mend it."),
        (("it is so", "", "mend it"), "it is so. Mend it."),
        (("it is so", "it must"), "it is so: it must."),
        (("it is so",), "it is so."),
    ],
)
def test_a_refusal_says_fact_reason_and_remedy(
    words: tuple[str, ...], text: str
) -> None:
    assert str(KvlatheError(*words)) == text

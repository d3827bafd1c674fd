"""Text that others wrote reaches a terminal as text that it does not obey."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from kvlathe.base.console import shown

TEXTS = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("\x1b\x9b\r\n\t"))
)


@given(TEXTS)
def test_control_characters_are_written_out(text: str) -> None:
    """But for new lines and tabs. What they were can be read, and nothing else
    changes."""
    expected = ""
    for each in text:
        control = unicodedata.category(each) == "Cc" and each not in "\n\t"
        expected += f"\\x{ord(each):02x}" if control else each
    assert shown(text) == expected

"""An extension of griffe: examples are code, and shapes such as [token][rank] are no
links."""

from __future__ import annotations

from collections.abc import Iterator

import griffe


def escaped(line: str) -> str:
    """A docstring's line in Markdown. Indented lines are code and stay."""
    return line if line.startswith("    ") else line.replace("][", "]\\[")


def as_markdown(docstring: str) -> Iterator[str]:
    """The lines of a docstring. An example, from its first ``>>>`` to an empty line, is
    a block of code."""
    example = False
    for line in docstring.splitlines():
        if example and not line.strip():
            yield "```"
            example = False
        elif not example and line.startswith(">>> "):
            yield "```pycon"
            example = True
        yield line if example else escaped(line)
    if example:
        yield "```"


class Shapes(griffe.Extension):
    """Rewrites every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = "\n".join(as_markdown(obj.docstring.value))

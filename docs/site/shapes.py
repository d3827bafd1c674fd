"""An extension of griffe: shapes such as [token][rank] are no links."""

from __future__ import annotations

import griffe


def escaped(line: str) -> str:
    """A docstring's line in Markdown. Indented lines are code and stay."""
    return line if line.startswith("    ") else line.replace("][", "]\\[")


class Shapes(griffe.Extension):
    """Escapes brackets that follow each other in every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring is not None:
            lines = obj.docstring.value.splitlines()
            obj.docstring.value = "\n".join(escaped(line) for line in lines)

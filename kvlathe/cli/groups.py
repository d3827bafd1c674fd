"""``kvlathe --help``: the commands by what they are for, each with its whole first
sentence."""

from __future__ import annotations

import click

WHOLE = 1000
"""More characters than a first sentence has."""

GROUPS = {
    "Build": ("build", "calibrate", "methods", "frontier", "native"),
    "Run": ("generate", "chat", "compact"),
    "Serve": ("serve", "dynamo", "triton-repo"),
    "Measure": ("eval", "compare", "bench-serve"),
    "Look": ("inspect", "engines", "doctor"),
}
"""Heading -> its commands, the first ones first."""


class Grouped(click.Group):
    """A group whose help lists its commands by GROUPS. What is in none comes last."""

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        named = {name for names in GROUPS.values() for name in names}
        others = [name for name in self.list_commands(ctx) if name not in named]
        for heading, names in {**GROUPS, "Other": others}.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            rows = [
                (name, first_sentence(command)) for name, command in commands if command
            ]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows, col_max=12)


def first_sentence(command: click.Command) -> str:
    """The first sentence of a command's help, however long it is."""
    return command.get_short_help_str(WHOLE).partition(". ")[0].rstrip(".") + "."

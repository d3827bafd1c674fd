"""``kvlathe methods``: which compression methods there are, and what may be written
behind each. The same list ends the help of ``kvlathe build``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvlathe.base import console
from kvlathe.cli.common import Result, reports

if TYPE_CHECKING:
    from kvlathe.export.methods.options import Option

MISSING = "They are read from the exporter, of which {} is not installed here."


class MethodsHelp(click.Command):
    """A command whose help ends with the methods, in one line each."""

    def format_options(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        super().format_options(ctx, formatter)
        with formatter.section("Methods (their options: kvlathe methods NAME)"):
            try:
                from kvlathe.export.methods.registry import methods
            except ImportError as error:
                formatter.write_text(MISSING.format(error.name))
                return
            formatter.write_dl(
                [(name, method.summary) for name, method in methods().items()]
            )


def show_methods(result: Result) -> None:
    """A table of all methods, or of one method's options."""
    if "methods" in result:
        rows = [
            (row["method"], row["summary"], ", ".join(row["options"]))
            for row in result["methods"]
        ]
        console.print_table("", ("method", "what it does", "options"), rows)
        return
    title = f"{result['method']}: {result['summary']}"
    rows = [(row["option"], row["about"]) for row in result["options"]]
    if rows:
        console.print_table(title, ("option, default first", "what it says"), rows)
    else:
        console.print_pairs("", [(title, "it has no options")])


@click.command("methods")
@click.argument("name", required=False)
@reports(show_methods)
def methods_command(name: str | None) -> Result:
    """List the compression methods, or the options of one.

    build --compression takes NAME, NAME:option=value,option=value, and compositions
    such as fdc+hack:bits=8.
    """
    from kvlathe.export.methods.options import options_of
    from kvlathe.export.methods.registry import method, methods

    if name is None:
        rows: list[Result] = []
        for known, one in methods().items():
            names = [option.name for option in options_of(one.options)]
            rows.append({"method": known, "summary": one.summary, "options": names})
        return {"methods": rows}
    asked = method(name)
    options = [_described(option) for option in options_of(asked.options)]
    return {"method": name, "summary": asked.summary, "options": options}


def _described(option: Option) -> Result:
    return {"option": option.written, "default": option.default, "about": option.about}


COMMANDS = (methods_command,)

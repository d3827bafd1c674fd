"""``kvlathe``: the command line. It parses, calls one function of the part that does
the work, and prints the result.

Exit codes: 0 done; 1 refused, with one line ``error: ...`` on stderr; 2 wrong usage;
130 Ctrl-C.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from kvlathe.base import console
from kvlathe.base.errors import KvlatheError
from kvlathe.base.package import __version__
from kvlathe.cli import bench as cli_bench
from kvlathe.cli import build as cli_build
from kvlathe.cli import chat as cli_chat
from kvlathe.cli import doctor as cli_doctor
from kvlathe.cli import dynamo as cli_dynamo
from kvlathe.cli import evaluate as cli_eval
from kvlathe.cli import frontier as cli_frontier
from kvlathe.cli import methods as cli_methods
from kvlathe.cli import native as cli_native
from kvlathe.cli import run as cli_run
from kvlathe.cli import serve as cli_serve
from kvlathe.cli import show as cli_show
from kvlathe.cli import triton as cli_triton
from kvlathe.cli.groups import Grouped

EPILOG = """\b
A first engine:
  kvlathe build MODEL --output-dir out/mine --compression hack:bits=4
  kvlathe generate out/mine --prompt "def main():" --max-new-tokens 64
MODEL is a checkpoint's folder, a GGUF file or a name on the Hugging Face Hub.

The documentation is in docs/ of the source, and begins with docs/index.md. Flags of
vLLM, llama.cpp and trtllm-build are translated in docs/migrating.md.
"""


LAST_STREAM = 2
"""The file descriptor of standard error."""


def spelling(name: str) -> str:
    """Flags may be written with - or with _, as in --output-dir and --output_dir."""
    return name.replace("_", "-")


@click.group(
    cls=Grouped,
    context_settings={
        "token_normalize_func": spelling,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
    },
    epilog=EPILOG,
)
@click.version_option(__version__, "-V", "--version", prog_name="kvlathe")
def cli() -> None:
    """Compress the KV cache of a decoder LLM, export it as an engine, run the
    engine."""


PARTS = (
    cli_build,
    cli_methods,
    cli_run,
    cli_chat,
    cli_eval,
    cli_frontier,
    cli_serve,
    cli_triton,
    cli_dynamo,
    cli_bench,
    cli_show,
    cli_native,
    cli_doctor,
)

for command in (command for part in PARTS for command in part.COMMANDS):
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run ``kvlathe`` with ``arguments`` (by default the process's own) and exit."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    _open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may be bytes
    sys.exit(run(arguments))


def _open_streams() -> None:
    """Lead standard streams that were closed nowhere: else the next file that is opened
    would be one of them, and take what is printed."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= LAST_STREAM:
        pass
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(nowhere, "w", encoding="utf-8"))


def run(arguments: Sequence[str]) -> int:
    """The exit code of ``kvlathe`` with ``arguments``. Every failure that a user can
    cause ends here, in one line."""
    try:
        code = cli.main(list(arguments), prog_name="kvlathe", standalone_mode=False)
        sys.stdout.flush()
        return code or 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except click.ClickException as error:
        return _failed(arguments, _usage(error), error.exit_code)
    except KvlatheError as error:
        return _failed(arguments, str(error), 1)
    except click.Abort:
        return _failed(arguments, "interrupted.", 130)
    except ModuleNotFoundError as error:
        if (error.name or "kvlathe").split(".")[0] == "kvlathe":
            raise
        return _failed(arguments, _lacking(str(error.name)), 1)
    except OSError as error:
        return _failed(arguments, _system_error(error), 1)


def _lacking(module: str) -> str:
    """A package that is missing, in words. What knows the command's extra says so before
    it works; this is for what nothing asked about."""
    package = module.split(".")[0]
    lacking = f"{package} is not installed"
    return str(KvlatheError("this cannot go on", lacking, f"run pip install {package}"))


def _system_error(error: OSError) -> str:
    """A refusal of the operating system in words. Output that is lost is not written
    again when Python ends."""
    reason = (error.strerror or str(error)).lower()
    if error.filename is not None:
        refused = KvlatheError(f"{error.filename} cannot be used", reason)
        return str(refused)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    refused = KvlatheError(
        "the result cannot be written", reason, "give standard output more room"
    )
    return str(refused)


ELSEWHERE = {
    "--ctx-size": "--max-seq-len",
    "--n-ctx": "--max-seq-len",
    "--n-predict": "--max-new-tokens",
    "--max-tokens": "--max-new-tokens",
    "--parallel": "--max-batch-size",
    "--n-gpu-layers": "--device, or --backend cuda of a build",
    "--kv-cache-dtype": "--compression",
    "--cache-type-k": "--compression",
    "--cache-type-v": "--compression",
    "--quantization": "--weights",
    "--model": "the first word behind the command",
    "--calibration": "--calibration of kvlathe build, whose engine this takes",
}
"""Flags of other programs, and of other commands, and what says the same here:
docs/migrating.md has all."""


def _usage(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    hint = f" See '{context.command_path} --help'." if context else ""
    said = error.format_message()
    if isinstance(error, click.NoSuchOption):
        here = ELSEWHERE.get(error.option_name)
        said = (
            f"No such option '{error.option_name}': here it is {here}" if here else said
        )
    return said + ("" if said.endswith((".", "?")) else ".") + hint


def _failed(arguments: Sequence[str], message: str, code: int) -> int:
    """One line on stderr; scripts that asked for JSON always get one object on
    stdout."""
    console.fail(message)
    if "--json" in arguments:
        print(json.dumps({"error": message}))
    return code


if __name__ == "__main__":
    main()

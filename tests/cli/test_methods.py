"""``kvlathe methods`` and the end of ``kvlathe build --help`` say what the methods
declare."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from kvlathe.cli.build import build_command
from kvlathe.cli.main import cli
from kvlathe.export.methods.compression import parse
from kvlathe.export.methods.options import options_of
from kvlathe.export.methods.registry import methods
from tests.test_architecture import ROOT

LIGHT = """
import sys

FCD = ("--compression", "fcd")
from kvlathe.cli.main import run
assert run(["build", "--help"]) == run(["methods", "uncomp"]) == 0
assert run(["build", "--model", "models/lathe-5m", "--output-dir", "out/no", *FCD]) == 1
heavy = {"torch", "transformers", "onnx", "scipy"} & set(sys.modules)
assert not heavy, heavy
"""


def ask(*words: str) -> Result:
    return CliRunner().invoke(cli, words)


def test_the_help_of_a_build_names_every_method() -> None:
    said = CliRunner().invoke(build_command, ["--help"]).output
    listed = said.partition("Methods (")[2].splitlines()
    names = [
        line.split()[0] for line in listed if line.startswith("  ") and line[2] > " "
    ]
    assert names == list(methods())


@pytest.mark.parametrize("name", methods())
def test_listed_options_of_a_method_can_be_asked_for(name: str) -> None:
    """Each option by its default, and by each other value that it has."""
    found = json.loads(ask("methods", name, "--json").stdout)
    assert found["summary"] == methods()[name].summary
    known = {one.name: one for one in options_of(methods()[name].options)}
    assert [row["option"].partition("=")[0] for row in found["options"]] == list(known)
    for row in found["options"]:
        option, _, values = row["option"].partition("=")
        for value in filter(None, values.split("|")):
            (asked,) = parse(f"{name}:{option}={value}").methods
            written = known[option].kind.write(getattr(asked.options, option))
            assert written == value and asked.written == (option,)


def test_all_methods_are_listed_with_their_options() -> None:
    found = json.loads(ask("methods", "--json").stdout)["methods"]
    assert {row["method"]: row["options"] for row in found} == {
        name: [one.name for one in options_of(method.options)]
        for name, method in methods().items()
    }
    assert "uncomp" in ask("methods").stdout


def test_a_name_that_there_is_not_is_refused_with_the_nearest() -> None:
    refused = ask("methods", "zipcahe")
    assert refused.exit_code == 1
    assert "Did you mean zipcache?" in str(refused.exception)


def test_help_and_refusals_load_no_library_of_builds() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Did you mean fdc?" in done.stderr

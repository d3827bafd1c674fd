"""The command line as scripts see it: exit codes, where output goes, spellings, errors
in one sentence."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from kvlathe.base import console, json_files
from kvlathe.base.errors import KvlatheError
from kvlathe.base.package import __version__
from kvlathe.cli import build as cli_build
from kvlathe.cli import common as cli_common
from kvlathe.cli import evaluate as cli_eval
from kvlathe.cli import main as cli
from kvlathe.cli import run as cli_run
from kvlathe.cli.frontier import frontier_command
from kvlathe.cli.groups import GROUPS, Grouped, first_sentence
from kvlathe.cli.show import rank_table, show_ranks
from kvlathe.export.model.spec import read_spec
from kvlathe.tasks.tasks import read_texts

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "build",
    "methods",
    "calibrate",
    "generate",
    "compact",
    "eval",
    "inspect",
    "engines",
    "compare",
)


def kvlathe(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:  # noqa: ANN401
    command = [sys.executable, "-m", "kvlathe", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)


def test_help_names_every_command_and_is_quick() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = kvlathe("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and all(name in done.stdout for name in COMMANDS)
    # Processor time: the clock also counts what else runs.
    assert after.ru_utime - before.ru_utime < 2.0


def test_help_lists_each_command_once_in_a_group_and_in_whole_sentences(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sorted(sum(GROUPS.values(), ())) == sorted(cli.cli.commands)
    assert cli.run(["--help"]) == 0
    _, *sections = " ".join(capsys.readouterr().out.split()).split("Build:")
    said = "".join(sections)
    assert "..." not in said and "docs/index.md" in said
    for name, command in cli.cli.commands.items():
        sentence = first_sentence(command)
        assert f" {name} {sentence} " in said
        assert " ".join((command.help or "").split()).startswith(sentence)


def test_a_command_of_no_group_is_listed_too() -> None:
    command = click.Command("own", help="Do something. Then more.")
    said = Grouped("x", commands={"own": command}).get_help(click.Context(cli.cli))
    assert "Other:" in said and "own  Do something.\n" in f"{said}\n"


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_the_version_is_said(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([flag]) == 0
    assert __version__ in capsys.readouterr().out


def test_a_shell_completes_commands() -> None:
    environment = {**os.environ, "COMP_WORDS": "kvlathe ser", "COMP_CWORD": "1"}
    environment["_KVLATHE_COMPLETE"] = "bash_complete"
    assert kvlathe(env=environment).stdout.split() == ["plain,serve"]
    assert "_KVLATHE_COMPLETE=bash_source" in (ROOT / "docs" / "cli.md").read_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([name, "--help"]) == 0
    assert "Usage: kvlathe" in capsys.readouterr().out


def test_every_option_says_what_it_does() -> None:
    obvious = {"seed", "prompt", "max_new_tokens", "repetition_penalty", "temperature"}
    for command in cli.cli.commands.values():
        for parameter in command.params:
            if isinstance(parameter, click.Option) and parameter.name not in obvious:
                assert parameter.help, f"{command.name} {parameter.name}"


def test_the_documentation_names_every_flag_and_no_other() -> None:
    parameters = [p for command in leaves(cli.cli) for p in command.params]
    known = {flag for p in parameters for flag in p.opts if flag.startswith("--")}
    negative = {flag for p in parameters for flag in p.secondary_opts}
    assert flags_in("docs/cli.md") - negative == known | {"--help"}
    said = flags_in("README.md") | flags_in("docs/troubleshooting.md")
    assert said <= known | negative | OF_SCRIPTS


OF_SCRIPTS = {"--real"}
"""Flags of scripts/demo.sh."""


def flags_in(name: str) -> set[str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


def leaves(group: click.Group) -> Iterator[click.Command]:
    for command in group.commands.values():
        if isinstance(command, click.Group):
            yield from leaves(command)
        else:
            yield command


def test_flags_are_written_with_either_sign(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for flag in ("--output_dir", "--output-dir"):
        assert (
            cli.run(
                [
                    "build",
                    "--model",
                    str(tmp_path / "none"),
                    flag,
                    str(tmp_path / "out"),
                    "--log_level",
                    "error",
                ]
            )
            == 1
        )
        texts.append(capsys.readouterr().err)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "arguments",
    [
        ["build", "--model", "MISSING", "--output_dir", "OUT"],
        ["generate", "MISSING", "--prompt", "x"],
        ["eval", "MISSING", "--text", "MISSING"],
        ["inspect", "MISSING"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_missing_input_is_one_sentence_and_exit_code_1(
    arguments: list[str], tmp_path: Path
) -> None:
    arguments = [str(tmp_path / x.lower()) if x.isupper() else x for x in arguments]
    done = kvlathe(*arguments)
    assert done.returncode == 1 and done.stdout == ""
    assert (
        done.stderr.startswith("error: ")
        and done.stderr.count("\n") == 1
        and "Traceback" not in done.stderr
    )
    assert not list(tmp_path.iterdir())


def test_json_is_one_object_on_stdout_even_for_a_failure(tmp_path: Path) -> None:
    done = kvlathe("inspect", str(tmp_path), "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"] in done.stderr


def test_wrong_usage_is_exit_code_2() -> None:
    assert kvlathe("generate", "engine").returncode == 2
    assert kvlathe("engines", "prune").returncode == 2


def floats_of(group: click.Group, *words: str) -> Iterator[tuple[str, ...]]:
    """Every option of a float, with its command's words before it."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from floats_of(command, *words, name)
        for parameter in command.params:
            if isinstance(parameter.type, click.types.FloatParamType):
                yield (*words, name, parameter.opts[0])


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e999"])
def test_numbers_that_are_none_are_wrong_usage_of_every_command(
    number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = list(floats_of(cli.cli))
    assert len(options) > 20 and ("engines", "prune", "--max-gib") in options
    for *words, option in options:
        assert cli.run([*words, option, number]) == 2, (words, option)
        assert f"Invalid value for '{option}'" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["nanG", "infG", "0", "-1", "8X", ""])
def test_a_size_that_is_none_is_wrong_usage(
    size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["serve", "engine", "--cache-size", size]) == 2
    assert "is not a size such as 512M or 8G. See" in capsys.readouterr().err


def test_the_root_script_is_the_build_command() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "build_engine.py", "--help"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "Usage: kvlathe build" in done.stdout


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_lead_nowhere(closed: str) -> None:
    program = f"{shlex.quote(sys.executable)} -m kvlathe"
    for command, code in (("methods --json", 0), ("inspect nowhere", 1)):
        line = f"{program} {command} {closed}"
        done = subprocess.run(
            line, shell=True, cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == code and "Traceback" not in done.stderr


WRITES_A_FILE = """
import os, sys
from pathlib import Path
import click
from kvlathe.cli import main as cli
from kvlathe.cli.common import reports

@click.command("writes")
@click.argument("path", type=Path)
@reports(print)
def writes(path):
    with path.open("wb", buffering=0) as file:
        file.write(b"first")
        print("said", flush=True)
        for stream in (1, 2):
            os.write(stream, b"said by C")
        file.write(b"last")
    return {}

cli.cli.add_command(writes)
cli.main(["writes", sys.argv[1]])
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_file_has_nothing_of_what_is_said_to_closed_streams(
    closed: str, tmp_path: Path
) -> None:
    """Else the file that is opened next has the number of a stream that was closed."""
    (tmp_path / "program.py").write_text(WRITES_A_FILE, "utf-8")
    done = subprocess.run(
        f"{shlex.quote(sys.executable)} program.py file {closed}",
        shell=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert (tmp_path / "file").read_bytes() == b"firstlast"


def test_ctrl_c_is_exit_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_path: Path) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_run, "read_text", interrupted)
    assert cli.run(["generate", "engine", "--prompt-file", "x"]) == 130
    assert capsys.readouterr().err.strip().endswith("error: interrupted.")


CTRL_C_WHILE_LOADING = """
import os, signal, sys
class Loads:
    def find_spec(self, name, *_):
        if name == "kvlathe.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Loads())
from kvlathe.cli.entry import main
main()
"""


def test_ctrl_c_while_modules_are_loaded_is_quiet() -> None:
    command = [sys.executable, "-c", CTRL_C_WHILE_LOADING, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_prints_of_libraries_do_not_reach_stdout() -> None:
    """Prints of Python and of C code inside the block go to stderr, also what C had
    only buffered."""
    code = (
        "import ctypes, os\n"
        "from kvlathe.cli.common import only_results_on_stdout\n"
        "with only_results_on_stdout():\n"
        "    print('python'); os.write(1, b'raw\\n'); ctypes.CDLL(None).puts(b'c')\n"
        "print('result')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == "result\n" and set(done.stderr.split()) == {
        "python",
        "raw",
        "c",
    }


def test_a_closed_pipe_is_quiet() -> None:
    line = f"{sys.executable} -m kvlathe.cli.main build --help | head -n 1"
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.startswith("Usage") and done.stderr == ""


def test_a_prompt_that_is_no_text_is_refused(tmp_path: Path) -> None:
    for option in ("--prompt", "--stop"):
        arguments = ["generate", "engine", option, b"\xff\xfe"]
        arguments += [] if option == "--prompt" else ["--prompt", "x"]
        done = subprocess.run(
            [sys.executable, "-m", "kvlathe", *arguments], cwd=ROOT, capture_output=True
        )
        assert done.returncode == 1 and b"Traceback" not in done.stderr
        assert f"{option} cannot be read: it is not UTF-8".encode() in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_output_that_cannot_be_written_is_one_sentence(
    extra: list[str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "kvlathe", "engines", "list", *extra]
    environment = {**os.environ, "KVLATHE_CACHE": str(tmp_path)}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=full, stderr=-1, text=True
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: the result cannot be written: no space left")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_json_that_is_nested_too_deep_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("[" * 300_000)
    with pytest.raises(KvlatheError, match="nested too deep"):
        json_files.read_object(tmp_path / name)
    (tmp_path / "config.json").write_text("[" * 300_000)
    with pytest.raises(KvlatheError, match=r"config\.json"):
        read_spec(tmp_path)
    with pytest.raises(KvlatheError, match="line 1 of"):
        read_texts(tmp_path / name)


def test_a_prompt_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("binary", "absent"):
        with pytest.raises(KvlatheError, match="cannot be read"):
            cli_common.read_text(tmp_path / name)


def test_a_prompt_file_is_read_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "def f():\r\n\treturn 'é'\r \n"
    (tmp_path / "prompt").write_bytes(prompt.encode())
    assert cli_common.read_text(tmp_path / "prompt") == prompt
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(prompt.encode())))
    assert cli_common.read_text(Path("-")) == prompt
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    with pytest.raises(KvlatheError, match="not UTF-8 text"):
        cli_common.read_text(Path("-"))


def test_ranks_are_shown_by_layer_and_head() -> None:
    lanes = [
        {"head": 0, "rank_k": 32, "rank_v": 48, "fill_from": None},
        {"head": 1, "rank_k": 0, "rank_v": 0, "fill_from": 0},
    ]
    assert rank_table(lanes) == (("layer", "head 0", "head 1"), [("0", "32/48", "= 0")])


def test_heads_that_are_alike_are_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    lane = {"rank_k": 64, "rank_v": 48, "fill_from": None}
    alike = [{**lane, "head": head} for _ in range(9) for head in range(2)]
    show_ranks(alike, 64)
    assert capsys.readouterr().out.split("\n")[0].endswith("64/48 in every head")
    show_ranks([{**alike[0], "rank_k": 16}, *alike[1:]], 64)
    assert capsys.readouterr().out.count("64/48") == len(alike) - 1


@pytest.mark.parametrize(
    ("command", "here"),
    [
        (("generate", "MODEL", "--n-predict", "9"), "--max-new-tokens"),
        (("serve", "MODEL", "--ctx-size", "9"), "--max-seq-len"),
        (("serve", "--model", "MODEL"), "the first word"),
        (("build", "MODEL", "--kv-cache-dtype", "fp8"), "--compression"),
    ],
)
def test_a_flag_of_another_program_is_translated(
    command: tuple[str, ...], here: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(command) == 2
    assert f"here it is {here}" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [((), "No model is named"), (("a", "--model", "b"), "both name a model")],
)
def test_a_build_takes_one_model(
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["build", *words, "--output-dir", str(tmp_path / "out")]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_port_that_is_taken_is_refused_before_a_build(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder is no model at all, which only a build would find out."""
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.run(["serve", str(tmp_path), "--port", port]) == 1
    assert f":{port} cannot be listened on" in capsys.readouterr().err


def test_scores_say_what_they_were_measured_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = {"file": "eval.jsonl", "windows": 8, "window_tokens": 2048}
    asked = {"file": "lines.jsonl", "questions": 49, "every": 3, "too_long": 1}
    cli_eval.show_scores(
        {
            "kv_bytes_removed": 0.5156,
            "perplexity": 3.5,
            "kl": None,
            "measured_on": {"text": text, "retrieval": asked},
        }
    )
    shown = " ".join(capsys.readouterr().out.split())
    assert "removed 51.6%" in shown
    assert "perplexity 3.5" in shown and "KL" not in shown
    assert (
        "8 windows of 2048 tokens of eval.jsonl; 49 questions of lines.jsonl (one in 3), 1 more too long"
        in shown
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (3, "3"),
        (1234567, "1,234,567"),
        (0.123456, "0.1235"),
        (2048.5, "2,048"),
        (True, "True"),
    ],
)
def test_numbers_are_shown_short(value: object, shown: str) -> None:
    assert console.cell(value) == shown


def test_slow_work_is_told_of_while_it_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Tells where there is no terminal: after SLOW_SECONDS, every LINE_SECONDS, at the
    end."""
    now = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    with caplog.at_level("INFO", "kvlathe"):
        for _ in console.progress(range(1000), "reading texts"):
            now += 0.125
    assert caplog.messages[0] == "reading texts: 17 of 1,000, 123 s left"
    assert len(caplog.messages) == 6
    assert caplog.messages[-1] == "reading texts: 125.0 s"


def test_progress_passes_everything_on_and_is_silent_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert [*console.progress(range(5), "counting")] == [0, 1, 2, 3, 4]
    assert capsys.readouterr() == ("", "")


def test_a_bar_of_unknown_length_shows_no_question_mark() -> None:
    bars = console._new_bars()
    (count,) = (column for column in bars.columns if isinstance(column, console.Count))
    for total, shown in ((None, "3"), (1200, "3/1,200")):
        task = bars.add_task("counting", total=total, completed=3)
        assert count.render(bars.tasks[task]).plain == shown


@pytest.mark.parametrize(
    ("started", "named"),
    [
        ("/somewhere/kvlathe/__main__.py", "kvlathe"),
        ("/usr/bin/kvlathe", "kvlathe"),
        ("build_engine.py", "build_engine.py"),
    ],
)
def test_a_report_names_the_command_as_one_would_type_it(
    started: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [started, "build", "--model", "a model"])
    assert cli_build.command_line() == f"{named} build --model 'a model'"


@pytest.mark.parametrize(
    ("flags", "bytes_of_weights", "named"),
    [
        ([], 400, ["--compression", "--weights"]),
        ([], 120, ["--compression"]),
        (["--compression", "none"], 400, ["--weights"]),
        (["--compression", "none", "--weights", "float32"], 400, []),
    ],
)
def test_a_build_names_the_flags_that_would_make_its_engine_smaller(
    flags: list[str],
    bytes_of_weights: int,
    named: list[str],
    tmp_path: Path,
    logged: list[str],
) -> None:
    """Where nobody chose them. The file has 100 bytes."""
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(100))
    asked = ["--model", str(file), "--output-dir", "out", *flags]
    with cli_build.build_command.make_context("build", asked):
        result = {"weight_bytes": bytes_of_weights, "weights": "float32"}
        cli_build.name_fewer_bytes(file, result)
    assert [re.findall("--(?:compression|weights)(?= )", x)[0] for x in logged] == named


def test_a_build_with_auto_names_the_command_of_the_frontier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one would type it, and only where ``auto`` chose."""
    said: list[str] = []
    monkeypatch.setattr(cli_build.log, "info", lambda text, *x: said.append(text % x))
    model, engine = Path("models/a b"), Path("out/engine")
    for plain in ("hack:bits=4", "none", "duo:share=0.5"):
        cli_build.name_frontier(model, plain, engine)
    assert not said
    for chosen in ("auto", "auto:arithmetic=int", "fdc+auto"):
        cli_build.name_frontier(model, chosen, engine)
    assert len(said) == 3
    program, name, *options = shlex.split(said[0].split(": ", 1)[1])
    assert (program, name) == ("kvlathe", "frontier")
    asked = frontier_command.make_context(name, options).params
    assert asked["model"] == model and asked["output"] == Path("out/frontier")

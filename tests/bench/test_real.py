"""The programme of public benchmarks: what it counts, what it asks, and what a program
of a model cannot do."""

from __future__ import annotations

import socket
import statistics
from pathlib import Path

import numpy as np
import pytest

from benchmarks.real import sandbox, tables
from benchmarks.real.asking import Asker
from benchmarks.real.engines import ROWS, folder_of
from benchmarks.real.perplexity import loss
from benchmarks.real.results import (
    Cell,
    Mean,
    Record,
    Results,
    average,
    cells,
    differences,
    load,
    save,
)
from benchmarks.real.samples import Sample, contained, parting, read, split, write
from kvlathe.base.errors import KvlatheError
from kvlathe.export.methods.compression import parse
from kvlathe.tasks.metrics import log_softmax
from tests.support.runtime_cases import at_once, llm, text

SAMPLE = Sample("vt@4096", 3, "VAR A = 1", "\nQuestion:", 30, "contains", ("A", "B"))


# -- records ---------------------------------------------------------------------------
def test_a_run_that_was_killed_in_a_line_goes_on_behind_it(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    records = [Record("none", "vt@4096", n, 0.5, 16.0, 4096) for n in range(3)]
    for record in records[:2]:
        Results(file).append(record)
    whole = file.read_text()
    file.write_text(whole[: len(whole) - 20])
    cut = Results(file)
    assert list(cut.known) == [records[0].key]
    cut.append(records[1])
    cut.append(records[2])
    assert Results(file).records == records


def test_kept_cells_are_those_of_the_records(tmp_path: Path) -> None:
    records = [Record("a", "t@1", n, n / 4, 2.0 + n, 9) for n in (2, 0, 1)]
    found = cells(records)
    assert found == [Cell("a", "t@1", 3.0, {0: 0.0, 1: 0.25, 2: 0.5})]
    save(tmp_path / "kept.json", "m", found)
    assert load(tmp_path / "kept.json") == ("m", found)


def test_a_standard_error_is_the_sample_deviation_over_the_root_of_the_count() -> None:
    values = [0.0, 1.0, 1.0, 0.25, 0.5]
    mean = Mean.of(values)
    assert mean.value == pytest.approx(statistics.mean(values))
    assert mean.error == pytest.approx(statistics.stdev(values) / 5**0.5)


def test_the_error_of_a_mean_over_tasks_is_that_of_drawing_all_again() -> None:
    rng = np.random.default_rng(0)
    drawn = rng.random((3, 4, 50_000))  # three tasks of four samples
    spread = drawn.mean(1).mean(0).std()
    errors = drawn.std(1, ddof=1) / 2
    said = [average([Mean(0.5, e, 4) for e in row]).error for row in errors.T[:2000]]
    assert np.sqrt(np.square(said).mean()) == pytest.approx(spread, rel=0.03)


def test_differences_are_those_of_the_same_samples() -> None:
    reference = Cell("none", "t", 16.0, {0: 0.2, 1: 0.9, 2: 0.4})
    own = Cell("a", "t", 4.0, {1: 0.8, 2: 0.3, 7: 1.0})
    assert differences(own, reference) == pytest.approx([-0.1, -0.1])


# -- samples and scores ----------------------------------------------------------------
def test_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    write(tmp_path / "samples.jsonl", [SAMPLE])
    assert read(tmp_path / "samples.jsonl") == [SAMPLE]


class Turns:
    """A tokenizer whose template frames a turn; every character is a token."""

    chat_template = "a template"

    def __init__(self) -> None:
        self.special = {"bos_token": "<"}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord("<")] * add_special_tokens + [ord(x) for x in text]

    def chat_prompt(self, messages: list[dict[str, str]]) -> str:
        return f"[user: {messages[0]['content']}][assistant: "


@pytest.mark.parametrize(
    ("chat", "context", "question"),
    [
        (False, "<a fact. What? b fact.", " What? It is"),
        (True, "[user: a fact. What? b fact.", " What?][assistant: It is"),
    ],
)
def test_a_sample_is_cut_before_its_last_question(
    chat: bool, context: str, question: str
) -> None:
    cut = split(Turns(), "a fact. What? b fact.", " What?", " It is", chat)
    assert cut == (context, question)


def test_scores_are_shares_of_the_answers_and_lengths_before_a_parting() -> None:
    assert contained("the vars are ab and QX", ("AB", "CD", "qx", "EF")) == 0.5
    assert parting([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert parting([1, 2], [1, 2, 3]) == 2


def test_every_row_is_a_request_with_a_folder_of_its_own() -> None:
    assert all(parse(row.partition("@")[0]) for row in ROWS)
    assert len({folder_of(Path(), row) for row in ROWS}) == len(ROWS)


# -- answers of an engine --------------------------------------------------------------
@pytest.mark.parametrize("kind", ["one", "sealed", "budget"])
def test_answers_are_those_of_a_cache_that_has_not_seen_the_question(kind: str) -> None:
    """Each token is the likeliest behind the context as a prompt and the question as
    an answer's beginning."""
    engine = llm("torch", kind)
    tokenizer = engine.tokenizer
    context, question = tokenizer.decode(text(300)), " = open(path)\n"
    sample = Sample("t", 0, context, question, 12, "contains", endless=True)
    asker = Asker(engine)
    [(_, answer)] = asker.answers([sample])
    before = tokenizer.encode(context, False)
    asked = [*before, *tokenizer.encode(question, False)]
    whole = [*asked, *answer.ids]
    rows = range(len(asked) - 1, len(whole) - 1)
    ranked = len(before) if engine.plan.index.ranked else None
    logits = engine.logits(whole, rows, ranked)
    chosen = logits[range(len(rows)), answer.ids]
    assert (logits.max(-1) - chosen < 1e-3).all()
    assert len(answer.ids) == 12
    assert tokenizer.decode(answer.ids) == answer.text


def test_an_answer_ends_before_a_stop_and_not_at_one_in_the_question() -> None:
    engine = llm("torch", "one")
    context = engine.tokenizer.decode(text(100))
    free = Sample("t", 0, context, "\ndef", 12, "contains", endless=True)
    [(_, answer)] = Asker(engine).answers([free])
    stop = answer.text[4:7]
    ends = Sample("t", 0, context, "\ndef", 12, "contains", stop=(stop, "\ndef"))
    [(_, cut)] = Asker(engine).answers([ends])
    assert cut.text == answer.text[: answer.text.index(stop)]


def test_the_loss_of_a_window_is_that_of_its_last_quarter() -> None:
    window = text(256)
    rows = range(191, 255)
    logs = log_softmax(at_once(256)[rows])
    wanted = -logs[range(64), window[192:]].mean()
    assert loss(llm("torch", "one"), list(window)) == pytest.approx(wanted, abs=2e-3)


# -- programs --------------------------------------------------------------------------
def listening() -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("assert sum([1, 2]) == 4", "AssertionError"),
        ("import sys\nsys.exit(0)", "SystemExit"),
        ("import os\nos._exit(0)", "ended the process"),
        ("while True:\n    pass", "ran for"),
        ("x = bytearray(1 << 31)", "MemoryError"),
        ("open('x', 'wb').write(b'1' * (1 << 21))", ""),
        ("def f(:", "SyntaxError"),
    ],
)
def test_a_program_that_is_wrong_or_takes_too_much_fails(
    program: str, why: str
) -> None:
    outcome = sandbox.run(program, seconds=1.5)
    assert not outcome.passed
    assert why in outcome.error


def test_a_program_that_is_right_passes_and_reaches_no_network() -> None:
    with listening() as server:
        reach = f"import socket\nsocket.create_connection({server.getsockname()}, 1)"
        assert sandbox.run("import math\nassert math.isqrt(10) == 3").passed
        assert not sandbox.run(reach).passed


# -- tables ----------------------------------------------------------------------------
def test_tables_go_between_their_marks_and_nothing_else_changes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- m one -->\nold\n<!-- end -->\nb <!-- m two -->\n")
    assert tables.write(page, "m", {"one": "| new |", "gone": "x"}) == ["one"]
    assert page.read_text() == (
        "a\n<!-- m one -->\n| new |\n<!-- end -->\nb <!-- m two -->\n"
    )
    with pytest.raises(KvlatheError, match="has no end"):
        tables.write(page, "m", {"one": "", "two": ""})


def test_the_table_of_ruler_has_the_rows_with_all_tasks_beside_the_uncompressed() -> (
    None
):
    scores = {"none": (1.0, 0.5), "a": (0.5, 0.5)}
    records = [
        Record(row, f"{task}@4096", n, own[n], 16.0, 4096)
        for row, own in scores.items()
        for task in ("vt", "fwe")
        for n in (0, 1)
    ]
    short = Record("b", "vt@4096", 0, 1.0, 4.0, 4096)
    head, none, a = tables.ruler(tables.Table(cells([*records, short])), 4096)
    assert head[2:4] == ["vt", "fwe"]
    assert none[-2] == "+0.0 ± 0.0"
    assert a[-2] == "-25.0 ± 17.7"  # two tasks of half a point, plus or minus 25

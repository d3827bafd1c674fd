"""The examination: its questions are what they say, its measures are the libraries', an
engine beside itself loses nothing, and the page shows what was found."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.cli.main import run
from kvlathe.evaluation import continuations
from kvlathe.evaluation.evaluate import scored_rows
from kvlathe.evaluation.suite import CONTEXT, Exam, kv_bytes, run_suite
from kvlathe.evaluation.suite_page import colour, write_page
from kvlathe.plan.manifest import Limits
from kvlathe.runtime.text.tokenizer import Tokenizer
from kvlathe.tasks import line_retrieval as haystack
from kvlathe.tasks import tasks
from tests.support.runtime_cases import LIMITS, MODEL, engine_folder, llm

TEXT = MODEL.parents[1] / "data" / "eval_text.jsonl"
ENCODER = tasks.FolderEncoder(MODEL)


class Characters:
    """A tokenizer of another kind: one token a character, behind a first one that
    frames every text."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(x) for x in text]


# -- questions -------------------------------------------------------------------------
@settings(max_examples=25)
@given(
    st.integers(120, 1500), st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.integers(0, 99)
)
def test_a_needle_fits_and_lies_where_it_is_said_to(
    tokens: int, depth: float, seed: int
) -> None:
    found = haystack.needle(
        np.random.default_rng(seed), ENCODER, tokens, depth
    ).question
    prompt, answer = (
        Tokenizer(MODEL).decode(ids) for ids in (found.prompt, found.answer)
    )
    *lines, asked = prompt.split("\n")
    named = [
        re.fullmatch(r"line (\w+-\w+): REGISTER_CONTENT is <(\d{5})>", line)
        for line in lines
    ]
    records = [match.groups() for match in named if match]
    assert len(records) == len(lines) == len({name for name, _ in records})
    name, value = records[round(depth * (len(lines) - 1))]
    assert (
        asked == f"What is the REGISTER_CONTENT in line {name}? It is <"
        and answer == f"{value}>"
    )
    assert tokens - 60 < found.tokens <= tokens  # another line would not fit
    again = haystack.needle(
        np.random.default_rng(seed), ENCODER, tokens, depth
    ).question
    assert again == found


def test_any_tokenizer_gets_prompts_of_its_own_length() -> None:
    found = haystack.grid(Characters(), (400, 900), (0.0, 1.0), repeats=2, seed=3)
    assert [x.tokens for x in found] == 4 * [400] + 4 * [900]
    assert all(x.tokens - 100 < x.question.tokens <= x.tokens for x in found)
    assert len({x.question for x in found}) == 8
    assert "".join(map(chr, found[0].question.answer)).endswith(">")
    with pytest.raises(KvlatheError, match="30 tokens cannot be made"):
        haystack.needle(np.random.default_rng(0), Characters(), 30, 0.5)


def test_places_to_continue_are_cut_from_documents() -> None:
    code = "#include <x.h>\n" + "".join(
        f"static int value_{i}(void)\n{{\n\treturn {i} + {i};\n}}\n" for i in range(40)
    )
    prose = "It is a long sentence without any end\n" * 40
    assert (
        continuations.is_code(code)
        and not continuations.is_code(prose)
        and not continuations.is_code("\n")
    )
    for text, wanted in ((code, True), (prose, False)):
        found = continuations.openings(
            np.random.default_rng(0), Characters(), [code, prose], 9, 200, wanted
        )
        assert len(found) == 9
        for opening in found:
            before = "".join(map(chr, opening.prompt[1:]))
            assert (
                len(opening.prompt) <= 200
                and (before + opening.text) == text[-len(before + opening.text) :]
            )
            assert (
                text.endswith(opening.text)
                and len(text) - len(opening.text) >= continuations.BEFORE
            )
            assert not before[-1].isspace() and len(
                continuations.first_line(opening.text)
            ) >= (10 if wanted else 1)
    assert (
        continuations.openings(
            np.random.default_rng(0), Characters(), [prose], 9, 200, True
        )
        == []
    )


def test_edit_similarity_and_rouge_are_their_formulas() -> None:
    same = ["\n  return x;\nmore", "\nbreak;"]
    assert (
        continuations.edit_similarity(same, ["\n\treturn x;\nless", "\n    break;\n"])
        == 1
    )
    # two characters of "abcd" are in "abxy" in order: 2 * 2 / (4 + 4)
    assert continuations.edit_similarity(["abcd"], ["abxy"]) == 0.5
    # two of three words: precision and recall 2 / 3; what the document says later does
    # not count
    assert continuations.rouge_1(
        ["the red fox"], ["a red fox and many other animals"]
    ) == pytest.approx(2 / 3)


# -- the whole -------------------------------------------------------------------------
SMALL = Limits(max_batch_size=4, max_num_tokens=512, max_input_len=512, max_seq_len=640)
EXAM = Exam(
    windows=1, window_tokens=256, repeats=1, samples=3, prompt_tokens=128, new_tokens=8
)


@pytest.fixture(scope="module")
def result() -> dict:
    return run_suite(
        llm("onnx", "one", limits=SMALL), llm("onnx", "one", limits=SMALL), TEXT, EXAM
    )


def test_an_engine_beside_itself_loses_nothing(result: dict) -> None:
    scores = {(row["task"], row["metric"]): row for row in result["scores"]}
    for task, metric in (
        ("text", "perplexity"),
        ("line retrieval", "exact match"),
        ("continuation", "ROUGE-1"),
    ):
        row = scores[task, metric]
        assert row["ratio"] == 1 and row["engine"] == row["baseline"] > 0
    assert (
        scores["line retrieval", "exact match"]["engine"] > 0.8
    )  # the model can do it
    assert 0 < scores["code completion", "edit similarity"]["engine"] <= 1
    for task, metric in (
        ("code completion", "edit similarity"),
        ("continuation", "ROUGE-1"),
    ):
        assert scores[task, f"{metric} with the baseline's"]["engine"] == 1
    assert scores["text", "agreement with the baseline"]["engine"] == 1
    heat = result["heat_map"]
    assert (
        heat["lengths"] == [256, 512]
        and heat["engine"] == heat["baseline"]
        and len(heat["engine"]) == 5
    )
    assert (
        result["measured_on"]["questions"] == 10
        and result["measured_on"]["windows"] == 1
    )


@pytest.mark.slow
def test_a_compressed_engine_is_compared(result: dict) -> None:
    found = run_suite(
        llm("onnx", "coded", limits=SMALL), llm("onnx", "one", limits=SMALL), TEXT, EXAM
    )
    scores = {(row["task"], row["metric"]): row for row in found["scores"]}
    plain = {(row["task"], row["metric"]): row for row in result["scores"]}
    assert (
        scores["text", "perplexity"]["baseline"]
        == plain["text", "perplexity"]["engine"]
    )
    assert scores["text", "perplexity"]["ratio"] > 1
    assert 0.5 < scores["text", "agreement with the baseline"]["engine"] < 1
    assert (
        found["bytes"]["kv_bytes_removed_16bit"]
        > 0.5
        > result["bytes"]["kv_bytes_removed_16bit"]
    )


@pytest.mark.parametrize("kind", ["one", "coded"])
def test_bytes_are_those_of_the_pages_against_a_named_baseline(kind: str) -> None:
    layout = llm("onnx", kind).layout
    found, shape = kv_bytes(layout), layout.plan.model
    pages = {"one": [-(-CONTEXT // 64)], "coded": [1, CONTEXT // 64]}[
        kind
    ]  # 3,000 tokens end inside a page
    assert found["kv_bytes"] == sum(
        n * size for n, size in zip(pages, layout.page_stride, strict=True)
    )
    whole = CONTEXT * 2 * shape.layers * shape.kv_heads * shape.head_dim
    assert found["kv_bytes_removed_16bit"] == pytest.approx(
        1 - found["kv_bytes"] / (2 * whole)
    )
    assert found["kv_bytes_removed_hot_format"] == pytest.approx(
        1 - found["kv_bytes"] / (4 * whole)
    )


def test_windows_of_plans_that_rank_a_prompt_are_scored_behind_it() -> None:
    plain = llm("onnx", "one")
    assert scored_rows(plain, 2048) == range(2047)
    ranked: Any = SimpleNamespace(
        plan=SimpleNamespace(index=SimpleNamespace(ranked=True))
    )
    assert scored_rows(ranked, 2048) == range(1535, 2047)


class Cells(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []

    def handle_data(self, data: str) -> None:
        self.cells += [data.strip()] if data.strip() else []


def test_the_page_shows_every_number(result: dict, tmp_path: Path) -> None:
    shown = result | {
        "engine": {"model": "<m>", "compression": "c", "backend": "b"},
        "baseline": None,
    }
    write_page(shown, tmp_path / "page.html")
    page = Cells()
    page.feed((tmp_path / "page.html").read_text("utf-8"))
    assert {row["metric"] for row in result["scores"]} <= set(page.cells) and any(
        "<m>" in cell for cell in page.cells
    )
    heat = [f"{value:.2f}" for row in result["heat_map"]["engine"] for value in row]
    assert sum(cell in ("0.00", "1.00") for cell in page.cells) == 2 * len(heat)
    assert colour(0) != colour(0.5) != colour(1)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--suite", "--retrieval", "x.jsonl"],
        ["--text", "x.jsonl", "--report", "x.html"],
    ],
)
def test_flags_that_do_not_go_together(
    flags: list[str], capsys: pytest.CaptureFixture
) -> None:
    assert run(["eval", str(engine_folder("one")), *flags]) == 2
    assert "See 'kvlathe eval --help'" in capsys.readouterr().err


def test_limits_too_short_for_any_question_are_named() -> None:
    short = Limits(LIMITS.max_batch_size, 128, 128, 256)
    with pytest.raises(KvlatheError, match="max-input-len"):
        run_suite(llm("onnx", "one", limits=short), None, TEXT, EXAM)

"""Laws of metrics against scipy, of windows and questions, and of evaluation against
what it is made of."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr, softmax

from kvlathe.base.digests import sha256_file
from kvlathe.base.errors import KvlatheError
from kvlathe.evaluation import evaluate as evaluation
from kvlathe.evaluation.evaluate import evaluate
from kvlathe.plan.manifest import KvBytes, Limits
from kvlathe.runtime.text.tokenizer import Tokenizer
from kvlathe.tasks import metrics, tasks
from kvlathe.tasks.metrics import Sums

ROOT = Path(__file__).resolve().parents[2]
LATHE = ROOT / "models" / "lathe-5m"
VOCABULARY = 8192
seeds = st.integers(0, 2**32 - 1)


# -- metrics ---------------------------------------------------------------------------
@given(seeds, st.integers(1, 600), st.integers(2, 40), st.floats(0.1, 60))
def test_perplexity_agreement_and_divergence_are_their_definitions(
    seed: int, rows: int, vocabulary: int, sharp: float
) -> None:
    rng = np.random.default_rng(seed)
    one, other = (
        (sharp * rng.normal(size=(rows, vocabulary))).astype(np.float32),
        rng.normal(size=(rows, vocabulary)),
    )
    other, targets = (
        (sharp * other).astype(np.float32),
        rng.integers(vocabulary, size=rows),
    )
    p, q = (softmax(x.astype(np.float64), -1) for x in (one, other))
    np.testing.assert_allclose(
        np.exp(-metrics.nll(one, targets)), p[np.arange(rows), targets], rtol=1e-9
    )
    np.testing.assert_allclose(
        metrics.kl(one, other),
        rel_entr(p, q.clip(1e-320)).sum(-1),
        rtol=1e-5,
        atol=1e-5,
    )
    assert (metrics.kl(one, other) > -1e-12).all()
    assert metrics.agree(one, one).all() and not metrics.kl(one, one).any()
    assert metrics.exact(one, one.argmax(-1)) and not metrics.exact(
        one, (one.argmax(-1) + 1) % vocabulary
    )


@given(seeds, st.integers(2, 50))
def test_sums_of_parts_are_sums_of_the_whole(seed: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    one, other = rng.normal(size=(2, rows, 7)).astype(np.float32)
    targets, cut = rng.integers(7, size=rows), rows // 2
    parts = Sums.of(one[:cut], targets[:cut], other[:cut]) + Sums.of(
        one[cut:], targets[cut:], other[cut:]
    )
    whole = Sums.of(one, targets, other)
    assert (parts.tokens, parts.agreed) == (whole.tokens, whole.agreed)
    assert (parts.nll, parts.kl) == pytest.approx((whole.nll, whole.kl))


def test_knowing_nothing_costs_the_whole_vocabulary() -> None:
    assert Sums.of(
        np.zeros((9, 50), np.float32), np.arange(9)
    ).perplexity == pytest.approx(50)


# -- tasks -----------------------------------------------------------------------------
@given(
    st.lists(st.lists(st.integers(1, 99), max_size=30), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(2, 20),
)
def test_windows_are_the_documents_in_order(
    documents: list[list[int]], count: int, tokens: int
) -> None:
    stream = [token for document in documents for token in (*document, 0)]
    if len(stream) < 2:
        with pytest.raises(KvlatheError, match="nothing to predict"):
            tasks.windows(documents, 0, count, tokens)
        return
    found = tasks.windows(documents, 0, count, tokens)
    joined = [token for window in found for token in window]
    assert joined == stream[: len(joined)]
    if len(stream) < tokens:
        assert found == [stream]
    else:
        assert {len(window) for window in found} == {tokens} and len(found) == min(
            count, len(stream) // tokens
        )


def test_the_checkpoint_and_the_engine_read_text_alike() -> None:
    ours, engines = tasks.FolderEncoder(LATHE), Tokenizer(LATHE)
    text = "def main():\n    return 'x\u2028y'"
    assert (
        ours.encode(text) == engines.encode(text) and ours.eos_id == engines.eos_ids[0]
    )


def test_every_nth_question_is_read(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    rows: list[dict[str, Any]] = [
        {"prompt": f"line {i}: what is it? ", "answer": f"{i}\u2028>", "position": 0.5}
        for i in range(10)
    ]
    path.write_text(
        "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", "utf-8"
    )
    encoder = tasks.FolderEncoder(LATHE)
    found = tasks.read_questions(path, encoder, every=4)
    assert [x.answer for x in found] == [
        tuple(encoder.encode(rows[i]["answer"])) for i in (0, 4, 8)
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"text": "a"}\nnot json\n', "line 2 of .* cannot be used"),
        ('{"words": "a"}', 'it is not {"text"'),
        ("[1]", "line 1"),
        ('{"text": 3}', "line 1"),
        (
            '{"text": "a"}\n{"text": "b\\udc00"}',
            r"line 2 of .*half of a character, \\udc00",
        ),
    ],
)
def test_evaluation_text_that_cannot_be_used_is_refused(
    content: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text(content, "utf-8")
    with pytest.raises(KvlatheError, match=message):
        tasks.read_texts(path)
    with pytest.raises(KvlatheError, match="cannot be read"):
        tasks.read_texts(tmp_path / "missing.jsonl")


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_a_text(
    tmp_path: Path,
) -> None:
    path = tmp_path / "text.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "\\ud83d\\ude00"}\r\n')
    assert tasks.read_texts(path) == ["a", "\U0001f600"]


# -- evaluation ------------------------------------------------------------------------
@dataclass
class Stub:
    """A model that says the next token of whatever it is given, shifted by a little
    noise: logits are of ``seed``."""

    seed: int = 0
    blur: float = 0.0
    longest: int = 512
    wrong: tuple[int, ...] = ()
    ranked: bool = False

    @property
    def limits(self) -> Limits:
        return Limits(4, 128, self.longest, self.longest)

    @property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(LATHE)

    @property
    def plan(self) -> Any:  # noqa: ANN401
        model = SimpleNamespace(vocab_size=VOCABULARY)
        index = SimpleNamespace(ranked=self.ranked)
        return SimpleNamespace(index=index, model=model, page_tokens=16)

    @property
    def manifest(self) -> Any:  # noqa: ANN401
        sizes = KvBytes(60.0, 100.0, 50.0)
        return SimpleNamespace(kv_bytes=sizes, model="stub", model_digest="stub")

    def logits(
        self, token_ids: Sequence[int], rows: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        rng = np.random.default_rng([self.seed, *token_ids[:20]])
        out = (self.blur * rng.normal(size=(len(token_ids), VOCABULARY))).astype(
            np.float32
        )
        following = np.array([*token_ids[1:], 0])
        out[np.arange(len(token_ids)), following] += 5
        if token_ids[0] in self.wrong:
            out[:, 7] += 50
        return out[list(rows)]

    def logits_in_blocks(
        self, texts: Sequence[Sequence[int]], blocks: Sequence[range]
    ) -> Generator[npt.NDArray[np.float32]]:
        for block in blocks:
            yield np.stack([self.logits(ids, block) for ids in texts])

    def texts_at_once(self, tokens: int, most: int) -> int:
        return min(most, 2)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    text, questions = tmp_path / "text.jsonl", tmp_path / "questions.jsonl"
    words = [
        f"{word} and the rest of the document number {word}, " * 9
        for word in ("one", "two", "three", "four")
    ]
    text.write_text(
        "".join(json.dumps({"text": word}) + "\n" for word in words), "utf-8"
    )
    rows = [{"prompt": f"{word} is <", "answer": f"{word}>"} for word in "abcdef"]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return text, questions


def test_an_engine_evaluated_beside_itself_loses_nothing(
    files: tuple[Path, Path],
) -> None:
    found = evaluate(
        Stub(blur=0.3), Stub(blur=0.3), *files, windows=3, window_tokens=40, every=1
    )
    assert (found["perplexity_ratio"], found["agreement"], found["kl"]) == (1, 1, 0)
    assert found["retrieval_exact_match"] == 1 and found["kv_bytes_per_token"] == 60
    assert found["kv_bytes_removed"] == pytest.approx(0.4)
    assert found["measured_on"]["text"] == {
        "file": "text.jsonl",
        "sha256": sha256_file(files[0]),
        "windows": 3,
        "window_tokens": 40,
    }


def test_evaluation_reports_metrics_of_both_engines_logits(
    files: tuple[Path, Path],
) -> None:
    engine, baseline = Stub(1, 2.0), Stub(2, 1.0)
    found = evaluate(engine, baseline, files[0], windows=2, window_tokens=50)
    encoder = tasks.FolderEncoder(LATHE)
    cut = tasks.windows(
        tasks.encode_documents(encoder, tasks.read_texts(files[0])),
        encoder.eos_id,
        2,
        50,
    )
    ours, theirs = (
        np.concatenate([model.logits(w, range(49)) for w in cut])
        for model in (engine, baseline)
    )
    targets = np.concatenate([w[1:] for w in cut])
    perplexities = [
        float(np.exp(metrics.nll(x, targets).mean())) for x in (ours, theirs)
    ]
    assert found["perplexity"] == pytest.approx(perplexities[0])
    assert found["perplexity_ratio"] == pytest.approx(perplexities[0] / perplexities[1])
    assert found["kl"] == pytest.approx(metrics.kl(theirs, ours).mean())
    assert found["agreement"] == pytest.approx(metrics.agree(theirs, ours).mean())


def test_measures_that_were_not_asked_for_are_none(files: tuple[Path, Path]) -> None:
    found = evaluate(Stub(), text=files[0])
    assert found["perplexity"] > 1
    assert all(
        found[key] is None
        for key in ("perplexity_ratio", "agreement", "kl", "retrieval_exact_match")
    )


def test_answers_are_counted_one_by_one(files: tuple[Path, Path]) -> None:
    first = Tokenizer(LATHE).encode("c is <")[0]
    found = evaluate(Stub(wrong=(first,)), retrieval=files[1], every=2)
    assert found["retrieval_exact_match"] == pytest.approx(2 / 3)
    assert found["measured_on"]["retrieval"]["questions"] == 3


def test_the_baseline_answers_the_same_questions(files: tuple[Path, Path]) -> None:
    first = Tokenizer(LATHE).encode("c is <")[0]
    wrong, right = Stub(wrong=(first,)), Stub()
    found = evaluate(wrong, right, retrieval=files[1], every=2, both=True)
    assert found["retrieval_exact_match"] == pytest.approx(2 / 3)
    assert found["retrieval_exact_match_baseline"] == 1
    found = evaluate(right, wrong, retrieval=files[1], every=2, both=True)
    assert found["retrieval_exact_match_baseline"] == pytest.approx(2 / 3)


def test_windows_shrink_and_long_questions_go(files: tuple[Path, Path]) -> None:
    found = evaluate(Stub(longest=16), Stub(), files[0])
    assert found["measured_on"]["text"]["window_tokens"] == 16
    with pytest.raises(KvlatheError, match=r"no question of .* fits"):
        evaluate(Stub(longest=2), retrieval=files[1])


@given(
    st.integers(0, 900),
    st.integers(1, 900),
    st.sampled_from([100, 5000, 300000]),
    st.integers(1, 3),
)
def test_blocks_are_the_rows_cut_between_pages(
    start: int, count: int, words: int, texts: int
) -> None:
    plan = SimpleNamespace(model=SimpleNamespace(vocab_size=words), page_tokens=16)
    asked: Any = SimpleNamespace(plan=plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "LOGITS_AT_ONCE", 100_000)
        blocks = evaluation.row_blocks(asked, range(start, start + count), texts)
    rows = [row for block in blocks for row in block]
    assert rows == list(range(start, start + count))
    most = max(1, max(1, 100_000 // words) // texts)
    assert all(0 < len(block) <= most for block in blocks)
    if most >= 16:
        assert all(block.start % 16 == 0 for block in blocks[1:])

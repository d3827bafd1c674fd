"""Text in, text out: answers, streams, stop strings and refusals, and loading an engine
folder."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.plan import manifest as manifests
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.requests.engine_thread import Silence
from kvlathe.runtime.scheduling.sequence import Sequence
from kvlathe.runtime.sessions.protocols import StepPlan
from kvlathe.runtime.text.sampling_params import SamplingFields, SamplingParams
from tests.support.runtime_cases import (
    LIMITS,
    MODEL,
    built_folder,
    llm,
    text,
)


def test_streams_are_the_answer_in_pieces() -> None:
    engine, params = llm("torch", "one"), SamplingParams(max_new_tokens=24)
    pieces = list(engine.stream("def main():\n", params))
    assert (
        len(pieces) > 3
        and "".join(pieces) == engine.generate("def main():\n", params)[0].text
    )


def test_streams_may_be_read_in_turns() -> None:
    engine, params = (
        llm("torch", "split"),
        SamplingParams(max_new_tokens=12, ignore_eos=True, stop=("##",)),
    )
    prompts = ["def main():\n", "# Install\n", "import os\n"]
    expected = [answer.text for answer in engine.generate(prompts, params)]
    streams = [engine.stream(prompt, params) for prompt in prompts]
    found = ["", "", ""]
    for turn in 20 * (0, 1, 2):
        found[turn] += next(streams[turn], "")
    assert found == expected and engine.pool.bytes_in_use == 0


def test_a_stop_string_ends_the_text_before_it() -> None:
    engine = llm("torch", "one")
    whole = engine.generate(
        "def main():\n", SamplingParams(max_new_tokens=40, ignore_eos=True)
    )[0]
    stop = whole.text[len(whole.text) // 2 :][:3]
    cut = engine.generate(
        "def main():\n",
        SamplingParams(max_new_tokens=40, ignore_eos=True, stop=(stop,)),
    )[0]
    assert (
        cut.finish_reason == "stop" and cut.text == whole.text[: whole.text.index(stop)]
    )
    assert len(cut.token_ids) < len(whole.token_ids) and engine.pool.bytes_in_use == 0


def test_the_ending_token_ends_the_text_and_is_not_part_of_it() -> None:
    engine = llm("torch", "one")
    first = engine.generate(
        [list(text(40))], SamplingParams(max_new_tokens=5, ignore_eos=True)
    )[0]
    engine.engine.stop_ids = frozenset({first.token_ids[2]})
    at = first.token_ids.index(first.token_ids[2])
    answer = engine.generate([list(text(40))], SamplingParams(max_new_tokens=5))[0]
    assert (
        answer.finish_reason == "stop" and answer.token_ids == first.token_ids[: at + 1]
    )
    assert (
        answer.timings.prefill_tokens == 40
        and answer.timings.prefill_tokens_per_second > 0
    )


# -- refusals --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("prompts", "new", "said"),
    [
        ([[]], 4, "the prompt is empty"),
        ([""], 4, "the prompt is empty"),
        ([[5] * 3073], 4, "maximum input length is 3072 tokens"),
        ([[5] * 3000], 2000, "maximum context length is 4096 tokens"),
        ([[5, 8192]], 4, "out of range"),
        (b"abc", 4, "a text or a list of token ids"),
        ([b"abc"], 4, "a text or a list of token ids"),
        ([5.0, 6.0], 4, "a text or a list of token ids"),
        ([[5, 6.5]], 4, "a text or a list of token ids"),
        ([[True]], 4, "a text or a list of token ids"),
        ([["5"]], 4, "a text or a list of token ids"),
        (5, 4, "a text or a list of token ids"),
        (np.array([5.0, 6.0]), 4, "a text or a list of token ids"),
        ([[5, -1]], 4, "out of range"),
        ("\ud800", 4, "half of a character"),
    ],
)
def test_prompts_that_cannot_be_served_are_refused_before_a_step(
    prompts: Any,  # noqa: ANN401
    new: int,
    said: str,
) -> None:
    engine = llm("torch", "one")
    with pytest.raises(KvlatheError, match=re.escape(said)):
        engine.generate(prompts, SamplingParams(max_new_tokens=new))
    assert engine.pool.bytes_in_use == 0 and not engine.engine.scheduler.waiting


@pytest.mark.parametrize("params", ["x", {"max_new_tokens": 4}, [None], [4]])
def test_parameters_that_are_no_sampling_params_are_refused(params: Any) -> None:  # noqa: ANN401
    with pytest.raises(KvlatheError, match="must be SamplingParams"):
        llm("torch", "one").generate([5], params)


def test_fields_of_sampling_params_may_be_keyword_arguments() -> None:
    engine, params = llm("torch", "one"), SamplingParams(max_new_tokens=3)
    expected = engine.generate("def main():", params)[0]
    assert len(expected.token_ids) == 3
    assert engine.generate("def main():", max_new_tokens=3)[0].text == expected.text
    assert "".join(engine.stream("def main():", max_new_tokens=3)) == expected.text
    answers = asyncio.run(engine.agenerate("def main():", max_new_tokens=3))
    assert answers[0].token_ids == expected.token_ids


def test_keyword_arguments_that_are_no_sampling_parameters_are_refused() -> None:
    engine = llm("torch", "one")
    given: Any = {"max_tokens": 3}
    with pytest.raises(KvlatheError, match="Say max_new_tokens"):
        engine.generate("x", **given)
    with pytest.raises(KvlatheError, match="top_p is 2: it must be"):
        engine.generate("x", top_p=2)
    with pytest.raises(KvlatheError, match="max_new_tokens came beside params"):
        engine.generate("x", SamplingParams(), max_new_tokens=3)


def test_keyword_arguments_are_the_fields_of_sampling_params() -> None:
    fields = {field.name: field.type for field in dataclasses.fields(SamplingParams)}
    keywords = SamplingFields.__annotations__
    assert fields == {name: kind.__forward_arg__ for name, kind in keywords.items()}


def test_no_prompts_have_no_answers() -> None:
    engine = llm("torch", "one")
    request = engine.thread.submit([])
    assert request.done.wait(0), "a caller would wait for ever"
    assert engine.generate([]) == [] == asyncio.run(engine.agenerate([]))


def test_numpys_token_ids_are_a_prompt() -> None:
    engine, params = llm("torch", "one"), SamplingParams(max_new_tokens=3)
    ids = np.array(text(20), np.int32)
    expected = engine.generate([ids.tolist()], params)[0].token_ids
    as_given: tuple[Any, ...] = (ids, [ids], list(ids))
    for prompts in as_given:
        assert engine.generate(prompts, params)[0].token_ids == expected


def test_each_prompt_has_its_own_parameters_or_all_the_same() -> None:
    engine = llm("torch", "one")
    each = [SamplingParams(max_new_tokens=n) for n in (1, 2, 3)]
    answers = engine.generate([[5], [6], [7]], each)
    assert [len(answer.token_ids) for answer in answers] == [1, 2, 3]
    with pytest.raises(KvlatheError, match="2 prompts came with 3"):
        engine.generate([[5], [6]], each)


def test_a_request_that_can_never_fit_is_refused() -> None:
    with pytest.raises(KvlatheError, match="does not fit"):
        llm("torch", "one", tokens=64).generate(
            [list(text(700))], SamplingParams(max_new_tokens=500)
        )


def test_steps_of_several_texts_have_their_shortest_chunks_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last text gets what a step has left. Logits go to the texts as ever."""
    engine, counts = llm("torch", "one"), list[list[int]]()
    run = engine.session.run

    def seen(step: StepPlan) -> npt.NDArray[np.float32]:
        counts.append(np.diff(step.cu_seqlens_q).tolist())
        return run(step)

    monkeypatch.setattr(engine.session, "run", seen)
    size = LIMITS.max_num_tokens * 2 // 5
    texts = [list(text(size + 1, 50 * i)) for i in range(3)]
    (found,) = engine.logits_in_blocks(texts, [range(size - 2, size)])
    assert [len(one) for one in counts] == [3, 1]
    assert all(one == sorted(one) for one in counts)
    for one, logits in zip(texts, found, strict=True):
        alone = engine.logits(one, range(size - 2, size))
        np.testing.assert_allclose(logits, alone, rtol=1e-3, atol=1e-3)


def test_a_request_leaves_the_callers_tokens_alone() -> None:
    engine, tokens = llm("torch", "one"), list(text(5))
    request = engine.sequence(tokens, SamplingParams(max_new_tokens=3, ignore_eos=True))
    engine.thread.wait(engine.thread.submit([request], lambda _: None))
    assert request.tokens[:5] == tokens == list(text(5)) and len(request.tokens) == 8


@pytest.mark.parametrize("kind", ["split", "sealed", "budget"])
def test_the_longest_sequence_fits_and_no_longer_one(kind: str) -> None:
    made = llm("torch", kind, 300)
    most = made.most_tokens
    assert 0 < most < made.limits.max_seq_len
    prompt = list(text(most - 1))
    made.engine.scheduler.check(made.sequence(prompt, SamplingParams(max_new_tokens=1)))
    assert not made.pool.fits([made.pool.worst_pages(most + 1)])
    assert llm("torch", kind).most_tokens == made.limits.max_seq_len


# -- engine folders --------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return built_folder(tmp_path)


@pytest.mark.slow
def test_an_engine_folder_alone_loads_and_answers(folder: Path) -> None:
    engine = LLM.load(folder, threads=2)
    question = json.loads(
        (MODEL.parents[1] / "data" / "line_retrieval.jsonl").read_text().splitlines()[0]
    )
    answer = engine.generate(
        question["prompt"], SamplingParams(max_new_tokens=10, stop=("\n",))
    )[0]
    assert answer.text.startswith(question["answer"])
    assert engine.manifest is not None and engine.manifest.model == "lathe-5m"
    assert engine.pool.arena_bytes >= LIMITS.max_batch_size * engine.layout.bytes_for(
        LIMITS.max_seq_len
    )


@pytest.mark.parametrize("changed", ["vocab_size", "rank_v"])
def test_a_graph_of_another_plan_is_refused(folder: Path, changed: str) -> None:
    """Though everything is signed: it would fail in its first step."""
    raw = json.loads((folder / manifests.PLAN_FILE).read_text())
    holder = raw["model"] if changed == "vocab_size" else raw["lanes"][0]
    holder[changed] -= 16
    plan = CompressionPlan.from_json(json.dumps(raw))
    (folder / manifests.PLAN_FILE).write_text(plan.to_json())
    said = dataclasses.replace(
        manifests.read(folder),
        plan_digest=plan.digest,
        page_tokens=plan.page_tokens,
        files={},
    )
    manifests.write(folder, said)
    with pytest.raises(KvlatheError, match=r"model\.onnx does not belong to its plan"):
        LLM.load(folder)


def test_changed_files_and_foreign_backends_are_refused(folder: Path) -> None:
    ours = manifests.read(folder)
    (folder / manifests.ENGINE_FILE).write_text("")
    theirs = dataclasses.replace(ours, backend="tensorrt", files={})
    manifests.write(folder, theirs)
    with pytest.raises(KvlatheError, match="built for tensorrt"):
        LLM.load(folder)
    (folder / manifests.ENGINE_FILE).unlink()
    manifests.write(folder, ours)
    with (folder / manifests.PLAN_FILE).open("a") as file:
        file.write(" ")
    with pytest.raises(KvlatheError, match=r"plan\.json .* has changed"):
        LLM.load(folder)


def test_a_smaller_batch_than_the_engine_was_built_for(folder: Path) -> None:
    """Fewer sequences run at once, and less cache is asked for; answers stay."""
    whole = LLM.load(folder, threads=1)
    small = LLM.load(folder, threads=1, max_batch_size=2)
    assert small.limits == dataclasses.replace(whole.limits, max_batch_size=2)
    assert small.pool.arena_bytes < whole.pool.arena_bytes
    most = 0

    class Watch(Silence):
        def grew(self, sequence: Sequence, tokens: int, seconds: float) -> None:
            nonlocal most
            most = max(most, len(small.engine.scheduler.running))

    prompts, params = [[5, 6, 7], [8, 9], [10]], SamplingParams(max_new_tokens=4)
    with AsyncEngine(small, max_waiting=1, observer=Watch()) as engine:
        engine.check_count(3)
        with pytest.raises(KvlatheError, match="queues 3 at most"):
            engine.check_count(4)
        answers = small.generate(prompts, params)
    assert most == 2
    assert [x.token_ids for x in answers] == [
        x.token_ids for x in whole.generate(prompts, params)
    ]


@pytest.mark.parametrize("batch", [0, 1.5, "2", LIMITS.max_batch_size + 1])
def test_a_larger_batch_than_the_engine_was_built_for_is_refused(
    folder: Path,
    batch: Any,  # noqa: ANN401
) -> None:
    with pytest.raises(
        KvlatheError, match=f"was built for 1 to {LIMITS.max_batch_size}"
    ):
        LLM.load(folder, max_batch_size=batch)


def test_shorter_sequences_and_smaller_steps_than_the_engine_was_built_for(
    folder: Path,
) -> None:
    whole = LLM.load(folder, threads=1)
    least = max(whole.plan.prefill_chunk, LIMITS.max_batch_size)
    small = LLM.load(folder, threads=1, max_seq_len=600, max_num_tokens=least)
    assert small.limits == dataclasses.replace(
        whole.limits, max_num_tokens=least, max_input_len=600, max_seq_len=600
    )
    assert small.pool.arena_bytes < whole.pool.arena_bytes
    prompts, params = [text(500), text(300)], SamplingParams(max_new_tokens=8)
    assert [answer.token_ids for answer in small.generate(prompts, params)] == [
        answer.token_ids for answer in whole.generate(prompts, params)
    ]
    with pytest.raises(KvlatheError, match="maximum context length is 600 tokens"):
        small.generate([text(595)], params)


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ({"max_seq_len": LIMITS.max_seq_len + 1}, "was built for 1 to"),
        ({"max_seq_len": 0}, "was built for 1 to"),
        ({"max_num_tokens": LIMITS.max_num_tokens + 1}, "was built for: .* to"),
        ({"max_num_tokens": 1}, "holds a whole chunk of a prompt and a token of"),
    ],
)
def test_limits_that_an_engine_cannot_keep_are_refused(
    folder: Path, limit: dict[str, Any], said: str
) -> None:
    with pytest.raises(KvlatheError, match=said):
        LLM.load(folder, **limit)


def test_a_cache_below_a_page_is_refused(folder: Path) -> None:
    with pytest.raises(KvlatheError, match="too small"):
        LLM.load(folder, cache_bytes=1000)


@pytest.mark.parametrize("count", ["8M", 0, -1, 1.5, True])
@pytest.mark.parametrize("name", ["threads", "cache_bytes"])
def test_counts_that_are_no_whole_number_above_zero_are_refused(
    folder: Path, name: str, count: object
) -> None:
    counts: dict[str, Any] = {name: count}
    with pytest.raises(KvlatheError, match=f"{name} is .*whole number, 1 or more"):
        LLM.load(folder, **counts)


def test_a_cache_beyond_all_memory_is_refused_in_words(folder: Path) -> None:
    with pytest.raises(KvlatheError, match="Ask for less"):
        LLM.load(folder, cache_bytes=900 << 40)


def test_chats_need_a_template(folder: Path) -> None:
    with pytest.raises(KvlatheError, match="no chat template"):
        LLM.load(folder, threads=2).chat([{"role": "user", "content": "hello"}])

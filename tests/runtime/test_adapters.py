"""LoRA adapters at run time: each sequence of a batch computes with its own, as
transformers does with the sum put in, whatever bases a cache is in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from weakref import ref

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvlathe.base.adapters import Adapter
from kvlathe.base.errors import KvlatheError
from kvlathe.engines.build import BuildConfig, build
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.plan.adapter_maps import LowRank
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native import library as native
from kvlathe.runtime.sessions.adapters import LoadedAdapter
from kvlathe.runtime.sessions.host.adapter_feeds import MARK, AdapterFeeds
from kvlathe.runtime.sessions.protocols import StepPlan
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.adapter_cases import (
    ALPHAS,
    case_basis,
    cut_plan,
    expected,
    made_case,
    merged_models,
    three_adapters,
    write_engine,
)
from tests.support.adapters import change_tensors, write_adapter
from tests.support.checkpoints import make_model, whole_plan
from tests.support.families.sizes import sizes
from tests.support.runtime_cases import llm

Reference = Callable[[str], tuple[Path, torch.nn.Module]]
TOLERANCE = 1e-4
NAMES = (None, *ALPHAS)


@dataclass
class Case:
    """``merged``: the model with each adapter put in, and as it is (None)."""

    llm: LLM
    adapters: Path
    merged: Mapping[str | None, torch.nn.Module]


def case(kind: str) -> Case:
    """An engine of a tiny model in random bases, with three adapters loaded."""
    folder = made_case(kind)
    own = LLM.load(folder / "engine", share_prefixes=True, threads=1, device="cpu")
    for name in ALPHAS:
        own.load_adapter(name, folder / name)
    return Case(own, folder, merged_models(folder))


@pytest.fixture(scope="module")
def llama() -> Iterator[Case]:
    made = case("llama")
    yield made
    made.llm.close()


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 97, count).tolist()


def check_logits(made: Case) -> None:
    tokens = ids(90)
    wanted = {name: expected(made.merged[name], tokens) for name in NAMES}
    for name in NAMES:
        found = made.llm.logits(tokens, range(len(tokens)), adapter=name)
        np.testing.assert_allclose(found, wanted[name], atol=TOLERANCE, rtol=0)
        others = [wanted[other] for other in NAMES if other != name]
        assert min(np.abs(one - found).max() for one in others) > 100 * TOLERANCE


def test_logits_are_those_of_the_model_with_the_adapter_put_in(llama: Case) -> None:
    check_logits(llama)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["phi3", "gpt2", "falcon-40b", "granite", "qwen3"])
def test_adapters_of_other_families_are_put_in_as_well(kind: str) -> None:
    """Maps that are stored together or [in, out], factors, and norms of heads."""
    made = case(kind)
    check_logits(made)
    made.llm.close()


def test_a_plan_that_cuts_heads_treats_the_sum_as_a_build_would(
    tmp_path: Path,
) -> None:
    """Engines of the merged checkpoint with the same plan and bases say the same."""
    model = make_model(tmp_path / "model", "Llama", sizes(66, 6, 3, 32))
    checkpoint = Checkpoint(tmp_path / "model")
    plan, basis = cut_plan(checkpoint.spec)
    engine = write_engine(checkpoint, plan, basis, tmp_path / "engine")
    three_adapters(tmp_path, model)
    own, tokens = LLM.load(engine, threads=1, device="cpu"), ids(30)
    for name in ALPHAS:
        own.load_adapter(name, tmp_path / name)
        adapter = Adapter(tmp_path / name)
        merged = Checkpoint(tmp_path / "model", adapters=[adapter])
        wanted = decoder_from(merged, plan, basis).logits(tokens, range(30))
        found = own.logits(tokens, range(30), adapter=name)
        np.testing.assert_allclose(found, wanted, atol=TOLERANCE, rtol=0)
    own.close()


def test_a_batch_of_several_adapters_equals_each_alone(llama: Case) -> None:
    """Prompts and decodes of ragged lengths in the same steps."""
    rng = np.random.default_rng(5)
    prompts = [ids(int(n), i) for i, n in enumerate(rng.integers(2, 120, 8))]
    asked = [
        SamplingParams(
            max_new_tokens=12, ignore_eos=True, logprobs=3, adapter=NAMES[i % 4]
        )
        for i in range(len(prompts))
    ]
    together = llama.llm.generate(prompts, asked)
    for prompt, params, answer in zip(prompts, asked, together, strict=True):
        alone = llama.llm.generate([prompt], params)[0]
        assert answer.token_ids == alone.token_ids
        whole = [*prompt, *answer.token_ids]
        wanted = expected(llama.merged[params.adapter], whole)[len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(torch.from_numpy(wanted), -1).numpy()
        for row, one in zip(logprobs, answer.logprobs or (), strict=True):
            assert abs(row[one.token_id] - one.logprob) < 2 * TOLERANCE


def test_prefixes_are_shared_within_an_adapter_alone(llama: Case) -> None:
    prompt = ids(100, 9)

    def cached(adapter: str | None) -> int:
        params = SamplingParams(max_new_tokens=4, ignore_eos=True, adapter=adapter)
        sequence = llama.llm.sequence(list(prompt), params)
        llama.llm.thread.wait(llama.llm.thread.submit([sequence]))
        return sequence.reused

    assert [cached(name) for name in NAMES] == [0, 0, 0, 0]
    assert [cached(name) for name in NAMES] == [96, 96, 96, 96]


def test_an_unloaded_adapter_ends_its_answers_and_begins_none(
    llama: Case, reference: Reference, tmp_path: Path
) -> None:
    """Another one by its name shares no prefix with it."""
    own, prompt = llama.llm, ids(60, 11)
    own.load_adapter("short", llama.adapters / "red")
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, adapter="short")
    sequence = own.sequence(list(prompt), params)
    request = own.thread.submit([sequence])
    own.unload_adapter("short")
    own.thread.wait(request)
    red = own.generate([prompt], dataclasses.replace(params, adapter="red"))[0]
    assert sequence.answer == red.token_ids
    with pytest.raises(KvlatheError, match="there is no adapter 'short'"):
        own.generate([prompt], params)
    own.load_adapter("short", llama.adapters / "green")
    green = own.sequence(list(prompt), params)
    own.thread.wait(own.thread.submit([green]))
    assert green.reused == 0 and green.answer != sequence.answer
    own.unload_adapter("short")


def test_adapters_that_do_not_fit_are_refused(
    llama: Case, reference: Reference, tmp_path: Path
) -> None:
    """Another model's, one with more than products, a name that is taken, and an engine
    without --enable-lora."""
    _, other = reference("qwen3")
    write_adapter(tmp_path / "other", other)
    write_adapter(tmp_path / "dora", llama.merged[None], use_dora=True)
    write_adapter(tmp_path / "head", llama.merged[None])
    head = {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}
    change_tensors(tmp_path / "head", lambda tensors: tensors.update(head))
    refused = {
        "other": "has shape|no map",
        "dora": "it is DoRA",
        "head": "lacks|no map lm_head",
        "nowhere": "there is no folder",
    }
    for name, said in refused.items():
        with pytest.raises(KvlatheError, match=said):
            llama.llm.load_adapter(name, tmp_path / name)
    with pytest.raises(KvlatheError, match="is an adapter 'red' already"):
        llama.llm.load_adapter("red", llama.adapters / "green")
    assert [one.name for one in llama.llm.adapters.loaded] == list(ALPHAS)
    engine = llm("torch", "one")
    with pytest.raises(KvlatheError, match="without --enable-lora"):
        engine.load_adapter("red", llama.adapters / "red")


def test_numbers_that_the_engines_type_does_not_hold_are_refused(
    llama: Case, tmp_path: Path
) -> None:
    """One infinity in B would make NaN of the rows of everybody."""
    plan = whole_plan(Checkpoint(llama.adapters / "model").spec, projected=True)
    checkpoint, basis = Checkpoint(llama.adapters / "model"), case_basis(plan)
    engine = write_engine(checkpoint, plan, basis, tmp_path / "half", "float16")
    half = LLM.load(engine, threads=1, device="cpu", verify=False)
    half.load_adapter("red", llama.adapters / "red")
    write_adapter(tmp_path / "loud", llama.merged[None])

    def louder(factor: float) -> None:
        change_tensors(
            tmp_path / "loud",
            lambda tensors: tensors.update(
                {name: x * factor for name, x in tensors.items() if "lora_B" in name}
            ),
        )

    louder(1e6)
    with pytest.raises(KvlatheError, match="not finite in float16"):
        half.load_adapter("loud", tmp_path / "loud")
    assert [one.name for one in half.adapters.loaded] == ["red"]
    half.close()
    llama.llm.load_adapter("loud", tmp_path / "loud")
    llama.llm.unload_adapter("loud")
    louder(1e30)
    weight = f"{tmp_path / 'loud'}=1e9"
    with pytest.raises(KvlatheError, match="not finite in float32"):
        llama.llm.load_adapter("loud", weight)


def test_an_unloaded_adapter_is_let_go_with_its_last_answer(llama: Case) -> None:
    """And what steps were fed of it, which its answers have brought back."""
    shapes = {f"m{MARK}{x}": (2, 2) for x in ("a", "b", "of", "shift")}
    feeds = AdapterFeeds(shapes, dict.fromkeys(shapes, "tensor(float)"))
    ones = LowRank(np.ones((2, 1), np.float32), np.ones((1, 2), np.float32))

    def loaded(name: str) -> LoadedAdapter:
        return LoadedAdapter(name, Adapter(Path(name)), b"", {"m": ones})

    def step(adapter: LoadedAdapter) -> StepPlan:
        ids, ends = np.zeros(1, np.int32), np.array([0, 1], np.int32)
        given = ids, ids, ends, ids, ids[None], (), ids
        return StepPlan(*given, adapters=[adapter])

    short, other = loaded("short"), loaded("other")
    feeds.of(step(short))
    feeds.forget(short)
    name = f"m{MARK}a"
    fed, gone = ref(feeds.of(step(short))[name]), ref(short)
    assert feeds.of(step(short))[name] is fed()  # while its answers run
    del short
    feeds.of(step(other))
    assert fed() is None and gone() is None


def test_answers_keep_their_adapter_through_preemption_and_sleep(llama: Case) -> None:
    """With room for two of four sequences that are admitted at once."""
    engine, prompts = llama.adapters / "engine", [ids(60, i) for i in range(4)]
    asked = [
        SamplingParams(max_new_tokens=60, ignore_eos=True, adapter=name)
        for name in NAMES
    ]
    alone = [
        llama.llm.generate([prompt], params)[0].token_ids
        for prompt, params in zip(prompts, asked, strict=True)
    ]
    tight = llama.llm.layout.bytes_for(260)
    own = LLM.load(engine, tight, threads=1, device="cpu")
    for name in ALPHAS:
        own.load_adapter(name, llama.adapters / name)
    own.engine.scheduler.admission.fits = lambda sequences: True
    answers = own.generate(prompts, asked)
    assert [answer.token_ids for answer in answers] == alone
    assert own.engine.scheduler.preemptions > 0
    own.sleep()
    own.wake_up()
    assert own.generate([prompts[1]], asked[1])[0].token_ids == alone[1]
    own.close()


def test_guesses_are_verified_with_the_adapter(llama: Case) -> None:
    own = LLM.load(llama.adapters / "engine", threads=1, device="cpu")
    own.load_adapter("red", llama.adapters / "red")
    own.speculate("ngram", 4)
    prompt = 3 * ids(12, 21)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, adapter="red")
    wanted = llama.llm.generate([prompt], params)[0].token_ids
    assert own.generate([prompt], params)[0].token_ids == wanted
    own.close()


def test_a_sequence_with_an_adapter_stays_in_its_engine(llama: Case) -> None:
    params = SamplingParams(max_new_tokens=4, adapter="red")
    sequence = llama.llm.sequence(ids(40, 2), params)
    with pytest.raises(KvlatheError, match="computed with the adapter red"):
        llama.llm.exchange.prefill(sequence)


def test_damaged_adapters_are_refused_in_words(llama: Case, tmp_path: Path) -> None:
    """Bytes of a file changed, cut off and made up, 300 times."""
    whole = (llama.adapters / "red" / "adapter_model.safetensors").read_bytes()
    config = (llama.adapters / "red" / "adapter_config.json").read_bytes()
    (tmp_path / "adapter_config.json").write_bytes(config)
    rng, path = np.random.default_rng(0), tmp_path / "adapter_model.safetensors"
    size = int.from_bytes(whole[:8], "little")
    heads = [b"[]", b"{}", b"3", b'{"a": 1}', b'{"a": {"dtype": "F32"}}', b"[" * 9999]
    made = [len(head).to_bytes(8, "little") + head for head in heads]
    for i in range(300):
        data = bytearray(made[i] if i < len(made) else whole)
        if i >= len(made):
            for place in rng.integers(0, size + 8, rng.integers(1, 4)):
                data[place] = rng.integers(0, 256)
            data = data[: rng.integers(0, len(data)) if i % 3 == 0 else len(data)]
        path.write_bytes(bytes(data))
        try:
            llama.llm.load_adapter("odd", tmp_path)
        except KvlatheError:
            continue
        llama.llm.unload_adapter("odd")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["half", "function", "int8"])
def test_every_session_of_a_cpu_takes_adapters(
    kind: str, llama: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of 16 bits, the graph's own function, and weights that are codes."""
    source, tokens = llama.adapters / "model", ids(60)
    if kind == "int8":
        make_model(tmp_path / "model", "Llama", sizes(128, 4, 2))
        source = tmp_path / "model"
        merged = three_adapters(tmp_path, AutoModelForCausalLM.from_pretrained(source))
        asked = BuildConfig(source, tmp_path / "engine", weights="int8", measure=False)
        engine = build(dataclasses.replace(asked, enable_lora=True, use_cache=False))
    else:
        checkpoint, merged = Checkpoint(source), llama.merged
        three_adapters(tmp_path, merged[None])
        dtype = "float16" if kind == "half" else "float32"
        plan = whole_plan(checkpoint.spec, projected=True)
        given = checkpoint, plan, case_basis(plan), tmp_path / "engine", dtype
        engine = write_engine(*given)
    if kind == "function":
        monkeypatch.setenv("KVLATHE_NATIVE", "0")
        native.find.cache_clear()
    own = LLM.load(engine, threads=1, device="cpu", verify=False)
    for name in ALPHAS:
        own.load_adapter(name, tmp_path / name)
        found = own.logits(tokens, range(60), adapter=name)
        wanted = expected(merged[name], tokens)
        close = {"function": 3e-5, "half": 1e-2, "int8": 5e-2}[kind]
        rows = np.abs(found - wanted).max(1)  # one in sixty may amplify rounding
        assert np.median(rows) < close * np.abs(wanted).max()
    own.close()
    native.find.cache_clear()

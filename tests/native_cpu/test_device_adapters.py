"""LoRA adapters on a session of the cuda backend, in host memory: what the CPU's session
computes of the same."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvlathe.base.adapters import Adapter
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.weights_file import wiring
from kvlathe.plan.adapter_maps import AdapterMaps
from kvlathe.plan.engine_folder import read_plan
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.sessions.adapters import read_adapter
from kvlathe.runtime.sessions.torch_cuda.model.decoder import TorchDecoder
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.support.adapter_cases import ALPHAS, SIZES, case_basis, made_case
from tests.support.device_engines import arena, torch_session
from tests.support.host_device import HostDevice
from tests.support.session_laws import device_session

NAMES = (None, *ALPHAS)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def pair(native: Native) -> Iterator[tuple[LLM, LLM]]:
    """The torch decoder on the stand-in of a GPU, and the engine on the CPU."""
    folder = made_case("llama")
    engine = folder / "engine"
    plan = read_plan(engine)
    checkpoint, size = Checkpoint(folder / "model"), arena(plan)
    session = torch_session(native, checkpoint, plan, SIZES, size, case_basis(plan))
    ours = LLM(session, plan, SIZES, Tokenizer(engine), size, True, engine)
    theirs = LLM.load(engine, threads=1, device="cpu")
    for llm in (ours, theirs):
        for name in ALPHAS:
            llm.load_adapter(name, folder / name)
    yield ours, theirs
    ours.close()
    theirs.close()


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 97, count).tolist()


def test_logits_with_adapters_are_those_of_the_cpu(pair: tuple[LLM, LLM]) -> None:
    tokens = ids(90)
    for name in NAMES:
        found, wanted = (llm.logits(tokens, range(90), adapter=name) for llm in pair)
        np.testing.assert_allclose(found, wanted, atol=TOLERANCE, rtol=0)


def test_graphs_decode_mixes_of_adapters(pair: tuple[LLM, LLM]) -> None:
    """A batch of all of them and none; steps without adapters keep their own graphs."""
    prompts = [ids(n, n) for n in (5, 40, 17, 80, 3, 60)]
    asked = [
        SamplingParams(max_new_tokens=24, ignore_eos=True, adapter=NAMES[i % 4])
        for i in range(len(prompts))
    ]
    found, wanted = (llm.generate(prompts, asked) for llm in pair)
    assert [x.token_ids for x in found] == [x.token_ids for x in wanted]
    device = device_session(pair[0]).device
    assert isinstance(device, HostDevice)
    before = device.captures
    plain = SamplingParams(max_new_tokens=8, ignore_eos=True)
    pair[0].generate(prompts, plain)
    first = device.captures
    pair[0].generate(prompts, plain)
    assert before < first == device.captures


def test_an_adapter_that_comes_later_leaves_others_as_they_were(
    pair: tuple[LLM, LLM],
) -> None:
    """The matrices of all lie elsewhere then, and graphs are captured again."""
    ours, prompt = pair[0], ids(30, 4)
    params = SamplingParams(max_new_tokens=10, ignore_eos=True, adapter="red")
    before = ours.generate([prompt], params)[0].token_ids
    ours.load_adapter("late", made_case("llama") / "green")
    late = SamplingParams(max_new_tokens=10, ignore_eos=True, adapter="late")
    green = SamplingParams(max_new_tokens=10, ignore_eos=True, adapter="green")
    answers = ours.generate([prompt] * 3, [late, params, green])
    assert answers[1].token_ids == before
    assert answers[0].token_ids == answers[2].token_ids != before
    ours.unload_adapter("late")
    assert ours.generate([prompt], params)[0].token_ids == before


def test_a_decoder_has_nothing_of_adapters_that_are_gone() -> None:
    """Which ranks are whose: kept on the device for the layouts that maps have."""
    folder = made_case("llama")
    plan, maps = read_plan(folder / "engine"), AdapterMaps.read(folder / "engine")
    checkpoint = Checkpoint(folder / "model")
    tensors = decoder_from(checkpoint, plan, case_basis(plan)).state_dict()
    decoder = TorchDecoder(wiring(checkpoint.spec, plan), tensors, adapts=True)
    red, green = (
        read_adapter(name, Adapter(folder / name), maps, "float32")
        for name in ("red", "green")
    )
    decoder.load_adapters([red, green])
    rows, gone = decoder.adapter_rows, decoder.adapted[0].layout
    rows.begin(torch.tensor([red.number, 0], dtype=torch.int32))
    assert rows.others(gone, early=True) is not None
    decoder.load_adapters([green])
    rows.begin(torch.tensor([green.number, 0], dtype=torch.int32))
    for one in decoder.adapted:
        assert rows.others(one.layout, early=True) is not None
    with pytest.raises(KeyError):
        rows.others(gone, early=True)

"""Pages go from the pool of one GPU to that of another over NIXL, from process to
process; with one GPU, between two pools of it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvlathe.base.errors import KvlatheError
from kvlathe.dynamo import link as linking
from kvlathe.dynamo.asked import Asked
from kvlathe.dynamo.decoding import Decoding
from kvlathe.dynamo.following import Following
from kvlathe.dynamo.handoff import Handoff
from kvlathe.dynamo.link import Link
from kvlathe.engines.build import BuildConfig, build
from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native import library as native
from kvlathe.runtime.requests.held_pages import Arrival
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.native.library import Library
from tests.support.handoff_source import SourceProcess, source_on
from tests.support.runtime_cases import MODEL, text

PLANS: dict[str, dict[str, Any]] = {
    "none": {},
    "4 bit": {"compression": "hack:bits=4"},
    "ranks": {"compression": "fdc+hack:bits=8", "removal_rate": 0.15},
}
PARAMS = SamplingParams(max_new_tokens=40, ignore_eos=True)
LENGTHS = (700, 31, 129)
CACHE_BYTES = 1 << 26


@dataclasses.dataclass
class Pair:
    """``source``: in another process, on another GPU where there is one."""

    llm: LLM
    link: Link
    source: SourceProcess

    def handed(self, tokens: list[int]) -> Handoff:
        return Handoff.from_fields(self.source("prefill", tokens, PARAMS))

    def fetched(self, handoff: Handoff) -> Arrival:
        """As a decode worker does."""
        arrival = self.llm.exchange.expect(handoff.parcel)
        try:
            pieces = arrival.pieces(handoff.region)
            asyncio.run(self.link.read(handoff, pieces))
            arrival.check()
        except BaseException:
            arrival.close()
            raise
        return arrival


def engine_of(folder: Path, **asked: Any) -> Path:  # noqa: ANN401
    fixed: dict[str, Any] = {"backend": "cuda", "dtype": "float16", "device": "cpu"}
    fixed |= {"max_batch_size": 4, "max_seq_len": 1024, "prefill_chunk": 128}
    return build(BuildConfig(MODEL, folder, use_cache=False, **fixed | asked))


@pytest.fixture(scope="module", params=PLANS)
def pair(
    request: pytest.FixtureRequest,
    library: Library,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    try:
        linking._library()
    except KvlatheError as error:
        pytest.skip(str(error))
    other = "1" if torch.cuda.device_count() > 1 else "0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLATHE_LIBRARY", str(library.path.resolve()))
        if "UCX_NET_DEVICES" not in os.environ:
            patch.setenv("UCX_NET_DEVICES", "lo")
        native.find.cache_clear()
        folder = tmp_path_factory.mktemp("handoff") / "engine"
        engine = engine_of(folder, **PLANS[request.param])
        loaded = LLM.load(engine, CACHE_BYTES, share_prefixes=False)
        with loaded as llm, source_on(other, engine, CACHE_BYTES) as source:
            yield Pair(llm, Link("target", llm.exchange.memory), source)
    native.find.cache_clear()


@pytest.mark.parametrize("length", LENGTHS)
def test_text_is_that_of_one_engine_alone(pair: Pair, length: int) -> None:
    """Prompts of several pages, of less than one, and of one token more than pages
    hold."""
    prompt = list(text(length))
    expected = pair.llm.generate([prompt], PARAMS)[0].token_ids
    handoff = pair.handed(prompt)
    assert handoff.device == pair.link.region.device == "cuda:0"
    request = pair.llm.exchange.adopt_sequence(pair.fetched(handoff))
    pair.llm.thread.wait(request)
    assert request.sequences[0].answer == expected
    assert pair.source("release") == ([handoff.name], 0)
    assert pair.llm.pool.bytes_in_use == 0


def test_pages_arrive_whole_while_this_gpu_computes(pair: Pair) -> None:
    """Answers begin, end and give pages back all the time: no step that still runs
    reaches what arrives. What has arrived is checked twice."""
    prompts = [list(text(20 + 3 * i, i)) for i in range(60)]
    many = [pair.llm.sequence(prompt, PARAMS) for prompt in prompts]
    beside = pair.llm.thread.submit(many)
    came = 0
    while not beside.done.is_set() or not came:
        handoff = pair.handed(list(text(650, came)))
        arrival = pair.fetched(handoff)
        arrival.check()
        arrival.close()
        assert pair.source("release")[0] == [handoff.name]
        came += 1
    pair.llm.thread.wait(beside)
    assert pair.llm.pool.bytes_in_use == 0


def test_a_page_with_one_wrong_bit_is_refused(pair: Pair) -> None:
    handoff = pair.handed(list(text(300)))
    pair.source("damage", handoff.name)
    with pytest.raises(KvlatheError, match="does not have its digest"):
        pair.fetched(handoff)
    assert pair.llm.pool.bytes_in_use == 0
    assert pair.source("release")[0] == [handoff.name]


def test_pages_of_another_plan_are_refused_and_given_back(pair: Pair) -> None:
    handoff = pair.handed(list(text(200)))
    listed = handoff.parcel.listed
    origin = dataclasses.replace(listed.origin, plan="0" * 64)
    listed = dataclasses.replace(listed, origin=origin)
    parcel = dataclasses.replace(handoff.parcel, listed=listed)
    fields = dataclasses.replace(handoff, parcel=parcel).to_fields()
    engine = cast(AsyncEngine, SimpleNamespace(llm=pair.llm))
    decoding = Decoding(engine, pair.link, Following(engine))
    asked = cast(Asked, SimpleNamespace(params=PARAMS))
    with pytest.raises(KvlatheError, match="of another plan"):
        asyncio.run(decoding.fetch(asked, fields))
    assert pair.source("release") == ([handoff.name], 0)

"""The load test itself is tested: its lengths, arrivals and search, and what it says of
servers of known capacity."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("aiohttp")

from aiohttp import web

from kvlathe.base.errors import KvlatheError
from kvlathe.bench import load, measure, run, servers
from kvlathe.bench.load import TRACES, Request
from kvlathe.bench.measure import Point, Target
from kvlathe.plan import manifest as manifests
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.cache.pool import PagePool

ROOT = Path(__file__).resolve().parents[2]
LANES = tuple(Lane(i, h, 64, 64, 64) for i in range(2) for h in range(2))
PLAN = CompressionPlan(
    ModelShape(2, 2, 2, 64, 128, 1000, 4096),
    LANES,
    (Group((0, 1, 2, 3), Tier(32, 32)),),
)


# -- what is sent ----------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(TRACES))
def test_lengths_keep_the_papers_mean_least_and_largest(name: str) -> None:
    for lengths in (TRACES[name].prompt, TRACES[name].answer):
        drawn = load.draw(lengths, np.random.default_rng(3), 20000)
        assert lengths.least <= drawn.min() and drawn.max() <= lengths.largest
        assert abs(drawn.mean() / lengths.mean - 1) < 0.02 and drawn.std() > 0.1 * (
            lengths.largest - lengths.least
        )


@pytest.mark.parametrize("name", sorted(TRACES))
@pytest.mark.parametrize("fit", [False, True])
def test_every_request_fits_and_one_seed_is_one_load(name: str, fit: bool) -> None:
    text = list(range(100, 400))
    first = load.requests(TRACES[name], text, 300, 512, seed=5, fit=fit)
    longest = max(len(request.prompt) + request.new_tokens for request in first)
    assert (
        longest <= 512
        and min(request.new_tokens for request in first) >= load.FEWEST_NEW
    )
    assert first == load.requests(TRACES[name], text, 300, 512, seed=5, fit=fit)
    assert first != load.requests(TRACES[name], text, 300, 512, seed=6, fit=fit)
    for request in first:  # each prompt is a piece of the text, read round and round
        assert all(
            (b - a) % 300 == 1
            for a, b in zip(request.prompt, request.prompt[1:], strict=False)
        )


def test_short_traces_are_stretched_only_if_asked() -> None:
    trace = TRACES["imdb"]
    assert (
        load.scale_for(trace, 4096, fit=False)
        == 1
        < load.scale_for(trace, 4096, fit=True)
    )
    assert (
        load.scale_for(trace, 400, fit=False)
        == load.scale_for(trace, 400, fit=True)
        < 0.5
    )


def test_arrivals_of_a_load_are_poisson() -> None:
    gaps = load.gaps(20000, seed=1)
    assert abs(gaps.mean() - 1) < 0.03 and abs(gaps.std() - 1) < 0.03
    counts = np.histogram(np.cumsum(gaps), bins=np.arange(0, 19000, 5))[0]
    assert (
        abs(counts.var() / counts.mean() - 1) < 0.1
    )  # as many as expected, and as uneven


@pytest.mark.parametrize(
    "content",
    [
        "not json\n",
        '{"prompt": "x"}\n',
        "",
        '{"text": ""}\n',
        "[" * 99_999,
        '{"text": 3}',
    ],
)
def test_text_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "text.jsonl").write_text(content)
    with pytest.raises(KvlatheError):
        load.documents(tmp_path / "text.jsonl")


def test_documents_may_hold_what_ends_a_line_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "a\u2028b\x85"}\n', "utf-8")
    assert load.documents(path) == ["a\u2028b\x85"]


@pytest.mark.parametrize("name", sorted(TRACES))
@pytest.mark.parametrize("seed", range(4))
def test_a_few_typical_requests_are_as_slow_as_all(name: str, seed: int) -> None:
    """The limit is made from a few requests' latency alone, here of a server that
    prefills 32 times as fast."""
    sent = load.requests(TRACES[name], list(range(999)), 100, 4096, seed)
    times = [
        [len(r.prompt) / 32 / r.new_tokens + 1 for r in rs]
        for rs in (run.typical(sent, 6), sent)
    ]
    assert abs(np.mean(times[0]) / np.mean(times[1]) - 1) < 0.06 and len(times[0]) == 6


# -- the search ------------------------------------------------------------------------
@pytest.mark.parametrize("capacity", [0.01, 0.9, 1.0, 7.3, 300.0])
def test_the_largest_rate_is_found_to_the_tolerance(capacity: float) -> None:
    def observation(rate: float) -> Point:
        return Point(rate, rate <= capacity, rate)

    ((rate, points),) = measure.in_turns(
        [measure.search(1.0, 0.05)], lambda _, rate: observation(rate)
    )
    assert rate <= capacity < rate * 1.0501
    assert [point.rate for point in points] == sorted(
        point.rate for point in points
    ) and len(points) < 16


def test_a_server_that_is_never_fast_enough_has_rate_nought() -> None:
    ((rate, points),) = measure.in_turns(
        [measure.search(1.0, 0.05)], lambda _, rate: Point(rate, False, 1.0)
    )
    assert rate == 0 and len(points) <= measure.MOST_DOUBLINGS + 1


def test_a_limit_that_was_never_crossed_is_no_result() -> None:
    ((rate, points),) = measure.in_turns(
        [measure.search(1.0, 0.05)], lambda _, rate: Point(rate, True, 0.1)
    )
    with pytest.raises(KvlatheError, match=r"all 8 requests came at once.*--requests"):
        run.check_crossed("engine", rate, points, 8)
    run.check_crossed("engine", 1.0, [*points, Point(2 * rate, False, 9.0)], 8)


def test_searches_for_the_largest_rate_take_turns() -> None:
    asked: list[int] = []

    def observation(i: int, rate: float) -> Point:
        asked.append(i)
        return Point(rate, rate <= (3.0, 50.0)[i], rate)

    (slow, _), (fast, _) = measure.in_turns(
        [measure.search(1.0, 0.1), measure.search(1.0, 0.1)], observation
    )
    assert (
        asked[:6] == [0, 1, 0, 1, 0, 1]
        and slow <= 3 < slow * 1.101
        and fast <= 50 < fast * 1.101
    )


def test_equal_memory_is_room_for_exactly_so_many_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servers, "_layout", lambda _: CacheLayout(PLAN))
    pool = PagePool(CacheLayout(PLAN), servers.cache_bytes(Path("engine"), 1000, 8))
    assert pool.fits([pool.worst_pages(1000)] * 8) and not pool.fits(
        [pool.worst_pages(1000)] * 9
    )


@pytest.mark.parametrize(("batch", "warns"), [(8, True), (64, False)])
def test_memory_that_a_batch_cannot_use_is_pointed_out(
    batch: int,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = Limits(batch, 1024, 4096, 4096)
    monkeypatch.setattr(
        manifests, "verify", lambda *_, **__: SimpleNamespace(limits=limits)
    )
    monkeypatch.setattr(servers, "_layout", lambda _: CacheLayout(PLAN))
    sent = [Request([1] * 100, 100)] * 4
    layout = CacheLayout(PLAN)
    run._warn_of_batches([Path("engine")], 20 * layout.bytes_for(256), sent)
    assert ("--max-batch-size" in caplog.text) == warns


# -- a server whose capacity is known --------------------------------------------------
LATE = 25
"""So many times its time may a token take on a busy machine."""


class Stub:
    """An OpenAI-like server: ``places`` requests at a time, each token takes
    ``seconds``; others wait in line."""

    def __init__(self, places: int, seconds: float, fault: str = "") -> None:
        self.places, self.seconds, self.seen, self.fault = places, seconds, 0, fault
        self.loop = asyncio.new_event_loop()
        self.started = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self.started.wait(60)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._start())
        self.loop.run_forever()

    async def _start(self) -> None:
        self.room = asyncio.Semaphore(self.places)
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self.started.set()

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "stub"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.seen += 1
        if len(asked["prompt"]) > 1000:
            return web.json_response({"error": "too long"}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async with self.room:
            for _ in range(asked["max_tokens"]):
                await asyncio.sleep(self.seconds)
                await response.write(
                    b"data: "
                    + json.dumps({"choices": [{"text": "x"}]}).encode()
                    + b"\n\n"
                )
        usage = {"completion_tokens": asked["max_tokens"] - (self.fault == "short")}
        last = (
            b"nothing like JSON"
            if self.fault == "broken"
            else json.dumps({"choices": [], "usage": usage}).encode()
        )
        await response.write(b"data: " + last + b"\n\n")
        if self.fault != "cut":
            await response.write(b"data: [DONE]\n\n")
        return response

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub(places=2, seconds=0.02)
    yield server
    server.stop()


@pytest.mark.slow
def test_a_run_measures_what_the_server_does(stub: Stub) -> None:
    target = Target("stub", stub.url, "stub")
    requests = [Request([1, 2, 3], 8)] * 12
    idle = measure.alone(target, requests[0])
    assert 0.02 <= idle < LATE * 0.02
    slow = measure.run(target, requests, rate=4.0, limit=LATE * 0.02, seed=0)
    assert slow.within and slow.latency < LATE * 0.02
    assert 0.016 < (slow.between_tokens_p50 or 0) < LATE * 0.02
    assert 0.02 <= (slow.first_token_p50 or 0) < LATE * 0.02
    flooded = measure.run(target, requests * 4, rate=5000.0, limit=2 * idle, seed=0)
    assert (
        not flooded.within
        and flooded.latency > 2 * idle
        and flooded.tokens_per_second is None
    )  # left early


def test_refused_requests_end_the_measurement(stub: Stub) -> None:
    with pytest.raises(KvlatheError, match="HTTP 400"):
        measure.run(
            Target("stub", stub.url, "stub"), [Request([1] * 1001, 4)] * 4, 50.0, 1.0, 0
        )


@pytest.mark.parametrize(
    ("fault", "said"),
    [("short", "ignore_eos"), ("cut", "ended early"), ("broken", "JSON")],
)
def test_answers_that_are_not_whole_are_no_measurement(fault: str, said: str) -> None:
    """Nor are they a rate that was too high."""
    server = Stub(places=4, seconds=0.001, fault=fault)
    try:
        with pytest.raises(KvlatheError, match=said):
            measure.run(
                Target("stub", server.url, "stub"), [Request([1], 4)] * 4, 50.0, 1.0, 0
            )
    finally:
        server.stop()


@pytest.mark.slow
def test_urls_are_compared_and_drawn(stub: Stub, tmp_path: Path) -> None:
    fast = Stub(places=8, seconds=0.02)
    try:
        options = run.Options(
            trace="imdb",
            count=40,
            tolerance=0.3,
            max_seq_len=40,
            text=ROOT / "data/eval_text.jsonl",
            tokenizer=ROOT / "models/lathe-5m",
            plot=tmp_path / "plot.png",
        )
        result = run.compare([stub.url, fast.url], options)
    finally:
        fast.stop()
    assert result["ratio"] > 1.5 and result["servers"][0]["ratio"] == 1
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert all(len(server["points"]) > 2 for server in result["servers"])
    assert json.loads(json.dumps(result)) == result


def test_servers_by_url_need_a_length_and_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(KvlatheError, match="--max-seq-len"):
        run.compare(["http://127.0.0.1:9"], run.Options())
    with pytest.raises(KvlatheError, match="--tokenizer"):
        run.compare(["http://127.0.0.1:9"], run.Options(max_seq_len=64))
    assert run.unique(["a/none", "b/none", "c"]) == ["none (0)", "none (1)", "c"]

"""Prometheus metrics of a serving engine: vLLM's names with ``kvlathe_`` in place of
``vllm:``, plus bytes saved.

Gauges and counters are read from the engine when they are asked for; latencies are
observed as they happen.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.runtime.cache.block_store import BlockStores
from kvlathe.runtime.cache.prefix import PrefixCache
from kvlathe.runtime.memory_account import memory_account
from kvlathe.runtime.scheduling.sequence import Sequence
from kvlathe.server.cache_view import uncompressed_bytes
from kvlathe.server.responses.store import MOST_BYTES

FAST = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
)
SLOW = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
TOKENS = (
    1,
    2,
    5,
    10,
    20,
    50,
    100,
    200,
    500,
    1000,
    2000,
    5000,
    10000,
    20000,
    50000,
    100000,
)


LABELS = ["model_name"]
RENDERINGS = 20
"""Texts that are written in a second at most: one takes some milliseconds, in which no
stream goes on."""
RUNNING = "kvlathe_num_requests_running"
WAITING = "kvlathe_num_requests_waiting"
USAGE = "kvlathe_kv_cache_usage_perc"


class Metrics:
    """Observes an AsyncEngine (its ``observer``) and says what it has seen."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.registry = CollectorRegistry()
        self._text, self._rendered = b"", deque[float]()
        ProcessCollector(registry=self.registry)  # memory, processor time, open files
        said = "From submission to the first token."
        self._first = self._histogram("time_to_first_token_seconds", said, SLOW)
        self._growth = Growth(model)
        self.registry.register(self._growth)
        said = "From submission to the last token."
        self._whole = self._histogram("e2e_request_latency_seconds", said, SLOW)
        said = "From submission to admission."
        self._queued = self._histogram("request_queue_time_seconds", said, SLOW)
        said = "Prompt lengths."
        self._asked = self._histogram("request_prompt_tokens", said, TOKENS)
        said = "Answer lengths."
        self._said = self._histogram("request_generation_tokens", said, TOKENS)
        said = "Prompt tokens of requests that have ended."
        self._prompt = self._counter("prompt_tokens", said).labels(model)
        said = "Sequences ended, by reason."
        self._ends = self._counter("request_success", said, "finished_reason")
        said = "Requests answered by an error."
        self._errors = self._counter("http_errors", said, "status")

    def _histogram(self, name: str, said: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"kvlathe_{name}", said, LABELS, buckets=buckets, registry=self.registry
        ).labels(self.model)

    def _counter(self, name: str, said: str, *labels: str) -> Counter:
        return Counter(
            f"kvlathe_{name}", said, [*LABELS, *labels], registry=self.registry
        )

    def watch(self, engine: AsyncEngine) -> None:
        """Read this engine's state whenever the metrics are asked for."""
        self.registry.register(State(engine, self.model))

    def text(self) -> bytes:
        """The metrics in Prometheus's text format. Where they are asked for more than
        RENDERINGS times within a second, the last text is given again."""
        now = time.monotonic()
        while self._rendered and self._rendered[0] <= now - 1:
            self._rendered.popleft()
        if not self._text or len(self._rendered) < RENDERINGS:
            self._text = generate_latest(self.registry)
            self._rendered.append(now)
        return self._text

    def failed(self, status: int) -> None:
        """A request was answered with this HTTP status, an error."""
        self._errors.labels(self.model, status).inc()

    # -- Observer ----------------------------------------------------------------------
    def grew(self, sequence: Sequence, tokens: int, seconds: float) -> None:
        self._growth.tokens += tokens
        if sequence.answered == tokens:
            self._first.observe(seconds / tokens)
        else:
            self._growth.observe(seconds / tokens)

    def ended(self, sequence: Sequence) -> None:
        self._ends.labels(self.model, sequence.finish_reason).inc()
        self._prompt.inc(sequence.prompt_tokens)
        self._asked.observe(sequence.prompt_tokens)
        self._said.observe(sequence.answered)
        self._whole.observe(sequence.last_token - sequence.started)
        if sequence.admitted:
            self._queued.observe(sequence.admitted - sequence.started)


class Growth(Collector):
    """Tokens as they come. The engine's thread alone counts them, many in a step, so
    that it takes no lock."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.tokens = 0
        self._counts = [0] * (len(FAST) + 1)
        self._seconds = 0.0

    def observe(self, seconds: float) -> None:
        """Seconds between two tokens of one answer."""
        self._counts[bisect_left(FAST, seconds)] += 1
        self._seconds += seconds

    def collect(self) -> Iterator[Metric]:
        name, said = "kvlathe_generation_tokens", "Tokens generated."
        generated = CounterMetricFamily(name, said, labels=LABELS)
        generated.add_metric([self._model], self.tokens)
        yield generated
        name = "kvlathe_time_per_output_token_seconds"
        said = "Between two tokens of one answer."
        between = HistogramMetricFamily(name, said, labels=LABELS)
        names = map(floatToGoString, (*FAST, float("inf")))
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        between.add_metric([self._model], buckets, self._seconds)
        yield between


class State(Collector):
    """State of an engine's scheduler and pool at the moment of a scrape."""

    def __init__(self, engine: AsyncEngine, model: str) -> None:
        self._engine, self._model = engine, model

    def collect(self) -> Iterator[Metric]:
        for name, said, value in self._gauges():
            yield self._family(GaugeMetricFamily(name, said, labels=LABELS), value)
        for name, said, value in self._counters():
            yield self._family(CounterMetricFamily(name, said, labels=LABELS), value)
        yield from self._adapters()
        yield self._memory()

    def _family(
        self, family: GaugeMetricFamily | CounterMetricFamily, value: float
    ) -> Metric:
        family.add_metric([self._model], value)
        return family

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        engine, pool = self._engine, self._engine.llm.pool
        used = engine.bytes_used
        running = list(engine.llm.engine.scheduler.running)
        saved = uncompressed_bytes(engine.llm, running, used) - used
        kept = pool.bytes_in_use - used
        share = used / pool.arena_bytes
        yield RUNNING, "Sequences that run.", engine.running
        yield WAITING, "Sequences that wait for their turn.", engine.waiting
        yield USAGE, "Share of the cache in use, 0 to 1.", share
        yield (
            "kvlathe_kv_cache_bytes",
            "Bytes of the pages of running sequences, shared ones once.",
            used,
        )
        yield (
            "kvlathe_kv_cache_bytes_saved",
            "What these would take uncompressed, in pages too, less that.",
            saved,
        )
        yield (
            "kvlathe_kv_cache_bytes_kept",
            "Bytes of pages kept for requests that begin alike.",
            kept,
        )
        stores = self._stores
        if stores is not None and stores.host is not None:
            said = "Bytes of evicted prefixes in the host's memory."
            yield "kvlathe_host_cache_bytes", said, stores.host.bytes
        if stores is not None and stores.disk is not None:
            said = "Bytes of evicted prefixes on disk."
            yield "kvlathe_disk_cache_bytes", said, stores.disk.bytes

    def _memory(self) -> Metric:
        """The account of memory, and the responses that are kept."""
        name, said = "kvlathe_memory_most_bytes", "Bytes that a part takes at most."
        family = GaugeMetricFamily(name, said, labels=[*LABELS, "part"])
        account = {**memory_account(self._engine.llm), "responses": MOST_BYTES}
        for part, size in account.items():
            family.add_metric([self._model, part], size)
        return family

    def _adapters(self) -> Iterator[Metric]:
        """The LoRA adapters of requests, as vLLM says them: routers read from it where
        an adapter is at home. Its value is the time."""
        llm = self._engine.llm
        if not (loaded := llm.adapters.loaded):
            return
        scheduler = llm.engine.scheduler
        running = names_of(scheduler.running)
        waiting = names_of(scheduler.waiting)
        said = "LoRA adapters of the sequences that run and that wait."
        labels = [*LABELS, "max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        family = GaugeMetricFamily("kvlathe_lora_requests_info", said, labels=labels)
        values = [self._model, str(len(loaded)), running, waiting]
        family.add_metric(values, time.time())
        yield family

    @property
    def _stores(self) -> BlockStores | None:
        prefixes = self._engine.llm.engine.scheduler.prefixes
        return prefixes.stores if prefixes else None

    def _counters(self) -> Iterator[tuple[str, str, float]]:
        scheduler = self._engine.llm.engine.scheduler
        hits = scheduler.prefixes.hits if scheduler.prefixes else 0
        yield (
            "kvlathe_num_preemptions",
            "Sequences sent away for want of memory.",
            scheduler.preemptions,
        )
        yield (
            "kvlathe_prefix_cache_queries",
            "Tokens looked up among known prefixes.",
            scheduler.queries,
        )
        yield (
            "kvlathe_prefix_cache_hits",
            "Tokens found there and not computed again.",
            hits,
        )
        speculation = scheduler.speculation
        if speculation.drafter is not None:
            said = "Guesses at what follows a sequence that were tried."
            yield "kvlathe_spec_decode_num_drafts", said, speculation.drafts
            said = "Tokens of these guesses."
            yield "kvlathe_spec_decode_num_draft_tokens", said, speculation.drafted
            said = "Of these tokens, those that were right."
            yield "kvlathe_spec_decode_num_accepted_tokens", said, speculation.accepted
            said = "Times that guessing failed."
            yield "kvlathe_spec_decode_num_failures", said, speculation.failures
        yield from self._store_counters(scheduler.prefixes)

    def _store_counters(
        self, prefixes: PrefixCache | None
    ) -> Iterator[tuple[str, str, float]]:
        """Counters of evicted prefixes that came back, in tokens. They are among the
        hits."""
        stores = self._stores
        if prefixes is None or stores is None:
            return
        if stores.host is not None:
            said = "Tokens whose pages came back from the host's memory."
            yield "kvlathe_host_cache_hits", said, stores.host_hits * prefixes.block
        if stores.disk is not None:
            said = "Tokens whose pages came back from disk."
            yield "kvlathe_disk_cache_hits", said, stores.disk_hits * prefixes.block
            said = "Files of evicted prefixes that could not be written or read."
            yield "kvlathe_disk_cache_failures", said, stores.disk.failures


def names_of(sequences: Iterable[Sequence]) -> str:
    """The names of their adapters, between commas."""
    found = {one.params.adapter for one in list(sequences)}
    return ",".join(sorted(name for name in found if name))

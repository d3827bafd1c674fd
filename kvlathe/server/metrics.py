"""Prometheus metrics of a serving engine: vLLM's names with ``kvlathe_`` in place of ``vllm:``, plus bytes saved.

Gauges and counters are read from the engine when they are asked for; latencies are observed as they happen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.runtime.sequence import Sequence

FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
SLOW = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """Observes an AsyncEngine (its ``observer``) and says what it has seen."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # memory, processor time, open files
        self.model = model

        def histogram(name: str, said: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"kvlathe_{name}", said, ["model_name"], buckets=buckets, registry=self.registry)
            return made.labels(model)

        self._first = histogram("time_to_first_token_seconds", "From submission to the first token.", SLOW)
        self._between = histogram("time_per_output_token_seconds", "Between two tokens of one answer.", FAST)
        self._whole = histogram("e2e_request_latency_seconds", "From submission to the last token.", SLOW)
        self._queued = histogram("request_queue_time_seconds", "From submission to admission.", SLOW)
        self._asked = histogram("request_prompt_tokens", "Prompt lengths.", TOKENS)
        self._said = histogram("request_generation_tokens", "Answer lengths.", TOKENS)
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of requests that have ended.")
        self._generated = self._counter("generation_tokens", "Tokens generated.")
        labels = ["model_name", "finished_reason"]
        self._ends = Counter("kvlathe_request_success", "Sequences ended, by reason.", labels, registry=self.registry)
        labels = ["model_name", "status"]
        self._errors = Counter("kvlathe_http_errors", "Requests answered by an error.", labels, registry=self.registry)

    def _counter(self, name: str, said: str) -> Counter:
        return Counter(f"kvlathe_{name}", said, ["model_name"], registry=self.registry).labels(self.model)

    def watch(self, engine: AsyncEngine) -> None:
        """Read this engine's state whenever the metrics are asked for."""
        self.registry.register(State(engine, self.model))

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self.registry)

    def failed(self, status: int) -> None:
        """A request was answered with this HTTP status, an error."""
        self._errors.labels(self.model, status).inc()

    # -- Observer --------------------------------------------------------------------------------------------------
    def grew(self, sequence: Sequence, tokens: int, seconds: float) -> None:
        self._generated.inc(tokens)
        (self._first if sequence.answered == tokens else self._between).observe(seconds / tokens)

    def ended(self, sequence: Sequence) -> None:
        self._ends.labels(self.model, sequence.finish_reason).inc()
        self._prompt.inc(sequence.prompt_tokens)
        self._asked.observe(sequence.prompt_tokens)
        self._said.observe(sequence.answered)
        self._whole.observe(sequence.last_token - sequence.started)
        if sequence.admitted:
            self._queued.observe(sequence.admitted - sequence.started)


class State(Collector):
    """What an engine's scheduler and pool say at the moment."""

    def __init__(self, engine: AsyncEngine, model: str) -> None:
        self._engine, self._model = engine, model

    def collect(self) -> Iterator[Metric]:
        engine, llm = self._engine, self._engine.llm
        scheduler, pool = llm.engine.scheduler, llm.pool
        used = engine.bytes_used
        whole = self._uncompressed(list(scheduler.running), used)
        hits = scheduler.prefixes.hits if scheduler.prefixes else 0
        gauges = (
            ("num_requests_running", "Sequences that run.", engine.running),
            ("num_requests_waiting", "Sequences that wait for their turn.", engine.waiting),
            ("kv_cache_usage_perc", "Share of the cache in use, 0 to 1.", used / pool.arena_bytes),
            ("kv_cache_bytes", "Bytes of the pages of running sequences, shared ones once.", used),
            ("kv_cache_bytes_saved", "What these would take uncompressed, in pages too, less that.", whole - used),
            ("kv_cache_bytes_kept", "Bytes of pages kept for requests that begin alike.", pool.bytes_in_use - used),
        )
        counters = (
            ("num_preemptions", "Sequences sent away for want of memory.", scheduler.preemptions),
            ("prefix_cache_queries", "Tokens looked up among known beginnings.", scheduler.queries),
            ("prefix_cache_hits", "Tokens found there and not computed again.", hits),
        )
        for kind, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, said, value in rows:
                family = kind(f"kvlathe_{name}", said, labels=["model_name"])
                family.add_metric([self._model], value)
                yield family

    def _uncompressed(self, sequences: Iterable[Sequence], own: int) -> int:
        """Bytes of pages of the same number of tokens, uncompressed in the same number format, shared ones once: in
        proportion to their ``own`` bytes, as sharing is not compression."""
        llm = self._engine.llm
        page, strides = llm.plan.page_tokens, llm.pool.strides
        pages = sum(-(-sequence.cached // page) for sequence in sequences)
        held = sum(len(ids) * stride for s in sequences for ids, stride in zip(s.table.pages, strides, strict=False))
        return round(own / max(1, held) * pages * page * llm.manifest.kv_bytes.baseline) if llm.manifest else 0

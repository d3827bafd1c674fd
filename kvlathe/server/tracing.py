"""Spans of requests, for OpenTelemetry: what each asked for, what it took, and how long
it waited, its prompt was computed and it was answered.

Names and attributes are those of the semantic conventions for generative AI, version
1.38 (https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/). No span holds
text of a prompt or of an answer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from opentelemetry import context, propagate, trace
from opentelemetry.trace import Span, SpanKind, StatusCode, TracerProvider
from opentelemetry.util.types import AttributeValue

from kvlathe.base.errors import KvlatheError
from kvlathe.base.extras import pip_install
from kvlathe.base.package import __version__
from kvlathe.runtime.requests.request import Delta, Times
from kvlathe.server.errors import ApiError
from kvlathe.server.jobs import Job, Origin

PROVIDER = "kvlathe"
"""gen_ai.provider.name, and the name of whoever makes the spans."""
PARAMS = {
    "gen_ai.request.max_tokens": "max_new_tokens",
    "gen_ai.request.temperature": "temperature",
    "gen_ai.request.top_p": "top_p",
    "gen_ai.request.top_k": "top_k",
    "gen_ai.request.seed": "seed",
    "gen_ai.request.frequency_penalty": "frequency_penalty",
    "gen_ai.request.presence_penalty": "presence_penalty",
    "gen_ai.request.stop_sequences": "stop_strings",
}
"""Attribute -> the sampling parameter that it says."""


def exporting(endpoint: str) -> TracerProvider:
    """A provider whose spans go to ``endpoint``, such as
    ``http://localhost:4318/v1/traces``, by OTLP over HTTP. What OpenTelemetry's
    environment variables say of the service, of sampling and of batches holds. Raises
    KvlatheError where the packages are missing."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider as Sdk
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise KvlatheError(
            "--otlp-traces-endpoint cannot be used",
            f"{error.name} is not installed",
            f"run {pip_install('tracing')}",
        ) from error
    name = os.environ.get("OTEL_SERVICE_NAME", PROVIDER)
    provider = Sdk(resource=Resource.create({SERVICE_NAME: name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return provider


class Spans:
    """Makes the spans of requests to ``model``. ``provider`` None: the process's, where
    it has one: until then nothing is traced, and that costs nothing."""

    def __init__(self, model: str, provider: TracerProvider | None = None) -> None:
        self._model, self._provider = model, provider

    def origin(self, headers: Mapping[str, str]) -> Origin | None:
        """The origin of a request that has come, by its ``traceparent``; None where
        nobody traces."""
        if self._current() is None:
            return None
        # FastAPI has begun a span of the HTTP request, where it makes any.
        found = context.get_current()
        if not trace.get_current_span().get_span_context().is_valid:
            found = propagate.extract(headers)
        came = time.time_ns()
        return Origin(found, came, came - time.perf_counter_ns())

    @contextmanager
    def of(self, job: Job) -> Generator[Recorder | None]:
        """The span of a job, to be told of its deltas; None where nobody traces."""
        origin, provider = job.origin, self._current()
        if origin is None or provider is None:
            yield None
            return
        model = job.params.adapter or self._model
        operation = "chat" if job.kind.object.startswith("chat") else "text_completion"
        tracer = trace.get_tracer(PROVIDER, __version__, provider)
        span = tracer.start_span(
            f"{operation} {model}",
            origin.context,
            SpanKind.INTERNAL,
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": model,
            },
            start_time=origin.came,
        )
        if not span.is_recording():  # a sampler has left it out
            span.end()
            yield None
            return
        recorder = Recorder(span, tracer, job, model, origin.zero)
        try:
            yield recorder
        except ApiError as failure:
            recorder.failed(failure.code or str(failure.status_code))
            raise
        finally:
            recorder.end()

    def _current(self) -> TracerProvider | None:
        provider = self._provider or trace.get_tracer_provider()
        return None if isinstance(provider, trace.ProxyTracerProvider) else provider


class Recorder:
    """Writes what becomes of a job into its span, and a span for each part of each
    sequence's time into that one. ``zero``: as that of Origin."""

    def __init__(
        self, span: Span, tracer: trace.Tracer, job: Job, model: str, zero: int
    ) -> None:
        self._span, self._tracer, self._job = span, tracer, job
        self._inside = trace.set_span_in_context(span)
        self._zero = zero
        self._failed = False
        self._reasons: dict[int, str] = {}
        self._cached: dict[int, int] = {}
        self._tokens: dict[int, int] = {}
        span.set_attributes(_asked(job))
        span.set_attribute("gen_ai.response.id", job.id)
        span.set_attribute("gen_ai.response.model", model)

    def add(self, delta: Delta) -> None:
        """Note what a sequence said, and its times once it has ended."""
        index = delta.index
        self._tokens[index] = self._tokens.get(index, 0) + len(delta.token_ids)
        prompt = index // self._job.n
        self._cached[prompt] = max(delta.reused, self._cached.get(prompt, 0))
        if delta.finish_reason is None or delta.times is None:
            return
        self._reasons[index] = delta.finish_reason
        if delta.error is not None:
            self.failed(type(delta.error).__name__)
        elif delta.finish_reason in ("timeout", "cancelled"):
            self.failed(delta.finish_reason)
        self._parts(delta, delta.times)

    def failed(self, kind: str) -> None:
        """The request failed."""
        self._failed = True
        self._span.set_attribute("error.type", kind)
        self._span.set_status(StatusCode.ERROR)

    def end(self) -> None:
        """No more comes of the request."""
        sequences = len(self._job.prompts) * self._job.n
        if len(self._reasons) < sequences and not self._failed:
            self._span.set_attribute("error.type", "cancelled")  # its client has left
        reasons = [self._reasons[index] for index in sorted(self._reasons)]
        self._span.set_attribute("gen_ai.response.finish_reasons", reasons)
        self._span.set_attribute(
            "gen_ai.usage.input_tokens", sum(map(len, self._job.prompts))
        )
        self._span.set_attribute(
            "gen_ai.usage.cache_read.input_tokens", sum(self._cached.values())
        )
        self._span.set_attribute(
            "gen_ai.usage.output_tokens", sum(self._tokens.values())
        )
        self._span.end(self._zero + time.perf_counter_ns())

    def _parts(self, delta: Delta, times: Times) -> None:
        """Spans of the parts of a sequence that has ended: those that it came to."""
        index = delta.index
        prompt = len(self._job.prompts[index // self._job.n])
        answered = self._tokens[index]
        runs = times.admitted or times.last_token
        self._part("queue", index, times.submitted, runs, {})
        if times.admitted:
            tokens = {"kvlathe.tokens": prompt, "kvlathe.cached_tokens": delta.reused}
            self._part("prompt", index, runs, times.first_token, tokens)
        if answered > 1:
            tokens = {
                "kvlathe.tokens": answered - 1,
                "kvlathe.drafted_tokens": delta.drafted,
                "kvlathe.accepted_tokens": delta.accepted,
            }
            self._part("decode", index, times.first_token, times.last_token, tokens)

    def _part(
        self,
        name: str,
        index: int,
        start: float,
        end: float,
        attributes: Mapping[str, AttributeValue],
    ) -> None:
        """A span of sequence ``index`` between two times of time.perf_counter()."""
        span = self._tracer.start_span(
            name,
            self._inside,
            SpanKind.INTERNAL,
            {"kvlathe.choice": index, **attributes},
            start_time=self._moment(start),
        )
        span.end(self._moment(end))

    def _moment(self, seconds: float) -> int:
        return self._zero + int(seconds * 1e9)


def _asked(job: Job) -> dict[str, AttributeValue]:
    """The attributes of a job's parameters, without those that say nothing."""
    values = {name: getattr(job.params, field) for name, field in PARAMS.items()}
    said = {name: value for name, value in values.items() if value not in (None, ())}
    return said | ({"gen_ai.request.choice.count": job.n} if job.n > 1 else {})

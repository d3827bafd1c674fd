"""Spans of requests. The reference for names is OpenTelemetry's own list of the semantic
conventions, and its in-memory exporter receives what a collector would."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx2 as httpx
import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.llm import LLM
from kvlathe.server.tracing import Spans, exporting
from tests.support.adapter_cases import made_case
from tests.support.runtime_cases import llm
from tests.support.serving_cases import MODEL_NAME, Served, serving, with_template

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanContext

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
KNOWN = {value for name, value in vars(gen_ai_attributes).items() if name[0] == "G"}
EXPORTED = InMemorySpanExporter()


@pytest.fixture(scope="module")
def traced() -> Iterator[Served]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(EXPORTED))
    engine = with_template(llm("torch", "split"))
    with serving(engine, max_waiting=2, tracer_provider=provider) as found:
        yield found


def ask(served: Served, path: str, **body: object) -> httpx.Response:
    EXPORTED.clear()
    fields = {"model": MODEL_NAME, **body}
    return httpx.post(f"{served.url}{path}", json=fields, headers=PARENT, timeout=60)


def spans() -> list[ReadableSpan]:
    """The exported spans, once those of a request and of its HTTP are there."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        found = list(EXPORTED.get_finished_spans())
        names = " ".join(span.name for span in found)
        if MODEL_NAME in names and "POST" in names:
            return found
        time.sleep(0.01)
    raise AssertionError("the spans of the request did not come")


def context_of(span: ReadableSpan) -> SpanContext:
    assert span.context is not None
    return span.context


def of_model(found: Sequence[ReadableSpan]) -> ReadableSpan:
    return next(span for span in found if MODEL_NAME in span.name)


def said(span: ReadableSpan) -> Mapping[str, object]:
    assert span.attributes is not None
    return span.attributes


def inside(outer: ReadableSpan, found: Sequence[ReadableSpan]) -> list[ReadableSpan]:
    """The parts of a request, in the order of their choices and beginnings."""
    name = context_of(outer).span_id
    parts = [one for one in found if one.parent and one.parent.span_id == name]
    return sorted(parts, key=lambda one: (said(one)["kvlathe.choice"], one.start_time))


BODIES = {
    "/v1/completions": {"prompt": "def main():", "max_tokens": 5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "def main():"}]},
    "/v1/responses": {"input": "def main():", "max_output_tokens": 16},
    "/v1/messages": {
        "messages": [{"role": "user", "content": "def main():"}],
        "max_tokens": 5,
    },
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_each_request_has_one_span_of_the_clients_trace_with_its_parts_inside(
    traced: Served, path: str, stream: bool
) -> None:
    fields = {"/v1/chat/completions": {"max_tokens": 5}}.get(path, {})
    answer = ask(traced, path, stream=stream, **BODIES[path], **fields)
    assert answer.status_code == 200
    found = spans()
    [span] = [one for one in found if MODEL_NAME in one.name]
    kind = "text_completion" if path == "/v1/completions" else "chat"
    assert span.name == f"{kind} {MODEL_NAME}"
    assert {f"{context_of(one).trace_id:032x}" for one in found} == {TRACE}
    by_id = {context_of(one).span_id: one for one in found}
    top = span
    while top.parent and top.parent.span_id in by_id:
        top = by_id[top.parent.span_id]
    assert top.parent and f"{top.parent.span_id:016x}" == CALLER
    parts = inside(span, found)
    assert [part.name for part in parts] == ["queue", "prompt", "decode"]
    for part, after in itertools.pairwise(parts):
        assert part.end_time == after.start_time
    assert span.start_time and span.end_time
    for part in parts:
        assert part.start_time and part.end_time and part.start_time <= part.end_time
    first, last = parts[0].start_time, parts[-1].end_time
    assert first and last and span.start_time <= first <= last <= span.end_time


def test_no_span_ends_before_it_begins_where_the_clock_is_set_back(
    traced: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a year at each look."""
    years = itertools.count(2100 - 1970, -1)
    clock = lambda: next(years) * 365 * 86400 * 10**9  # noqa: E731
    monkeypatch.setattr(time, "time_ns", clock)
    assert ask(traced, "/v1/completions", prompt="x", max_tokens=3).status_code == 200
    found = spans()
    every = [of_model(found), *inside(of_model(found), found)]
    assert len(every) == 4
    for one in every:
        assert one.start_time and one.end_time
        assert 0 <= one.end_time - one.start_time < 60 * 10**9


def test_attributes_are_those_of_the_semantic_conventions(traced: Served) -> None:
    options = {"temperature": 0.5, "seed": 7, "top_p": 0.9, "stop": ["zzz"], "n": 2}
    answer = ask(
        traced, "/v1/completions", prompt=[[5] * 10], max_tokens=4, **options
    ).json()
    found = spans()
    span = of_model(found)
    assert {name for name in said(span) if name.startswith("gen_ai")} <= KNOWN
    usage = answer["usage"]
    assert dict(said(span)) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kvlathe",
        "gen_ai.request.model": MODEL_NAME,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.seed": 7,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.stop_sequences": ("zzz",),
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.model": MODEL_NAME,
        "gen_ai.response.finish_reasons": tuple(
            choice["finish_reason"] for choice in answer["choices"]
        ),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    parts = inside(span, found)
    assert [part.name for part in parts] == ["queue", "prompt", "decode"] * 2
    assert [said(part)["kvlathe.choice"] for part in parts] == [0, 0, 0, 1, 1, 1]
    read = [said(part)["kvlathe.tokens"] for part in parts if part.name == "prompt"]
    assert read == [10, 10]


def test_spans_name_the_adapter_of_a_request() -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(EXPORTED))
    folder = made_case("llama")
    engine = LLM.load(folder / "engine", threads=1, device="cpu")
    engine.load_adapter(f"{MODEL_NAME}-red", folder / "red")
    with serving(engine, tracer_provider=provider) as found:
        ask(found, "/v1/completions", model=f"{MODEL_NAME}-red", prompt=[5, 6])
        span = of_model(spans())
    assert span.name == f"text_completion {MODEL_NAME}-red"
    for name in ("gen_ai.request.model", "gen_ai.response.model"):
        assert said(span)[name] == f"{MODEL_NAME}-red"


def test_requests_that_fail_say_so(traced: Served) -> None:
    late = ask(
        traced,
        "/v1/completions",
        prompt=[5, 6],
        max_tokens=400,
        ignore_eos=True,
        deadline_seconds=0.001,
    )
    assert late.status_code == 408
    span = of_model(spans())
    assert said(span)["error.type"] == "timeout"
    assert not span.status.is_ok
    # Eight run and two wait: there is no room for one more.
    many = {"model": MODEL_NAME, "prompt": [[5]] * 10, "max_tokens": 400}
    fields = {**many, "ignore_eos": True, "stream": True}
    url = f"{traced.url}/v1/completions"
    with httpx.stream("POST", url, json=fields, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        answer = ask(traced, "/v1/completions", prompt=[5], max_tokens=4)
        assert answer.status_code == 429
        assert said(of_model(spans()))["error.type"] == "queue_full"
    assert traced.idle()


def test_requests_whose_clients_leave_end_their_spans(traced: Served) -> None:
    EXPORTED.clear()
    fields = {"model": MODEL_NAME, "prompt": [5], "max_tokens": 400, "stream": True}
    url = f"{traced.url}/v1/completions"
    with httpx.stream("POST", url, json={**fields, "ignore_eos": True}) as stream:
        next(stream.iter_lines())
    assert said(of_model(spans()))["error.type"] == "cancelled"
    assert traced.idle()


def test_spans_hold_no_words_of_prompts_and_answers(traced: Served) -> None:
    secret = "xylophone"
    text = ask(traced, "/v1/completions", prompt=f"def {secret}():", echo=True).text
    assert secret in text
    everything = "".join(span.to_json() for span in spans())
    assert secret not in everything


def test_nothing_is_made_where_nobody_traces(served: Served) -> None:
    EXPORTED.clear()
    assert Spans(MODEL_NAME).origin(PARENT) is None
    assert served.engine.llm is not None and not EXPORTED.get_finished_spans()


def test_a_trace_that_a_sampler_leaves_out_has_no_parts() -> None:
    provider = TracerProvider(sampler=ALWAYS_OFF)
    provider.add_span_processor(SimpleSpanProcessor(EXPORTED))
    engine = with_template(llm("torch", "split"))
    with serving(engine, tracer_provider=provider) as found:
        assert ask(found, "/v1/completions", prompt="a").status_code == 200
        assert found.idle()
    assert not EXPORTED.get_finished_spans()


class Collector(BaseHTTPRequestHandler):
    """Receives spans as a collector does."""

    bodies: list[bytes]

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def test_spans_go_to_the_endpoint_that_was_given() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
        ExportTraceServiceRequest,
    )

    Collector.bodies = []
    collector = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=collector.serve_forever, daemon=True)
    thread.start()
    provider = exporting(f"http://127.0.0.1:{collector.server_port}/v1/traces")
    assert isinstance(provider, TracerProvider)
    with serving(llm("torch", "split"), tracer_provider=provider) as found:
        assert ask(found, "/v1/completions", prompt="a").status_code == 200
    provider.shutdown()
    collector.shutdown()
    thread.join()
    collector.server_close()
    names: set[str] = set()
    for body in Collector.bodies:
        for part in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = {
                one.key: one.value.string_value for one in part.resource.attributes
            }
            assert resource["service.name"] == "kvlathe"
            names |= {span.name for scope in part.scope_spans for span in scope.spans}
    assert {f"text_completion {MODEL_NAME}", "queue", "prompt"} <= names


def test_an_endpoint_without_its_packages_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(KvlatheError, match="is not installed") as refused:
        exporting("http://127.0.0.1:4318/v1/traces")
    assert "[tracing]" in refused.value.remedy

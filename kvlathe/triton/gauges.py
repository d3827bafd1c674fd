"""Gauges that the token model adds to Triton's /metrics: how busy the engine is.
``kvlathe serve`` uses the same names."""

from __future__ import annotations

import triton_python_backend_utils as pb  # pyright: ignore[reportMissingImports]

from kvlathe.runtime.async_engine import AsyncEngine

GAUGES = {
    "kvlathe_num_requests_running": "Sequences in the batch",
    "kvlathe_num_requests_waiting": "Sequences that wait for their turn",
    "kvlathe_kv_cache_usage_perc": "Share of the KV cache's bytes in use by running sequences (0 to 1)",
}


class Gauges:
    """Labelled with the model's name: a server may hold several repositories of
    ours."""

    def __init__(self, engine: AsyncEngine, model: str) -> None:
        self._engine = engine
        self._families = [
            pb.MetricFamily(name, said, pb.MetricFamily.GAUGE)
            for name, said in GAUGES.items()
        ]
        self._gauges = [
            family.Metric(labels={"model": model}) for family in self._families
        ]

    def report(self) -> None:
        engine = self._engine
        values = (
            engine.running,
            engine.waiting,
            engine.bytes_used / engine.llm.pool.arena_bytes,
        )
        for gauge, value in zip(self._gauges, values, strict=True):
            gauge.set(float(value))

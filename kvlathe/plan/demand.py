"""PageDemand: the pages that one sequence can need, moment by moment.

A prompt needs most just before its tokens are quantized or dropped; a decode needs most
at its end. Where a prompt passes stages one after the other (stages.Stage), each stage is
hot in its own moment. Not all of these are at once, so they are kept apart.
"""

from __future__ import annotations

from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.stages import Pass


class PageDemand:
    """Pages of each bucket that sequences of one ``layout`` need."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.plan = layout.plan
        self._routes = self.plan.index.routes
        buckets = self.plan.index.buckets
        self._stages = [buckets[route.buckets[0]].stage for route in self._routes]

    def moments(self, tokens: int, prompt: int | None = None) -> list[list[int]]:
        """Pages of a sequence that grows to ``tokens`` tokens: one entry for each pass
        of its prompt, then the decode. ``prompt`` of them are its prompt (None: up to
        all)."""
        passes = self.plan.index.passes(tokens if prompt is None else prompt)
        per_pass = [self._during(passes, now) for now in range(len(passes))]
        if prompt is None:
            arrived = [tokens] * len(self._stages)
        else:
            arrived = [n + tokens - prompt for n in self._arrived(passes)]
        return [*per_pass, self.decode(arrived)]

    def prompt(self, tokens: int) -> list[int]:
        """Pages of a prompt of ``tokens`` tokens in its costliest moment."""
        passes = self.plan.index.passes(tokens)
        per_pass = [self._during(passes, now) for now in range(len(passes))]
        return max(per_pass, key=self.bytes)

    def decode(self, arrived: list[int]) -> list[int]:
        """Pages of a decode up to ``arrived`` tokens on each route."""
        pages = [0] * len(self.layout.page_stride)
        for route, count in zip(self._routes, arrived, strict=True):
            worst = route.worst_pages(count, 0)
            for bucket, most in zip(route.buckets, worst, strict=True):
                pages[bucket] = most
        return pages

    def bytes(self, pages: list[int]) -> int:
        strides = self.layout.page_stride
        return sum(n * stride for n, stride in zip(pages, strides, strict=True))

    def _arrived(self, passes: tuple[Pass, ...]) -> list[int]:
        """Tokens of the prompt that reach each route."""
        of_stage = [0] * self.plan.index.graphs
        for one in passes:
            for stage in range(one.first, one.end):
                of_stage[stage] = one.tokens
        return [of_stage[stage] for stage in self._stages]

    def _during(self, passes: tuple[Pass, ...], now: int) -> list[int]:
        """While pass ``now`` runs and its tokens move. Those of the stages before it have
        moved, and the stages after it are empty."""
        pages = [0] * len(self.layout.page_stride)
        arrived = self._arrived(passes)
        current = passes[now]
        for i, route in enumerate(self._routes):
            if self._stages[i] >= current.end:
                continue
            if self._stages[i] < current.first:
                held = route.written(arrived[i])
                most = tuple(-(-n // self.plan.page_tokens) for n in held)
            else:
                most = route.worst_pages(0, arrived[i])
            for bucket, count in zip(route.buckets, most, strict=True):
                pages[bucket] = count
        return pages

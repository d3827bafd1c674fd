"""Windows in the exported function: masks of the tokens that a lane's window hides
(export/attention/windows.py says what they compute).

Sizes: B sequences, Q queries, H lanes of the layer, Hs of them in a bucket, N places.
"""

from __future__ import annotations

from kvlathe.export.attention.tables import PlanFacts
from kvlathe.export.onnx.body import Body
from kvlathe.export.onnx.pages import NEVER, Places
from kvlathe.plan.plan import CompressionPlan


class WindowMasks:
    """Additive masks of one layer. ``first``: the first place after the sink that each
    query sees, [H, 1, B, Q, 1]."""

    def __init__(self, body: Body, plan: CompressionPlan, facts: PlanFacts) -> None:
        b = body
        self.body, self.plan, self.facts = body, plan, facts
        self.sealed = self._tokens("window_sealed")
        held = b.unsqueeze(self._tokens("window_buckets"), 2)
        own = b.op("Add", held, "query_offsets")
        self.own = b.unsqueeze(own, 1)  # [H, 1, B, Q]
        page = b.int32(plan.page_tokens)
        start = b.op("Mul", b.op("Div", self.own, page), page)
        recent = self._of_lanes("recent")
        exact = self._of_lanes("exact")
        sink = self._of_lanes("sink")
        to_the_page = b.op("Sub", start, recent)
        before = b.op("Sub", exact, b.int32(1))
        first = b.op("Max", to_the_page, b.op("Sub", self.own, before))
        self.first = b.unsqueeze(first, 4)
        self.sink = b.unsqueeze(sink, 4)  # [H, 1, 1, 1, 1]

    def _of_lanes(self, name: str) -> str:
        """A number of each lane's window, [H, 1, 1, 1]."""
        return self.body.unsqueeze(f"window_{name}", 2, 3)

    def _tokens(self, buckets: str) -> str:
        """Tokens that a lane has in some of its buckets, [H, B]."""
        b = self.body
        holds = b.unsqueeze(buckets, 1)
        counts = b.op("Mul", holds, "lengths")  # [H, B, S]
        return b.op("ReduceSum", counts, b.const([2]), keepdims=0)

    def fresh(self, causal: str) -> str:
        """The mask of the step's own tokens, [H, 1, B, Q, Q]; ``causal`` [Q, Q] too."""
        b = self.body
        return b.op("Add", self._hidden(b.unsqueeze(self.own, 3)), causal)

    def cached(self, tokens: Places) -> str:
        """The mask of a bucket's cached tokens, [Hs, 1, B, Q, N]; those past the length
        too."""
        b = self.body
        bucket = tokens.bucket
        places = tokens.every
        if self.plan.index.buckets[bucket].is_hot:
            places = b.op("Add", b.unsqueeze(self.sealed, 1, 3, 4), places)
        hidden = self._hidden(places)
        if not self.facts.shared:
            hidden = b.gather(hidden, f"lanes_{bucket}", 0)
        return b.op("Add", hidden, tokens.mask)

    def _hidden(self, places: str) -> str:
        """NEVER where a window hides a place, else 0."""
        b = self.body
        after_sink = b.op("GreaterOrEqual", places, self.sink)
        hidden = b.op("And", after_sink, b.op("Less", places, self.first))
        never, nothing = b.float(NEVER), b.float(0)
        return b.op("Where", hidden, never, nothing)

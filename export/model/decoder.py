"""Decoder: the folded model as a module. The accuracy search runs it, torch.onnx
exports it, fold fills it.

Sizes: T packed tokens of a step, R logit rows, D hidden size, d head dim, Hq query
heads, H KV heads, V vocabulary, W = sum of rank_k + rank_v over all lanes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from kvlathe.export.attention.eager import AttendLayer
from kvlathe.export.attention.step import StepTensors
from kvlathe.export.model.blocks import (
    AnyLinear,
    Linear,
    Norm,
    Rotator,
    Table,
    linear,
    table,
)
from kvlathe.export.model.layer import DecoderLayer, Widths
from kvlathe.export.model.sliced_head import LOGITS_AT_ONCE
from kvlathe.export.model.spec import DecoderSpec
from kvlathe.export.model.tensors import stream_maps
from kvlathe.layers.beside import Beside, in_table, layer_inputs
from kvlathe.layers.decoder import joined, logits
from kvlathe.layers.mixers import Spans
from kvlathe.layers.streams import narrowed, widened
from kvlathe.layers.temperature import query_factors
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.weight_formats import PLAIN, WeightFormats

FEW = 0.5
"""Share of a sequence's tokens: if fewer are asked for, the last layer computes no
others."""


class Decoder(nn.Module):
    """The folded model over a packed step (docs/attend.md gives every input).

    State names are those of ``fold``: ``embed.weight`` [V, D], ``positions.weight``,
    ``layers.<i>.<role>.weight`` [in, out], ``layers.<i>.attend.proj_q`` ...,
    ``norm.weight``, ``head.weight`` [D, V] (absent when tied). ``rope.*`` stay float32
    whatever ``dtype`` is: a half cannot hold a frequency. Where ``formats`` has codes,
    a weight is ``.codes``, ``.scales`` and ``.zeros`` (export/model/coded_weights.py).
    With ``stage`` only that stage of the plan: its layers under their own names,
    reading and giving hidden states where the model does not begin or end.
    ``gives_hidden``: whether what the head reads is given, too.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        plan: CompressionPlan,
        dtype: torch.dtype = torch.float32,
        stage: int | None = None,
        formats: WeightFormats = PLAIN,
    ) -> None:
        super().__init__()
        part = plan if stage is None else plan.part(stage)
        layers = range(spec.layers) if stage is None else plan.index.layers_of(stage)
        self.spec, self.plan, self.dtype = spec, part, dtype
        self.first, self.last = layers[0] == 0, layers[-1] == spec.layers - 1
        tied = self.last and spec.tied_head
        self.embed = (
            table(spec.vocab_size, spec.hidden_size, dtype, formats.table)
            if self.first or tied
            else None
        )
        learned = self.first and spec.has_positions
        self.positions = (
            Table(spec.max_positions, spec.hidden_size, dtype) if learned else None
        )
        self._add_inputs(spec, dtype)
        self._add_streams(spec, dtype)
        self._add_join(spec, dtype)
        self.gives_hidden = False
        self.rope = Rotator(spec.planes) if spec.ropes else None
        self.rope_of = [spec.rope_of[layer] if spec.ropes else 0 for layer in layers]
        self.layers = nn.ModuleDict(
            {
                str(layer): DecoderLayer(
                    spec,
                    layer,
                    Widths.folded(spec, part, i),
                    _attention(spec, part, i, layer, dtype),
                    dtype,
                    formats.maps,
                )
                for i, layer in enumerate(layers)
            }
        )
        self.norm = (
            Norm(spec.family.norm, spec.hidden_size, spec.family.norm_eps, dtype)
            if self.last
            else None
        )
        self.head = _head(spec, dtype, formats) if self.last and not tied else None

    def _add_inputs(self, spec: DecoderSpec, dtype: torch.dtype) -> None:
        """Add what makes embeddings of tokens for each layer, where they have any."""
        self.inputs_embed = self.inputs_project = self.inputs_norm = None
        of_layer = spec.family.layer_inputs
        if not of_layer or not self.first:
            return
        every = spec.layers * of_layer
        words = spec.family.input_rows or spec.vocab_size
        self.inputs_embed = Table(words, every, dtype)
        self.inputs_project = Linear(spec.hidden_size, every, False, dtype)
        self.inputs_norm = Norm("rms", of_layer, spec.family.norm_eps, dtype)

    def _add_streams(self, spec: DecoderSpec, dtype: torch.dtype) -> None:
        """Add maps that make several hidden states of one, and one of them."""
        hidden = spec.hidden_size
        self.to_streams: list[Linear] = []
        self.of_streams: list[Linear] = []
        for way, maps in (("in", self.to_streams), ("out", self.of_streams)):
            for role in stream_maps(spec, way):
                maps.append(Linear(hidden, hidden, False, dtype))
                self.add_module(role, maps[-1])

    def _add_join(self, spec: DecoderSpec, dtype: torch.dtype) -> None:
        """Add what a layer that guesses tokens reads with."""
        self.guess_embed_norm = self.guess_hidden_norm = self.guess_join = None
        if not spec.reads_hidden:
            return
        hidden, family = spec.hidden_size, spec.family
        given = family.norm, hidden, family.norm_eps, dtype
        self.guess_embed_norm, self.guess_hidden_norm = Norm(*given), Norm(*given)
        self.guess_join = Linear(2 * hidden, hidden, False, dtype)

    def forward(
        self,
        source: Tensor,
        positions: Tensor,
        cu_seqlens_q: Tensor,
        query_offsets: Tensor,
        lengths: Tensor,
        page_tables: Sequence[Tensor],
        pools: dict[str, Tensor],
        logit_rows: Tensor,
        observation_weights: Tensor | None = None,
        states: Tensor | None = None,
        places: Tensor | None = None,
        given: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """source: input_ids [T] or, past the first stage, hidden [T, D]; positions [T],
        logit_rows [R] -> (logits [R, V] float32 or, before the last stage, hidden [T,
        D]; rows [T, W] to append), mass [B, lanes of all layers, N] where the plan
        has an observation window, and states [B, numbers] after the step where layers
        keep some, given those before (None: of sequences without tokens).
        ``places`` [R]: of one sequence with nothing cached, the tokens that the last
        layer computes; logit_rows are then among them. ``given`` [T, D]: hidden states
        that enter beside the tokens, where the decoder reads some. Where it gives some,
        they come last: [R, D], which the head reads.
        """
        steps = cu_seqlens_q, query_offsets, lengths, page_tables, pools
        inputs = observation_weights, states, places, given
        x, *more = self._passed(source, positions, *steps, logit_rows, *inputs)
        if not self.last:
            return x, *more
        assert self.norm is not None
        hidden = self.norm(self._as_one(x))
        return self._logits(hidden), *more, *([hidden] if self.gives_hidden else [])

    def _passed(
        self,
        source: Tensor,
        positions: Tensor,
        cu_seqlens_q: Tensor,
        query_offsets: Tensor,
        lengths: Tensor,
        page_tables: Sequence[Tensor],
        pools: dict[str, Tensor],
        logit_rows: Tensor,
        observation_weights: Tensor | None = None,
        states: Tensor | None = None,
        places: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """``forward``, but hidden states [R, D] before the last norm in place of logits."""
        x = self._entering(source, hidden)
        given = self._inputs(source, x)
        if self.positions is not None:
            x = x + self.positions(positions)
        angles = self.rope(positions, self.dtype) if self.rope else [(None, None)]
        sequences = cu_seqlens_q, query_offsets, lengths
        pages = list(page_tables), pools, observation_weights
        held = self._states(sequences, x.shape[0], states)
        steps = [
            StepTensors(cos, sin, *sequences, *pages, None, *held)
            for cos, sin in angles
        ]
        warmth, layers = self.spec.family.temperature, range(len(self.layers))
        factors = query_factors(warmth, positions, layers)
        beside = Beside(given)
        handed_on: list[list[Tensor]] = []
        after: list[Tensor] = []
        for i, layer in enumerate(self.layers.values()):
            assert isinstance(layer, DecoderLayer)
            step = steps[self.rope_of[i]]
            if i < len(self.layers) - 1:
                x, *more = layer(x, step, query_factors=factors[i], beside=beside)
            else:
                step = dataclasses.replace(step, places=places)
                wanted = logit_rows if self.last and places is None else None
                x, *more = layer(x, step, places, wanted, factors[i], beside)
            if layer.mixer is not None:
                after.append(more.pop())
            if layer.caches:
                handed_on.append(more)
        rows, *mass = zip(*handed_on, strict=True)
        if self.last and places is not None:
            x = x.index_select(0, logit_rows)
        found = [torch.cat(rows, -1), *(torch.cat(of_layer, 1) for of_layer in mass)]
        return x, *found, *([torch.cat(after, -1)] if after else [])

    def _entering(self, source: Tensor, hidden: Tensor | None) -> Tensor:
        """[T, D]: embeddings, in a layer that guesses joined with ``hidden`` [T, D]; past
        the first stage ``source`` itself."""
        x = self.embed(source) if self.first and self.embed is not None else source
        if self.first and self.to_streams:
            return widened(x, self.to_streams)
        if hidden is None or self.guess_join is None:
            return x
        assert self.guess_embed_norm is not None and self.guess_hidden_norm is not None
        norms = self.guess_embed_norm, self.guess_hidden_norm
        return joined(x, hidden, *norms, self.guess_join)

    def _as_one(self, x: Tensor) -> Tensor:
        """[R, D] of what leaves the last layer."""
        return narrowed(x, self.of_streams) if self.of_streams else x

    def _states(
        self,
        sequences: tuple[Tensor, Tensor, Tensor],
        tokens: int,
        states: Tensor | None,
    ) -> tuple[Tensor | None, Spans | None]:
        """States before a step, and where its tokens are; None where no layer keeps a
        state."""
        numbers = sum(self.spec.shape.states)
        if not numbers:
            return None, None
        ends, offsets, lengths = sequences
        count = lengths.shape[0]
        if states is None:
            states = torch.zeros(count, numbers, device=lengths.device)
        return states, Spans.of(ends, offsets, tokens, count)

    def _inputs(self, input_ids: Tensor, x: Tensor) -> Tensor | None:
        """Compute what each layer is given of tokens, embedded as x [T, D]."""
        if self.inputs_embed is None:
            return None
        assert self.inputs_project is not None and self.inputs_norm is not None
        ids = in_table(input_ids, len(self.inputs_embed.weight), self.spec.vocab_size)
        return layer_inputs(
            self.inputs_embed(ids),
            self.inputs_project(x[:, : self.spec.hidden_size]),
            self.inputs_norm,
            self.spec.layers,
        )

    def _logits(self, x: Tensor) -> Tensor:
        """[R, D] -> [R, vocab]: logits of rows behind the last norm."""
        head = self.head
        if head is None:
            assert self.embed is not None
            head = self.embed.product
        return logits(x, head, self.spec.family.logit_softcap).float()

    @torch.inference_mode()
    def logits(self, input_ids: Sequence[int], rows: Sequence[int]) -> Tensor:
        """[len(rows), V] float32: next-token logits of one sequence, prefilled at once
        with nothing cached."""
        return self.read(input_ids, rows)

    @torch.inference_mode()
    def logits_in_blocks(
        self, input_ids: Sequence[int], rows: Sequence[int]
    ) -> Iterator[tuple[slice, Tensor]]:
        """The same, some rows after the other: (which of ``rows``, their logits),
        LOGITS_AT_ONCE at most."""
        hidden = self._hidden(input_ids, rows)
        size = max(1, LOGITS_AT_ONCE // self.spec.vocab_size)
        for start in range(0, len(rows), size):
            block = slice(start, min(start + size, len(rows)))
            yield block, self._logits(hidden[block])

    def read(self, input_ids: Sequence[int], rows: Sequence[int]) -> Tensor:
        """The same, where gradients may be taken."""
        return self._logits(self._hidden(input_ids, rows))

    def _hidden(self, input_ids: Sequence[int], rows: Sequence[int]) -> Tensor:
        """[len(rows), D]: what the head reads."""
        assert self.norm is not None
        count = len(input_ids)
        lengths = [[0] * len(self.plan.index.buckets)]

        def ints(numbers: object) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=self.device)

        logit_rows, places = ints(rows), None
        if 0 < len(rows) < FEW * count and not self.plan.index.observes:
            places, logit_rows = logit_rows.long().unique(return_inverse=True)
        x = self._passed(
            ints(input_ids),
            ints(range(count)),
            ints([0, count]),
            ints(range(count)),
            ints(lengths),
            [],
            {},
            logit_rows,
            places=places,
        )[0]
        return self.norm(self._as_one(x))

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


def _attention(
    spec: DecoderSpec,
    plan: CompressionPlan,
    place: int,
    layer: int,
    dtype: torch.dtype,
) -> AttendLayer | None:
    """The attention of a model's ``layer``, at this place of the plan; None where it has
    none."""
    if not spec.attends(layer):
        return None
    return AttendLayer(plan, plan.model.source(place), spec.scale(layer), dtype)


def _head(spec: DecoderSpec, dtype: torch.dtype, formats: WeightFormats) -> AnyLinear:
    """The head of a model that does not tie it to the embedding."""
    hidden, vocabulary = spec.hidden_size, spec.vocab_size
    return linear(hidden, vocabulary, spec.family.head_bias, dtype, formats.table)

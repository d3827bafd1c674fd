"""Divergence: the nats a token by which a plan's model departs from the uncompressed one, for
searches that score many plans on the same few windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from kvlathe.export.methods.composition import CacheSettings, Made, compose
from kvlathe.export.methods.compression import UNCOMPRESSED
from kvlathe.export.methods.options import RankOptions
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.measuring.layerwise import BothModels
from kvlathe.measuring.losses import Sums, text_sums
from kvlathe.measuring.sequences import Group, Passage
from kvlathe.plan.measurement import finite

STRIDE = 2
"""Every so many places of a window are scored: neighbours say nearly the same, and the
head takes as long as half of a small model."""


class Divergence:
    """Scores the plans of ``checkpoint`` on ``windows`` of token ids, as a decode would compute
    them, one layer of weights in memory at a time. No plan may rank tokens.

    Keys are cached after RoPE, so a basis that fits the first positions may not fit the
    last ones: every second window lies at the end of the longest sequence."""

    def __init__(
        self, checkpoint: Checkpoint, windows: Sequence[Sequence[int]]
    ) -> None:
        self._checkpoint = checkpoint
        passages = []
        last = checkpoint.spec.max_seq_len if checkpoint.spec.ropes else 0
        for i, window in enumerate(windows):
            rows = tuple(range(len(window) - 1)[::-STRIDE])[::-1]
            start = max(0, last - len(window)) if i % 2 else 0
            passages.append(Passage(tuple(window), rows, start=start))
        longest = max(map(len, windows))
        self._group = Group(longest, tuple(passages))

    def kl(self, made: Made) -> float:
        """Nats a token that a plan and its basis lose in the window where they lose
        most; at least 0. What is no number is more than any."""
        lost = [finite(one.kl / one.rows) for one in self.sums(made)]
        return max(0.0, *lost)

    def sums(self, made: Made) -> list[Sums]:
        """The sums of each window."""
        planned = self._last(BothModels(self._checkpoint, made, None))
        return self._compared(planned)

    @cached_property
    def _model(self) -> BothModels:
        """The model as it is."""
        spec = self._checkpoint.spec
        settings = CacheSettings(32, layer_windows=spec.windows)
        has_rope = spec.rope is not None
        whole = compose(
            UNCOMPRESSED, spec.shape, has_rope, None, RankOptions(), settings
        )
        return BothModels(self._checkpoint, whole, None)

    @cached_property
    def _whole(self) -> list[Tensor]:
        return self._last(self._model)

    def _last(self, models: BothModels) -> list[Tensor]:
        """[R, D] of each window: what the last layer gives at the scored places."""
        (work,) = models.run([self._group], math.inf, "scoring a plan")
        last = []
        for passage, running in zip(self._group.passages, work.whole, strict=True):
            last.append(running.hidden[list(passage.rows)])
        return last

    @torch.inference_mode()
    def _compared(self, planned: Sequence[Tensor]) -> list[Sums]:
        vocabulary = self._checkpoint.spec.vocab_size
        sums = []
        for passage, whole, plan in zip(
            self._group.passages, self._whole, planned, strict=True
        ):
            targets = torch.tensor(passage.targets, device=whole.device)
            both = partial(self._logits, whole), partial(self._logits, plan)
            sums.append(text_sums(*both, targets, vocabulary))
        return sums

    def _logits(self, last: Tensor, block: slice) -> Tensor:
        return self._model.head(last[block])

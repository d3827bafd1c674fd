"""Which tokens the answers have whose requests ask for penalties, counted where the logits
are: the host need not know a token before the next one is chosen.

A sequence has a slot from one choice to the next. Who was not in the last choice that
counted, or got tokens elsewhere, is written anew from what the host knows. So what was
counted for an answer that had ended already is forgotten with its slot.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvlathe.runtime.text.penalties import Penalties, Request, Sampler
from kvlathe.runtime.text.sampler import NO_TOKEN

ROWS_AT_ONCE = 32
"""What tokens lose is float64 [rows, vocab] while it is computed: of so many rows."""


def copied_to(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device. Memory that is not pinned is staged before the call returns:
    nothing waits for the GPU, and the array may go at once."""
    return torch.from_numpy(array).to(device, non_blocking=True)


class TokenCounts:
    """``answers`` [slots, vocab]: how often an answer has each token. ``seen``: whether it
    or its prompt has."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.device = device
        self.answers = torch.zeros(
            0,
            vocab,
            dtype=torch.int32,
            device=device,
        )
        self.seen = self.answers.bool()
        self._slots: dict[Sampler, int] = {}
        self._lengths: dict[Sampler, int] = {}
        self._places = self.answers  # slots of the rows of the choice that is made

    def penalized(self, logits: Tensor, asked: Penalties) -> Tensor:
        """The logits [R, vocab] after the penalties of some rows."""
        self._place(asked.requests)
        changed = logits.clone()
        for first in range(0, len(asked.rows), ROWS_AT_ONCE):
            some = slice(first, first + ROWS_AT_ONCE)
            rows = copied_to(asked.rows[some], self.device)
            changed[rows] = self._changed(logits[rows], asked, some)
        return changed

    def _changed(self, old: Tensor, asked: Penalties, some: slice) -> Tensor:
        """``old`` [r, vocab], the logits of ``some`` of the rows, after their penalties."""
        places = self._places[some]
        repetition = copied_to(asked.repetition[some], self.device)
        presence = copied_to(asked.presence[some], self.device)
        frequency = copied_to(asked.frequency[some], self.device)
        penalty = torch.where(self.seen[places], repetition[:, None], 1)
        penalized = torch.where(
            old > 0,
            old / penalty,
            old * penalty,
        )
        times = self.answers[places]
        taken = presence[:, None] + frequency[:, None] * times
        kept = torch.where(times > 0, taken, 0)
        return penalized - kept.float()

    def add(self, tokens: Tensor, asked: Penalties) -> None:
        """Count the tokens [R] that were chosen for the rows that ``penalized`` had."""
        rows = copied_to(asked.rows, self.device)
        own = tokens[rows]
        chosen = own != NO_TOKEN
        places = (self._places, own.clamp(min=0))
        self.answers[places] += chosen.int()
        self.seen[places] |= chosen
        for request in asked.requests:
            length = _length(request)
            self._lengths[request.sampler] = length + 1

    def _place(self, requests: tuple[Request, ...]) -> None:
        """Give each its slot, with what its answer has."""
        self._grow(len(requests))
        before, lengths = self._slots, self._lengths
        kept: dict[Sampler, int] = {}
        for request in requests:
            slot = before.get(request.sampler)
            if slot is not None:
                kept[request.sampler] = slot
        free = set(range(len(self.answers)))
        free.difference_update(kept.values())
        self._slots, self._lengths = kept, {}
        slots: list[int] = []
        for request in requests:
            sampler = request.sampler
            if sampler not in kept:
                kept[sampler] = free.pop()
                lengths.pop(sampler, None)
            slot = kept[sampler]
            if lengths.get(sampler) != _length(request):
                self._write(slot, request)
            slots.append(slot)
        numbers = np.array(slots, np.int64)
        self._places = copied_to(numbers, self.device)

    def _grow(self, slots: int) -> None:
        """Room for so many, and as many again as there were."""
        count, vocab = self.answers.shape
        if slots <= count:
            return
        more = max(slots - count, count)
        wider = self.answers.new_zeros(more, vocab)
        self.answers = torch.cat([self.answers, wider])
        wider = self.seen.new_zeros(more, vocab)
        self.seen = torch.cat([self.seen, wider])

    def _write(self, slot: int, request: Request) -> None:
        """What the host knows of a sequence, which must be all."""
        assert not request.pending, "a token that nobody counted is not known"
        context = np.asarray(request.context, np.int64)
        ids = copied_to(context, self.device)
        answer = ids[request.prompt_tokens :]
        once = torch.ones_like(answer)
        self.answers[slot] = 0
        self.answers[slot].index_add_(0, answer, once.int())
        self.seen[slot] = False
        self.seen[slot].index_fill_(0, ids, True)


def _length(request: Request) -> int:
    return len(request.context) + request.pending

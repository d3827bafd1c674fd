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


def sent(array: np.ndarray, device: torch.device) -> Tensor:
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
        rows = sent(asked.rows, self.device)
        old = logits[rows]
        repetition = sent(asked.repetition, self.device)
        seen = self.seen[self._places]
        penalty = torch.where(seen, repetition[:, None], 1)
        penalized = torch.where(
            old > 0,
            old / penalty,
            old * penalty,
        )
        changed = logits.clone()
        changed[rows] = penalized - self._taken(asked).float()
        return changed

    def _taken(self, asked: Penalties) -> Tensor:
        """[P, vocab] float64: what tokens lose that the answers have."""
        presence = sent(asked.presence, self.device)
        frequency = sent(asked.frequency, self.device)
        times = self.answers[self._places]
        taken = presence[:, None] + frequency[:, None] * times
        return torch.where(times > 0, taken, 0)

    def add(self, tokens: Tensor, asked: Penalties) -> None:
        """Count the tokens [R] that were chosen for the rows that ``penalized`` had."""
        rows = sent(asked.rows, self.device)
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
        self._places = sent(numbers, self.device)

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
        ids = sent(context, self.device)
        answer = ids[request.prompt_tokens :]
        once = torch.ones_like(answer)
        self.answers[slot] = 0
        self.answers[slot].index_add_(0, answer, once.int())
        self.seen[slot] = False
        self.seen[slot].index_fill_(0, ids, True)


def _length(request: Request) -> int:
    return len(request.context) + request.pending

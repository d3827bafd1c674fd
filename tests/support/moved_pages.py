"""Pages that go from pool to pool by address, as a network card or another GPU copies
them."""

from __future__ import annotations

import ctypes

from kvlathe.runtime.cache.parcel import Parcel
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.requests.held_pages import Arrival, Departure


def copied(source: LLM, departure: Departure, target: LLM) -> Arrival:
    """The arrival of what has left ``source`` in pages of ``target``; not checked
    yet."""
    parcel = Parcel.from_json(departure.parcel.to_json())
    arrival = target.exchange.expect(parcel)
    for piece in arrival.pieces(source.exchange.memory):
        ctypes.memmove(piece.target, piece.source, piece.size)
    return arrival

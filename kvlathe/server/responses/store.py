"""Responses that are kept, so that a later one may go on: in memory, and not for ever."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvlathe.server.fields import Json

MOST_BYTES = 64 << 20
"""Bytes of all responses that are kept."""
MOST_RESPONSES = 4096
MOST_CONVERSATION = 8 << 20
"""Bytes of a response and the items before it, with which another may go on."""
ITEM_BYTES = 256
"""Bytes that an item takes beside its text."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A response as JSON, and the items that came before its output: each one's id, and
    the item as JSON. A conversation's items are there with each of its responses.

    JSON of megabytes takes long to read, and Python does nothing else meanwhile. So each
    item stands for itself, and is read where it is asked for."""

    id: str
    response: bytes
    items: tuple[tuple[str, bytes], ...] = ()

    @classmethod
    def of(cls, response: Json, items: Sequence[Json]) -> Kept:
        texts = ((item["id"], json.dumps(item).encode()) for item in items)
        return cls(response["id"], json.dumps(response).encode(), tuple(texts))

    @property
    def size(self) -> int:
        return len(self.response) + sum(
            ITEM_BYTES + len(text) for _, text in self.items
        )

    @property
    def conversation(self) -> list[Json]:
        """The items of the conversation so far."""
        before = [json.loads(text) for _, text in self.items]
        return [*before, *json.loads(self.response)["output"]]


class Store:
    """Responses of all tenants. Each sees its own. Where there are too many, or too many
    bytes, that goes of the tenant with the most of them which was not used for longest:
    who has less than an equal share loses nothing to others."""

    def __init__(
        self, most_bytes: int = MOST_BYTES, most_responses: int = MOST_RESPONSES
    ) -> None:
        self.most_bytes, self.most_responses = most_bytes, most_responses
        self._kept: dict[str, OrderedDict[str, Kept]] = {}
        self._bytes: dict[str, int] = {}

    def put(self, tenant: str, kept: Kept) -> None:
        """Keep a response; one that is larger than all room is not kept."""
        if kept.size > self.most_bytes:
            return
        self._kept.setdefault(tenant, OrderedDict())[kept.id] = kept
        self._bytes[tenant] = self._bytes.get(tenant, 0) + kept.size
        while sum(self._bytes.values()) > self.most_bytes:
            self._drop_oldest(max(self._bytes, key=self._bytes.__getitem__))
        while sum(map(len, self._kept.values())) > self.most_responses:
            self._drop_oldest(max(self._kept, key=lambda one: len(self._kept[one])))

    def get(self, tenant: str, name: str) -> Kept | None:
        """A response that is kept. It stays longer than those that nobody asks for."""
        own = self._kept.get(tenant, {})
        kept = own.get(name)
        if kept is not None:
            self._kept[tenant].move_to_end(name)
        return kept

    def _drop_oldest(self, tenant: str) -> None:
        self.drop(tenant, next(iter(self._kept[tenant])))

    def drop(self, tenant: str, name: str) -> bool:
        """Forget a response. False where there is none."""
        own = self._kept.get(tenant, {})
        if name not in own:
            return False
        self._bytes[tenant] -= own.pop(name).size
        if not own:
            del self._kept[tenant], self._bytes[tenant]
        return True

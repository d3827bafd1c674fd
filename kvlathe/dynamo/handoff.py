"""Handoff from a prefill worker to a decode worker, through the frontend: a sequence's
parcel, and the place of its pages. An answer that ended with its first token is handed
over as that token."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.cache.parcel import Parcel, damaged
from kvlathe.runtime.requests.request import Delta
from kvlathe.runtime.requests.running import logprobs_of
from kvlathe.runtime.sessions.protocols import Region
from kvlathe.runtime.text.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Handoff:
    """``name`` of the departure at its worker, which ``agent`` reaches with
    ``metadata`` (base64, NIXL's own); its pool begins at ``address``."""

    name: str
    agent: str
    metadata: str
    address: int
    size: int
    device: str
    parcel: Parcel

    @property
    def region(self) -> Region:
        return Region(self.address, self.size, self.device)

    def to_fields(self) -> dict[str, object]:
        """The handoff as JSON."""
        fields: dict[str, object] = {}
        for name in ("name", "agent", "metadata", "address", "size", "device"):
            fields[name] = getattr(self, name)
        fields["parcel"] = self.parcel.to_json()
        return fields

    @classmethod
    def from_fields(cls, fields: Mapping[str, object]) -> Handoff:
        """Raises KvlatheError for what is none."""
        try:
            return cls(
                name=str(fields["name"]),
                agent=str(fields["agent"]),
                metadata=str(fields["metadata"]),
                address=int(cast(int, fields["address"])),
                size=int(cast(int, fields["size"])),
                device=str(fields["device"]),
                parcel=Parcel.from_json(str(fields["parcel"])),
            )
        except (LookupError, TypeError, ValueError) as error:
            raise damaged(f"its handoff is malformed ({error!r})") from error


def asked_again(parcel: Parcel, params: SamplingParams) -> Parcel:
    """The parcel with what the decode worker was asked for: a prefill worker is only
    asked for the first token."""
    running = parcel.running
    if running is None:
        raise KvlatheError(
            "no answer can go on from this parcel", "it holds a prefix", "send another"
        )
    text = json.dumps(dataclasses.asdict(params))
    return dataclasses.replace(
        parcel, running=dataclasses.replace(running, params=text)
    )


def said_before(parcel: Parcel) -> Delta:
    """The delta of all that a sequence had said where it comes from."""
    running = parcel.running
    assert running is not None
    return Delta(
        index=0,
        text="",
        token_ids=tuple(parcel.tokens[running.prompt_tokens :]),
        logprobs=tuple(logprobs_of(running.logprobs)),
        prompt_logprobs=tuple(logprobs_of(running.prompt_logprobs)),
    )

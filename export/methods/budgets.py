"""What the methods share that keep a budget of tokens by attention: how their options are written."""

from __future__ import annotations

from kvlathe.errors import KvlatheError
from kvlathe.export.methods.options import Part, known_only
from kvlathe.export.plan import Probe, TokenRule

MOST = 1 << 31
"""Tokens that no sequence has."""


def budget(written: dict[str, str], page_tokens: int, probe: Probe, recent: float) -> Part:
    """Every lane keeps ``budget`` tokens, whole pages, the share ``recent`` of them the newest. Raises KvlatheError."""
    known_only(written, ("budget", "recent"))
    tokens, share = (_number(written, key, default) for key, default in (("budget", 512), ("recent", recent)))
    if not page_tokens <= tokens < MOST or not 0 <= share <= 1:
        raise KvlatheError(
            f"budget={tokens:g},recent={share:g} cannot be used",
            f"a page holds {page_tokens} tokens, and recent is a share of the budget",
            "write for example budget=512,recent=0.5",
        )
    size = round(tokens / page_tokens) * page_tokens
    return Part(tokens=(TokenRule("budget", budget=size, recent=round(share * size)),), probe=probe)


def _number(written: dict[str, str], key: str, default: float) -> float:
    try:
        return float(written.get(key, default))
    except ValueError:
        raise KvlatheError(
            f"{key}={written[key]} cannot be used", "it is no number", f"write {key}={default}"
        ) from None

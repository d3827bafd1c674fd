"""One exception for everything a user can mend: what is so, why that is so or stops us,
and what to do."""

from __future__ import annotations


class KvlatheError(Exception):
    """A refusal at an edge, before anything is written.

    Its text is ``{fact}: {reason}. {remedy}.``; an empty reason or remedy is left out.
    The command line prints it after ``error:`` and exits with 1, the HTTP server
    answers 400 with it.
    """

    def __init__(self, fact: str, reason: str = "", remedy: str = "") -> None:
        self.fact = fact
        self.reason = reason
        self.remedy = remedy
        cause = fact.rstrip(".")
        if reason:
            cause += f": {reason.rstrip('.')}"
        sentences = [cause]
        if remedy:
            sentences.append(remedy[0].upper() + remedy[1:].rstrip("."))
        super().__init__(". ".join(sentences) + ".")


class EngineStopped(KvlatheError):
    """The engine's thread has ended: no request is answered any more."""


class Busy(KvlatheError):
    """There is no room just now. ``retry_after``: seconds until another try is worth
    it."""

    def __init__(self, fact: str, reason: str, retry_after: int) -> None:
        super().__init__(fact, reason, f"try again in {retry_after} s")
        self.retry_after = retry_after


class Asleep(Busy):
    """The engine has given its memory back, until somebody wakes it."""


class DeviceLost(EngineStopped):
    """The engine's device computes nothing any more. No request can be answered."""

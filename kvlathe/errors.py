"""One exception for everything a user can mend: what is so, why that stops us, what to do."""

from __future__ import annotations


class KvlatheError(Exception):
    """A refusal at an edge. Its text is one sentence naming fact, reason and remedy; nothing was half-written.

    The command line prints it after ``error:`` and exits with 1, the HTTP server answers 400 with it.
    """

    def __init__(self, fact: str, reason: str = "", remedy: str = "") -> None:
        self.fact, self.reason, self.remedy = fact, reason, remedy
        sentence = fact.rstrip(".")
        if reason:
            sentence += f", because {reason.rstrip('.')}"
        if remedy:
            sentence += f": {remedy.rstrip('.')}"
        super().__init__(sentence + ".")

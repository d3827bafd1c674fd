"""ClosesAtExit: what is closed at the end of a ``with`` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class ClosesAtExit(ABC):
    """``with`` gives the object itself and closes it, whatever happened inside."""

    @abstractmethod
    def close(self) -> object:
        """Give back what the object holds; a second call does nothing. What it gives is
        the object's own matter."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

"""What a session is: small protocols, and the values that they exchange.

A session is a loaded engine with the memory of its pages. It runs steps, moves pages,
and quantizes pages; a session whose engine ranks tokens also ranks them, and one on a GPU
samples there. Callers ask for the protocol that they need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.moves import Selection
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.text.sampler import Sampled, SamplingRows

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


class HiddenRows(Protocol):
    """Hidden states of a prompt's rows between two passes, in the memory of their
    session."""

    @property
    def known(self) -> Int32 | None:
        """Where they are in the prompt; None where finding that out would wait."""
        ...

    def places(self) -> Int32:
        """Where they are in the prompt. May wait."""
        ...

    def stay(self, count: int, last: int) -> HiddenRows:
        """Those that enter the next pass, ascending: the ``last`` ones, and of the others
        those to which observed rows gave most (of two equal ones the earlier)."""
        ...


@dataclass(eq=False, slots=True)
class PassRows:
    """A step's part of a prompt that passes stages.

    Its rows are ``start`` to ``end`` - 1 of the ``count`` rows of a pass; in the step they
    begin at row ``at``. ``entered``: all of the pass as they enter; None where they are
    tokens. ``left``: those that have left; the step adds its own. ``leaves``: whether
    rows stay behind after the pass, so that the others must be kept.
    """

    at: int
    start: int
    end: int
    count: int
    leaves: bool
    entered: HiddenRows | None
    left: HiddenRows | None

    @property
    def rows(self) -> slice:
        """Its rows in the step."""
        end = self.at + self.end - self.start
        return slice(self.at, end)

    @property
    def places(self) -> slice:
        """Its rows in the pass."""
        return slice(self.start, self.end)

    @property
    def ends(self) -> bool:
        """Whether the pass ends with them."""
        return self.end == self.count


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One packed step: any mix of prefill chunks and decodes (docs/attend.md).

    T tokens of B sequences; S buckets; R rows of logits. Arrays may be padded to a
    capacity: tokens past ``cu_seqlens_q[-1]`` are padding rows, and sequences past the
    real ones have no queries and length 0.

    - ``input_ids``, ``positions``: [T]
    - ``after``: [T], the row of logits of the step before from which a token was
      sampled, where the host does not know it yet; its ``input_ids`` say nothing. -1
      elsewhere. None: all are known
    - ``cu_seqlens_q``: [B + 1], where each sequence's tokens begin
    - ``query_offsets``: [Q], 0 .. Q - 1 for the longest sequence of the step
    - ``lengths``: [B, S], tokens that were cached before this step
    - ``page_tables``: S arrays [B, M_s]; the pages of this step's tokens are in them
    - ``logit_rows``: [R], the tokens whose next-token logits are wanted
    - ``stages``: [B, 2], the stages that each sequence passes: first, end. None: all
    - ``observation_weights``: [T], 1 for rows whose attention is observed, else 0
    - ``observed_attention``: [B, lanes, N], zeros; the step fills it
    - ``passes``: B, of each sequence that does not pass all stages. Where the places of its
      rows are not known, its ``positions`` are those of the prompt's last tokens
    """

    input_ids: Int32
    positions: Int32
    cu_seqlens_q: Int32
    query_offsets: Int32
    lengths: Int32
    page_tables: tuple[Int32, ...]
    logit_rows: Int32
    after: Int32 | None = None
    stages: Int32 | None = None
    observation_weights: Float32 | None = None
    observed_attention: Float32 | None = None
    passes: tuple[PassRows | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class FullPage:
    """A full page to be sealed: ``page`` of fresh bucket ``fresh``.

    ``cold_pages``: one page of each of its cold buckets, in the order of
    ``plan.index.buckets[fresh].cold``. ``position``: place of the page's first token in its sequence.
    Stochastic rounding depends on it.
    """

    fresh: int
    page: int
    cold_pages: tuple[int, ...]
    position: int


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of a sequence's tokens in one bucket, [lanes of the bucket, tokens].

    ``attention``: the attention that the observation window has given to each token.
    ``position``: each token's position, where the plan keeps positions.
    """

    attention: Float32
    position: Int32 | None


class StepRunner(Protocol):
    """Runs steps."""

    def run(self, step: StepPlan) -> Float32:
        """Logits [R, vocab].

        Writes the step's K and V to the places after ``lengths`` in the fresh buckets.
        Adds what observed rows attended to the scores of the pages. Where
        ``step.observed_attention`` is given, it holds the observed rows' attention
        afterwards, of all kept lanes, layer by layer. Where ``step.stages`` is given,
        computes only the layers that each sequence passes; ``step.passes`` then holds
        what its tokens leave with. A step that fails may be run again.

        Raises KvlatheError for a step that is larger than the engine was built for.
        """
        ...


class PageMover(Protocol):
    """Moves whole pages between steps."""

    def copy_page(self, bucket: int, source: int, target: int) -> None:
        """Copy on write."""
        ...

    def read_page(self, bucket: int, page: int) -> bytes:
        """Swap out: the page's bytes."""
        ...

    def write_page(self, bucket: int, page: int, data: bytes) -> None:
        """Swap in."""
        ...


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that a network card or another process may be given: ``size`` bytes from
    ``address`` on. ``device``: whose addresses these are, ``cpu`` or ``cuda:0``, with the
    GPU's number in its own process."""

    address: int
    size: int
    device: str


@runtime_checkable
class PoolMemory(Protocol):
    """Has its pages in one range of memory, page by page as the layout says. Others may
    read there, and write to pages that nobody here has."""

    @property
    def region(self) -> Region:
        """The pool: page i of a bucket begins at i times the bucket's page stride."""
        ...

    def mark(self) -> Callable[[], None]:
        """A function that waits, in any thread, until what was asked so far is done.
        Before that a step that still runs may write to pages that were given back."""
        ...


@runtime_checkable
class PageSummer(Protocol):
    """Sums pages where they lie, so that their digests need no copy of them."""

    def row_sums(self, bucket: int, pages: Sequence[int]) -> Callable[[], Int64]:
        """[pages, rows]: the sums of each page's rows (kvlathe/plan/page_digest.py), as
        the page is after what was asked so far. The function waits for them, in any
        thread."""
        ...


class PageQuantizer(Protocol):
    """Quantizes full pages between steps."""

    def seal(self, pages: Sequence[FullPage]) -> None:
        """Quantize each page into one page of each of its cold buckets."""
        ...


@runtime_checkable
class TokenRanker(Protocol):
    """Scores the tokens of a plan that ranks them, and moves them between buckets."""

    def scores(self, bucket: int, pages: Sequence[int], tokens: int) -> Scores:
        """Scores of the first ``tokens`` tokens in ``pages`` of a bucket."""
        ...

    def move(
        self,
        source: int,
        pages: Sequence[int],
        target: int,
        target_pages: Sequence[int],
        places: npt.NDArray[np.int64],
    ) -> None:
        """Write a sequence's tokens, with their scores, into new pages of ``target``.

        ``places`` [lanes of the target, n]: for each lane (in lane order) the places of
        its tokens in ``pages`` of bucket ``source``, ascending. Within a bucket the
        bytes stay what they are. Between buckets the number format changes, and the
        target's pages are filled.
        """
        ...

    def forget(self, bucket: int, pages: Sequence[int]) -> None:
        """Set the observed attention of all tokens in ``pages`` to 0."""
        ...

    def unobserve(self) -> None:
        """Restore the scores from before the last ``run``: its step is rolled back."""
        ...


@runtime_checkable
class DeviceRanker(Protocol):
    """A TokenRanker that also ranks, where the scores are, so that nothing waits."""

    def rank(
        self,
        selection: Selection,
        pages: Sequence[int],
        targets: Sequence[Sequence[int]],
        seen: npt.NDArray[np.int64] | None,
        keys: Sequence[int],
    ) -> None:
        """Make a selection among the tokens in ``pages``; ``targets`` are new pages of each
        of its targets. ``seen``, ``keys``: as in cache/token_ranking.py."""
        ...


class Sampling(Protocol):
    """Tokens that are being computed."""

    def result(self) -> Sampled:
        """Wait for them."""
        ...


Choose = Callable[[SamplingRows], Sampling]
"""Chooses tokens from the logits of a step that may still run; the rows say what each of
them asks for."""


@runtime_checkable
class TokenSampler(Protocol):
    """Samples where the logits are, so that only tokens cross to the host."""

    def start(self, step: StepPlan) -> Choose:
        """Run a step as ``StepRunner.run`` does. What it returns chooses a token for
        each of its R rows of logits, and is to be called before the next step.

        Neither waits: the next step may be given before the tokens are there, and
        ``StepPlan.after`` then names them. So may pages be moved and sealed.
        """
        ...


@runtime_checkable
class TokenCounter(Protocol):
    """A TokenSampler that counts the tokens of answers where it chooses them, for rows
    that ask for it (``SamplingRows.penalties``)."""

    counts_tokens: bool


@runtime_checkable
class OnDevice(Protocol):
    """Runs on something that can be lost while the process lives."""

    def lost(self) -> str:
        """Why it computes nothing any more; empty while it does. Waits for it."""
        ...

    def warm_up(self) -> None:
        """Make now what steps would make when they are first needed. Raises
        KvlatheError where memory is missing."""
        ...


@runtime_checkable
class Watched(Protocol):
    """Is made of several processes, each of which may die while nothing runs."""

    def watch(self, tell: Callable[[], None]) -> None:
        """``tell`` is called, in some thread, once one of them has died."""
        ...

    def check(self) -> None:
        """Raises DeviceLost where one has."""
        ...

    def close(self) -> None:
        """End them."""
        ...


class Session(StepRunner, PageMover, PageQuantizer, Protocol):
    """What every engine needs of its session."""


def ranker_of(session: Session, plan: CompressionPlan) -> TokenRanker | None:
    """The session as a ranker of tokens; None where ``plan`` ranks none.

    Raises KvlatheError where ``plan`` ranks tokens and the session cannot.
    """
    if not plan.index.ranked:
        return None
    if isinstance(session, TokenRanker):
        return session
    raise KvlatheError(
        "this engine cannot run here",
        f"its plan ranks tokens and {type(session).__name__} keeps no scores",
        "run it with --device cpu, or build it with a compression that ranks no tokens",
    )

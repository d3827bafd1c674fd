"""Session: a loaded engine with the memory of its pages, and the values that it
exchanges with whoever runs it."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.sessions.adapters import Adapters, LoadedAdapter
from kvlathe.runtime.sessions.page_moves import PageMoves
from kvlathe.runtime.text.sampler import Sampled, SamplingRows

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Hidden = object
"""Hidden states [n, D] of rows, in the memory of their session, where others of its kind
read them. Nobody writes to them."""
HiddenRow = tuple[Hidden, int]
"""One row of them."""
PLAIN = "plain"
"""The coding of pages whose bytes are those of the pool."""


class HiddenRows(Protocol):
    """Hidden states of a prompt's rows between two passes, in the memory of their
    session."""

    @property
    def known(self) -> Int32 | None:
        """The places in the prompt; None where finding that out would wait."""
        ...

    def places(self) -> Int32:
        """The places in the prompt. May wait."""
        ...

    def stay(self, count: int, last: int) -> HiddenRows:
        """Those that enter the next pass, ascending: the ``last`` ones, and of the
        others those to which observed rows gave most (of two equal ones the
        earlier)."""
        ...


@dataclass(eq=False, slots=True)
class PassRows:
    """A step's part of a prompt that passes stages.

    Its rows are ``start`` to ``end`` - 1 of the ``count`` rows of a pass; in the step
    they begin at row ``at``. ``entered``: all of the pass as they enter; None where
    they are tokens. ``left``: those that have left; the step adds its own. ``leaves``:
    whether rows stay behind after the pass, so that the others must be kept.
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
    - ``states``: [B, numbers], what layers keep of each sequence before the step;
      ``states_after`` the same, which the step fills. None: no layer keeps a state, or
      the session keeps them
    - ``state_slots``: [B, 2], where the session keeps the states, before the step and
      after it. None: no layer keeps a state, or ``states`` are given
    - ``passes``: B, of each sequence that does not pass all stages. Where the places of its
      rows are not known, its ``positions`` are those of the prompt's last tokens
    - ``hidden``: T, what a layer that guesses tokens reads beside each of them
      (docs/speculative.md). None: the engine is a whole model
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
    states: Float32 | None = None
    states_after: Float32 | None = None
    state_slots: Int32 | None = None
    adapters: Adapters | None = None
    hidden: Sequence[HiddenRow] | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of a sequence's tokens in one bucket, [lanes of the bucket, tokens].

    ``attention``: the attention that the observation window has given to each token.
    ``position``: each token's position, where the plan keeps positions.
    """

    attention: Float32
    position: Int32 | None


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that a network card or another process may be given: ``size`` bytes from
    ``address`` on. ``device``: whose addresses these are, ``cpu`` or ``cuda:0``, with
    the GPU's number in its own process."""

    address: int
    size: int
    device: str


class Sampling(Protocol):
    """Tokens that are being computed."""

    def result(self) -> Sampled:
        """Wait for them."""
        ...


Choose = Callable[[SamplingRows], Sampling]
"""Chooses tokens from the logits of a step that may still run; the rows say what each
of them asks for."""

Capability = Literal[
    "samples",
    "counts_tokens",
    "moves_tokens",
    "pool_memory",
    "page_sums",
    "adapters",
    "hidden_states",
]
"""An ability that a session may have beside what every session does.

- ``samples``: chooses tokens where the logits are (``start``), so that only tokens cross
  to the host.
- ``counts_tokens``: counts the tokens of answers where it chooses them, for rows that
  ask for it (``SamplingRows.penalties``).
- ``moves_tokens``: keeps scores of tokens, and carries out ``PageMoves.selections``,
  ``relocations`` and ``resets``.
- ``pool_memory``: has its pages in one range of memory, page by page as the layout says
  (``region``, ``mark``). Others may read there, and write to pages that nobody here has.
- ``page_sums``: sums pages where they lie (``row_sums``), so that their digests need no
  copy of them.
- ``adapters``: runs steps whose sequences have adapters (``StepPlan.adapters``), which
  it was told of (``take_adapter``).
- ``hidden_states``: gives what the head read in a step (``hidden``).
"""


State = object
"""All that layers keep of a sequence beside pages, after its committed tokens, as a
session gives it. Nobody writes to one that is there."""
StateAfter = Callable[[int], State]
"""The state of a step's sequence, by its place in the step, once the step has run."""


class PageMover(Protocol):
    """Takes whole pages out of a pool and puts them back. ``coding``: how their bytes
    are coded outside."""

    coding: str = PLAIN

    def read_page(self, bucket: int, page: int) -> bytes:
        """Swap out: the page's bytes."""
        ...

    def write_page(self, bucket: int, page: int, data: bytes) -> None:
        """Swap in."""
        ...

    def leave_state(self, state: State) -> None:
        """Swap out: ``state`` is in host memory until a step needs it."""

    def read_state(self, state: State) -> bytes:
        """The numbers of a state, float32 little-endian."""
        return np.asarray(state, "<f4").tobytes()

    def write_state(self, data: bytes) -> State:
        """A state of what ``read_state`` gave, in host memory until a step needs it."""
        return np.frombuffer(data, "<f4").astype(np.float32)


class Session(PageMover):
    """A loaded engine with the memory of its pages. It runs steps, and carries out
    moves of pages between them. What else it can do is in its ``capabilities``; a
    caller asks there before it calls one of the last methods here."""

    capabilities: frozenset[Capability] = frozenset()
    making = 0.0
    """Seconds that steps took so far to make what others like them find."""

    @abstractmethod
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

    def keep_states(
        self, step: StepPlan, before: Sequence[State | None], numbers: int
    ) -> tuple[StepPlan, StateAfter]:
        """``step`` with the states of its sequences ``before`` it, of so many numbers
        each; None before a sequence's first token. Here they are arrays of the host."""
        states = np.zeros((len(before), numbers), np.float32)
        for row, state in zip(states, before, strict=True):
            if state is not None:
                row[:] = cast("Float32", state)
        after = np.empty_like(states)
        step = dataclasses.replace(step, states=states, states_after=after)
        return step, lambda place: after[place].copy()

    @abstractmethod
    def apply(self, moves: Sequence[PageMoves]) -> None:
        """Carry out moves between two steps: all copies first, then all seals together,
        then what moves tokens, sequence by sequence, then the resets."""
        ...

    def roll_back(self) -> None:
        """The last step, which has run, did not happen: scores are what they were
        before it."""

    # -- whatever it runs on -----------------------------------------------------------
    def lost(self) -> str:
        """Why it computes nothing any more; empty while it does. Waits for what was
        asked so far."""
        return ""

    def warm_up(self) -> None:
        """Make now what steps would make when they are first needed. Raises
        KvlatheError where memory is missing."""

    def watch(self, tell: Callable[[], None]) -> None:
        """Call ``tell``, where a session is made of several processes, in some thread
        once one of them has died."""

    def check(self) -> None:
        """Raises DeviceLost where one of them has."""

    def close(self) -> None:
        """End them."""

    # -- capabilities ------------------------------------------------------------------
    def start(self, step: StepPlan) -> Choose:
        """``samples``: run a step as ``run`` does. What it returns chooses a token for
        each of its R rows of logits, and is to be called before the next step.

        Neither waits: the next step may be given before the tokens are there, and
        ``StepPlan.after`` then names them. So may pages be moved and sealed.
        """
        raise NotImplementedError("samples")

    @property
    def region(self) -> Region:
        """``pool_memory``: page i of a bucket begins at i times the bucket's page
        stride."""
        raise NotImplementedError("pool_memory")

    def mark(self) -> Callable[[], None]:
        """``pool_memory``: a function that waits, in any thread, until what was asked
        so far is done. Before that a step that still runs may write to pages that were
        given back."""
        raise NotImplementedError("pool_memory")

    def row_sums(self, bucket: int, pages: Sequence[int]) -> Callable[[], Int64]:
        """``page_sums``: [pages, rows], the sums of each page's rows
        (kvlathe/plan/page_digest.py), as the page is after what was asked so far. The
        function waits for them, in any thread."""
        raise NotImplementedError("page_sums")

    def keep_hidden(self) -> None:
        """``hidden_states``: keep what the head reads, if it is not kept already. To be
        called before a step of which somebody will ask for it."""

    def hidden(self) -> Hidden:
        """``hidden_states``: what the head read in the step that was given last, [R, D]."""
        raise NotImplementedError("hidden_states")

    def take_adapter(self, adapter: LoadedAdapter) -> None:
        """``adapters``: be ready for steps with it. Raises KvlatheError where there is
        no room for it."""
        raise NotImplementedError("adapters")

    def drop_adapter(self, adapter: LoadedAdapter) -> None:
        """``adapters``: no new sequence will have it."""
        raise NotImplementedError("adapters")


def check_session(session: Session, plan: CompressionPlan) -> None:
    """Raises KvlatheError where ``plan`` ranks tokens and the session moves
    none."""
    if plan.index.ranked and "moves_tokens" not in session.capabilities:
        raise KvlatheError(
            "this engine cannot run here",
            f"its plan ranks tokens and {type(session).__name__} moves none",
            "run it with --device cpu, or build it with a compression that ranks no tokens",
        )

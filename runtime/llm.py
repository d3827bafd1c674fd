"""LLM: an engine folder in, text out. The command line, the evaluation and servers use
it.

Any number of threads and tasks may ask at the same time: one thread runs the engine
(requests/engine_thread.py), and each of its steps serves them all.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Generator
from collections.abc import Sequence as Items
from concurrent.futures import Future
from contextlib import aclosing
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar, Unpack

import numpy as np
import numpy.typing as npt

from kvlathe.base import devices
from kvlathe.base.closing import ClosesAtExit
from kvlathe.base.console import log
from kvlathe.base.errors import KvlatheError
from kvlathe.plan.engine_folder import open_engine
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.manifest import Limits, Manifest
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.cache.block_store import StoreSizes, open_stores
from kvlathe.runtime.cache.cold import CodedPages, ColdPages, PageCodec
from kvlathe.runtime.cache.parcel import Origin
from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.cache.prefix import PrefixCache
from kvlathe.runtime.drafters import drafter
from kvlathe.runtime.loading import Wanted, load_session, loaded_again
from kvlathe.runtime.requests.adapters import EngineAdapters
from kvlathe.runtime.requests.answer import Answer
from kvlathe.runtime.requests.compaction import Compaction, CompactionResult, compacted
from kvlathe.runtime.requests.deltas import deltas
from kvlathe.runtime.requests.engine_thread import EngineThread
from kvlathe.runtime.requests.exchange import Exchange
from kvlathe.runtime.requests.forced import ForcedText, until
from kvlathe.runtime.requests.request import Delta, OnDelta, Request
from kvlathe.runtime.requests.sequences import (
    Prompt,
    SequenceFactory,
    as_batch,
    token_ids,
)
from kvlathe.runtime.scheduling.engine import Engine
from kvlathe.runtime.scheduling.parts.speculation import MOST_DRAFTS, Speculation
from kvlathe.runtime.scheduling.scheduler import Scheduler
from kvlathe.runtime.scheduling.sequence import Sequence
from kvlathe.runtime.sessions.protocols import Session
from kvlathe.runtime.settings import (
    Lower,
    check_counts,
    lowered,
    memory_share,
    refuse_layer,
    refuse_shards,
    refuse_states,
)
from kvlathe.runtime.sleeping import Sleeper, SleepMode
from kvlathe.runtime.text.guide import Compiled
from kvlathe.runtime.text.sampling_params import (
    SamplingFields,
    SamplingParams,
    made_of,
)
from kvlathe.runtime.text.structure import Structure
from kvlathe.runtime.text.tokenizer import Tokenizer

Params = SamplingParams | Items[SamplingParams] | None
"""One for all prompts, one for each, or None: the defaults."""
SAVE_SECONDS = 10.0
"""Most time for which an LLM that closes writes shared prefixes to disk."""


P = TypeVar("P")


def asked(params: P, fields: SamplingFields) -> P | SamplingParams:
    """``params``, or those that ``fields`` say. Raises KvlatheError for both at once."""
    if not fields:
        return params
    if params is not None:
        raise KvlatheError(
            f"{', '.join(fields)} came beside params",
            "SamplingParams holds all that is asked for",
            "give one or the other",
        )
    return made_of(fields)


class LLM(ClosesAtExit):
    """An engine with its tokenizer and its cache, for callers in any thread.

    ``engine`` is a folder that ``kvlathe build`` wrote:

    >>> from kvlathe import LLM, SamplingParams
    >>> llm = LLM.load(engine)
    >>> params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    >>> answers = llm.generate(["def main():", "# How to install"], params)
    >>> [(answer.finish_reason, len(answer.token_ids)) for answer in answers]
    [('length', 8), ('length', 8)]

    A stream gives the same text in pieces. Closing the LLM ends its thread:

    >>> "".join(llm.stream("def main():", params)) == answers[0].text
    True
    >>> llm.close()
    """

    def __init__(
        self,
        session: Session,
        plan: CompressionPlan,
        limits: Limits,
        tokenizer: Tokenizer,
        cache_bytes: int,
        share_prefixes: bool | None = False,
        folder: Path | None = None,
    ) -> None:
        self.plan = plan
        self.tokenizer = tokenizer
        self.layout = CacheLayout(plan)
        self.pool = PagePool(self.layout, cache_bytes)
        share = plan.index.sharable if share_prefixes is None else share_prefixes
        prefixes = PrefixCache(self.pool, limits.max_batch_size) if share else None
        scheduler = Scheduler(self.pool, session, limits, prefixes)
        self.engine = Engine(session, self.pool, scheduler, tokenizer.eos_ids)
        self.thread = EngineThread(self.engine)
        self._compacting = threading.Lock()  # each takes the pages of a whole prompt
        self.manifest: Manifest | None = None
        self.attention = "unknown"
        self.adapters = EngineAdapters(self.engine, self.thread, folder)
        self._sequences = SequenceFactory(
            plan, self.pool, scheduler, tokenizer, self.adapters
        )
        self.thread.watch(session)
        self._sleeper: Sleeper | None = None
        self._cold: PageCodec | None = None  # codes pages that wait on the host
        # The thread must not outlive the LLM. At the interpreter's end it is joined.
        weakref.finalize(self, self.thread.stop).atexit = False

    @classmethod
    def load(
        cls,
        engine_dir: str | Path,
        cache_bytes: int | None = None,
        threads: int | None = None,
        verify: bool = True,
        share_prefixes: bool | None = False,
        device: str | None = None,
        max_batch_size: int | None = None,
        gpu_memory_utilization: float = devices.GPU_MEMORY_UTILIZATION,
        stores: StoreSizes | None = None,
        tensor_parallel_size: int = 1,
        max_seq_len: int | None = None,
        max_num_tokens: int | None = None,
    ) -> LLM:
        """Load an engine folder.

        ``cache_bytes``: size of the KV cache; by default max_batch_size sequences of
            max_seq_len tokens, at most half of the machine's memory. On a GPU: what
            ``gpu_memory_utilization``, this engine's share of its memory, leaves beside
            the weights. Memory of the host is taken as it is used.
        ``threads``: of the processor; by default one a core.
        ``verify``: check that the files are those that were built, else only their sizes.
        ``share_prefixes``: requests that have ended leave their pages to later ones that
            begin alike, until room is needed; None: where the plan allows it.
        ``device``: cpu, cuda or auto; None: KVLATHE_DEVICE, or else auto.
        ``max_batch_size``: sequences that run at once, ``max_seq_len``: tokens of the
            longest, ``max_num_tokens``: tokens of a step; at most and by default the
            engine's. Lower ones need less cache.
        ``stores``: places for shared prefixes whose pages were needed (docs/travel.md).
        ``tensor_parallel_size``: GPUs to use (docs/scale.md), each with ``cache_bytes``.

        Raises KvlatheError where the folder is incomplete or changed, or its backend
        cannot run here.
        """
        check_counts(
            tensor_parallel_size=tensor_parallel_size,
            threads=threads,
            cache_bytes=cache_bytes,
        )
        folder = Path(engine_dir)
        opened = open_engine(folder, deep=verify)
        refuse_layer(opened)
        wanted_limits = Lower(max_batch_size, max_seq_len, max_num_tokens)
        limits = lowered(
            opened.manifest.limits, opened.plan.prefill_chunk, wanted_limits
        )
        manifest = dataclasses.replace(opened.manifest, limits=limits)
        log.info("loading %s", folder)
        wanted = Wanted(
            device,
            tensor_parallel_size,
            memory_share(gpu_memory_utilization),
            cache_bytes,
            threads,
        )
        found = load_session(opened, manifest, wanted)
        given = (found.session, found.plan, limits, Tokenizer(folder))
        llm = cls(*given, found.cache_bytes, share_prefixes, folder)
        llm.manifest = opened.manifest
        llm.attention = found.attention
        llm.engine.scheduler.prompt_tokens = found.prompt_tokens
        llm.engine.memory = found.memory
        load = partial(loaded_again, opened, manifest, wanted, found.cache_bytes)
        llm._sleeper = Sleeper(llm.engine, llm.thread, load)
        if stores is not None:
            llm.keep_evicted(stores)
        return llm

    def keep_evicted(self, sizes: StoreSizes) -> None:
        """Keep shared prefixes whose pages have to go. To be called before the first
        request. Raises KvlatheError where none are shared, for sizes that are none, and
        where the folder cannot be made."""
        check_counts(host_bytes=sizes.host_bytes, disk_bytes=sizes.disk_bytes)
        refuse_states(self.plan)
        mover, origin = self.engine.scheduler.mover, self.exchange.origin
        prefixes = self.exchange.prefixes  # asked first: it may refuse
        prefixes.stores = open_stores(mover, self.layout.page_stride, origin, sizes)

    def code_cold_pages(self) -> None:
        """Code sequences that wait in the host's memory: they take fewer bytes there,
        and moving them takes longer (docs/cold_pages.md). To be called before the first
        request.

        Raises KvlatheError where the library for it is missing.
        """
        refuse_shards(self.plan)
        self._cold = CodedPages(self.layout)
        self._use(self.session)
        prefixes = self.engine.scheduler.prefixes
        if prefixes and prefixes.stores:
            prefixes.stores.use(self.engine.scheduler.mover)

    def speculate(
        self,
        speculative: str | Path = "ngram",
        num_speculative_tokens: int = MOST_DRAFTS,
    ) -> None:
        """Guess tokens, and verify several in a step where that is faster
        (docs/speculative.md). ``ngram``: as they followed before; else by a draft
        engine, the folder of a smaller one. ``num_speculative_tokens``: at once, of an
        answer. To be called before the first request. Raises KvlatheError where it
        cannot be.
        """
        check_counts(num_speculative_tokens=num_speculative_tokens)
        guessing = drafter(speculative, self.engine, self.tokenizer)
        self.engine.speculate(
            Speculation(guessing, num_speculative_tokens, self.engine.stop_ids)
        )

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Let requests name a LoRA adapter (SamplingParams.adapter), at any time. Those
        of one batch may have different ones. ``path``: a folder as PEFT writes it, or
        ``DIR=WEIGHT`` (docs/adapters.md).

        Raises KvlatheError for an engine that was not built with --enable-lora, an
        adapter that does not fit it, and a name that is taken.
        """
        self.adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; sequences that have it end with it. Raises KvlatheError
        where there is none of this name."""
        self.adapters.unload(name)

    # -- life --------------------------------------------------------------------------
    @property
    def session(self) -> Session:
        """The session that computes the steps."""
        return self.engine.session

    def sleep(self, mode: SleepMode = "abort") -> None:
        """Give the memory of weights and pages back until ``wake_up``. Shared prefixes
        are gone, but for those in a host's store. Requests that come meanwhile wait.
        ``mode`` abort ends those that are here with Asleep; keep moves them to the host
        or computes them again later, as preemption does.

        Raises KvlatheError on several GPUs, Busy while a prefix is compacted or others
        read pages.
        """
        self._able_to_sleep().sleep(mode, self._use)

    def wake_up(self) -> None:
        """Load the weights again and go on. Raises KvlatheError where the folder was
        changed meanwhile, and OutOfMemory where somebody else has the memory: the
        engine sleeps on then."""
        self._able_to_sleep().wake_up(self._use)

    @property
    def is_sleeping(self) -> bool:
        return self.thread.asleep

    def _able_to_sleep(self) -> Sleeper:
        if self._sleeper is None or self.plan.is_part:
            reason = "it is spread over several GPUs"
            if self._sleeper is None:
                reason = "it was not loaded from a folder"
            raise KvlatheError("this engine cannot sleep", reason)
        return self._sleeper

    def _use(self, session: Session) -> None:
        """Compute and move pages by ``session`` from now on."""
        scheduler = self.engine.scheduler
        self.engine.session = session
        scheduler.mover = ColdPages(session, self._cold) if self._cold else session
        if scheduler.prefixes and scheduler.prefixes.stores:
            scheduler.prefixes.stores.mover = scheduler.mover
        self.thread.watch(session)

    def close(self) -> None:
        """End the engine's thread, and what it computes with a KvlatheError. Later
        requests are refused. The memory goes back with the object. Where there is a
        disk cache, shared prefixes are written to it first, for SAVE_SECONDS at
        most."""
        prefixes = self.engine.scheduler.prefixes
        self._sequences.guides.close()
        try:
            if prefixes and prefixes.stores:
                with contextlib.suppress(KvlatheError):  # closed already, or failed
                    save = partial(prefixes.save, SAVE_SECONDS)
                    self.thread.call(save, asleep=True)
                prefixes.stores.close()
        finally:
            self.thread.close()

    # -- text --------------------------------------------------------------------------
    def generate(
        self,
        prompts: Prompt | Items[Prompt],
        params: Params = None,
        **fields: Unpack[SamplingFields],
    ) -> list[Answer]:
        """Answers in the order of ``prompts`` (texts or token ids), computed together
        in packed steps. More than max_batch_size prompts take turns. ``fields``, those
        of SamplingParams, may be given in place of ``params``: here and in the methods
        below.

        Raises KvlatheError before anything runs if a prompt is empty, too long or no
        prompt; what ended one answer early ends all.
        """
        sequences = self._batch(prompts, asked(params, fields))
        self.thread.wait(self.thread.submit(sequences))
        return [Answer.of(sequence) for sequence in sequences]

    async def agenerate(
        self,
        prompts: Prompt | Items[Prompt],
        params: Params = None,
        **fields: Unpack[SamplingFields],
    ) -> list[Answer]:
        """``generate`` in asyncio. Cancelling the task cancels the request."""
        sequences = self._batch(prompts, asked(params, fields))
        async with aclosing(self._deltas(sequences)) as stream:
            async for delta in stream:
                if delta.error:
                    raise delta.error
        return [Answer.of(sequence) for sequence in sequences]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Generator[str, None, Answer]:
        """The answer's text in pieces of whole characters, as they come. The generator
        returns the whole answer. Closing it early cancels the request."""
        self.thread.refuse_own_thread()
        own = asked(params, fields) or SamplingParams()
        sequence = self.sequence(self.encode(prompt), own)
        inbox: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        request = self.thread.submit([sequence], inbox.put)
        try:
            while not (delta := inbox.get()).finish_reason:
                if delta.text:
                    yield delta.text
            request.raise_failure()
            if delta.text:
                yield delta.text
        finally:
            self.thread.end(request)
        return Answer.of(sequence)

    async def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **fields: Unpack[SamplingFields],
    ) -> AsyncGenerator[str, None]:
        """``stream`` in asyncio. Leaving the loop early cancels the request."""
        sequences = self._batch([prompt], asked(params, fields))
        async with aclosing(self._deltas(sequences)) as stream:
            async for delta in stream:
                if delta.error:
                    raise delta.error
                if delta.text:
                    yield delta.text

    def chat(
        self,
        messages: Items[dict[str, Any]],
        params: SamplingParams | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Answer:
        """The answer to ``messages`` ({"role": ..., "content": ...}) through the
        checkpoint's chat template."""
        prompt = self.tokenizer.encode(
            self.tokenizer.chat_prompt(messages), add_special_tokens=False
        )
        return self.generate([prompt], asked(params, fields))[0]

    # -- prefixes ----------------------------------------------------------------------
    def compact(
        self,
        prompt: Prompt,
        keep: float | None = None,
        salt: bytes = b"",
        given_up: threading.Event | None = None,
    ) -> CompactionResult:
        """Cache a prompt that later ones begin with, and keep only the share ``keep``
        (None: the plan's) of its KV pairs: those that the model needs to repeat it.

        Later requests of the same tenant (``salt``) that begin with it attend what was
        kept, until room is needed or the LLM goes. It takes about three times a
        prefill; other requests go on meanwhile. It ends between two steps once
        ``given_up`` is set. Raises KvlatheError then, and where the plan has no rule
        for it, or prefixes are not shared.
        """
        tokens = self.encode(prompt)
        work = Compaction(
            self.engine, self._sequences, self.tokenizer, tokens, keep, salt
        )
        with self._compacting:
            return compacted(self.thread, work, given_up)

    @cached_property
    def exchange(self) -> Exchange:
        """Prefixes and running sequences leave for another engine of the same build, or
        come from one (docs/travel.md)."""
        refuse_shards(self.plan)
        origin = Origin.of(self.plan, self.manifest)
        return Exchange(self.engine, self.thread, self._sequences, origin)

    # -- limits ------------------------------------------------------------------------
    @property
    def limits(self) -> Limits:
        return self.engine.scheduler.limits

    @property
    def sharable(self) -> bool:
        """Whether sequences that begin alike may share what they begin with."""
        return self.plan.index.sharable

    @property
    def most_tokens(self) -> int:
        """The longest sequence that the limits allow and the cache can hold, whatever
        its prompt's length."""

        def too_long(tokens: int) -> bool:
            return not self.pool.has_room_for(tokens)

        return bisect.bisect_right(
            range(1, self.limits.max_seq_len + 1), False, key=too_long
        )

    # -- requests ----------------------------------------------------------------------
    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a text, or the given ones, checked."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return token_ids(prompt)

    def sequence(self, tokens: list[int], params: SamplingParams) -> Sequence:
        """A new request for these prompt tokens. Raises KvlatheError for what this
        engine cannot serve."""
        return self._sequences.request(tokens, params)

    def ready(self, structure: Structure, client: str = "") -> Future[Compiled] | None:
        """A structure, compiled, so that answers with it do not wait for that as long
        as somebody holds it; None where there is nothing to compile. Clients take turns
        at being compiled for. Raises KvlatheError where this engine cannot follow it,
        at once or from the future."""
        return self._sequences.guides.ready(structure, client)

    def _batch(self, prompts: Prompt | Items[Prompt], params: Params) -> list[Sequence]:
        batch = as_batch(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(batch)
        else:
            each = list(params)
        if len(each) != len(batch):
            raise KvlatheError(
                f"{len(batch)} prompts came with {len(each)} sampling parameters",
                "each prompt needs its own, or all the same",
                "give one SamplingParams, or one for each prompt",
            )
        pairs = zip(batch, each, strict=True)
        return [self.sequence(self.encode(prompt), own) for prompt, own in pairs]

    async def _deltas(self, sequences: list[Sequence]) -> AsyncGenerator[Delta, None]:
        request: Request | None = None

        def submit(on_delta: OnDelta) -> Request:
            nonlocal request
            request = self.thread.submit(sequences, on_delta)
            return request

        async with aclosing(deltas(submit, self.thread.cancel)) as stream:
            async for delta in stream:
                yield delta
        assert request
        request.raise_failure()

    # -- evaluation --------------------------------------------------------------------
    def logits(
        self,
        token_ids: Items[int],
        rows: Items[int],
        prompt: int | None = None,
        adapter: str | None = None,
    ) -> npt.NDArray[np.float32]:
        """Next-token logits [len(rows), vocab] after the places ``rows`` of one text,
        through the paged cache and, where it is named, an adapter.

        Where the plan seals, chunks are one page, so that every token attends what its
        decode would attend. Where it ranks a prompt, the first ``prompt`` tokens are
        one (default: up to the first of ``rows``); the others are fed as their decode
        would see them. Rows inside a prompt attend a cache that is not compressed.
        Raises KvlatheError for a text that is empty or too long.
        """
        given_up = threading.Event()
        text = self._forced(token_ids, rows, prompt, adapter)
        try:
            return self.thread.call(partial(text.logits, given_up.is_set))
        except BaseException:  # an interrupt ends the work too
            given_up.set()
            raise

    def logits_in_blocks(
        self, texts: Items[Items[int]], blocks: Items[range]
    ) -> Generator[npt.NDArray[np.float32]]:
        """The same of several texts at once, for ``blocks`` of rows, ascending, one
        after the other: [texts, rows, vocab] each. No more than one block's logits are in
        memory."""
        rows = [row for block in blocks for row in block]
        given_up = threading.Event()
        own = [self._forced(text, rows, None) for text in texts]
        try:
            for block in blocks:
                work = partial(
                    until, self.engine, own, block.stop, block, given_up.is_set
                )
                found = self.thread.call(work)
                yield found.reshape(len(own), len(block), -1)
        finally:
            given_up.set()
            for text in own:
                self.thread.call(text.close)

    def texts_at_once(self, tokens: int, most: int) -> int:
        """The texts of ``tokens`` tokens that the cache holds together, 1 to
        ``most``."""
        worst = self.pool.worst_pages(tokens)
        most = min(most, self.engine.scheduler.limits.max_batch_size)
        counts = range(most, 1, -1)
        return next((n for n in counts if self.pool.fits([worst] * n)), 1)

    def _forced(
        self,
        token_ids: Items[int],
        rows: Items[int],
        prompt: int | None,
        adapter: str | None = None,
    ) -> ForcedText:
        tokens = self.encode(token_ids)
        return ForcedText(self.engine, self._sequences, tokens, rows, prompt, adapter)

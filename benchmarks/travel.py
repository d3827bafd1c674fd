"""The time that travelling pages save: evicted prefixes from the host's memory and from
disk, swap, and a sequence in another engine, beside computing the same tokens again.

    python -m benchmarks.travel --model DIR [--only REQUEST ...] [--folder DIR] [--rounds 5]

Every request is built. A prompt of n tokens and one more is asked for its first token:
computed, with its prefix in the pool, in the host's memory, on disk with the system's
cache, and on disk without it (posix_fadvise). "swap" is out and in again, "move" packed
export and adoption in a second engine. Each number is that of the fastest round. One table
and one JSON line a request.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click

from benchmarks.support.commands import DATA
from kvlathe.base.console import print_table
from kvlathe.engines.build import build
from kvlathe.engines.config import BuildConfig
from kvlathe.runtime.cache.block_store import HostStore, StoreSizes
from kvlathe.runtime.cache.disk_store import DiskStore
from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.cache.prefix import PrefixCache
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.tasks import tasks

REQUESTS = ("none", "hack:bits=8", "hack:bits=4")
LENGTHS = (64, 128, 256, 512, 1024, 2048, 3072)
ONE = SamplingParams(max_new_tokens=1, ignore_eos=True)
COLUMNS = (
    "tokens",
    "stored MB",
    "computed",
    "pool",
    "host",
    "disk, cached",
    "disk",
    "swap",
    "moved MB",
    "move",
)


class Bench:
    """Times of one engine folder; ``rounds`` of each measurement."""

    def __init__(self, engine: Path, folder: Path, rounds: int, threads: int) -> None:
        self.rounds = rounds
        sizes = StoreSizes(1 << 32, folder)
        self.llm = LLM.load(engine, threads=threads, share_prefixes=True, stores=sizes)
        self.other = LLM.load(engine, threads=threads)
        prefixes = self.llm.engine.scheduler.prefixes
        assert prefixes is not None and prefixes.stores is not None
        self.prefixes: PrefixCache = prefixes
        self.stores = prefixes.stores
        assert self.stores.disk is not None
        self.disk: DiskStore = self.stores.disk
        texts = tasks.read_texts(DATA / "eval_text.jsonl")
        documents = tasks.encode_documents(self.llm.tokenizer, texts)
        self.tokens = [token for document in documents for token in document]

    def first_token(self, prompt: list[int]) -> float:
        """Seconds until the first token is there."""
        started = time.perf_counter()
        self.llm.generate([prompt], ONE)
        return time.perf_counter() - started

    def evict(self) -> None:
        def all_of_them() -> None:
            while self.prefixes.reclaim():
                pass

        self.llm.thread.call(all_of_them)

    def with_stores(self, host: bool, disk: bool) -> None:
        """Keep what is evicted from now on there, in new stores."""
        self.evict()
        for path in self.disk.folder.iterdir():
            path.unlink()
        self.disk.use("plain")
        self.stores.disk = self.disk if disk else None
        self.stores.host = HostStore(1 << 32) if host else None
        self.prefixes.stores = self.stores if host or disk else None

    def best(self, work: Callable[[], float]) -> float:
        return min(work() for _ in range(self.rounds))

    def computed(self, prompt: list[int]) -> float:
        self.with_stores(host=False, disk=False)

        def once() -> float:
            self.evict()
            return self.first_token(prompt)

        once()
        return self.best(once)

    def in_pool(self, prompt: list[int]) -> float:
        self.first_token(prompt)
        return self.best(lambda: self.first_token(prompt))

    def stored(self, prompt: list[int], host: bool, cold: bool = False) -> float:
        """From a store; ``cold``: the system's cache has nothing of its files."""
        self.with_stores(host, not host)
        self.first_token(prompt)

        def once() -> float:
            self.evict()
            self.disk.flush()
            for path in self.disk.folder.iterdir():
                if cold:
                    forget(path)
            return self.first_token(prompt)

        return self.best(once)

    def swapped(self, tokens: int) -> float:
        """Pages of so many tokens, to the host's memory and back."""
        llm, pool = self.llm, self.llm.pool
        self.with_stores(host=False, disk=False)

        def once() -> float:
            table = pool.open()
            table.lengths = pool.layout.all_held(tokens)
            page = llm.plan.page_tokens
            table.pages = pool.take([-(-held // page) for held in table.lengths])
            started = time.perf_counter()
            swapped = PagePool.swap_out(pool, table, llm.session)
            table = pool.swap_in(swapped, llm.session)
            seconds = time.perf_counter() - started
            pool.release(table)
            return seconds

        return llm.thread.call(lambda: self.best(once))

    def moved(self, prompt: list[int]) -> tuple[float, int]:
        """A sequence with its first token, packed here and adopted in a second engine:
        seconds, bytes."""
        sizes: list[int] = []

        def once() -> float:
            params = SamplingParams(max_new_tokens=2, ignore_eos=True)
            sequence = self.llm.sequence(list(prompt), params)
            scheduler = self.llm.engine.scheduler
            self.llm.thread.call(lambda: scheduler.add(sequence))
            self.llm.thread.call(self.llm.engine.step)
            while not sequence.answered:
                self.llm.thread.call(self.llm.engine.step)
            started = time.perf_counter()
            departure = self.llm.exchange.export_sequence(sequence)
            assert departure is not None
            with departure:
                data = departure.packed()
            arrival = self.other.exchange.unpack(data)
            seconds = time.perf_counter() - started
            request = self.other.exchange.adopt_sequence(arrival)
            self.other.thread.wait(request)
            sizes.append(len(data))
            return seconds

        return self.best(once), sizes[0]

    def row(self, length: int) -> dict[str, float]:
        prompt = self.tokens[: length + 1]
        found = {"tokens": float(length), "computed": self.computed(prompt)}
        found["pool"] = self.in_pool(prompt)
        found["host"] = self.stored(prompt, host=True)
        found["disk, cached"] = self.stored(prompt, host=False)
        found["disk"] = self.stored(prompt, host=False, cold=True)
        found["stored MB"] = self.disk.bytes / 1e6
        found["swap"] = self.swapped(length)
        found["move"], size = self.moved(prompt)
        found["moved MB"] = size / 1e6
        return found


def forget(path: Path) -> None:
    """The system's cache forgets a file, which was written out before."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cells(row: dict[str, float]) -> list[str]:
    """Seconds in milliseconds."""
    texts: list[str] = []
    for name in COLUMNS:
        value = row[name]
        if name == "tokens":
            texts.append(f"{value:,.0f}")
        elif name.endswith("MB"):
            texts.append(f"{value:.1f}")
        else:
            texts.append(f"{value * 1e3:.1f}")
    return texts


@click.command()
@click.option("--model", type=click.Path(path_type=Path), required=True)
@click.option("--only", multiple=True, default=REQUESTS)
@click.option("--folder", type=click.Path(path_type=Path))
@click.option("--rounds", default=5)
@click.option("--threads", default=2)
def main(
    model: Path, only: tuple[str, ...], folder: Path | None, rounds: int, threads: int
) -> None:
    for request in only:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            made = Path(name)
            engine = build(BuildConfig(model, made / "engine", request, workers=1))
            bench = Bench(engine, made / "disk", rounds, threads)
            rows = [bench.row(length) for length in LENGTHS]
            title = f"{model.name}, {request}, ms until the first token"
            print_table(title, COLUMNS, [cells(row) for row in rows])
            print(json.dumps({"model": model.name, "request": request, "rows": rows}))


if __name__ == "__main__":
    main()

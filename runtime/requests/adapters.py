"""EngineAdapters: LoRA adapters of a running engine, by the names that requests give.

One that is unloaded is given to no new request. Sequences that have it go on with it.
"""

from __future__ import annotations

import threading
from pathlib import Path

from kvlathe.base.adapters import read_adapter as as_adapter
from kvlathe.base.console import human_bytes, log
from kvlathe.base.errors import KvlatheError
from kvlathe.plan import manifest as manifests
from kvlathe.plan.adapter_maps import ADAPTERS_FILE, AdapterMaps
from kvlathe.runtime.requests.engine_thread import EngineThread
from kvlathe.runtime.scheduling.engine import Engine
from kvlathe.runtime.sessions.adapters import LoadedAdapter, read_adapter


class EngineAdapters:
    """Adapters of the engine in ``folder`` (None: it came from no folder)."""

    def __init__(
        self, engine: Engine, thread: EngineThread, folder: Path | None = None
    ) -> None:
        self._engine, self._thread, self._folder = engine, thread, folder
        self._lock = threading.Lock()
        self._known: dict[str, LoadedAdapter] = {}

    @property
    def loaded(self) -> tuple[LoadedAdapter, ...]:
        """The adapters that requests may name, the first loaded first."""
        return tuple(self._known.values())

    def find(self, name: str) -> LoadedAdapter:
        """Raises KvlatheError for a name that none has."""
        found = self._known.get(name)
        if found is None:
            names = ", ".join(self._known) or "none"
            raise KvlatheError(
                f"there is no adapter {name!r:.80}",
                f"loaded are {names}",
                "load it first (load_adapter), or name another",
            )
        return found

    def load(self, name: str, path: str | Path) -> LoadedAdapter:
        """As LLM.load_adapter."""
        if not name.strip():
            raise KvlatheError("an adapter needs a name", "it is blank", "give it one")
        with self._lock:
            if name in self._known:
                raise KvlatheError(
                    f"there is an adapter {name!r:.80} already",
                    f"it was read from {self._known[name].adapter.folder}",
                    "unload that one first, or give another name",
                )
            maps, dtype = self._maps()
            loaded = read_adapter(name, as_adapter(path), maps, dtype)
            self._thread.call(lambda: self._engine.session.take_adapter(loaded))
            self._known[name] = loaded
        size = human_bytes(loaded.bytes)
        log.info("adapter %s: %d maps, %s", name, len(loaded.maps), size)
        return loaded

    def unload(self, name: str) -> None:
        """As LLM.unload_adapter."""
        with self._lock:
            loaded = self.find(name)
            self._thread.call(lambda: self._engine.session.drop_adapter(loaded))
            del self._known[name]

    def _maps(self) -> tuple[AdapterMaps, str]:
        """The maps that adapters may change, and the engine's type. Raises KvlatheError
        where there are none, and Asleep while no session could tell."""
        session = self._thread.call(lambda: self._engine.session)
        fact = "this engine takes no adapters at run time"
        if self._folder is None or not (self._folder / ADAPTERS_FILE).is_file():
            raise KvlatheError(
                fact,
                "it was built without --enable-lora",
                "build it with that, or merge the adapter: build with --lora",
            )
        if "adapters" not in session.capabilities:
            kind = type(session).__name__
            raise KvlatheError(
                fact,
                f"{kind}, which runs it, has no products beside its maps",
                "run it on a CPU, or build it for the cuda backend and run it on one GPU",
            )
        dtype = manifests.read(self._folder).compute_dtype
        return AdapterMaps.read(self._folder), dtype

"""A follower, the worker of a shard: ``python -m ...follower SHARD SIZE SOCKET``. It
does what the leader tells it (workers.py), and ends when the leader does."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from kvlathe.base.errors import KvlatheError
from kvlathe.base.memory import out_of_memory
from kvlathe.runtime.sessions.torch_cuda.shards.workers import FAILED, SAID

log = logging.getLogger("kvlathe")
Message = tuple[str, tuple[object, ...], bool]


def follow(connection: Connection, worker: object) -> None:
    """Have ``worker`` do what comes, until the leader is gone. Whatever fails is said,
    and ends the process: the other workers cannot go on without this one."""
    commands: queue.SimpleQueue[Message] = queue.SimpleQueue()
    thread = threading.Thread(target=_listen, args=(connection, commands), daemon=True)
    thread.start()
    while True:
        name, arguments, answers = commands.get()
        try:
            result = getattr(worker, name)(*arguments)
        except Exception as error:
            _fail(connection, error)
            return
        if answers:
            connection.send((SAID, result))


def _listen(connection: Connection, commands: queue.SimpleQueue[Message]) -> None:
    """The leader may go while this process waits for it on the GPU: nothing else would
    notice."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            commands.put(connection.recv())
    os._exit(0)


def _fail(connection: Connection, error: Exception) -> None:
    if not isinstance(error, KvlatheError) and not out_of_memory(error):
        log.exception("a worker failed")
    words = str(error) or type(error).__name__
    with contextlib.suppress(OSError):
        connection.send((FAILED, words))
    sys.stderr.flush()
    os._exit(1)


def run(worker_of: Callable[[int, int], object]) -> None:
    """The process of a follower. ``worker_of``: what obeys, by shard and size."""
    shard, size, number = (int(argument) for argument in sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(number)
    try:
        worker = worker_of(shard, size)
    except Exception as error:
        _fail(connection, error)
        return
    follow(connection, worker)


def main() -> None:
    from kvlathe.runtime.sessions.torch_cuda.shards.parallel import Worker

    run(Worker)


if __name__ == "__main__":
    main()

"""A simulation of many GPUs that serve one model: replicas, or prefill and decode workers
with a link between them.

What a worker does is what the scheduler does (`runtime/scheduling/scheduler.py`): a step
takes a token of every answer and then prompt chunks, oldest first. A request is admitted
once its pages at its fullest find room. A decode worker takes its pages first, then reads
those of the prompt over the link: one transfer at a time on either side.

Left out: preemption, network latency, HTTP, and workers that fail.
"""

from __future__ import annotations

import bisect
import heapq
import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field

import simpy

from benchmarks.support.step_times import StepTimes

LOOKED_AT = 16
"""Workers that the router compares."""

Waits = Generator[simpy.Event, object, None]


@dataclass(frozen=True)
class Engine:
    """One GPU with one build of the model.

    ``cache_tokens``: of the pool. ``most_running``: sequences at once. ``step_tokens``:
    of a step of prompts. ``beside``: prompt tokens of a step that has answers, too.
    """

    times: StepTimes
    token_bytes: int
    cache_tokens: int
    most_running: int = 256
    step_tokens: int = 8192
    beside: int = 8192


@dataclass(frozen=True)
class Shape:
    """``prefill`` workers compute prompts for ``decode`` workers; with no prefill
    workers the others do both. ``link``: bytes a second of each worker."""

    prefill: int
    decode: int
    link: float = 12.5e9

    @property
    def gpus(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        if self.prefill:
            return f"{self.prefill}:{self.decode}"
        return f"{self.decode} whole"


@dataclass
class Job:
    """A request. ``hit``: tokens of its prompt that are cached where it is computed.
    Times are seconds; ``first``: of the first token, ``last``: of the last."""

    due: float
    prompt: int
    answer: int
    hit: int = 0
    done: int = 0
    first: float = 0.0
    last: float = 0.0
    source: Worker | None = None

    @property
    def per_token(self) -> float:
        """Mean seconds between tokens."""
        return (self.last - self.first) / max(1, self.answer - 1)


@dataclass
class Worker:
    """One GPU. ``held``: tokens that its pool has promised. ``running``: (the step after
    which it ends, number, job). ``arriving``: jobs whose pages are on their way, or
    ``arrived``. ``then``: who goes on with a job whose prompt is done."""

    env: simpy.Environment
    engine: Engine
    link: float
    then: Callable[[Job], None] | None = None
    waiting: deque[Job] = field(default_factory=deque[Job])
    prompts: deque[Job] = field(default_factory=deque[Job])
    running: list[tuple[int, int, Job]] = field(default_factory=list)
    arrived: deque[Job] = field(default_factory=deque[Job])
    unfinished: int = 0
    held: int = 0
    most_held: int = 0
    arriving: int = 0
    cached: int = 0
    steps: int = 0
    started: int = 0

    def __post_init__(self) -> None:
        self.card = simpy.Resource(self.env)
        self.wake = self.env.event()
        self.env.process(self._work())

    def submit(self, job: Job) -> None:
        self.unfinished += 1
        self.waiting.append(job)
        self._admit()

    def give_up(self, job: Job) -> None:
        """The pages of a job that another worker has read are free."""
        self._end(self._need(job))

    # -- who runs ----------------------------------------------------------------------
    def _need(self, job: Job) -> int:
        return job.prompt if self.then else job.prompt + job.answer

    def _admit(self) -> None:
        """Let jobs in, in order, until one finds no room."""
        while self.waiting:
            job = self.waiting[0]
            here = len(self.prompts) + len(self.running) + self.arriving
            need = self._need(job)
            if here >= self.engine.most_running:
                return
            if self.held and self.held + need > self.engine.cache_tokens:
                return
            self.waiting.popleft()
            self.held += need
            self.most_held = max(self.most_held, self.held)
            if job.source:
                self.arriving += 1
                self.env.process(self._pull(job, job.source))
            else:
                job.done = job.hit
                self.prompts.append(job)
                self._notify()

    def _pull(self, job: Job, source: Worker) -> Waits:
        """Read the pages of a prompt. The card of the source is taken first, always:
        so no two workers wait for each other."""
        with source.card.request() as there:
            yield there
            with self.card.request() as here:
                yield here
                yield self.env.timeout(job.prompt * self.engine.token_bytes / self.link)
        source.give_up(job)
        self.arrived.append(job)
        self._notify()

    def _adopt(self) -> None:
        """Jobs whose pages came during a step go on after it."""
        while self.arrived:
            self.arriving -= 1
            self._begin(self.arrived.popleft())

    def _notify(self) -> None:
        if not self.wake.triggered:
            self.wake.succeed()

    def _begin(self, job: Job) -> None:
        """Its first token is there."""
        job.first = job.last = self.env.now
        if job.answer == 1:
            self._end(self._need(job))
            return
        self.started += 1
        self.cached += job.prompt
        heapq.heappush(self.running, (self.steps + job.answer - 1, self.started, job))

    def _end(self, need: int) -> None:
        self.held -= need
        self.unfinished -= 1
        self._admit()

    # -- steps -------------------------------------------------------------------------
    def _work(self) -> Waits:
        while True:
            self.wake = self.env.event()
            self._adopt()
            if self.prompts:
                yield from self._mixed_step()
            elif self.running:
                yield from self._answers()
            else:
                yield self.wake

    def _mixed_step(self) -> Waits:
        """One step that has prompt chunks."""
        engine, answers = self.engine, len(self.running)
        room = engine.step_tokens - answers
        if answers:
            room = min(room, engine.beside)
        seconds = engine.times.step + engine.times.decode(answers, self.cached)
        complete: list[Job] = []
        for job in self.prompts:
            count = min(room, job.prompt - job.done)
            seconds += engine.times.prompt(count, count * (job.done + count / 2))
            job.done += count
            room -= count
            if job.done == job.prompt:
                complete.append(job)
            if not room:
                break
        yield self.env.timeout(seconds)
        self._ran(1)
        for job in complete:
            self.prompts.popleft()
            if self.then and job.answer > 1:
                job.source = self
                self.then(job)
            else:
                self._begin(job)

    def _answers(self) -> Waits:
        """Steps of answers alone, until one ends or a prompt comes. They are one event:
        the time of ``k`` steps is a sum of an arithmetic series."""
        most = self.running[0][0] - self.steps
        began = self.env.now
        yield self.env.timeout(self._seconds(most)) | self.wake
        spent = self.env.now - began
        ran = most
        if self.wake.triggered:
            ran = bisect.bisect_left(range(most), spent, key=self._seconds)
            ran = max(1, ran)
            yield self.env.timeout(max(0.0, self._seconds(ran) - spent))
        self._ran(ran)

    def _seconds(self, steps: int) -> float:
        """Seconds of so many steps of the answers that run."""
        times, answers = self.engine.times, len(self.running)
        further = answers * steps * (steps - 1) / 2
        reading = times.cached * (self.cached * steps + further)
        return steps * (times.step + times.decode(answers, 0)) + reading

    def _ran(self, steps: int) -> None:
        """Every answer is so many tokens longer."""
        self.steps += steps
        self.cached += steps * len(self.running)
        while self.running and self.running[0][0] <= self.steps:
            _, _, job = heapq.heappop(self.running)
            job.last = self.env.now
            self.cached -= job.prompt + job.answer - 1
            self._end(self._need(job))


@dataclass
class Cluster:
    """Workers behind a router. It chooses who has the fewest unfinished requests, or
    with ``in_turn`` the next one."""

    env: simpy.Environment
    engine: Engine
    shape: Shape
    in_turn: bool = False

    def __post_init__(self) -> None:
        self.decoding = [self._worker(None) for _ in range(self.shape.decode)]
        self.computing = [
            self._worker(self._hand_over) for _ in range(self.shape.prefill)
        ]
        self.sent = 0
        self.drawn = random.Random(0)

    def _worker(self, then: Callable[[Job], None] | None) -> Worker:
        return Worker(self.env, self.engine, self.shape.link, then)

    def submit(self, job: Job) -> None:
        entrance = self.computing or self.decoding
        self.sent += 1
        if self.in_turn:
            entrance[(self.sent - 1) % len(entrance)].submit(job)
        else:
            self._least(entrance).submit(job)

    def _hand_over(self, job: Job) -> None:
        self._least(self.decoding).submit(job)

    def _least(self, workers: Sequence[Worker]) -> Worker:
        """One with the fewest unfinished requests; where there are many, of some that are
        drawn."""
        some = workers
        if len(workers) > LOOKED_AT:
            some = self.drawn.choices(workers, k=LOOKED_AT)
        return min(some, key=lambda worker: worker.unfinished)

    def arrivals(self, jobs: Iterable[Job]) -> Waits:
        """Submit jobs when they are due."""
        for job in jobs:
            yield self.env.timeout(job.due - self.env.now)
            self.submit(job)


def simulate(
    engine: Engine, shape: Shape, jobs: Sequence[Job], in_turn: bool = False
) -> Cluster:
    """Run ``jobs``, ordered by when they are due, to the end. Their times are filled
    in."""
    env = simpy.Environment()
    cluster = Cluster(env, engine, shape, in_turn)
    env.process(cluster.arrivals(jobs))
    env.run()
    return cluster

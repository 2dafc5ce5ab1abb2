"""One simulation from its seed to its end, and what was found to be wrong in it."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

from cluster.routing import frame_intake
from tests.simulated_cluster.client import End
from tests.simulated_cluster.fleet import Fleet
from tests.simulated_cluster.odds import Odds
from tests.simulated_cluster.setting import Setting
from tests.simulated_cluster.story import Story
from tests.simulated_cluster.token_channel import SimulatedReceiver
from tests.simulated_cluster.virtual_time import GoesRound, NothingToDo, Stage, virtual_time
from tests.simulated_cluster.world import World

# Errors that our code logs where it was a fault of the simulation's; all others are bugs.
_EXPECTED_ERRORS = frozenset({"call_failed"})
# What a router may take for a death of who computed a request: of that many it is refused as their cause.
_LIKE_DEATHS = ("kill", "freeze", "link breaks", "links break", "call late")


@dataclass(frozen=True, slots=True)
class Run:
    """wrong: in words; empty: all is well. seen: faults by kind; ends: of clients, with their errors."""

    seed: int
    wrong: tuple[str, ...]
    trace: tuple[str, ...]
    seen: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    num_events: int = 0

    def __str__(self) -> str:
        again = f"python -m tests.simulated_cluster.replay {self.seed}"
        return "\n".join([f"seed {self.seed}: {len(self.wrong)} wrong; the whole story: {again}", *self.wrong])


class Simulation:
    """Runs seeds, one after another, on one thread."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def run(self, seed: int, keeps_trace: bool = False) -> Run:
        """keeps_trace: also of one in which nothing is wrong."""
        worlds: list[World] = []
        stories: list[Story] = []

        async def play() -> None:
            rng = random.Random(seed)
            setting = Setting.of(rng)
            world = World(rng, Odds.of(rng, setting.has_digests), asyncio.get_running_loop())
            worlds.append(world)
            world.trace("seed", "%s: %s", seed, setting)
            world.trace("weather", "%s", world.odds)
            world.loop.set_exception_handler(lambda _, context: world.found_wrong("loop", "%s", context))
            fleet = Fleet(world, setting)
            story = Story(world, fleet)
            stories.append(story)
            with _logs_to(world):
                await fleet.open()
                await story.play()
                _check(world, fleet, story)
                await fleet.close()

        try:
            with _no_collection():
                self._stage.run(play)
        except (NothingToDo, GoesRound) as error:
            worlds[0].found_wrong("loop", "%s", type(error).__name__)
        world, (story,) = worlds[0], stories
        trace = tuple(world.trace.lines()) if keeps_trace or world.wrong else ()
        ends = Counter(f"{client.end} {client.error}".strip() for client in story.clients)
        return Run(seed, tuple(world.wrong), trace, world.seen, ends, len(world.trace))


@contextmanager
def simulation() -> Iterator[Simulation]:
    """Until its end, our modules' clocks are the simulation's: nothing real may run meanwhile."""
    with virtual_time() as stage, patch.object(frame_intake, "TokenReceiver", SimulatedReceiver):
        gc.collect()
        gc.freeze()  # what is there by now stays, and need not be looked through once a seed
        try:
            yield Simulation(stage)
        finally:
            gc.unfreeze()


@contextmanager
def _no_collection() -> Iterator[None]:
    """What a collection ends, such as a generator that nobody has closed, would depend on what ran before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check(world: World, fleet: Fleet, story: Story) -> None:
    """What must be true of every simulation at its end."""
    for client in story.clients:
        client.check(fleet.versions)
        if client.end is End.OPEN:
            world.found_wrong(client.name, "it never ended")
    for replica in fleet.living():
        try:
            replica.check_books()
        except AssertionError as error:
            world.found_wrong(replica.name, "its books are wrong: %s", error)
        errors = replica.transfers.driver.errors
        preemption = replica.scheduler.preemption
        world.seen["swapped out"] += preemption.num_swapped
        world.seen["evicted"] += preemption.num_evicted
        world.seen["fetched from host"] += replica.runner.num_fetched
        prefixes = replica.scheduler.prefixes
        world.seen["tokens found in caches"] += 0 if prefixes is None else prefixes.stats().num_found_tokens
        world.seen["KV read"] += replica.transfers.driver.results["ready"]
        for kind in ("internal", "callback", "hook", "poll"):
            if errors.get(kind):
                world.found_wrong(replica.name, "its transfers had %s errors: %s", kind, errors[kind])


class _LogTrace(logging.Handler):
    """What our code logs is part of the story; errors are wrong."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.WARNING)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", "")
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" ({record.exc_info[1]!r})"
        told = {
            name: getattr(record, name)
            for name in ("request", "generation", "detail", "reason", "status")
            if hasattr(record, name)
        }
        if record.levelno >= logging.ERROR and not self._is_expected(event, record):
            self._world.found_wrong(record.module, "%s: %s %s", event, text, told)
        else:
            self._world.trace(record.module, "log: %s %s %s", event, text, told)

    def _is_expected(self, event: str, record: logging.LogRecord) -> bool:
        if event == "request_quarantined":
            num_deaths: int = vars(record)["num_deaths"]
            return sum([self._world.seen[kind] for kind in _LIKE_DEATHS]) >= num_deaths
        return event in _EXPECTED_ERRORS


@contextmanager
def _logs_to(world: World) -> Iterator[None]:
    handler = _LogTrace(world)
    loggers = [logging.getLogger(name) for name in ("cluster", "replicas", "scheduler")]
    for one in loggers:
        one.addHandler(handler)
    before = [one.propagate for one in loggers]
    for one in loggers:
        one.propagate = False
    try:
        yield
    finally:
        for one, propagates in zip(loggers, before, strict=True):
            one.removeHandler(handler)
            one.propagate = propagates

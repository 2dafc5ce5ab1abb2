"""What happens in one simulation: requests come and are cancelled, replicas die, stop, leave, come, get new weights.

Drawn by its seed; at the end the weather clears, and everything must come to rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from cluster.routing.generation import Generation
from scheduler.generation_spec import GenerationSpec
from scheduler.sampling_params import SamplingParams
from tests.simulated_cluster.client import Client, End
from tests.simulated_cluster.fleet import POOLS, Fleet
from tests.simulated_cluster.odds import Odds
from tests.simulated_cluster.prefix_model import VOCAB_SIZE, answer
from tests.simulated_cluster.replica import SimulatedReplica
from tests.simulated_cluster.setting import LONGEST_PROMPT, MOST_TOKENS
from tests.simulated_cluster.world import World

_STARTS_S = 0.4  # a replica
_PATIENCE_S = 30.0  # for everything to come to rest
_CALM_WITHIN_S = 5.0  # longer than anything holds that the storm has left behind
_POLL_S = 0.05


class Story:
    """clients: all that there were."""

    def __init__(self, world: World, fleet: Fleet) -> None:
        self._world, self._fleet, self._rng = world, fleet, world.rng
        self.clients: list[Client] = []
        self._prefixes = [self._ids(LONGEST_PROMPT) for _ in range(3)]
        self._tasks: set[asyncio.Task[None]] = set()
        self._updated_s = 0.0  # when the last rolling update is over
        self._is_clear = False  # the weather: nobody is struck any more

    async def play(self) -> None:
        """All of it. What is found to be wrong the world is told."""
        rng, world = self._rng, self._world
        length_s = rng.choice([0.5, 1.5, 3.0])
        for _ in range(rng.choice([4, 8, 20])):
            world.later(rng.uniform(0.0, length_s), self._submit)
        for _ in range(rng.choice([0, 2, 3, 5])):
            world.later(rng.uniform(0.0, length_s), self._disturb)
        if rng.random() < 0.5:
            self._move_on(world.now_s + length_s)
        await asyncio.sleep(length_s + 0.1)
        await self._all_end()
        self._clear_up()
        await self._come_to_rest()
        await self._still_works()

    # -- clients -----------------------------------------------------------------------------------

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple([self._rng.randrange(VOCAB_SIZE) for _ in range(count)])

    def _spec(self) -> GenerationSpec:
        rng = self._rng
        known = rng.choice(self._prefixes)[: rng.choice([0, 4, 8, 16, 24])]
        prompt_ids = (*known, *self._ids(rng.randint(1, LONGEST_PROMPT - len(known))))
        choices = tuple(range(rng.choice([1, 1, 1, 2, 3])))
        sampling = SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(1 << 30))
        max_tokens = rng.choice([1, 2, rng.randint(1, MOST_TOKENS), MOST_TOKENS, MOST_TOKENS])
        spec = GenerationSpec(prompt_ids, choices, max_tokens, frozenset(), sampling, priority=rng.choice([0, 0, 1]))
        if rng.random() < 0.4:
            tokens, _ = answer(spec, rng.choice(choices), self._fleet.weights.version)
            spec = replace(spec, stop_token_ids=frozenset({rng.choice(tokens)}))
        return spec

    def _submit(self, timeout_s: float | None = None) -> Client:
        rng, world = self._rng, self._world
        timeout_s = timeout_s or rng.choice([0.3, 6.0, 12.0, 12.0, 12.0, 12.0])
        client = Client(world, Generation(f"c{len(self.clients)}", self._spec(), timeout_s))
        self.clients.append(client)
        seat = rng.choice(self._fleet.seats)
        client.router = seat.name
        client.task = world.loop.create_task(client.ask(seat.router))
        if rng.random() < 0.15:
            world.later(world.about(0.3), self._cancel, client)
        return client

    def _cancel(self, client: Client) -> None:
        if client.end is End.OPEN and client.task is not None:
            self._world.fault(client.name, "cancel")
            client.task.cancel()

    # -- disturbances ------------------------------------------------------------------------------

    def _disturb(self) -> None:
        rng = self._rng
        ops: list[tuple[Callable[[], None], int]] = [
            (self._kill, 4),
            (self._restart, 8),
            (self._freeze, 4),
            (self._scale_up, 1),
            (self._scale_down, 3),
            (self._swap_weights, 2),
            (self._break_links, 2),
            (self._migrate, 8),
            (self._kill_router, 2),
        ]
        (op,) = rng.choices([op for op, _ in ops], [weight for _, weight in ops])
        op()

    def _hit(self, strike: Callable[[SimulatedReplica], None]) -> None:
        """Anybody now, or somebody while KV is read from it."""
        rng, fleet = self._rng, self._fleet
        if rng.random() < 0.3:
            if living := fleet.living():
                strike(rng.choice(living))
            return

        def told(agent_name: str, for_s: float) -> None:
            self._world.later(rng.uniform(0.0, for_s), strike_at, agent_name)

        def strike_at(agent_name: str) -> None:
            victim = next((one for one in fleet.living() if one.agent_name == agent_name), None)
            if victim is not None and not self._is_clear:
                strike(victim)

        fleet.network.at_next_read(told)

    def _kill(self) -> None:
        def strike(victim: SimulatedReplica) -> None:
            self._fleet.kill(victim)
            self._world.later(self._world.about(_STARTS_S), self._fleet.start, victim.pool)

        self._hit(strike)

    def _restart(self) -> None:
        """Another process comes in its place, where notes and reads for the old one reach it."""

        def strike(victim: SimulatedReplica) -> None:
            self._fleet.kill(victim)
            delay_s = self._rng.choice([0.0, 0.0, 0.0, 0.02, 0.2])
            self._world.later(delay_s, self._fleet.start, victim.pool, victim.agent_name)

        self._hit(strike)

    def _freeze(self) -> None:
        self._hit(lambda victim: victim.freeze(self._rng.choice([0.1, 0.5, 1.5, 3.0])))

    def _scale_up(self) -> None:
        self._fleet.start(self._pool())

    def _scale_down(self) -> None:
        staying = self._fleet.staying(self._pool())
        if len(staying) > 1 or (staying and self._rng.random() < 0.2):
            self._fleet.leave(self._rng.choice(staying))

    def _swap_weights(self) -> None:
        """A rolling update: others first, then the old ones leave, one after another. Now and then only the pools'
        layout is another."""
        fleet, rng, world = self._fleet, self._rng, self._world
        before = fleet.weights
        if rng.random() < 0.7:
            fleet.weights = replace(before, version=before.version + 1)
            fleet.versions.add(fleet.weights.version)
        else:
            fleet.weights = replace(before, layout=before.layout + 1)
        world.fault("fleet", "swap", "to %s", fleet.weights.fingerprint)
        old = [one for pool in POOLS for one in fleet.staying(pool)]
        rng.shuffle(old)
        after_s = 0.0
        for one in old:
            after_s += world.about(0.2)
            world.later(after_s, fleet.start, one.pool)
            leaves_s = after_s + world.about(0.1)
            world.later(leaves_s, fleet.leave, one)
            self._updated_s = max(self._updated_s, world.now_s + leaves_s)

    def _break_links(self) -> None:
        self._hit(self._fleet.break_links)

    def _kill_router(self) -> None:
        """What it had begun is cut off; engines must find out."""
        seat = self._rng.choice(self._fleet.seats)

        async def die() -> None:
            await self._fleet.kill_router(seat)
            for client in self.clients:
                if client.router == seat.name and client.task is not None:
                    client.task.cancel()

        self._tasks.add(self._world.loop.create_task(die()))

    def _migrate(self) -> None:
        """Everything that runs somewhere is to go on elsewhere, wherever there is room, and soon once more."""
        seat = self._rng.choice(self._fleet.seats)
        moves = seat.router._moves
        for attempts in list(moves._running.values()):
            for attempt in [one for one in attempts if one.may_move]:
                if self._rng.random() < 0.7 and moves.start(attempt, "rebalancing"):
                    self._world.fault(seat.name, "migrate", "%s", attempt.request_id)

    def _move_on(self, until_s: float) -> None:
        """Over and over."""
        self._migrate()
        if self._world.now_s < until_s:
            self._world.later(self._world.about(0.05), self._move_on, until_s)

    def _pool(self) -> str:
        return self._rng.choice(POOLS) if self._fleet.setting.num_prefill else "decode"

    # -- the end -----------------------------------------------------------------------------------

    async def _all_end(self) -> None:
        """Each client within its own time, and a moment more."""
        while any(client.end is End.OPEN for client in self.clients):
            late = [c for c in self.clients if c.end is End.OPEN and self._world.now_s > self._due_s(c)]
            if late:
                for client in late:
                    self._world.found_wrong(client.name, "it hangs")
                return
            await asyncio.sleep(_POLL_S)

    def _due_s(self, client: Client) -> float:
        return 1000.0 + 4.0 + client.generation.timeout_s

    def _clear_up(self) -> None:
        """No more faults, and somebody of each pool who stays."""
        world, fleet = self._world, self._fleet
        world.trace("weather", "clears up")
        world.odds, self._is_clear = Odds.calm(), True
        for one in fleet.living():
            one.thaw()
        for pool in POOLS if fleet.setting.num_prefill else ("decode",):
            if not any(one.weights == fleet.weights for one in fleet.staying(pool)):
                fleet.start(pool)

    async def _come_to_rest(self) -> None:
        """Nothing is left of anything, within some time."""
        until_s = self._world.now_s + _PATIENCE_S
        while remains := dict(self._fleet.remains()):
            if self._world.now_s > until_s:
                for name, what in remains.items():
                    self._world.found_wrong(name, "left behind: %s", what)
                return
            await asyncio.sleep(_POLL_S)

    async def _still_works(self) -> None:
        """After all that, a request is served as if nothing had been."""
        since_s = max(self._world.now_s, self._updated_s)
        until_s, calm_s = since_s + _CALM_WITHIN_S, self._fleet.setting.limits.frozen_after_s
        # For so long as a silence of before may still be noticed.
        while self._world.now_s < min(until_s, since_s + calm_s):
            await asyncio.sleep(_POLL_S)
            if not self._fleet.is_known:
                since_s = self._world.now_s
        for _ in range(2):
            client = self._submit(timeout_s=12.0)
            assert client.task is not None
            await asyncio.wait({client.task})
            if client.end not in (End.FINISHED, End.CANCELLED) and not client.error.startswith("400"):
                self._world.found_wrong(client.name, "after all a request fails: %s", client.error)
        await self._come_to_rest()

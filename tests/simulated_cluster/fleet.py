"""The replicas of both pools and the routers in front of them, as they come and go."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from cluster.routing.pool_client import Loss, PoolClient, ReplicaLost
from cluster.routing.replica_registry import ReplicaTable
from cluster.routing.router import Router
from replicas.messages import Call, GenerateCall, PrefillCall
from tests.simulated_cluster.call_link import CallLink
from tests.simulated_cluster.kv_network import Network
from tests.simulated_cluster.no_metrics import RouterMetrics
from tests.simulated_cluster.prefix_model import Weights
from tests.simulated_cluster.replica import SimulatedReplica
from tests.simulated_cluster.setting import Setting
from tests.simulated_cluster.token_channel import SimulatedReceiver
from tests.simulated_cluster.world import World

POOLS = ("decode", "prefill")
_TOLD_S = 0.05  # until routers know of a change
_UNNOTICED_S = 0.5  # until Serve knows of a death


class SimulatedPool(PoolClient):
    """One pool as one router sees it: told of changes late, and with connections that break."""

    def __init__(self, world: World, fleet: Fleet, router: str) -> None:
        self._world, self._fleet, self._router = world, fleet, router
        self.table: ReplicaTable = {}
        self.links: dict[str, CallLink] = {}
        self._ids = count()

    def replicas(self) -> ReplicaTable:
        return self.table

    async def submit(self, replica_id: str, call: Call[Any]) -> Any:
        world = self._world
        link = self.links.get(replica_id)
        if link is None or link.is_broken:
            if replica_id not in self.table:
                raise ReplicaLost(replica_id, Loss.LEAVING, "is not in its pool")
            link = self.links[replica_id] = CallLink(world, self._router, self._fleet.replicas[replica_id])
            if self._fleet.replicas[replica_id].is_dead:
                link.is_broken = True
                loss = world.rng.choice([Loss.DEAD, Loss.UNREACHABLE])
                raise ReplicaLost(replica_id, loss, "can't be reached", may_have_reached=False)
        if world.happens(world.odds.link_breaks):
            world.fault(replica_id, "link breaks", "to %s", self._router)
            link.break_later(world.rng.choice([0.0, 0.05, 0.5]), Loss.UNREACHABLE, "the link is broken")
        if not isinstance(call, GenerateCall | PrefillCall):
            return await link.call(f"{self._router}-{next(self._ids)}", call)
        world.trace(self._router, "-> %s %s %s", replica_id, type(call).__name__, _told(call))
        try:
            reply = await link.call(call.request_id, call)
        except BaseException as error:
            world.trace(self._router, "<- %s %s: %r", replica_id, call.request_id, error)
            raise
        world.trace(self._router, "<- %s %s %s %s", replica_id, call.request_id, reply.status, reply.detail)
        return reply


def _told(call: GenerateCall | PrefillCall) -> str:
    spec = call.spec
    prompt = f"{spec.prompt_len} tokens ({spec.num_output_in_prompt} of output), choices {spec.choices}"
    source = f", KV from {call.source.replica_id}" if isinstance(call, GenerateCall) and call.source else ""
    return f"{call.request_id}: {prompt}, {spec.max_tokens} to come{source}"


class RouterSeat:
    """One ingress's router, and its end of the token channels."""

    def __init__(self, world: World, fleet: Fleet, setting: Setting, name: str) -> None:
        """SimulatedReceiver must stand for the real one by now."""
        self.name, self.is_dead = name, False
        self.pools = {pool: SimulatedPool(world, fleet, name) for pool in POOLS}
        self.router = Router(
            decode=self.pools["decode"],
            prefill=self.pools["prefill"] if setting.num_prefill else None,
            rules=setting.rules,
            limits=setting.limits,
            metrics=RouterMetrics(world),  # type: ignore[arg-type]
            channel_host="",
            has_prefix_cache=setting.has_prefix_cache,
        )
        receiver = self.router._intake.receiver
        assert isinstance(receiver, SimulatedReceiver)
        self.receiver = receiver
        self.router_id = receiver.address.router_id

    def die(self) -> None:
        """Its process has ended."""
        self.is_dead = True
        for pool in self.pools.values():
            for link in pool.links.values():
                link.vanish()

    def told(self, pool: str, table: ReplicaTable) -> None:
        """A pool is this now."""
        self.pools[pool].table = table
        if pool == "decode":
            self.router.pools_changed(table)
        else:
            self.router.prefill_changed()

    @property
    def num_lost(self) -> int:
        """Replicas that it chooses no more, for now or for good."""
        pools = (self.router._decode, self.router._prefill)
        return sum(len(pool.lost) for pool in pools if pool is not None)

    @property
    def is_disturbed(self) -> bool:
        """Whether a connection of it is."""
        return any(link.is_disturbed for pool in self.pools.values() for link in pool.links.values())

    def remains(self) -> dict[str, Any]:
        """Everything that must be empty when nothing is going on."""
        router, view = self.router, self.router._view
        every = {
            "mailboxes": len(router._mailboxes),
            "waiting": router.num_waiting,
            "demand": router.demand.num_open + router.demand.coming_prompt_tokens,
            "in flight": +view._in_flight,
            "unheard": +view._unheard_blocks,
            "prompts": +view._prompt_tokens,
            "coming": {ids: state.num_coming for ids, state in view.pairs._states.items() if state.num_coming},
            "callback errors": self.receiver.counts.callback_errors,
        }
        return {name: value for name, value in every.items() if value}


class Fleet:
    """replicas: by name, those that have ended too."""

    def __init__(self, world: World, setting: Setting) -> None:
        self.world, self.setting = world, setting
        self.network = Network(world)
        self.replicas: dict[str, SimulatedReplica] = {}
        self._all_seats: list[RouterSeat] = []
        self.weights = Weights(version=1)
        self.versions = {1}  # all that there ever were
        self._names = count()
        self._tables: dict[str, dict[str, dict[str, Any]]] = {pool: {} for pool in POOLS}

    async def open(self) -> None:
        """Routers and replicas, which know each other."""
        setting = self.setting
        for _ in range(setting.num_routers):
            await self.start_router()
        for pool, num in (("decode", setting.num_decode), ("prefill", setting.num_prefill)):
            for _ in range(num):
                self.start(pool, told_s=0.0)

    async def close(self) -> None:
        for seat in self._all_seats:
            await seat.router.stop()

    async def start_router(self) -> None:
        seat = RouterSeat(self.world, self, self.setting, f"router{len(self._all_seats)}")
        self._all_seats.append(seat)
        await seat.router.start()
        for pool in POOLS:
            self._tell_now(seat, pool)

    async def kill_router(self, seat: RouterSeat) -> None:
        """Its clients are cut off by the caller, behind this; another one comes."""
        self.world.fault(seat.name, "kill router")
        seat.die()
        await self.start_router()

    @property
    def seats(self) -> list[RouterSeat]:
        """Of the routers that live."""
        return [seat for seat in self._all_seats if not seat.is_dead]

    def living(self, pool: str | None = None) -> list[SimulatedReplica]:
        """Whose process has not ended."""
        return [one for one in self.replicas.values() if not one.is_dead and pool in (None, one.pool)]

    def staying(self, pool: str) -> list[SimulatedReplica]:
        return [one for one in self.living(pool) if not one.is_leaving]

    @property
    def is_known(self) -> bool:
        """Whether there is somebody in each pool, all routers know who and choose any of them, and nothing that the
        storm has left behind is in the way."""
        for pool in POOLS if self.setting.num_prefill else ("decode",):
            there = {one.name for one in self.staying(pool)}
            if not there or any(seat.pools[pool].table.keys() != there for seat in self.seats):
                return False
        if any(one.sender is not None and one.sender.is_stuck for one in self.living()):
            return False
        return not any(seat.num_lost or seat.is_disturbed for seat in self.seats)

    def find_receiver(self, router_id: str) -> SimulatedReceiver | None:
        return next((seat.receiver for seat in self.seats if seat.router_id == router_id), None)

    # -- changes -----------------------------------------------------------------------------------

    def start(self, pool: str, agent_name: str = "", told_s: float | None = None) -> SimulatedReplica:
        """A replica with the weights of now. agent_name: of the place where another one was; empty: a new place."""
        name = f"{pool[0]}{next(self._names)}"
        replica = SimulatedReplica(
            self.world,
            self.setting,
            self.network,
            self.find_receiver,
            pool,
            name,
            agent_name or f"at-{name}",
            self.weights,
        )
        self.replicas[name] = replica
        self.world.trace(name, "starts at %s with %s", replica.agent_name, self.weights.fingerprint)
        self._tables[pool] = {**self._tables[pool], name: replica.metadata()}
        self._tell(pool, told_s)
        return replica

    def kill(self, replica: SimulatedReplica) -> None:
        self.world.fault(replica.name, "kill")
        replica.die(loses_frames=self.world.rng.random() < 0.5)
        self.world.later(self.world.rng.uniform(0.0, _UNNOTICED_S), self._remove, replica)

    def leave(self, replica: SimulatedReplica) -> None:
        replica.leave()
        self.world.later(self.world.rng.choice([0.0, 0.1]), self._remove, replica)

    def break_links(self, replica: SimulatedReplica) -> None:
        self.world.fault(replica.name, "links break")
        for link in list(replica._links):
            link.break_off(Loss.UNREACHABLE, "the link is broken")

    def _remove(self, replica: SimulatedReplica) -> None:
        self._tables[replica.pool] = {n: of for n, of in self._tables[replica.pool].items() if n != replica.name}
        self._tell(replica.pool, None)

    def _tell(self, pool: str, told_s: float | None) -> None:
        for seat in self.seats:
            delay_s = self.world.rng.uniform(0.0, _TOLD_S) if told_s is None else told_s
            if delay_s:
                self.world.later(delay_s, self._tell_now, seat, pool)
            else:
                self._tell_now(seat, pool)

    def _tell_now(self, seat: RouterSeat, pool: str) -> None:
        """As it is by now: nobody hears of changes in another order."""
        if seat.pools[pool].table is not self._tables[pool]:
            seat.told(pool, self._tables[pool])

    # -- the end -----------------------------------------------------------------------------------

    def remains(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Of each replica that lives, and each router, what is not empty."""
        for one in (*self.living(), *self.seats):
            if remains := one.remains():
                yield one.name, remains

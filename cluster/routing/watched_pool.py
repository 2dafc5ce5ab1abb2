"""A pool whose replicas can stop answering: calls to one that does are given up, and it is not chosen any more."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from cluster.routing.key_feed import MAX_PARTS, KeyFeed
from cluster.routing.pool_client import Loss, PoolClient, ReplicaLost
from cluster.routing.pulse_table import PulseRules, PulseTable
from cluster.routing.replica_registry import ReplicaTable
from replicas.messages import Call, CallStatus, EngineLoad, GenerateReply, PrefillReply, PulseCall, ReplyT

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class WatchedPool(PoolClient):
    """One pool as this router sees it. On the router's event loop.

    A replica that has said nothing for a while (no frame, no reply) is asked how it is: a call a second and silent
    replica. Frozen ones are asked on, and come back when they answer; what waited for them has failed by then. What
    replicas have cached all are asked for, silent or not.
    """

    def __init__(
        self,
        name: str,
        pool: PoolClient,
        rules: PulseRules,
        on_lost: Callable[[str, Loss], None],
        on_load: Callable[[str, EngineLoad], None],
        keys: KeyFeed | None = None,
        on_leaving: Callable[[str], None] = lambda _: None,
        on_back: Callable[[], None] = lambda: None,
    ) -> None:
        """on_lost: told of each loss, by pool and kind. on_load: what a replica said of its load when it was asked.
        keys: takes what replicas have cached; None: nobody wants to know. on_leaving: told of one that says that it
        leaves, again and again. on_back: told when one answers again."""
        self.name, self._keys, self._on_leaving, self._on_back = name, keys, on_leaving, on_back
        self._pool, self._rules, self._on_lost, self._on_load = pool, rules, on_lost, on_load
        self._pulses = PulseTable(rules)
        self._lost: dict[str, Loss] = {}
        self._leaving: set[str] = set()  # who has said so, whatever became of it, while it is there or works for us
        # Calls, and what else waits for a replica, in the order in which they came: those that are lost together are
        # tried again in it.
        self._open: dict[str, dict[asyncio.Timeout, None]] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), context=contextvars.Context())

    async def stop(self) -> None:
        tasks = {task for task in (self._task, *self._asking.values()) if task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._pool.close()

    # -- who there is ------------------------------------------------------------------------------

    def replicas(self) -> ReplicaTable:
        """All that take work as far as Serve knows, the frozen ones too."""
        return self._pool.replicas()

    def usable(self) -> ReplicaTable:
        """Those of them that may be chosen."""
        table = self._pool.replicas()
        if not self._lost:
            return table
        return {name: metadata for name, metadata in table.items() if name not in self._lost}

    def staying(self) -> ReplicaTable:
        """Those that neither leave nor have died: the others are being replaced, or the pool is being emptied."""
        gone = (Loss.LEAVING, Loss.DEAD)
        return {name: of for name, of in self._pool.replicas().items() if self._lost.get(name) not in gone}

    def silent(self) -> ReplicaTable:
        """Those that may answer again: frozen, or out of reach."""
        table = self._pool.replicas()
        may_answer = [name for name, loss in self._lost.items() if loss in (Loss.FROZEN, Loss.UNREACHABLE)]
        return {name: table[name] for name in may_answer if name in table}

    @property
    def lost(self) -> dict[str, Loss]:
        """Those that may not, and why."""
        return {name: loss for name, loss in self._lost.items() if name in self._pool.replicas()}

    def tell_of_deaths(self, tell: Callable[[str], None]) -> None:
        def died(replica_id: str) -> None:
            self._is_dead(replica_id, Loss.DEAD)
            tell(replica_id)

        self._pool.tell_of_deaths(died)

    def heard(self, replica_id: str, load: EngineLoad) -> None:
        """A frame of it has come."""
        self._pulses.heard(replica_id)
        if load.is_leaving:
            self._says_it_leaves(replica_id)

    # -- calls -------------------------------------------------------------------------------------

    async def submit(self, replica_id: str, call: Call[ReplyT]) -> ReplyT:
        """As of the pool; raises ReplicaLost too when the replica freezes meanwhile, or says that it is leaving."""
        reply = await self._while_it_answers(replica_id, self._pool.submit(replica_id, call))
        if isinstance(reply, GenerateReply | PrefillReply) and reply.status is CallStatus.LEAVING:
            # Its own word, and for good. One that is off the table may be back: Serve reconfigures it for a moment.
            if replica_id in self._pool.replicas():
                self._lose(replica_id, Loss.LEAVING)
            raise ReplicaLost(replica_id, Loss.LEAVING, "is leaving")
        return reply

    @asynccontextmanager
    async def until_lost(self, replica_id: str) -> AsyncIterator[None]:
        """What is within ends, and this raises ReplicaLost, when the replica is lost meanwhile: for who waits for what
        it does by itself, with no call open there."""
        limit = asyncio.timeout(None)  # none, until the replica is lost
        self._open.setdefault(replica_id, {})[limit] = None
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            loss = self._lost.get(replica_id, Loss.FROZEN)
            loss = Loss.FROZEN if loss is Loss.LEAVING else loss
            had_left = replica_id in self._leaving
            raise ReplicaLost(replica_id, loss, "has stopped answering", had_left=had_left) from None
        finally:
            if (others := self._open.get(replica_id)) is not None:
                others.pop(limit, None)
                if not others:
                    del self._open[replica_id]

    async def _while_it_answers(self, replica_id: str, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            async with self.until_lost(replica_id):
                result = await work
        except ReplicaLost as lost:
            if lost.loss in (Loss.DEAD, Loss.UNREACHABLE):
                lost.had_left = replica_id in self._leaving
                self._is_dead(replica_id, lost.loss)
            raise
        self._pulses.heard(replica_id)
        return result

    def _is_dead(self, replica_id: str, loss: Loss) -> None:
        """Or can't be reached."""
        if replica_id in self._pool.replicas():
            self._pulses.suspect(replica_id)
            self._lose(replica_id, loss)

    # -- the watch ---------------------------------------------------------------------------------

    async def _run(self) -> None:
        is_failing = False
        interval_s = self._rules.interval_s if self._keys is None else min(self._rules.interval_s, self._keys.every_s)
        while True:
            await asyncio.sleep(interval_s)
            try:
                self._tick(time.monotonic())
                is_failing = False
            except Exception:  # frozen replicas must be noticed all the same, at the next tick
                if not is_failing:
                    extra = {"event": "watch_failed", "of_pool": self.name}
                    logger.exception("the watch over a pool failed; it goes on", extra=extra)
                is_failing = True

    def _tick(self, now_s: float) -> None:
        table = self._pool.replicas()
        for gone in [name for name in self._lost if name not in table]:
            del self._lost[gone]
        self._leaving = {name for name in self._leaving if name in table or name in self._open}
        changes = self._pulses.tick(now_s, table)
        for name in changes.froze:
            if self._lost.get(name) in (None, Loss.LEAVING):
                self._lose(name, Loss.FROZEN)
        for name in changes.recovered:
            self._recover(name)
        due = () if self._keys is None else self._keys.due(now_s, table)
        for name in dict.fromkeys((*changes.ask, *due)):
            if name not in self._asking:
                self._asking[name] = asyncio.create_task(self._ask(name), context=contextvars.Context())

    def _lose(self, replica_id: str, loss: Loss) -> None:
        if self._lost.get(replica_id) is loss:
            return
        if loss is Loss.LEAVING:
            self._leaving.add(replica_id)
        if (self._lost.get(replica_id), loss) != (Loss.LEAVING, Loss.FROZEN):  # who leaves is not chosen again
            self._lost[replica_id] = loss
        self._on_lost(self.name, loss)
        logger.warning("replica lost", extra={"event": "replica_lost", "replica": replica_id, "why": loss})
        if loss is not Loss.LEAVING:  # who leaves ends what it has begun
            now_s = asyncio.get_running_loop().time()
            for limit in self._open.pop(replica_id, ()):
                limit.reschedule(now_s)

    def _says_it_leaves(self, replica_id: str) -> None:
        """It is not chosen any more, and ends what it has begun."""
        if replica_id in self._pool.replicas():
            self._lose(replica_id, Loss.LEAVING)
        self._on_leaving(replica_id)

    def _recover(self, replica_id: str) -> None:
        if self._lost.get(replica_id) not in (None, Loss.LEAVING):
            del self._lost[replica_id]
            logger.info("replica answers again", extra={"event": "replica_recovered", "replica": replica_id})
            self._on_back()

    async def _ask(self, replica_id: str) -> None:
        try:
            async with asyncio.timeout(self._rules.frozen_after_s):
                await self._ask_all(replica_id)
        except Exception as error:  # its silence goes on, and tells
            extra = {"event": "pulse_failed", "replica": replica_id, "reason": repr(error)}
            logger.info("no pulse", extra=extra)
            return
        finally:
            del self._asking[replica_id]

    async def _ask_all(self, replica_id: str) -> None:
        """How it is, and all that it has cached since, part by part."""
        for _ in range(1 if self._keys is None else MAX_PARTS):
            after = None if self._keys is None else self._keys.position(replica_id)
            pulse = await self._pool.submit(replica_id, PulseCall(after))
            self._pulses.heard(replica_id, pulse.stalled_s)
            self._on_load(replica_id, pulse.load)
            if pulse.load.is_leaving:
                self._says_it_leaves(replica_id)
            if self._keys is None or after is None or not self._keys.heard(replica_id, pulse.keys, after):
                return

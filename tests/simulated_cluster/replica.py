"""One replica: the real engine, its transfers and what answers its calls, turned by timers instead of threads.

As a process: it can be killed, and it can be stopped and go on, with everything that was meant for it meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

from cluster.routing.pool_client import Loss
from replicas.channels.wire import Decoder, MalformedMessage, encode
from replicas.engine.engine import Engine
from replicas.engine.engine_parts import EngineParts
from replicas.fault_points import FaultPoints
from replicas.messages import Call, CallStatus, TransferPeer
from replicas.serving.decode_replica import DecodeReplica
from replicas.serving.engine_builder import BuiltEngine
from replicas.serving.engine_replica import EngineReplica
from replicas.serving.prefill_replica import PrefillReplica
from scheduler.capabilities import DECODE, PREFILL
from scheduler.prefix_book import PrefixOptions
from scheduler.recent_keys import RecentKeys
from scheduler.scheduler import Scheduler
from tests.simulated_cluster.call_link import CallLink
from tests.simulated_cluster.kv_network import Network, SimulatedTransport
from tests.simulated_cluster.no_metrics import NoMetrics
from tests.simulated_cluster.prefix_model import PrefixRunner, Weights
from tests.simulated_cluster.setting import Setting
from tests.simulated_cluster.stepped_threads import SteppedInbox, SteppedTransfers
from tests.simulated_cluster.token_channel import PatientFrames, SimulatedReceiver, SimulatedSender
from tests.simulated_cluster.world import World

_CELL_BYTES = 8
_WAKE_S = 0.0005
_DRAIN_POLL_S = 0.05
_IDLE_FRAME_S = 0.5


class _Shell(EngineReplica[Any, Any]):
    """What answers calls, without Serve and without a socket."""

    def __init__(self, built: BuiltEngine) -> None:
        self._built, self._engine = built, built.engine
        self._watch = SimpleNamespace(stalled_s=0.0)  # type: ignore[assignment]
        self.leaves = False

    @property
    def is_leaving(self) -> bool:
        return self.leaves


class _DecodeShell(_Shell, DecodeReplica):
    pass


class _PrefillShell(_Shell, PrefillReplica):
    pass


class SimulatedReplica:
    """name: of this process. agent_name: of its place, which another process may have had before."""

    def __init__(
        self,
        world: World,
        setting: Setting,
        network: Network,
        find_receiver: Callable[[str], SimulatedReceiver | None],
        pool: str,
        name: str,
        agent_name: str,
        weights: Weights,
    ) -> None:
        self.world, self.pool, self.name, self.agent_name, self.weights = world, pool, name, agent_name, weights
        self.is_dead = self.is_frozen = self.is_leaving = False
        self._backlog: list[Callable[[], object]] = []
        self._links: dict[CallLink, set[str]] = {}  # with the calls that are open
        self._setting, self._is_stepping = setting, False
        self._engine_timer = self._transfer_timer = None
        decodes = pool == "decode"
        limits = setting.decode if decodes else setting.prefill
        epoch = f"e{name}"
        num_host_blocks = int(limits.num_blocks * setting.host_share)
        if not decodes and not setting.has_prefix_cache:
            num_host_blocks = 0
        recent_keys = RecentKeys(epoch, 512) if setting.has_prefix_cache else None
        prefixes = None
        if recent_keys is not None:
            uses_host = bool(num_host_blocks)
            prefixes = PrefixOptions(weights.fingerprint, on_piece=recent_keys.append, uses_host=uses_host)
        self.scheduler = Scheduler(
            limits, DECODE if decodes else PREFILL, setting.admission, setting.lag, num_host_blocks, prefixes=prefixes
        )
        self.runner = PrefixRunner(
            weights,
            limits,
            setting.max_blocks,
            num_host_blocks,
            world.rng,
            lambda: world.happens(world.odds.row_breaks),
        )
        self.sender = None
        frames = None
        if decodes:
            self.sender = SimulatedSender(world, name, epoch, find_receiver, stall_deadline_s=2.0)
            frames = PatientFrames(self.sender, _IDLE_FRAME_S)
        no_pool: Any = None
        metrics: Any = NoMetrics()
        parts = EngineParts(self.scheduler, self.runner, FaultPoints(None, no_pool), metrics, 1)
        self.engine = Engine(pool, parts, frames)
        self.engine._inbox = self._inbox = SteppedInbox(self.engine.calls.fail, self._wake_engine)
        block_bytes = limits.block_size * _CELL_BYTES
        peer = TransferPeer(name, epoch, agent_name, b"", weights.fingerprint, limits.num_blocks, block_bytes)
        self.transport = SimulatedTransport(network, peer, self.runner.blocks, self._wake_transfers)
        self.transfers = SteppedTransfers(
            self.transport,
            self.engine.on_transfer_event,
            setting.timing,
            setting.max_blocks_in_flight * block_bytes,
            self.runner.digest_blocks if setting.has_digests else None,
            self._wake_transfers,
        )
        self.engine.transfers = self.transfers
        layout: Any = SimpleNamespace(block_size=limits.block_size, bytes_per_token=_CELL_BYTES)
        settings: Any = SimpleNamespace(pool=pool, may_also=False)
        self.built = BuiltEngine(self.engine, self.transfers, peer, settings, layout, metrics, None, recent_keys)
        self.shell = (_DecodeShell if decodes else _PrefillShell)(self.built)
        self._decoder: Decoder[Call[Any]] = self.shell.decoder()
        self._schedule_engine(0.0)
        self._schedule_transfers(0.0)

    def metadata(self) -> dict[str, Any]:
        key = {"channel_public_key": self.sender.public_key} if self.sender is not None else {}
        return {**self.built.metadata(), **key, "node_id": "n", "actor": self.name}

    # -- a process ---------------------------------------------------------------------------------

    def act(self, act: Callable[[], object]) -> None:
        """Something is its turn here: now, or when the process goes on again, or never."""
        if self.is_dead:
            return
        if self.is_frozen:
            self._backlog.append(act)
        else:
            act()

    def freeze(self, for_s: float) -> None:
        if not self.is_dead and not self.is_frozen:
            self.world.fault(self.name, "freeze", "for %.3f s", for_s)
            self.is_frozen = True
            self.world.later(for_s, self.thaw)

    def thaw(self) -> None:
        if self.is_frozen and not self.is_dead:
            self.world.trace(self.name, "goes on, with %s things to do", len(self._backlog))
            self.is_frozen = False
            backlog, self._backlog = self._backlog, []
            for act in backlog:
                self.act(act)

    def die(self, *, loses_frames: bool) -> None:
        """At once, whatever it was doing. loses_frames: what it has sent and has not arrived is lost too."""
        if self.is_dead:
            return
        self.is_dead = self.transport.is_dead = True
        self.transport.close()
        if self.sender is not None and loses_frames:
            self.sender.is_cut = True
        for link in self._links:
            # Whether a process has died is not always known when its connection ends.
            loss = Loss.DEAD if self.world.rng.random() < 0.8 else Loss.UNREACHABLE
            link.break_later(self.world.rng.choice([0.001, 0.05, 0.5]), loss, "its process has ended")

    def leave(self) -> None:
        """Take no new requests, end what has begun, then the process."""
        if not self.is_leaving:
            self.world.fault(self.name, "leave")
            self.is_leaving = self.shell.leaves = True
            self.act(self.engine.leave)
            deadline_s = self.world.now_s + self._setting.drain_timeout_s
            self.world.later(_DRAIN_POLL_S, self.act, partial(self._drain, deadline_s))

    def _drain(self, deadline_s: float) -> None:
        num_open = sum(map(len, self._links.values()))
        if self.world.now_s < deadline_s and (num_open or not self.built.is_drained):
            self.world.later(_DRAIN_POLL_S, self.act, partial(self._drain, deadline_s))
            return
        self.world.trace(self.name, "ends, with %s calls open", num_open)
        self.engine._stopping = True
        self.engine._end_all(CallStatus.REJECTED, "the engine is stopping")
        if self.sender is not None:
            self.sender.shut_down()
        self.transfers.driver.cancel_all()
        self.transfers.crank()
        self.die(loses_frames=False)

    # -- its threads -------------------------------------------------------------------------------

    def _wake_engine(self) -> None:
        if not self._is_stepping:
            self._schedule_engine(self.world.about(_WAKE_S))

    def _schedule_engine(self, delay_s: float) -> None:
        due_s = self.world.now_s + delay_s
        if self._engine_timer is not None:
            if self._engine_timer.when() <= due_s:
                return
            self._engine_timer.cancel()
        self._engine_timer = self.world.loop.call_at(due_s, self.act, self._turn_engine)

    def _turn_engine(self) -> None:
        self._engine_timer, self._is_stepping = None, False
        self._inbox.wait_s = None
        try:
            self.engine._iterate()
        except Exception as error:
            self.world.found_wrong(self.name, "the engine's loop failed: %r", error)
            self.engine._end_all(CallStatus.ERROR, "the engine failed")
        wait_s = self._inbox.wait_s
        if wait_s is None:
            self._is_stepping = True
            self._schedule_engine(self.world.about(self._setting.step_s))
        else:
            self._schedule_engine(0.0 if self._inbox.has_any else wait_s)

    def _wake_transfers(self) -> None:
        self._schedule_transfers(self.world.about(_WAKE_S))

    def _schedule_transfers(self, delay_s: float) -> None:
        due_s = self.world.now_s + delay_s
        if self._transfer_timer is not None:
            if self._transfer_timer.when() <= due_s:
                return
            self._transfer_timer.cancel()
        self._transfer_timer = self.world.loop.call_at(due_s, self.act, self._turn_transfers)

    def _turn_transfers(self) -> None:
        self._transfer_timer = None
        self.transfers.crank()
        self._schedule_transfers(max(0.0, self.transfers.due_s - self.world.now_s))

    # -- its calls ---------------------------------------------------------------------------------

    def take(self, link: CallLink, call_id: str, payload: bytes) -> None:
        """As `replicas.channels.call_server.CallServer`."""
        try:
            reply = self.shell._take(self._decoder(payload))
        except MalformedMessage as error:
            self.world.found_wrong(self.name, "a malformed call: %s", error)
            return
        opened = self._links.setdefault(link, set())
        if not isinstance(reply, Future):
            link.reply(call_id, encode(reply))
            return
        opened.add(call_id)
        reply.add_done_callback(partial(self._done, link, call_id))

    def cancel(self, link: CallLink, call_id: str) -> None:
        self.engine.cancel(call_id)

    def hung_up(self, link: CallLink) -> None:
        """Its router has gone, as far as this replica can tell."""
        for call_id in sorted(self._links.pop(link, ())):
            self.engine.cancel(call_id)

    def _done(self, link: CallLink, call_id: str, future: Future[Any]) -> None:
        self._links.get(link, set()).discard(call_id)
        error = future.exception()
        if error is not None:
            link.reply(call_id, b"", type(error).__name__)
        elif not self.is_dead:
            link.reply(call_id, encode(future.result()))

    # -- what it holds -----------------------------------------------------------------------------

    def remains(self) -> dict[str, Any]:
        """Everything that must be empty when nothing is going on."""
        ledger, transfers = self.scheduler.ledger(), self.transfers.snapshot()
        every = {
            "ledger": None if ledger.is_idle and not ledger.promised_blocks and not ledger.used_slots else ledger,
            "blocks": ledger.blocks if ledger.blocks.unowned != ledger.blocks.total else None,
            "requests": list(self.scheduler._requests),
            "calls": list(self.engine.calls.by_id),
            "open calls": sorted(call_id for calls in self._links.values() for call_id in calls),
            "leases": transfers.leases_open,
            "expected": transfers.reads_expected,
            "reads": transfers.reads_in_flight + transfers.reads_waiting,
            "steps": len(self.engine.core.in_flight),
        }
        return {name: value for name, value in every.items() if value}

    def check_books(self) -> None:
        """Raises AssertionError when they don't add up."""
        self.scheduler.allocator.check_integrity()

"""The network between engines: notes that are lost, doubled, late, overtaken, garbled; reads that fail, hang, go wrong.

An agent's name belongs to a place and not to a process: who starts again there has the same name, and gets what was
meant for who was there before. So it is the epochs that tell them apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from replicas.kv.kv_transport import KvTransport, PeerUnreachable, ReadHandle, ReadState, check_probe, check_read
from replicas.messages import TransferPeer
from tests.simulated_cluster.world import World

_LATE_S = 1.5
_HANGS_S = 6.0


@dataclass(slots=True)
class _Read:
    peer: TransferPeer
    unread: list[tuple[int, int]]  # (local block, remote block), in the order in which they come
    note: bytes
    fails: bool
    state: ReadState = ReadState.READING


@dataclass(slots=True)
class Network:
    """agents: by their names, those that are there now."""

    world: World
    agents: dict[str, SimulatedTransport] = field(default_factory=dict)
    _watchers: list[Callable[[str, float], None]] = field(default_factory=list)

    def join(self, transport: SimulatedTransport) -> None:
        self.agents[transport.name] = transport

    def leave(self, transport: SimulatedTransport) -> None:
        if self.agents.get(transport.name) is transport:
            del self.agents[transport.name]

    def at_next_read(self, told: Callable[[str, float], None]) -> None:
        """Once: from which agent KV is about to be read, and for how long that takes."""
        self._watchers.append(told)

    def begins_read(self, agent_name: str, for_s: float) -> None:
        if self._watchers:
            self._watchers.pop(0)(agent_name, for_s)

    def send(self, sender: str, receiver: str, payload: bytes) -> None:
        """It arrives with whoever has the name then."""
        world, odds = self.world, self.world.odds
        if world.happens(odds.note_lost):
            world.fault(sender, "note lost", "to %s", receiver)
            return
        num_copies = 1
        if world.happens(odds.note_twice):
            world.fault(sender, "note twice", "to %s", receiver)
            num_copies = 2
        for _ in range(num_copies):
            delay_s, copy = world.about(odds.note_s), payload
            if world.happens(odds.note_late):
                delay_s += world.rng.uniform(0.0, _LATE_S)
                world.fault(sender, "note late", "to %s by %.3f s", receiver, delay_s)
            if world.happens(odds.note_garbled):
                copy = copy[: world.rng.randrange(len(copy))]
                world.fault(sender, "note garbled", "to %s", receiver)
            world.later(delay_s, self._arrive, sender, receiver, copy)

    def _arrive(self, sender: str, receiver: str, payload: bytes) -> None:
        agent = self.agents.get(receiver)
        if agent is not None:
            agent.mail.append((sender, payload))
            agent.on_change()


class SimulatedTransport(KvTransport):
    """One engine's end. blocks: its pool, which reads of others copy from and its own copy into."""

    def __init__(
        self, network: Network, peer: TransferPeer, blocks: list[list[int]], on_change: Callable[[], None]
    ) -> None:
        """on_change: something has come, or a read has ended: a poll would see it."""
        self.name, self.on_change = peer.agent_name, on_change
        self.blocks = blocks
        self.mail: list[tuple[str, bytes]] = []
        self._network, self._world, self._peer = network, network.world, peer
        self._loaded: set[str] = set()
        self._reads: dict[int, _Read] = {}
        self._ids = count()
        self.is_dead = False
        network.join(self)

    def local_peer(self) -> TransferPeer:
        return self._peer

    def load_peer(self, peer: TransferPeer) -> None:
        self._loaded.add(peer.agent_name)

    def remove_peer(self, agent_name: str) -> None:
        self._loaded.discard(agent_name)

    def notify(self, agent_name: str, payload: bytes) -> None:
        self._reach(agent_name)
        self._network.send(self.name, agent_name, payload)

    def poll_notifications(self) -> list[tuple[str, bytes]]:
        """Who has written can be answered."""
        mail, self.mail = self.mail, []
        self._loaded.update(sender for sender, _ in mail)
        return mail

    def start_read(
        self,
        peer: TransferPeer,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
        notification: bytes,
    ) -> ReadHandle:
        self._reach(peer.agent_name)
        check_read(self._peer, peer, local_block_ids, remote_block_ids)
        world = self._world
        pairs = list(zip(local_block_ids, remote_block_ids, strict=True))
        world.rng.shuffle(pairs)
        read = _Read(peer, pairs, notification, world.happens(world.odds.read_fails))
        whole_s = world.about(world.odds.read_s)
        if world.happens(world.odds.read_hangs):
            whole_s += world.rng.uniform(0.0, _HANGS_S)
            world.fault(self.name, "read hangs", "from %s for %.3f s", peer.agent_name, whole_s)
        self._network.begins_read(peer.agent_name, whole_s)
        num_parts = min(len(pairs), world.rng.randint(1, 3))
        handle = ReadHandle(peer.agent_name, next(self._ids))
        self._reads[handle.read_id] = read
        for part in range(num_parts):
            world.later(whole_s * (part + 1) / num_parts, self._land, read, num_parts - part)
        return handle

    def start_probe(self, peer: TransferPeer, num_bytes: int) -> ReadHandle:
        self._reach(peer.agent_name)
        check_probe(self._peer, peer, num_bytes)
        handle = ReadHandle(peer.agent_name, next(self._ids))
        read = self._reads[handle.read_id] = _Read(peer, [], b"", False)
        self._world.later(self._world.about(self._world.odds.read_s), self._land, read, 1)
        return handle

    def poll_read(self, handle: ReadHandle) -> ReadState:
        return self._reads[handle.read_id].state

    def release_read(self, handle: ReadHandle) -> None:
        if self._reads[handle.read_id].state is ReadState.READING:
            raise ValueError("nothing can recall a read")
        del self._reads[handle.read_id]

    def close(self) -> None:
        self._network.leave(self)

    def _reach(self, agent_name: str) -> None:
        """Whether somebody has died is not always known at once."""
        if agent_name not in self._loaded:
            raise PeerUnreachable(f"{agent_name} is not loaded")
        if agent_name not in self._network.agents and self._world.rng.random() < 0.5:
            raise PeerUnreachable(f"{agent_name} is dead")

    def _land(self, read: _Read, parts_left: int) -> None:
        """A part of it: from whoever has the name now, as its memory is now."""
        if read.state is not ReadState.READING or self.is_dead:
            return
        source, world = self._network.agents.get(read.peer.agent_name), self._world
        if source is None:
            world.trace(self.name, "a read from %s fails: it is dead", read.peer.agent_name)
            self._end(read, ReadState.FAILED)
            return
        for _ in range(-(-len(read.unread) // parts_left)):
            local, remote = read.unread.pop()
            if remote < len(source.blocks):
                self.blocks[local][:] = source.blocks[remote]
            if world.happens(world.odds.read_falsified):
                self._falsify(world.rng, local)
        if parts_left > 1:
            return
        if read.fails:
            world.fault(self.name, "read fails", "from %s", read.peer.agent_name)
            self._end(read, ReadState.FAILED)
            return
        self._end(read, ReadState.DONE)
        if read.note:
            self._network.send(self.name, read.peer.agent_name, read.note)

    def _falsify(self, rng: random.Random, block_id: int) -> None:
        block = self.blocks[block_id]
        block[rng.randrange(len(block))] ^= 1 << rng.randrange(60)
        self._world.fault(self.name, "read falsified", "block %s", block_id)

    def _end(self, read: _Read, state: ReadState) -> None:
        read.state = state
        self.on_change()

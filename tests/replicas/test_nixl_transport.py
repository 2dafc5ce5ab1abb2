"""The real transport, CPU to CPU over UCX: two agents in one process, and two processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import IO, Any

import msgpack
import msgspec
import pytest
import torch
from nixl_cu13._bindings import nixlBackendError

from replicas.kv.kv_transport import InvalidRead, PeerUnreachable, ReadHandle, ReadState, merge_runs
from replicas.kv.nixl_address import NixlAddress
from replicas.kv.nixl_transport import NixlTransport
from replicas.messages import TransferPeer

SHAPE = (64, 2, 2, 16, 2, 32)  # blocks of 16 KiB
BIG_SHAPE = (64, 16, 2, 16, 4, 64)  # 64 blocks of 512 KiB: long enough to catch a read in flight


def until(condition: Callable[[], Any], timeout_s: float = 120.0) -> Any:
    """Poll until true; the value."""
    give_up_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < give_up_s, "it never happened"
        time.sleep(0.0005)
    return value


def collect(mail: list[tuple[str, bytes]], number: int, *transports: NixlTransport) -> None:
    """Poll all transports until so many notifications have come."""

    def enough() -> bool:
        for transport in transports:
            mail.extend(transport.poll_notifications())
        return len(mail) >= number

    until(enough)


class Pair:
    """A source and a reader in this process, loaded with each other."""

    def __init__(self) -> None:
        self.source_pool = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
        self.reader_pool = torch.zeros(SHAPE)
        self.source = NixlTransport(self.source_pool, "prefill-0", "a1", "f")
        self.reader = NixlTransport(self.reader_pool, "decode-0", "b1", "f")
        self.source.load_peer(self.reader.local_peer())
        self.reader.load_peer(self.source.local_peer())

    def start(self, local: list[int], remote: list[int], payload: bytes = b"done") -> ReadHandle:
        return self.reader.start_read(self.source.local_peer(), local, remote, payload)

    def finish(self, handle: ReadHandle) -> list[tuple[str, bytes]]:
        """Poll both sides until the read and its notification are through. The notifications."""
        mail: list[tuple[str, bytes]] = []

        def step() -> bool:
            mail.extend(self.source.poll_notifications())
            return self.reader.poll_read(handle) is not ReadState.READING and bool(mail)

        until(step)
        assert self.reader.poll_read(handle) is ReadState.DONE
        self.reader.release_read(handle)
        return mail


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.reader.close()
    pair.source.close()
    pair.source.close()  # idempotent


def test_names_and_layout(pair: Pair) -> None:
    peer = pair.source.local_peer()
    assert peer.agent_name == "prefill-0-a1"
    address = NixlAddress.decode(peer.address)
    assert (peer.num_blocks, peer.block_bytes, address.mem_type) == (64, 16384, "DRAM")
    assert address.base_address == pair.source_pool.data_ptr()


def test_read_copies_these_blocks_and_no_others_and_then_notifies(pair: Pair) -> None:
    pair.reader_pool.zero_()
    assert pair.finish(pair.start([10, 11, 3], [5, 6, 60])) == [("decode-0-b1", b"done")]
    assert torch.equal(pair.reader_pool[[10, 11, 3]], pair.source_pool[[5, 6, 60]])
    untouched = [block for block in range(64) if block not in (10, 11, 3)]
    assert not pair.reader_pool[untouched].any()


def test_adjacent_blocks_are_one_descriptor(pair: Pair) -> None:
    handle = pair.start(list(range(8, 40)), list(range(20, 52)))
    assert pair.reader.num_descriptors(handle) == 1
    pair.finish(handle)
    assert torch.equal(pair.reader_pool[8:40], pair.source_pool[20:52])
    # Adjacent at the reader, not at the source, and the other way round.
    handle = pair.start([0, 1, 2, 3, 9], [7, 8, 50, 51, 52])
    assert pair.reader.num_descriptors(handle) == 3
    pair.finish(handle)
    assert torch.equal(pair.reader_pool[[0, 1, 2, 3, 9]], pair.source_pool[[7, 8, 50, 51, 52]])


def test_merge_runs() -> None:
    assert merge_runs([1, 2, 3], [4, 5, 6]) == [(1, 4, 3)]
    assert merge_runs([1, 2, 3], [4, 5, 7]) == [(1, 4, 2), (3, 7, 1)]
    assert merge_runs([3, 2, 1], [6, 5, 4]) == [(3, 6, 1), (2, 5, 1), (1, 4, 1)]
    assert merge_runs([], []) == []
    with pytest.raises(ValueError):
        merge_runs([1], [])


@pytest.mark.parametrize(
    ("local", "remote"), [([64], [0]), ([0], [64]), ([-1], [0]), ([0], [-1]), ([1, 1], [2, 3]), ([1], [1, 2]), ([], [])]
)
def test_bad_block_ids_are_refused_before_anything_is_posted(pair: Pair, local: list[int], remote: list[int]) -> None:
    before = pair.reader_pool.clone()
    with pytest.raises(InvalidRead):
        pair.start(local, remote)
    assert torch.equal(pair.reader_pool, before)
    assert pair.source.poll_notifications() == []


def test_a_pool_of_other_blocks_is_refused(pair: Pair) -> None:
    peer = replace(pair.source.local_peer(), block_bytes=8192)
    with pytest.raises(InvalidRead):
        pair.reader.start_read(peer, [0], [0], b"done")


def test_a_peer_that_lies_about_its_pool_cannot_be_read_past_its_registration(pair: Pair) -> None:
    liar = replace(pair.source.local_peer(), num_blocks=1 << 20)
    reader = NixlTransport(torch.zeros(SHAPE), "decode-liar", "b1", "f")
    reader.load_peer(liar)
    with pytest.raises(PeerUnreachable):
        reader.start_read(liar, [0], [100_000], b"done")
    reader.close()


def test_loading_is_idempotent_and_unloaded_peers_are_unreachable(pair: Pair) -> None:
    reader = NixlTransport(torch.zeros(SHAPE), "decode-1", "b1", "f")
    mail: list[tuple[str, bytes]] = []
    peer = pair.source.local_peer()
    with pytest.raises(PeerUnreachable):
        reader.notify(peer.agent_name, b"hello")
    with pytest.raises(PeerUnreachable):
        reader.start_read(peer, [0], [0], b"done")
    reader.load_peer(peer)
    reader.load_peer(peer)
    reader.notify(peer.agent_name, b"hello")
    # The sender has to poll too: UCX makes the connection in its polls.
    collect(mail, 1, pair.source, reader)
    assert mail == [("decode-1-b1", b"hello")]
    reader.remove_peer(peer.agent_name)
    reader.remove_peer("never heard of")
    with pytest.raises(PeerUnreachable):
        reader.notify(peer.agent_name, b"hello")
    reader.close()


def test_unusable_metadata_is_unreachable(pair: Pair) -> None:
    peer = pair.source.local_peer()
    address = NixlAddress.decode(peer.address)
    for metadata in (b"", b"junk", address.agent_metadata[:100], os.urandom(300)):
        junk = replace(address, agent_metadata=metadata).encode()
        with pytest.raises(PeerUnreachable, match="metadata"):
            pair.reader.load_peer(replace(peer, agent_name="prefill-9-a1", address=junk))
    with pytest.raises(PeerUnreachable, match="belongs to"):
        pair.reader.load_peer(replace(peer, agent_name="prefill-9-a1"))
    pair.finish(pair.start([0], [0]))  # the real one is still loaded


def test_an_address_of_another_transport_is_unreachable(pair: Pair) -> None:
    peer = pair.source.local_peer()
    address = NixlAddress.decode(peer.address)
    wrong_field = msgspec.msgpack.encode({**asdict(address), "mem_type": "DISK"})
    for junk in (b"", b"fake", address.agent_metadata, peer.address[:-1], peer.address + b"x", wrong_field):
        with pytest.raises(PeerUnreachable, match="the address of prefill-9-a1 is none of NIXL's"):
            pair.reader.load_peer(replace(peer, agent_name="prefill-9-a1", address=junk))
    pair.finish(pair.start([0], [0]))


def test_large_notifications_arrive_whole_and_in_order(pair: Pair) -> None:
    payloads = [os.urandom(100_000), *(bytes([number]) for number in range(50))]
    for payload in payloads:
        pair.reader.notify("prefill-0-a1", payload)
    mail: list[tuple[str, bytes]] = []
    collect(mail, len(payloads), pair.source, pair.reader)
    assert [payload for _, payload in mail] == payloads


def test_a_scattered_pool_is_refused() -> None:
    with pytest.raises(ValueError):
        NixlTransport(torch.zeros(8, 8).T, "prefill-2", "a1", "f")


# -- probes ------------------------------------------------------------------------------------------------------------


def test_a_probe_reads_into_memory_of_its_own_and_tells_nobody(pair: Pair) -> None:
    before = pair.reader_pool.clone()
    peer, num_bytes = pair.source.local_peer(), pair.source_pool.nbytes
    for _ in range(2):  # over what the first has read
        handle = pair.reader.start_probe(peer, num_bytes)
        until(lambda h=handle: pair.source.poll_notifications() or pair.reader.poll_read(h) is not ReadState.READING)
        assert pair.reader.poll_read(handle) is ReadState.DONE
        pair.reader.release_read(handle)
    assert torch.equal(pair.reader._scratch, pair.source_pool.view(-1).view(torch.uint8))
    assert torch.equal(pair.reader_pool, before)
    assert pair.source.poll_notifications() == []
    with pytest.raises(InvalidRead, match=f"a probe of {num_bytes + 1} bytes; at most {num_bytes}"):
        pair.reader.start_probe(peer, num_bytes + 1)
    with pytest.raises(PeerUnreachable, match="is not loaded"):
        pair.reader.start_probe(replace(peer, agent_name="prefill-9-a1"), 1)


def test_nobody_can_read_what_a_probe_reads_into(pair: Pair) -> None:
    """It is registered after the peers' metadata were made."""
    scratch = NixlAddress.decode(pair.reader.local_peer().address)
    there = replace(scratch, base_address=pair.reader._scratch.data_ptr())
    peer = replace(pair.reader.local_peer(), address=there.encode())
    reader = NixlTransport(torch.zeros(SHAPE), "decode-2", "b1", "f")
    reader.load_peer(peer)
    with pytest.raises(PeerUnreachable):
        reader.start_read(peer, [0], [0], b"done")
    reader.close()


# -- two processes -------------------------------------------------------------------------------------------------

# The source: answers "ping", lives until its standard input ends.
CHILD = f"""
import os, select, sys, time
out = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # NIXL logs to standard output
import msgpack, torch
from dataclasses import astuple
from pathlib import Path
from replicas.messages import TransferPeer
from replicas.kv.nixl_transport import NixlTransport
torch.set_num_threads(1)
pool = torch.arange(torch.Size({BIG_SHAPE}).numel(), dtype=torch.float32).view({BIG_SHAPE})
transport = NixlTransport(pool, "prefill-child", "c1", "f")
links = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and fd.exists()]
rows = [row.split() for name in ("tcp", "tcp6") for row in Path("/proc/self/net", name).read_text().splitlines()]
listens = [row[1] for row in rows if row[3] == "0A" and f"socket:[{{row[9]}}]" in links]
out.write(msgpack.packb([list(astuple(transport.local_peer())), listens]))
out.flush()
transport.load_peer(TransferPeer(*msgpack.unpackb(os.read(0, 1 << 16))))
end_s = time.monotonic() + 300
while time.monotonic() < end_s:
    for sender, payload in transport.poll_notifications():
        if payload == b"ping":
            transport.notify(sender, b"pong")
    if select.select([0], [], [], 0.001)[0]:
        break
os._exit(0)
"""


class Remote:
    """A source in another process, and a reader here."""

    def __init__(self, epoch: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).resolve().parents[2],
        )
        self.pool = torch.zeros(BIG_SHAPE)
        self.reader = NixlTransport(self.pool, "decode-parent", epoch, "f")

    def connect(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        fields, self.listens = _read_message(self.process.stdout)
        self.peer = TransferPeer(*fields)
        self.process.stdin.write(msgpack.packb(list(astuple(self.reader.local_peer()))))
        self.process.stdin.flush()
        self.load()

    def load(self) -> None:
        """Load the peer and hear of it once, so that what follows finds a connection."""
        self.reader.load_peer(self.peer)
        self.reader.notify(self.peer.agent_name, b"ping")
        assert until(self.reader.poll_notifications) == [("prefill-child-c1", b"pong")]

    def start(self, blocks: list[int]) -> ReadHandle:
        return self.reader.start_read(self.peer, blocks, blocks, b"done")

    def finish(self, handle: ReadHandle, state: ReadState) -> None:
        until(lambda: self.reader.poll_read(handle) is not ReadState.READING)
        assert self.reader.poll_read(handle) is state
        self.reader.release_read(handle)

    def check_dead(self) -> None:
        with pytest.raises(PeerUnreachable):
            self.start([0])
        with pytest.raises(PeerUnreachable):
            self.reader.notify(self.peer.agent_name, b"hello")
        self.reader.close()

    def stand_still(self) -> None:
        """Until SIGCONT. Once this is over: the signal takes its time, in which reads would go on."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _read_message(stream: IO[bytes]) -> Any:
    unpacker = msgpack.Unpacker()
    while True:
        piece = os.read(stream.fileno(), 1 << 16)
        assert piece, "the child ended early"
        unpacker.feed(piece)
        for message in unpacker:
            return message


@pytest.fixture(scope="module")
def remotes() -> Iterator[list[Remote]]:
    with pytest.MonkeyPatch.context() as patch:
        remotes = [Remote("e1")]
        # A stopped source cannot serve TCP. (Where the kernel allows CMA, shared memory could be read all the same.)
        patch.setenv("UCX_TLS", "tcp,self")
        remotes.append(Remote("e2"))  # its start overlaps with the first one's
    for remote in remotes:
        remote.connect()
    yield remotes
    for remote in remotes:
        remote.kill()


ALL = torch.arange(torch.Size(BIG_SHAPE).numel(), dtype=torch.float32).view(BIG_SHAPE)


def test_between_processes_bytes_are_equal_and_only_loopback_listens(remotes: list[Remote]) -> None:
    remote = remotes[0]
    handle = remote.start(list(range(64)))
    assert remote.reader.num_descriptors(handle) == 1
    remote.finish(handle, ReadState.DONE)
    assert torch.equal(remote.pool, ALL)
    assert remote.listens, "the check below would be empty"
    # Little-endian hex of 127.0.0.1.
    assert {address.split(":")[0] for address in remote.listens} == {"0100007F"}


def test_a_source_that_dies_idle_becomes_unreachable(remotes: list[Remote]) -> None:
    remote = remotes[0]
    remote.kill()

    def refused() -> bool:
        try:
            remote.reader.notify(remote.peer.agent_name, b"hello")
        except PeerUnreachable:
            return True
        remote.reader.poll_notifications()
        return False

    until(refused)
    remote.check_dead()


def test_removing_a_peer_does_not_pretend_that_its_reads_have_ended(remotes: list[Remote]) -> None:
    remote = remotes[1]
    remote.stand_still()
    handle = remote.start(list(range(64)))
    remote.reader.remove_peer(remote.peer.agent_name)
    with pytest.raises(PeerUnreachable):
        remote.start([0])
    with pytest.raises(PeerUnreachable):
        remote.reader.load_peer(remote.peer)
    assert {remote.reader.poll_read(handle) for _ in range(200)} == {ReadState.READING}
    remote.process.send_signal(signal.SIGCONT)
    remote.finish(handle, ReadState.DONE)
    assert torch.equal(remote.pool, ALL)


def test_a_source_that_dies_fails_reads_in_flight_and_refuses_new_ones(remotes: list[Remote]) -> None:
    remote = remotes[1]
    remote.load()
    remote.stand_still()
    handles = [remote.start(list(range(32))), remote.start(list(range(32, 64)))]
    with pytest.raises(ValueError):
        remote.reader.release_read(handles[0])
    with pytest.raises(ValueError):
        remote.reader.close()
    remote.kill()
    for handle in handles:
        remote.finish(handle, ReadState.FAILED)
    remote.check_dead()


# -- reads that fail in part ---------------------------------------------------------------------------------------


class HalfFailing:
    """A NIXL agent of which one descriptor fails while the others are under way: it raises at `point`, having posted.

    As NIXL's own (nixl_agent.cpp): what failed once is stored, and told whenever the handle is asked after.
    """

    def __init__(self, agent: Any, point: str) -> None:
        self._agent, self._point = agent, point
        self.num_raised = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def transfer(self, handle: Any) -> Any:
        state = self._agent.transfer(handle)
        assert state == "PROC"
        return self._raise() if self._point == "transfer" else state

    def check_xfer_state(self, handle: Any) -> Any:
        return self._raise()

    def _raise(self) -> Any:
        self.num_raised += 1
        raise nixlBackendError("NIXL_ERR_BACKEND")


@pytest.fixture
def stoppable(monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    """A source that sends nothing while it is stopped."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    remote = Remote("e3")
    remote.connect()
    yield remote
    remote.kill()


SCATTERED = [0, 2, 4, 6, 9, 11, 20, 63]  # a descriptor each


@pytest.mark.parametrize("point", ["transfer", "check"])
def test_a_read_that_failed_in_part_is_never_said_to_have_ended(stoppable: Remote, point: str) -> None:
    """Its other descriptors land long after NIXL has called it failed: whoever had got the blocks would be hurt."""
    reader = stoppable.reader
    stoppable.stand_still()
    reader._agent._agent = failing = HalfFailing(reader._agent._agent, point)
    handle = stoppable.start(SCATTERED)
    assert reader.num_descriptors(handle) == len(SCATTERED)
    states = {reader.poll_read(handle) for _ in range(20)}
    assert failing.num_raised == 1, "what NIXL stored is no news"
    assert not stoppable.pool.any()
    with pytest.raises(ValueError):
        reader.release_read(handle)
    stoppable.process.send_signal(signal.SIGCONT)

    def landed() -> bool:
        reader.poll_notifications()
        return torch.equal(stoppable.pool[SCATTERED], ALL[SCATTERED])

    until(landed)
    assert states == {reader.poll_read(handle)} == {ReadState.UNKNOWN}
    with pytest.raises(ValueError):
        reader.close()


def test_a_source_that_dies_in_a_probe_fails_it(stoppable: Remote) -> None:
    stoppable.stand_still()
    handle = stoppable.reader.start_probe(stoppable.peer, 1 << 24)
    with pytest.raises(ValueError):
        stoppable.reader.close()
    stoppable.kill()
    stoppable.finish(handle, ReadState.FAILED)
    assert not stoppable.pool.any()
    stoppable.check_dead()


def started_and_not_ended(remote: Remote) -> ReadHandle:
    """A read of which some has landed and some has not. One that is too fast for that is done again."""
    for _ in range(100):
        remote.pool.zero_()
        handle = remote.start(list(range(64)))
        while (state := remote.reader.poll_read(handle)) is ReadState.READING:
            if remote.pool.any():
                return handle
        assert state is ReadState.DONE
        remote.reader.release_read(handle)
    raise AssertionError("every read ended at once")


def stopped_in_mid_read(remote: Remote) -> ReadHandle:
    """The source stands still, so that it is sure what has not landed when it dies."""
    for _ in range(100):
        handle = started_and_not_ended(remote)
        remote.stand_still()
        for _ in range(100):  # and what is on its way already lands
            if (state := remote.reader.poll_read(handle)) is not ReadState.READING:
                break
            time.sleep(0.001)
        if state is ReadState.READING and not torch.equal(remote.pool, ALL):
            return handle
        remote.process.send_signal(signal.SIGCONT)
        remote.finish(handle, ReadState.DONE)
    raise AssertionError("every read was through before the source stood still")


def test_nothing_lands_once_the_source_has_died_under_a_read(stoppable: Remote) -> None:
    """That is the one failure that ends a read: UCX has torn down the connection, and what was posted with it."""
    handle = stopped_in_mid_read(stoppable)
    stoppable.kill()
    stoppable.finish(handle, ReadState.FAILED)
    assert not torch.equal(stoppable.pool, ALL)
    stoppable.pool.fill_(-1.0)
    for _ in range(500):
        stoppable.reader.poll_notifications()
    assert (stoppable.pool == -1.0).all()
    stoppable.check_dead()

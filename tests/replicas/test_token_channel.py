"""Sender and receiver together, over real sockets on the loopback address."""

from __future__ import annotations

import asyncio
import errno
import pickle
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from replicas.channels import token_receiver, token_sender
from replicas.channels.outbox import prompt_parts
from replicas.channels.token_sender import FrameGone, TokenSender
from replicas.channels.wire import decode_frame, encode
from replicas.messages import ChannelAddress, Frame, PromptLogprobs, TokenLogprobs
from tests.replicas.token_channel_rig import LOAD, items, running_router, running_sender, until


async def test_frames_arrive_in_order_and_whole() -> None:
    async with running_router() as router:
        with running_sender() as sender:
            router.receiver.allow(sender.public_key)
            sender.open(router.receiver.address)
            for seq in range(200):
                assert sender.send("router", LOAD, (f"admitted-{seq}",), items(seq % 5, seq)) == seq
            await until(lambda: len(router.frames) == 200, sender)
            assert router.frames == [
                Frame("decode", "e1", seq, LOAD, (f"admitted-{seq}",), items(seq % 5, seq), (), (), ())
                for seq in range(200)
            ]
            assert not sender.has_unsent
            assert router.gaps == []
            assert router.receiver.is_alive


async def test_two_routers_have_sequences_of_their_own() -> None:
    async with running_router("a") as a, running_router("b") as b:
        with running_sender() as sender:
            for router in (a, b):
                router.receiver.allow(sender.public_key)
                sender.open(router.receiver.address)
            for seq in range(20):
                sender.send("a", LOAD)
                if seq % 2:
                    sender.send("b", LOAD)
            await until(lambda: len(a.frames) == 20 and len(b.frames) == 10, sender)
            assert a.seqs == list(range(20))
            assert b.seqs == list(range(10))


async def test_unknown_key_is_refused_until_it_is_allowed() -> None:
    async with running_router() as router:
        with running_sender() as sender:
            sender.open(router.receiver.address)
            sender.send("router", LOAD)
            with pytest.raises(AssertionError, match="not in time"):
                await until(lambda: bool(router.frames), sender, within_s=0.7)
            assert sender.has_unsent, "refused at the handshake, not after it"
            assert router.receiver.counts.unauthorized == 0
            router.receiver.allow(sender.public_key)
            await until(lambda: router.seqs == [0], sender)


async def test_disallow_works_on_an_open_connection() -> None:
    async with running_router() as router:
        with running_sender() as sender:
            router.receiver.allow(sender.public_key)
            sender.open(router.receiver.address)
            sender.send("router", LOAD)
            await until(lambda: router.seqs == [0], sender)
            router.receiver.disallow(sender.public_key)
            sender.send("router", LOAD)
            await until(lambda: router.receiver.counts.unauthorized == 1, sender)
            assert router.seqs == [0]


@contextmanager
def deaf_router() -> Iterator[ChannelAddress]:
    """Accepts connections (no ZAP handler: of anybody) and never reads."""
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    public, secret = zmq.curve_keypair()
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = public, secret
    socket.rcvhwm = 10
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    try:
        yield ChannelAddress("deaf", f"tcp://127.0.0.1:{port}", public.decode())
    finally:
        socket.close(linger=0)
        context.term()


async def test_a_router_that_never_reads_stalls_only_itself() -> None:
    async with running_router() as router:
        with deaf_router() as address, running_sender(stall_deadline_s=0.3, ring_frames=300) as sender:
            router.receiver.allow(sender.public_key)
            sender.open(address)
            sender.open(router.receiver.address)
            big = items(256)
            took_s = []
            for seq in range(1500):
                started = time.monotonic()
                sender.send("deaf", LOAD, (), big)
                took_s.append(time.monotonic() - started)
                if seq % 10 == 0:
                    sender.send("router", LOAD)
                    await asyncio.sleep(0)
            *others_s, slowest_s = sorted(took_s)
            print(f"slowest send to a router that never reads: {slowest_s * 1e3:.1f} ms")
            assert others_s[-3] < 1.0, "in some of them the machine may stand still"
            await until(lambda: sender.stalled_routers(time.monotonic()) == ["deaf"], sender)
            await until(lambda: len(router.frames) == 150, sender)
            # What ZeroMQ has taken can be pushed out of the ring.
            await until(lambda: sender._channels["deaf"].ring.oldest_seq > 0, sender)
            with pytest.raises(FrameGone):
                sender.replay("deaf", 0)
            assert decode_frame(sender.replay("deaf", 1499)[0]).seq == 1499
            sender.close("deaf")
            assert sender.stalled_routers(time.monotonic()) == []
            with pytest.raises(KeyError):
                sender.send("deaf", LOAD)


async def test_an_absent_router_stalls_and_frames_wait_in_order() -> None:
    now_s = 100.0
    sender = TokenSender("decode", "e1", stall_deadline_s=5.0, now_s=lambda: now_s)
    sender.open(ChannelAddress("absent", "tcp://127.0.0.1:9", zmq.curve_keypair()[0].decode()))
    assert sender.stalled_routers(1000.0) == []  # nothing waits
    for _ in range(3):
        sender.send("absent", LOAD)
    assert sender.has_unsent
    assert sender.stalled_routers(104.0) == []
    assert sender.stalled_routers(105.1) == ["absent"]
    assert [decode_frame(frame).seq for frame in sender.replay("absent", 1)] == [1, 2]
    assert not sender.owes_tokens  # its load is all that the router has missed
    sender.send("absent", LOAD, admitted=["request"])
    sender.send("absent", LOAD)
    assert sender.owes_tokens
    sender.shut_down(linger_s=0)


async def test_a_restarted_router_gets_a_channel_of_its_own() -> None:
    with running_sender(stall_deadline_s=0.1) as sender:
        async with running_router("old") as router:
            router.receiver.allow(sender.public_key)
            sender.open(router.receiver.address)
            sender.send("old", LOAD)
            await until(lambda: router.seqs == [0], sender)

        def old_channel_is_stalled() -> bool:
            sender.send("old", LOAD)
            return sender.stalled_routers(time.monotonic()) == ["old"]

        await until(old_channel_is_stalled)
        async with running_router("new") as router:
            router.receiver.allow(sender.public_key)
            sender.open(router.receiver.address)
            sender.send("new", LOAD)
            await until(lambda: router.seqs == [0], sender)
            sender.close("old")
            assert sender.stalled_routers(time.monotonic()) == []


async def test_a_channel_opened_again_goes_on_with_its_numbers() -> None:
    """Otherwise a router would take the new frames for old ones and drop them."""
    async with running_router() as router:
        with running_sender() as sender:
            router.receiver.allow(sender.public_key)
            sender.open(router.receiver.address)
            for _ in range(3):
                sender.send("router", LOAD)
            await until(lambda: router.seqs == [0, 1, 2], sender)
            sender.open(router.receiver.address)  # already open: nothing happens
            sender.close("router")
            sender.open(router.receiver.address)
            assert sender.replay("router", 3) == []
            with pytest.raises(FrameGone):
                sender.replay("router", 2)
            assert sender.send("router", LOAD) == 3
            await until(lambda: router.seqs == [0, 1, 2, 3], sender)
            assert router.gaps == []


async def test_a_lost_connection_shows_as_a_gap_and_replay_fills_it() -> None:
    """Frames that were in a connection when it broke."""
    async with running_router() as router:
        with running_sender() as sender:
            router.receiver.allow(sender.public_key)
            sender.open(router.receiver.address)
            sender.send("router", LOAD, (), items(2))
            await until(lambda: router.seqs == [0], sender)
            # Taken by ZeroMQ, then lost with the socket.
            channel = sender._channels["router"]
            token_sender._close(channel, linger_ms=0)
            channel.socket, channel.monitor = sender._connect(channel.address)
            lost = [Frame("decode", "e1", seq, LOAD, (), items(3, seq), (), (), ()) for seq in (1, 2)]
            for frame in lost:
                channel.ring.keep(encode(frame), is_owed=True)
                channel.ring.sent()
            sender.send("router", LOAD)  # a sign of life is enough
            await until(lambda: bool(router.gaps), sender)
            assert router.gaps == [("decode", "e1", 1)]
            replayed = await asyncio.to_thread(sender.replay, "router", 1)
            router.receiver.deliver_replayed([decode_frame(payload) for payload in replayed])
            assert router.seqs == [0, 1, 2, 3]
            assert router.frames[1:3] == lost


def test_frames_that_are_gone_are_named() -> None:
    with running_sender() as sender:
        sender.open(absent())
        sender.send("absent", LOAD)
        for seq, router_id in ((2, "absent"), (-1, "absent"), (0, "unknown")):
            with pytest.raises(FrameGone) as caught:
                sender.replay(router_id, seq)
            copied = pickle.loads(pickle.dumps(caught.value))
            assert (copied.router_id, copied.from_seq) == (router_id, seq)


async def test_scores_of_a_long_prompt_push_nothing_out_of_a_channel_that_is_not_connected_yet() -> None:
    """The first frame, with an admission and a token, waits while one prompt after another is scored."""
    top = tuple((token_id, -1.0) for token_id in range(20))
    scores = tuple(TokenLogprobs(-0.5, top) for _ in range(4096))
    async with running_router() as router:
        with running_sender() as sender:
            sender.open(router.receiver.address)  # which does not let it in yet
            sender.send("router", LOAD, ("first",), items(1))
            for number in range(3):
                sender.send("router", LOAD, (), (), (PromptLogprobs(f"request-{number}", 0, scores),))
            assert sender.has_unsent
            router.receiver.allow(sender.public_key)
            await until(lambda: len(router.frames) == 4, sender)
            assert router.gaps == []
            assert (router.frames[0].admitted, router.frames[0].tokens) == (("first",), items(1))
            assert [frame.prompts[0].request_id for frame in router.frames[1:]] == [f"request-{n}" for n in range(3)]
            assert router.frames[3].prompts[0].positions == scores


def test_a_router_for_which_too_much_waits_is_stalled() -> None:
    """It ends by the engine's word, not by a gap that cannot be filled."""
    with running_sender(unsent_bytes=10_000) as sender:
        sender.open(absent())
        now_s = time.monotonic()
        sender.send("absent", LOAD, (), items(10))
        assert sender.stalled_routers(now_s) == []
        for _ in range(20):
            sender.send("absent", LOAD, (), items(40))
        assert sender.stalled_routers(now_s) == ["absent"]
        assert decode_frame(sender.replay("absent", 0)[0]).tokens == items(10)


def test_a_replay_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply to a call takes no more than a part of what may be kept."""
    monkeypatch.setattr(token_sender, "REPLAY_BYTES", 1000)
    with running_sender() as sender:
        sender.open(ChannelAddress("absent", "tcp://127.0.0.1:9", zmq.curve_keypair()[0].decode()))
        for seq in range(40):
            sender.send("absent", LOAD, (), items(2, seq))
        payloads = sender.replay("absent", 3)
        assert [decode_frame(payload).seq for payload in payloads] == list(range(3, 3 + len(payloads)))
        assert sum(map(len, payloads[:-1])) <= 1000 < sum(map(len, payloads))
        assert len(sender.replay("absent", 39)) == 1


async def test_an_address_that_cannot_be_used_leaves_the_channel_that_there_is() -> None:
    async with running_router() as router:
        with running_sender() as sender:
            router.receiver.allow(sender.public_key)
            sender.open(router.receiver.address)
            sender.send("router", LOAD)
            await until(lambda: router.seqs == [0], sender)
            with pytest.raises(ValueError, match="token channel"):
                sender.open(ChannelAddress("router", "nonsense", router.receiver.address.public_key))
            sender.send("router", LOAD)
            await until(lambda: router.seqs == [0, 1], sender)


def test_a_channel_for_which_no_socket_is_left_is_refused_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_sender() as sender:
        sender.open(absent())
        refusal = zmq.ZMQError(errno.EMFILE)
        monkeypatch.setattr(sender._context, "socket", lambda kind: raise_it(refusal))
        with pytest.raises(ValueError, match="Too many open files"):
            sender.open(ChannelAddress("other", "tcp://127.0.0.1:9", zmq.curve_keypair()[0].decode()))
        assert sender.send("absent", LOAD) == 0


def raise_it(error: Exception) -> None:
    raise error


def absent() -> ChannelAddress:
    return ChannelAddress("absent", "tcp://127.0.0.1:9", zmq.curve_keypair()[0].decode())


@pytest.mark.parametrize(
    ("endpoint", "key"), [("nonsense", None), ("tcp://127.0.0.1:9", "short"), ("tcp://x:9", "é" * 40)]
)
def test_an_unusable_address_is_refused(endpoint: str, key: str | None) -> None:
    with running_sender() as sender:
        with pytest.raises(ValueError, match="token channel"):
            sender.open(ChannelAddress("router", endpoint, key or zmq.curve_keypair()[0].decode()))
        with pytest.raises(FrameGone):
            sender.replay("router", 0)


async def test_throughput() -> None:
    """Printed, not asserted: this machine is shared."""
    num_frames = 10_000
    async with running_router() as router:
        with running_sender(ring_bytes=10**9, ring_frames=2 * num_frames) as sender:
            router.receiver.allow(sender.public_key)
            sender.open(router.receiver.address)
            tokens = items(32)
            started = time.monotonic()
            for seq in range(num_frames):
                sender.send("router", LOAD, (), tokens)
                if seq % 20 == 0:
                    await asyncio.sleep(0)
            await until(lambda: len(router.frames) == num_frames, sender)
            elapsed_s = time.monotonic() - started
            print(f"{num_frames} frames of 32 tokens in {elapsed_s:.2f} s: {num_frames / elapsed_s:.0f} frames/s")
            assert router.seqs == list(range(num_frames))


async def test_large_frames_leave_the_event_loop_its_turn() -> None:
    """Frames that cost as much as one may: a turn takes two of them, not as many as there are."""
    top = tuple((token_id, -1.0) for token_id in range(20))
    (part,) = prompt_parts(PromptLogprobs("r", 0, tuple(TokenLogprobs(-0.5, top) for _ in range(195))))
    size = len(encode(Frame("decode", "e1", 0, LOAD, (), (), (part,), (), ())))
    assert token_receiver.BYTES_PER_TURN / 4 < size < token_receiver.BYTES_PER_TURN
    turns_of: list[int] = []  # the turn of the loop in which each frame came
    turn = 0
    async with running_router() as router:
        with running_sender() as sender:
            router.receiver.allow(sender.public_key)
            router.receiver._on_frame = lambda frame: turns_of.append(turn)
            sender.open(router.receiver.address)
            for _ in range(12):
                sender.send("router", LOAD, (), (), (part,))
            while len(turns_of) < 12:
                turn += 1
                sender.flush()
                await asyncio.sleep(0)
    assert max(Counter(turns_of).values()) <= 1 + token_receiver.BYTES_PER_TURN // size


async def test_a_flood_leaves_the_event_loop_its_turn() -> None:
    async with running_router() as router:
        with running_sender() as sender:
            router.receiver.allow(sender.public_key)
            sender.open(router.receiver.address)

            def flood() -> None:
                for _ in range(3000):
                    sender.send("router", LOAD)
                    if sender.has_unsent:
                        time.sleep(0.0005)

            turns = 0
            thread = asyncio.create_task(asyncio.to_thread(flood))
            while not thread.done() or len(router.frames) < 3000:
                turns += 1
                await asyncio.sleep(0)
                if thread.done():
                    sender.flush()
            assert turns > 3000 / token_receiver.FRAMES_PER_TURN / 2
            assert router.seqs == list(range(3000))


def test_limits_are_consistent() -> None:
    assert token_sender.MAX_FRAMES_PER_FLUSH <= token_sender.SEND_HIGH_WATER_MARK

"""The receiving end: order, gaps, identity, and bytes that are no frames."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import pytest
import zmq

from replicas.channels import token_receiver
from replicas.channels.token_receiver import TokenReceiver
from replicas.channels.wire import encode
from replicas.messages import ChannelAddress, Frame
from tests.replicas.token_channel_rig import Router, frame_of, raw_push, raw_sender, running_router, until


async def test_gap_is_reported_once_and_filled_by_replay() -> None:
    async with running_router() as router:
        with raw_sender(router) as send:
            for seq in (0, 1, 4, 5, 4, 6):
                send(encode(frame_of(seq)))
            await until(lambda: router.receiver.counts.held == 3)
            assert router.seqs == [0, 1]
            assert router.gaps == [("decode", "e1", 2)]
            router.receiver.deliver_replayed(frame_of(seq) for seq in (2, 3, 4, 5, 6))
            assert router.seqs == list(range(7))
            send(encode(frame_of(7)))
            send(encode(frame_of(3)))
            send(encode(frame_of(8)))
            await until(lambda: len(router.frames) == 9)
            assert router.seqs == list(range(9))
            assert router.gaps == [("decode", "e1", 2)]
            # 4 while held; 4, 5, 6 replayed while held or after; 3 late
            assert router.receiver.counts.duplicate == 5
            assert router.receiver.counts.gaps == 1


async def test_a_first_frame_that_is_not_number_0_is_a_gap() -> None:
    async with running_router() as router:
        with raw_sender(router) as send:
            send(encode(frame_of(3)))
            await until(lambda: bool(router.gaps))
            assert router.gaps == [("decode", "e1", 0)]
            router.receiver.deliver_replayed([frame_of(0), frame_of(1), frame_of(2)])
            assert router.seqs == [0, 1, 2, 3]


async def test_a_second_gap_is_reported_when_the_first_is_filled_and_can_be_skipped() -> None:
    async with running_router() as router:
        with raw_sender(router) as send:
            for seq in (0, 2, 4, 5):
                send(encode(frame_of(seq)))
            await until(lambda: router.receiver.counts.held == 3)
            assert router.gaps == [("decode", "e1", 1)]
            router.receiver.deliver_replayed([frame_of(1)])
            assert router.seqs == [0, 1, 2]
            assert router.gaps == [("decode", "e1", 1), ("decode", "e1", 3)]
            router.receiver.skip_gap("decode", "e1")
            assert router.seqs == [0, 1, 2, 4, 5]
            send(encode(frame_of(6)))
            await until(lambda: router.seqs[-1] == 6)
            router.receiver.skip_gap("decode", "e1")  # nothing to skip
            assert len(router.gaps) == 2


async def test_frames_behind_a_gap_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_receiver, "MAX_HELD_FRAMES", 3)
    async with running_router() as router:
        with raw_sender(router) as send:
            for seq in range(1, 7):
                send(encode(frame_of(seq)))
            await until(lambda: router.receiver.counts.overflowed == 3)
            router.receiver.deliver_replayed([frame_of(0)])
            assert router.seqs == [0, 1, 2, 3]
            send(encode(frame_of(7)))
            await until(lambda: len(router.gaps) == 2)
            router.receiver.deliver_replayed(frame_of(seq) for seq in range(4, 8))
            assert router.seqs == list(range(8))


async def test_epochs_are_separate_and_a_forgotten_one_stays_so() -> None:
    async with running_router() as router:
        with raw_sender(router) as send:
            send(encode(frame_of(0, epoch="e1")))
            send(encode(frame_of(0, epoch="e2")))
            send(encode(frame_of(2, epoch="e1")))
            await until(lambda: len(router.gaps) == 1)
            router.receiver.forget("decode", "e1")
            send(encode(frame_of(1, epoch="e1")))
            send(encode(frame_of(1, epoch="e2")))
            await until(lambda: len(router.frames) == 3)
            assert [(frame.epoch, frame.seq) for frame in router.frames] == [("e1", 0), ("e2", 0), ("e2", 1)]
            router.receiver.deliver_replayed([frame_of(1, epoch="e1")])
            assert len(router.frames) == 3
            assert router.receiver.counts.forgotten == 2


async def test_one_that_comes_back_is_heard_from_where_it_is() -> None:
    async with running_router() as router:
        with raw_sender(router) as send:
            send(encode(frame_of(0, epoch="e1")))
            await until(lambda: len(router.frames) == 1)
            router.receiver.forget("decode", "e1")
            send(encode(frame_of(1, epoch="e1")))
            await until(lambda: router.receiver.counts.forgotten == 1)
            router.receiver.resume("decode", "e1")
            router.receiver.resume("decode", "e2")  # was never forgotten: it begins at its beginning
            for seq in (2, 3):
                send(encode(frame_of(seq, epoch="e1")))
            send(encode(frame_of(1, epoch="e2")))
            await until(lambda: len(router.gaps) == 1)
            assert [(frame.epoch, frame.seq) for frame in router.frames] == [("e1", 0), ("e1", 2), ("e1", 3)]
            assert router.gaps == [("decode", "e2", 0)]


async def test_a_callback_may_forget_and_may_fail() -> None:
    router = Router()

    def on_frame(frame: Frame) -> None:
        router.frames.append(frame)
        if frame.seq == 1:
            raise RuntimeError("a fault of the owner")
        if frame.seq == 3:
            router.receiver.forget("decode", "e1")

    router.receiver = TokenReceiver("router", "127.0.0.1", on_frame, lambda *_: None)
    await router.receiver.start()
    with raw_sender(router) as send:
        for seq in (0, 1, 2, 4, 3, 5):
            send(encode(frame_of(seq)))
        await until(lambda: router.receiver.counts.forgotten == 1)
    assert router.seqs == [0, 1, 2, 3]
    assert router.receiver.counts.callback_errors == 1
    assert router.receiver.is_alive
    await router.receiver.stop()


async def test_plaintext_and_wrong_server_key_are_refused() -> None:
    async with running_router() as router:
        address = router.receiver.address
        keys = zmq.curve_keypair()
        router.receiver.allow(keys[0].decode())
        impostor = ChannelAddress("router", address.endpoint, zmq.curve_keypair()[0].decode())
        with raw_push(address, None) as plain, raw_push(impostor, keys) as mistaken:
            for socket in (plain, mistaken):
                with suppress(zmq.Again):  # ZeroMQ may have given up on the refused connection by now
                    socket.send(encode(frame_of(0)), zmq.NOBLOCK)
            with pytest.raises(AssertionError, match="not in time"):
                await until(lambda: bool(router.frames), within_s=0.7)
            assert router.receiver.counts == token_receiver.ReceiverCounts()


async def test_a_replica_cannot_speak_for_another() -> None:
    async with running_router() as router:
        with raw_sender(router) as send, raw_sender(router) as send_other:
            send(encode(frame_of(0)))
            await until(lambda: router.seqs == [0])
            send_other(encode(frame_of(1)))
            await until(lambda: router.receiver.counts.unauthorized == 1)
            send(encode(frame_of(1)))
            await until(lambda: router.seqs == [0, 1])


async def test_malformed_bytes_are_counted_and_dropped() -> None:
    async with running_router() as router:
        with raw_sender(router) as send:
            whole = encode(frame_of(0))
            bad = [
                b"",
                b"\x00",
                b"\xc1" * 50,
                whole[:-1],
                whole + b"\x00",
                b"\xff" * 10_000,
                b"cos\nsystem\n(S'ls'\ntR.",
            ]
            for payload in bad:
                send(payload)
            send(whole)
            await until(lambda: router.seqs == [0])
            assert router.receiver.counts.malformed == len(bad)
            assert router.receiver.is_alive


async def test_several_parts_are_malformed() -> None:
    async with running_router() as router:
        keys = zmq.curve_keypair()
        router.receiver.allow(keys[0].decode())
        with raw_push(router.receiver.address, keys) as socket:
            socket.send_multipart([encode(frame_of(0)), b"more"])
            await until(lambda: router.receiver.counts.malformed == 1)


class FaultySocket:
    """The first calls of recv_multipart on PULL sockets raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception, times: int) -> None:
        self.num_raised = 0
        receive = zmq.Socket.recv_multipart

        def recv_multipart(socket: zmq.Socket[bytes], *arguments: Any, **options: Any) -> Any:
            if socket.type == zmq.PULL and self.num_raised < times:
                self.num_raised += 1
                raise error
            return receive(socket, *arguments, **options)

        monkeypatch.setattr(zmq.Socket, "recv_multipart", recv_multipart)


async def test_a_wake_up_without_a_message_does_not_end_reception(monkeypatch: pytest.MonkeyPatch) -> None:
    socket = FaultySocket(monkeypatch, zmq.Again(), 3)
    async with running_router() as router:
        with raw_sender(router) as send:
            send(encode(frame_of(0)))
            await until(lambda: router.seqs == [0])
    assert socket.num_raised == 3


async def test_a_broken_socket_is_no_longer_alive(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The replica's health check sees it; the event loop does not spin over it."""
    socket = FaultySocket(monkeypatch, zmq.ZMQError(zmq.ENOTSOCK), 1)
    async with running_router() as router:
        assert router.receiver.is_alive
        with raw_sender(router) as send:
            send(encode(frame_of(0)))
            await until(lambda: not router.receiver.is_alive)
    assert (socket.num_raised, router.frames) == (1, [])
    assert "reception has ended" in caplog.text


async def test_frames_beyond_one_turn_come_without_another_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor tells of a burst once; other callbacks run between its parts."""
    monkeypatch.setattr(token_receiver, "FRAMES_PER_TURN", 5)
    async with running_router() as router:
        with raw_sender(router) as send:
            send(encode(frame_of(0)))
            await until(lambda: router.seqs == [0])
            for seq in range(1, 101):
                send(encode(frame_of(seq)))
            time.sleep(0.3)  # all of it arrives while the event loop looks elsewhere
            seen = set()
            while len(router.frames) < 101:
                await asyncio.sleep(0)
                seen.add(len(router.frames))
            assert router.seqs == list(range(101))
            assert len(seen) >= 20


async def test_a_frame_that_cannot_be_handled_is_one_frames_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of ours in the handling of one: it is missing, as if it had not come, and others go on."""
    decode, fails = token_receiver.decode_frame, [True]

    def failing(payload: bytes) -> Frame:
        if fails and fails.pop():
            raise LookupError("a bug of ours")
        return decode(payload)

    monkeypatch.setattr(token_receiver, "decode_frame", failing)
    async with running_router() as router:
        with raw_sender(router) as send:
            for seq in range(3):
                send(encode(frame_of(seq)))
            await until(lambda: bool(router.gaps))
            assert router.receiver.is_alive
            assert router.receiver.counts.callback_errors == 1
            router.receiver.deliver_replayed([frame_of(0)])
            assert router.seqs == [0, 1, 2]


async def test_a_receiver_that_lets_nobody_in_any_more_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong with one question ends pyzmq's task that answers them, without a word."""
    async with running_router() as router, running_router("other") as other:
        assert router.receiver.is_alive

        def failing(domain: str, key: bytes) -> bool:
            raise LookupError("a bug of ours")

        monkeypatch.setattr(router.receiver._allowed, "callback", failing)
        with raw_sender(router) as send:
            send(encode(frame_of(0)))
            await until(lambda: not router.receiver.is_alive)
        assert other.receiver.is_alive
        assert router.frames == []

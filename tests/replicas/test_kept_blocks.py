"""A reader that holds a part of a prompt's KV reads the rest from another process, over NIXL, and verifies it."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from replicas.kv.block_digests import DigestBlocks
from replicas.kv.handoff_actions import (
    BlocksDisputed,
    Event,
    HandoffArrived,
    KvLost,
    KvReady,
    LossReason,
    SourceReleased,
)
from replicas.kv.nixl_transport import NixlTransport
from replicas.messages import TransferPeer
from tests.replicas.transfer_engines import Engine, deadline_s, until

WAIT_S = 60.0
SHAPE = (140_000, 2, 2, 1, 1, 4)  # blocks of 64 bytes: a million tokens are few bytes
BLOCK_BYTES = 64
SOURCE_IDS, READER_IDS = (3, 4, 9, 70_000), (20, 7, 8, 131_000)  # of a prompt of 4 blocks
PROMPT_LEN = 60


def be_source() -> None:
    """In a process of its own: offers blocks, and changes them, as its standard input says; prints what it is told."""
    source = Engine(lambda pool: NixlTransport(pool, "prefill-0", "s1", "f"), shape=SHAPE)
    source.faults.after_confirm = lambda transfer_id, block_ids: None  # type: ignore[method-assign]
    source.pool.copy_(_source_pool())
    digests_of = source.thread._running()._digest_blocks
    assert digests_of is not None
    _print(source.peer.to_metadata())
    for line in sys.stdin:
        do, *values = json.loads(line)
        if do == "offer":
            transfer_id, reader, block_ids = values
            peer = TransferPeer.from_metadata(reader)
            source.thread.offer(transfer_id, peer, block_ids, PROMPT_LEN, (), deadline_s(WAIT_S))
        elif do == "change":
            source.pool[values] += 1.0
            _print({"changed": values})
        elif do == "lie":  # from now on of its digests
            source.thread._running()._digest_blocks = partial(_lie, values[0], digests_of)
            _print({"lies": values})
        elif do == "outcome":
            event = source.await_event(SourceReleased, values[0])
            assert isinstance(event, SourceReleased)
            _print({"outcome": event.outcome})
        elif do == "disputed":
            disputed = source.await_event(BlocksDisputed, values[0])
            assert isinstance(disputed, BlocksDisputed)
            _print({"disputed": disputed.block_ids, "errors": source.thread.snapshot().errors})
    assert source.thread.stop(WAIT_S)


def _lie(how: str, digests_of: DigestBlocks, block_ids: Sequence[int]) -> bytes:
    digests = digests_of(block_ids)
    return {"not": digests, "short": digests[:-8], "ragged": digests[:-1], "other": digests[::-1]}[how]


def _source_pool() -> torch.Tensor:
    """Every block has other bytes, also when 1 is added somewhere."""
    return torch.arange(torch.Size(SHAPE).numel(), dtype=torch.float32).view(SHAPE)


def _print(value: object) -> None:
    print(json.dumps(value), flush=True)


class Remote:
    """A source in another process, and the reader here."""

    def __init__(self) -> None:
        program = "from tests.replicas.test_kept_blocks import be_source; be_source()"
        root = Path(__file__).resolve().parents[2]
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root, text=True
        )
        self.reader = Engine(lambda pool: NixlTransport(pool, "decode-0", "r1", "f"), shape=SHAPE)
        self.peer = TransferPeer.from_metadata(self._hear())
        self.expected = _source_pool()
        self.bytes_before = 0

    def offer(self, transfer_id: str, block_ids: Sequence[int] = SOURCE_IDS) -> None:
        """Until it has arrived."""
        self.reader.thread.expect(transfer_id, self.peer, PROMPT_LEN, len(block_ids), deadline_s(WAIT_S))
        self._tell("offer", transfer_id, self.reader.peer.to_metadata(), list(block_ids))

    @property
    def num_read(self) -> int:
        """Blocks, in this test."""
        num_bytes = self.reader.thread.snapshot().bytes_read - self.bytes_before
        assert num_bytes % BLOCK_BYTES == 0
        return num_bytes // BLOCK_BYTES

    def change(self, *block_ids: int) -> None:
        """The source's bytes, behind its digests' back."""
        self.ask("change", *block_ids)
        self.expected[list(block_ids)] += 1.0

    def ask(self, *words: object) -> dict[str, Any]:
        self._tell(*words)
        return self._hear()

    def end(self, transfer_id: str) -> Event:
        """How it ended here."""

        def ended() -> list[Event]:
            of_it = [event for event in list(self.reader.events) if event.transfer_id == transfer_id]
            return [event for event in of_it if isinstance(event, KvReady | KvLost)]

        until(ended, WAIT_S)
        return ended()[0]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(WAIT_S) == 0
        assert self.reader.thread.stop(WAIT_S)

    def _tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:  # NIXL's log is there too
            if line.startswith("{"):
                heard: dict[str, Any] = json.loads(line)
                return heard
        raise AssertionError("the source ended early")


@pytest.fixture(scope="module")
def process() -> Iterator[Remote]:
    remote = Remote()
    yield remote
    remote.close()


@pytest.fixture
def remote(process: Remote) -> Remote:
    """The one of all tests, honest."""
    process.ask("lie", "not")
    process.reader.faults.corrupts = False
    process.bytes_before = process.reader.thread.snapshot().bytes_read
    return process


def test_what_is_kept_is_neither_read_nor_verified_and_the_rest_is(remote: Remote) -> None:
    """For every number of kept blocks: its bytes, the source's copy of which changes after it was digested."""
    reader, num_blocks = remote.reader, len(SOURCE_IDS)
    for num_kept in range(num_blocks + 1):
        transfer_id, read_before = f"kept-{num_kept}", remote.num_read
        reader.pool.zero_()
        kept, read = list(READER_IDS[:num_kept]), list(READER_IDS[num_kept:])
        reader.pool[kept] = 9.0
        remote.offer(transfer_id)
        arrived = reader.await_event(HandoffArrived, transfer_id)
        assert isinstance(arrived, HandoffArrived)
        assert arrived.handoff.digests is not None
        assert len(arrived.handoff.digests) == 8 * num_blocks
        remote.change(*SOURCE_IDS[:num_kept])
        reader.thread.read_into(transfer_id, READER_IDS, num_kept)
        assert remote.end(transfer_id) == KvReady(transfer_id)
        assert remote.ask("outcome", transfer_id) == {"outcome": "confirmed"}
        assert remote.num_read - read_before == len(read)
        assert torch.equal(reader.pool[read], remote.expected[list(SOURCE_IDS[num_kept:])])
        assert (reader.pool[kept] == 9.0).all()
        assert int(reader.pool.flatten(1).any(1).sum()) == num_blocks, "something landed elsewhere"


def test_a_block_that_changed_at_the_source_is_named_by_its_own_digest(
    remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    remote.offer("changed")
    remote.reader.await_event(HandoffArrived, "changed")
    remote.change(SOURCE_IDS[0], SOURCE_IDS[2], SOURCE_IDS[3])  # of which the first is kept
    with caplog.at_level(logging.WARNING):
        remote.reader.thread.read_into("changed", READER_IDS, 1)
        lost = remote.end("changed")
    detail = "block 2 of the prompt (9 of prefill-0, read into 8); wrong in all: 2 of 3 read"
    assert lost == KvLost("changed", LossReason.DIGEST_MISMATCH, detail)
    (line,) = [record for record in caplog.records if getattr(record, "event", "") == "kv_lost"]
    assert (line.request, line.reason, line.detail) == ("changed", "digest mismatch", detail)  # type: ignore[attr-defined]
    assert detail in line.getMessage()
    assert remote.ask("disputed", "changed")["disputed"] == [SOURCE_IDS[2], SOURCE_IDS[3]]
    remote.offer("again")
    remote.reader.await_event(HandoffArrived, "again")
    remote.reader.thread.read_into("again", READER_IDS, 1)
    assert remote.end("again") == KvReady("again"), "offered as it is now, it is read"


def test_a_block_that_changed_on_the_way_is_named(remote: Remote) -> None:
    remote.offer("way")
    remote.reader.await_event(HandoffArrived, "way")
    remote.reader.faults.corrupts = True
    remote.reader.thread.read_into("way", READER_IDS, 2)
    detail = "block 3 of the prompt (70000 of prefill-0, read into 131000); wrong in all: 1 of 2 read"
    assert remote.end("way") == KvLost("way", LossReason.DIGEST_MISMATCH, detail)
    remote.offer("all")
    remote.reader.await_event(HandoffArrived, "all")
    remote.reader.thread.read_into("all", READER_IDS, 4)
    assert remote.end("all") == KvReady("all"), "what is not read cannot change"


@pytest.mark.parametrize(("how", "num_bytes"), [("short", 24), ("ragged", 31)])
def test_a_list_of_digests_of_the_wrong_length_is_refused_before_anything_is_read(
    remote: Remote, how: str, num_bytes: int
) -> None:
    remote.ask("lie", how)
    remote.offer(how)
    assert remote.end(how) == KvLost(how, LossReason.MISMATCH, f"{num_bytes} bytes of digests for 4 blocks")
    assert remote.ask("outcome", how) == {"outcome": "dropped"}
    assert remote.num_read == 0


def test_digests_of_something_else_give_no_kv(remote: Remote) -> None:
    remote.ask("lie", "other")
    remote.offer("other")
    remote.reader.await_event(HandoffArrived, "other")
    remote.reader.thread.read_into("other", READER_IDS, 0)
    lost = remote.end("other")
    assert isinstance(lost, KvLost)
    assert lost.reason is LossReason.DIGEST_MISMATCH
    assert "wrong in all: 4 of 4 read" in lost.detail
    told = remote.ask("disputed", "other")
    assert told["disputed"] == list(SOURCE_IDS)
    assert told["errors"]["disputed"] >= 1


@pytest.mark.parametrize("num_tokens", [131_072, 1_048_576])
def test_the_longest_prompts_handoff_arrives(remote: Remote, num_tokens: int) -> None:
    """In blocks of 8 tokens, scattered, with ids of five bytes: 210 KB, and 1.7 MB for a million tokens."""
    num_blocks, transfer_id = num_tokens // 8, f"long-{num_tokens}"
    source_ids, reader_ids = (random.Random(seed).sample(range(SHAPE[0]), num_blocks) for seed in (1, 2))
    remote.offer(transfer_id, source_ids)
    until(lambda: "HandoffArrived" in remote.reader.seen(transfer_id), WAIT_S)
    remote.reader.thread.read_into(transfer_id, reader_ids, num_blocks - 5)
    assert remote.end(transfer_id) == KvReady(transfer_id)
    assert torch.equal(remote.reader.pool[reader_ids[-5:]], remote.expected[source_ids[-5:]])
    assert remote.num_read == 5

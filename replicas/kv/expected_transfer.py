"""One transfer that a reader expects: what it must be, which of its blocks are read, how far it has come. No I/O.

The prompt's blocks, in prompt order; the source tells of them part by part, and each is read once it is told of:

    | 0 .. num_kept - 1: here already, not read, not verified | .. num_read - 1 | .. num_ordered - 1: being read
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from replicas.kv.block_digests import DIGEST_BYTES
from replicas.kv.handoff_actions import Backoff, CheckDigests
from replicas.messages import Handoff, TransferPeer


class TransferPhase(Enum):
    WAITING = "waiting"  # for the handoff, or its first part
    OFFERED = "offered"  # waiting for memory
    READING = "reading"
    BETWEEN = "between parts"  # all that was told of has been read, and more is to come
    CONFIRMING = "confirming"  # the last read has ended, or there is none


@dataclass(slots=True)
class ExpectedTransfer:
    """deadline_s: absolute. is_running: of a request that the source decodes, whose handoff says how many blocks there
    are. lease_s: the source's word; None before it was heard. renew_s: when the lease is to be renewed. resend: of the
    DONE. block_ids: here, of the whole prompt; told_ids: at the source, of what it has told of, and digests of those,
    if it gave any. num_unchecked: blocks that were read and whose digests are not compared yet.
    """

    transfer_id: str
    peer: TransferPeer
    prompt_len: int
    num_blocks: int | None
    deadline_s: float
    is_running: bool = field(init=False)
    phase: TransferPhase = TransferPhase.WAITING
    lease_s: float | None = None
    told_ids: list[int] = field(default_factory=list)
    digests: bytearray = field(default_factory=bytearray)
    block_ids: tuple[int, ...] = ()
    num_kept: int = 0
    num_read: int = 0  # those that are kept included, as in num_ordered
    num_ordered: int = 0
    num_unchecked: int = 0
    confirmed: bool = False
    renew_s: float = math.inf
    resend: Backoff | None = None

    def __post_init__(self) -> None:
        self.is_running = self.num_blocks is None

    @property
    def due_s(self) -> float:
        return min(self.deadline_s, self.renew_s, self.resend.due_s if self.resend is not None else math.inf)

    @property
    def num_told(self) -> int:
        return len(self.told_ids)

    @property
    def is_told(self) -> bool:
        """Whether the last part has come."""
        return self.num_told == self.num_blocks

    @property
    def is_all_ordered(self) -> bool:
        """Whether nothing is left to be read behind the read in flight, if there is one. Needs its blocks."""
        return self.is_told and self.num_ordered == self.num_blocks

    def take(self, part: Handoff) -> bool:
        """What a part without a `mismatch` tells of. Mutates. Whether it is news: not if all of it is known already, or
        if a part in front of it is missing."""
        if not part.first_block <= self.num_told < part.first_block + len(part.block_ids):
            return False
        num_known = self.num_told - part.first_block
        if self.num_blocks is None:
            self.num_blocks = len(part.block_ids)
        self.lease_s = part.lease_s
        self.told_ids += part.block_ids[num_known:]
        if part.digests is not None:
            self.digests += part.digests[num_known * DIGEST_BYTES :]
        return True

    def give(self, block_ids: tuple[int, ...], num_kept: int) -> None:
        """Memory for it. Mutates. Raises ValueError for what would not fit, or overwrite a kept block."""
        if self.num_blocks is None or len(block_ids) != self.num_blocks:
            raise ValueError(f"{len(block_ids)} blocks for {self.num_blocks}")
        if not 0 <= num_kept <= self.num_blocks:
            raise ValueError(f"{num_kept} of {self.num_blocks} blocks are kept")
        if num_kept and not set(block_ids[:num_kept]).isdisjoint(block_ids[num_kept:]):
            raise ValueError("a block that is kept would be read over")
        self.block_ids = block_ids
        self.num_kept = self.num_read = self.num_ordered = num_kept

    def order(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The next blocks to be read, here and at the source; None: there are none yet. Mutates: they are ordered."""
        if self.num_ordered >= self.num_told:
            return None
        first, self.num_ordered = self.num_ordered, self.num_told
        return self.block_ids[first : self.num_told], tuple(self.told_ids[first:])

    def read(self) -> CheckDigests:
        """What was ordered is here, and how it is checked. Mutates."""
        first, self.num_read = self.num_read, self.num_ordered
        digests = bytes(self.digests[first * DIGEST_BYTES : self.num_read * DIGEST_BYTES])
        return CheckDigests(self.transfer_id, first, self.block_ids[first : self.num_read], digests)

    def mismatch(self, part: Handoff, fingerprint: str, require_digests: bool) -> str:
        """What is wrong with a part whose id and epochs are right; empty when nothing is."""
        end = part.first_block + len(part.block_ids)
        if part.fingerprint != fingerprint:
            return f"fingerprint {part.fingerprint}"
        if part.prompt_len != self.prompt_len:
            return f"{part.prompt_len} prompt tokens, not {self.prompt_len}"
        if bool(part.moved) != self.is_running:
            return "a prompt's" if self.is_running else "a running request's"
        if self.is_running and (part.first_block or not part.is_last):
            return "a part of a running request's"
        num_blocks = len(part.block_ids) if self.num_blocks is None else self.num_blocks
        if not part.block_ids or (end != num_blocks if part.is_last else end >= num_blocks):
            more = "" if part.is_last else " and more to come"
            return f"blocks {part.first_block} to {end}{more}, of {num_blocks}"
        if any(not 0 <= block_id < self.peer.num_blocks for block_id in part.block_ids):
            return f"a block id outside 0..{self.peer.num_blocks - 1}"
        known_ids = self.told_ids[part.first_block : end]
        if known_ids != list(part.block_ids[: len(known_ids)]):
            return f"block {part.first_block} and those behind it told of twice, and not alike"
        if part.digests is None:
            return "no digests, but this engine verifies" if require_digests else ""
        if len(part.digests) != DIGEST_BYTES * len(part.block_ids):
            return f"{len(part.digests)} bytes of digests for {len(part.block_ids)} blocks"
        known = bytes(self.digests[part.first_block * DIGEST_BYTES : end * DIGEST_BYTES])
        return "" if part.digests.startswith(known) else f"digests from block {part.first_block} on that have changed"

    def disputed(self, check: CheckDigests, places: Sequence[int]) -> tuple[int, ...]:
        """The source's ids of blocks that did not come as they were offered. places: among those checked."""
        return tuple(self.told_ids[check.first_block + place] for place in places)

    def describe_wrong(self, check: CheckDigests, places: Sequence[int]) -> str:
        """The first of them, in words, and how many there are. places: as `disputed`, ascending."""
        first, (remote_id, *_) = places[0], self.disputed(check, places)
        where = f"{remote_id} of {self.peer.replica_id}, read into {check.local_block_ids[first]}"
        others = f"; wrong in all: {len(places)} of {len(check.local_block_ids)} read"
        return f"block {check.first_block + first} of the prompt ({where}){others}"

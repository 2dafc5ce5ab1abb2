"""One transfer that a reader expects: what it must be, which of its blocks are read, how far it has come. No I/O.

The prompt's blocks, in prompt order; block_ids[i] are the ids at the reader:

    | 0 .. num_kept - 1: here already, not read, not verified | num_kept .. num_blocks - 1: read and verified |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from replicas.kv.block_digests import DIGEST_BYTES
from replicas.kv.handoff_actions import Backoff
from replicas.messages import Handoff, TransferPeer


class TransferPhase(Enum):
    WAITING = "waiting"  # for the handoff
    OFFERED = "offered"  # waiting for memory
    READING = "reading"
    CONFIRMING = "confirming"  # the read has ended, or there is none


@dataclass(slots=True)
class ExpectedTransfer:
    """num_blocks: None until the handoff of a request that the source decodes says how many. deadline_s: absolute.
    renew_s: when the lease is to be renewed. resend: of the DONE."""

    transfer_id: str
    peer: TransferPeer
    prompt_len: int
    num_blocks: int | None
    deadline_s: float
    phase: TransferPhase = TransferPhase.WAITING
    handoff: Handoff | None = None
    block_ids: tuple[int, ...] = ()
    num_kept: int = 0
    confirmed: bool = False
    digest_agrees: bool = False
    renew_s: float = math.inf
    resend: Backoff | None = None

    @property
    def due_s(self) -> float:
        return min(self.deadline_s, self.renew_s, self.resend.due_s if self.resend is not None else math.inf)

    @property
    def local_block_ids(self) -> tuple[int, ...]:
        """Into which is read."""
        return self.block_ids[self.num_kept :]

    @property
    def remote_block_ids(self) -> tuple[int, ...]:
        """Which are read. Needs a handoff, as `digests`."""
        assert self.handoff is not None
        return self.handoff.block_ids[self.num_kept :]

    @property
    def digests(self) -> bytes | None:
        """Of those that are read; None: the source gave none."""
        assert self.handoff is not None
        digests = self.handoff.digests
        return None if digests is None else digests[self.num_kept * DIGEST_BYTES :]

    def give(self, block_ids: tuple[int, ...], num_kept: int) -> None:
        """Memory for it. Mutates. Raises ValueError for what would not fit, or overwrite a kept block."""
        if self.num_blocks is None or len(block_ids) != self.num_blocks:
            raise ValueError(f"{len(block_ids)} blocks for {self.num_blocks}")
        if not 0 <= num_kept <= self.num_blocks:
            raise ValueError(f"{num_kept} of {self.num_blocks} blocks are kept")
        if num_kept and not set(block_ids[:num_kept]).isdisjoint(block_ids[num_kept:]):
            raise ValueError("a block that is kept would be read over")
        self.block_ids, self.num_kept = block_ids, num_kept

    def mismatch(self, handoff: Handoff, fingerprint: str, require_digests: bool) -> str:
        """What is wrong with a handoff whose id and epochs are right; empty when nothing is."""
        if handoff.fingerprint != fingerprint:
            return f"fingerprint {handoff.fingerprint}"
        if handoff.prompt_len != self.prompt_len:
            return f"{handoff.prompt_len} prompt tokens, not {self.prompt_len}"
        if bool(handoff.moved) != (self.num_blocks is None):
            return "a prompt's" if self.num_blocks is None else "a running request's"
        num_blocks = len(handoff.block_ids)
        if self.num_blocks is not None and num_blocks != self.num_blocks:
            return f"{num_blocks} blocks, not {self.num_blocks}"
        if any(not 0 <= block_id < self.peer.num_blocks for block_id in handoff.block_ids):
            return f"a block id outside 0..{self.peer.num_blocks - 1}"
        if handoff.digests is None:
            return "no digests, but this engine verifies" if require_digests else ""
        if len(handoff.digests) != DIGEST_BYTES * num_blocks:
            return f"{len(handoff.digests)} bytes of digests for {num_blocks} blocks"
        return ""

    def arrived(self, handoff: Handoff) -> None:
        """One without a mismatch. Mutates."""
        self.phase, self.handoff, self.num_blocks = TransferPhase.OFFERED, handoff, len(handoff.block_ids)

    def disputed(self, places: Sequence[int]) -> tuple[int, ...]:
        """The source's ids of blocks that did not come as they were offered. places: among those read."""
        return tuple(self.remote_block_ids[place] for place in places)

    def describe_wrong(self, places: Sequence[int]) -> str:
        """The first of them, in words, and how many there are. places: as `disputed`, ascending."""
        first = places[0]
        where = f"{self.remote_block_ids[first]} of {self.peer.replica_id}, read into {self.local_block_ids[first]}"
        others = f"; wrong in all: {len(places)} of {len(self.local_block_ids)} read"
        return f"block {self.num_kept + first} of the prompt ({where}){others}"

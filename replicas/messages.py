"""The only types that cross processes, and those of `scheduler` that are part of them. No torch.

Three carriers, one codec (`channels.wire`: msgpack, checked against these types and ranges; nothing is unpickled):
- ZeroMQ calls (router <-> replicas): every `Call` and its reply, fields by name.
- ZeroMQ frames (decode -> router): `Frame`, an array of its fields, none of them optional.
- NIXL notifications (prefill <-> decode): `Handoff`, `TransferNote` and `Dispute`, likewise.
"""

from __future__ import annotations

import sys
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Annotated, Any, Generic, TypeVar

from msgspec import Meta, Struct

from replicas.checked_fields import CheckedMove, CheckedToken, Count, Name, Score
from replicas.engine_load import PROMPT_SHARE_S as PROMPT_SHARE_S
from replicas.engine_load import EngineLoad as EngineLoad
from replicas.recent_part import KeyPart as KeyPart
from replicas.recent_part import KeyPosition as KeyPosition
from scheduler.beam_search import BeamParams as BeamParams
from scheduler.generated_token import FinishReason as FinishReason
from scheduler.generated_token import Token as Token
from scheduler.generation_spec import GenerationSpec as GenerationSpec
from scheduler.grammar import Grammar as Grammar
from scheduler.moved_choice import MovedChoice as MovedChoice
from scheduler.token_logprobs import PromptLogprobs as PromptLogprobs
from scheduler.token_logprobs import TokenLogprobs as TokenLogprobs

WIRE_VERSION = 7  # of what streams: another version's is malformed

ReplyT = TypeVar("ReplyT")


class Call(Struct, Generic[ReplyT], tag=True, frozen=True):
    """Router -> replica, by name: what comes back is a ReplyT."""


@dataclass(frozen=True, slots=True)
class TransferPeer:
    """One end of KV transfers: an engine's pool and how to reach it. Published in replica metadata.

    address: bytes that a transport makes and only its like reads (`replicas.kv.kv_transport`).
    """

    replica_id: str
    epoch: str  # new at every engine start
    agent_name: str
    address: bytes
    fingerprint: str  # a ModelIdentity with its layout, as text: two ends must agree
    num_blocks: int
    block_bytes: int

    def to_metadata(self) -> dict[str, Any]:
        """As plain JSON, for replica metadata, which passes through Ray's controller."""
        return {**asdict(self), "address": b64encode(self.address).decode("ascii")}

    @staticmethod
    def from_metadata(metadata: Mapping[str, Any]) -> TransferPeer:
        return TransferPeer(**{**metadata, "address": b64decode(metadata["address"])})


class Handoff(Struct, tag=f"handoff-{WIRE_VERSION}", array_like=True, forbid_unknown_fields=True, frozen=True):
    """Source -> reader: a part of a prompt's KV lies ready in these blocks, under a lease. Parts follow each other
    without gaps; most prompts have one. Sent again, several may be one."""

    transfer_id: Name
    source_epoch: Name
    reader_epoch: Name
    fingerprint: Name
    block_ids: tuple[Count, ...]  # the part's, at the source, in prompt order
    prompt_len: Count
    # Of each of those blocks, in that order (`replicas.kv.block_digests`); None when verification is off.
    digests: bytes | None
    # Of the last part, as candidates. Without log-probabilities: decode has no use for them.
    first_tokens: tuple[CheckedToken, ...]
    lease_s: Annotated[float, Meta(gt=0.0, le=sys.float_info.max)]  # relative: clocks of two hosts are never compared
    # Of a beam search, instead of first tokens: the most likely ones (token id, log-probability), best first.
    candidates: tuple[tuple[Count, Score], ...]
    first_block: Count  # which of the prompt's blocks the part begins with
    is_last: bool  # the part ends the prompt; its lease began with the first one
    # Of a request that the source decoded, instead of either: its choices that go on, and all their blocks.
    moved: tuple[CheckedMove, ...] = ()


class NoteKind(StrEnum):
    DONE = "done"  # reader -> source: the read ended; also carried by the READ itself
    CONFIRM = "confirm"  # source -> reader: the lease was alive throughout; the blocks are freed now
    REFUSE = "refuse"  # source -> reader: unknown, expired or ended otherwise: do not use what you read
    DROP = "drop"  # either way: this transfer will not happen; free at once
    RENEW = "renew"  # reader -> source: keep the lease; answers each part, and is carried by READs of all but the last


class TransferNote(Struct, tag=f"note-{WIRE_VERSION}", array_like=True, forbid_unknown_fields=True, frozen=True):
    kind: NoteKind
    transfer_id: Name
    source_epoch: Name
    reader_epoch: Name
    reason: Name
    num_blocks: Count  # of a RENEW: so many of the prompt's blocks, its first ones, the reader has been told of; else 0


class Dispute(Struct, tag=f"dispute-{WIRE_VERSION}", array_like=True, forbid_unknown_fields=True, frozen=True):
    """Reader -> source, once, whether its lease is still open or not: these blocks were not as they were offered.

    If they did not change on their way, then in the source's memory, where another prompt may be about to use them.
    """

    transfer_id: Name
    source_epoch: Name
    reader_epoch: Name
    block_ids: Annotated[tuple[Count, ...], Meta(min_length=1)]  # the source's


class Pulse(Struct, frozen=True, omit_defaults=True):
    """Load, not older than a step and 50 ms. stalled_s: since when the engine stands still; 0.0: it does not. keys:
    what it has cached since; None: it was not asked, or caches nothing."""

    load: EngineLoad
    stalled_s: float
    keys: KeyPart | None = None


class PulseCall(Call[Pulse], frozen=True, omit_defaults=True):
    """How is the replica? Answered while it computes. keys_from: what it has cached from there on is asked for too."""

    keys_from: KeyPosition | None = None


class ForgetPeerCall(Call[None], frozen=True):
    """A replica of the other pool has died: transfers from it are lost, leases held for it end."""

    agent_name: str


@dataclass(frozen=True, slots=True)
class ReplayReply:
    """Encoded frames, from the first that was asked for on, some MB at most; none when that one is not kept."""

    frames: tuple[bytes, ...]


class ReplayCall(Call[ReplayReply], frozen=True):
    """Router -> decode: these frames have not come."""

    router_id: str
    from_seq: int


class Frame(Struct, tag=f"frame-{WIRE_VERSION}", array_like=True, forbid_unknown_fields=True, frozen=True):
    """Decode -> one router: everything one step produced for it; with no items, a sign of life."""

    replica_id: Name
    epoch: Name
    seq: Count  # per (decode engine, router), from 0 without gaps
    load: EngineLoad
    # Request ids whose memory was reserved; that of a beam search once more when its KV has come: its tokens come late.
    admitted: tuple[Name, ...]
    tokens: tuple[CheckedToken, ...]
    # Of prompts that decode computes itself: in order, the last no later than the first token.
    prompts: tuple[PromptLogprobs, ...]
    # (request id, tokens of its prompt that decode neither computed nor read), no later than its first token here; none
    # of those where it found nothing.
    cached: tuple[tuple[Name, Count], ...]
    # (request id, drafts there were so far, those that held), no later than the tokens that held: of requests whose
    # client said what it expects.
    drafted: tuple[tuple[Name, Count, Count], ...]


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """Where a router's ZeroMQ PULL socket listens, and its CURVE public key (Z85 text)."""

    router_id: str
    endpoint: str
    public_key: str


@dataclass(frozen=True, slots=True)
class CallAddress:
    """Where a replica takes calls, and its CURVE public key (Z85 text).

    Nobody can connect without the key, and it never travels over that connection: it is a secret of the cluster, told
    in the replica's metadata, not logged and not shown.
    """

    endpoint: str
    public_key: str

    def to_metadata(self) -> dict[str, str]:
        return asdict(self)


class CallStatus(StrEnum):
    OK = "ok"
    CANCELLED = "cancelled"
    REJECTED = "rejected"  # can never fit, or the engine is stopping; detail says which
    KV_LOST = "kv_lost"  # the prompt's KV did not arrive intact: retry on another pair
    EVICTED = "evicted"  # decode's memory ran short, and its host's too: replay it
    TIMEOUT = "timeout"
    LEAVING = "leaving"  # the replica is about to end: nothing was begun
    MOVED = "moved"  # it goes on at another replica, which reads its KV here
    NOTHING_ALLOWED = "nothing_allowed"  # the request's own rules of token choice forbid every token
    GRAMMAR_LIMIT = "grammar_limit"  # following its grammar took more work than one request may cause
    ERROR = "error"
    ENGINE_FAILED = "engine_failed"  # whatever the request is like: all that was open there ended so

    @property
    def may_retry(self) -> bool:
        """Whether another attempt could end otherwise."""
        return self not in (CallStatus.TIMEOUT, CallStatus.NOTHING_ALLOWED, CallStatus.GRAMMAR_LIMIT)


@dataclass(frozen=True, slots=True)
class GenerateReply:
    """When the attempt is over. Tokens never travel here, only how many were sent in frames."""

    status: CallStatus
    detail: str
    num_tokens_sent: tuple[tuple[int, int], ...]  # (choice, tokens)
    queue_s: float
    transfer_s: float
    decode_s: float
    prefill_s: float = 0.0  # of a prompt that decode computed itself
    num_cached: Count = 0  # prompt tokens that were neither computed nor read here


class GenerateCall(Call[GenerateReply], frozen=True):
    """Router -> decode: one attempt. source None: decode prefills this prompt itself.

    request_id is unique per attempt (never the client's id) and names the KV transfer too. timeout_s: from now on.
    has_begun: tokens of its request have reached the client, or its KV lies somewhere: it goes before newcomers.
    is_suspect: replicas have died while they computed it: it is let in alone among its like.
    """

    request_id: str
    spec: GenerationSpec
    timeout_s: float
    channel: ChannelAddress
    source: TransferPeer | None
    has_begun: bool = False
    is_suspect: bool = False
    # Tokens that its longest choice has by now: the source decodes it, and stops once it is admitted here. 0: none.
    num_generated: Count = 0


@dataclass(frozen=True, slots=True)
class PrefillReply:
    status: CallStatus
    detail: str
    first_tokens: tuple[CheckedToken, ...]
    queue_s: float
    prefill_s: float
    load: EngineLoad
    # One TokenLogprobs for each prompt token, None of the first; empty when not asked for. Encoded in parts
    # (`channels.wire.encode_scores`): a router decodes them one at a time.
    prompt_scores: tuple[bytes, ...] = ()
    num_cached: Count = 0  # prompt tokens that were not computed


class PrefillCall(Call[PrefillReply], frozen=True):
    """Router -> prefill, after decode admitted the same attempt. has_begun: as of that."""

    request_id: str
    spec: GenerationSpec
    timeout_s: float
    reader: TransferPeer
    has_begun: bool = False


@dataclass(frozen=True, slots=True)
class MigrateReply:
    """OK: it has stopped, and its KV is offered. Any other status: it goes on as if nothing had been asked."""

    status: CallStatus
    detail: str


class MigrateCall(Call[MigrateReply], frozen=True):
    """Router -> decode, after the reader admitted the attempt transfer_id: stop the running attempt request_id, whose
    generate call then ends as MOVED, and let the reader have its KV. timeout_s: to stop it."""

    request_id: str
    transfer_id: str
    reader: TransferPeer
    timeout_s: float

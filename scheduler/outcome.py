"""What a scheduler tells its engine after an event or a step: frozen facts, applied elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from scheduler.beam_search import Candidate
from scheduler.block_allocator import BlockCounts
from scheduler.generated_token import Token


class NeverFits(Exception):
    """The request needs more memory or slots than the engine has in all; waiting would not help."""

    def __init__(self, what: str, needed: int, available: int) -> None:
        super().__init__(what, needed, available)
        self.what, self.needed, self.available = what, needed, available

    def __str__(self) -> str:
        return f"needs {self.needed} {self.what}, the pool has {self.available}"


class DuplicateRequest(ValueError):
    """A request of this id is still known, perhaps over but not yet let go by a step or a transfer."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return f"request {self.request_id} was submitted before"


class NotCapable(ValueError):
    """The engine has no such half: it was asked to compute, read, decode or offer what it cannot."""

    def __init__(self, request_id: str, what: str) -> None:
        super().__init__(request_id, what)
        self.request_id, self.what = request_id, what

    def __str__(self) -> str:
        return f"request {self.request_id}: this engine cannot {self.what}"


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Some chunks of a prompt to be handed over are computed, not yet the last: the blocks that are full since, in
    prompt order. The transfer holds them already."""

    request_id: str
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptDone:
    """A prompt to be handed over is computed: its first token per choice, and the blocks that hold its KV, all of them.

    block_ids is empty when every choice already ended: nothing will be handed over, and all is released but what parts
    had: their reader is going to let go of it.
    candidates: of a beam search that goes on, instead of first tokens: what may come first.
    """

    request_id: str
    first_tokens: tuple[Token, ...]
    block_ids: tuple[int, ...]
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks for a prompt whose KV is to be read, in prompt order. The first num_kept hold theirs already."""

    block_ids: tuple[int, ...]
    num_kept: int


class StepEvents(NamedTuple):
    """What a committed step brought: tokens of requests that are decoded here, prompts that can be handed over, and
    parts of others that can be."""

    tokens: tuple[Token, ...] = ()
    prompts: tuple[PromptDone, ...] = ()
    parts: tuple[PromptPart, ...] = ()


@dataclass(frozen=True, slots=True)
class Ledger:
    """Everything an engine holds, for metrics and for "is it back at its baseline"."""

    blocks: BlockCounts
    promised_blocks: int
    budget_blocks: int
    num_queued: int
    queued_prompt_tokens: int
    num_active: int  # admitted, prefilling, loading or running
    num_leased: int
    num_ending: int  # over, but some block waits for a step or a transfer to let go
    used_slots: int

    @property
    def is_idle(self) -> bool:
        """Whether no request is here in any state, and nothing is held for one."""
        return not (self.num_queued or self.num_active or self.num_leased or self.num_ending)

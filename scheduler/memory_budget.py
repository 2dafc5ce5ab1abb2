"""How many blocks may be promised, and to whom: what all budgets have in common, and the simplest one.

A promise is made at admission and ends when the last block of the request is free.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType

from scheduler.length_estimator import LengthEstimator
from scheduler.request import Request

NOBODY: Mapping[str, int] = MappingProxyType({})


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold the KV of `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def blocks_for_generation(prompt_len: int, max_tokens: int, num_choices: int, block_size: int) -> int:
    """Worst case of one request: full prompt blocks once, the rest once per choice (copy-on-write).

    The last sampled token is never fed, so it needs no KV: prompt_len + max_tokens - 1 positions a choice,
    and with max_tokens 1 no choice writes at all.
    """
    if max_tokens == 1:
        return num_blocks_for(prompt_len, block_size)
    shared = prompt_len // block_size
    per_choice = num_blocks_for(prompt_len + max_tokens - 1, block_size)
    return shared + num_choices * (per_choice - shared)


def blocks_needed(request: Request, block_size: int) -> int:
    """Most blocks that it can ever need: those of its prompt, and of what is decoded here."""
    if request.hands_over:
        return num_blocks_for(request.prompt_len, block_size)
    return blocks_for_generation(request.prompt_len, request.spec.max_tokens, len(request.spec.choices), block_size)


def tokens_moved_in(request: Request, block_size: int) -> int:
    """Of one that goes on here: so many tokens a choice is taken to have when it comes. It is generating elsewhere
    meanwhile, so a block's worth more than was said."""
    return min(request.num_generated + block_size, request.spec.max_tokens)


class Budget(ABC):
    """Promises of blocks by request id. Not thread-safe: the engine thread owns it.

    What happens to a request between its admission and its end matters only to a budget that looks ahead.
    """

    estimator: LengthEstimator | None = None  # of how long answers become; None: as long as they may

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_shared = 0  # blocks in use that are in nobody's promise, as several hold them (`SharedBlocks`)

    @property
    @abstractmethod
    def promised(self) -> int:
        """Blocks that are in use or must be kept for those who were admitted."""

    @property
    @abstractmethod
    def available(self) -> int:
        """Blocks that a newcomer gets, whatever it does with them."""

    def free_from(self, num_steps: int) -> int:
        """Blocks that a newcomer may use from the step on that is num_steps away."""
        return self.available

    def start_of(self, request: Request) -> int | None:
        """The step from which on one that waits would surely fit, as all is projected now; None: it is not known."""
        return None

    def num_ahead(self) -> int:
        """Blocks by which the highest use may rise if requests get further than was projected."""
        return self.available

    def later_free(self) -> tuple[int, ...]:
        """As free_from, at each of admission.LATER_STEPS; empty where nothing is projected."""
        return ()

    @property
    def expected_tokens(self) -> int | None:
        """What a choice that starts now is taken to generate, or None: as many as its max_tokens."""
        return None if self.estimator is None else self.estimator.estimate(1)

    def fits_ever(self, num_blocks: int, *, hands_over: bool = False) -> bool:
        """Whether a request that needs so many could be admitted alone. hands_over: its KV, when it has it."""
        return num_blocks <= self.num_blocks

    @abstractmethod
    def promise(self, request: Request, joined: Mapping[str, int] = NOBODY) -> bool:
        """Admit a request that has not started if it fits; mutates only then. One promise per request.

        Its num_shared blocks are there already, and counted. joined: how many of whose own blocks are shared from then
        on, as it holds them too.
        """

    @abstractmethod
    def fits(self, request: Request) -> bool:
        """Whether `promise` may admit it: it does if nobody's own blocks are shared by that."""

    @abstractmethod
    def shrink(self, request_id: str, num_blocks: int) -> None:
        """The request is over, but so many of its blocks are still held. Mutates; a promise never grows."""

    @abstractmethod
    def end(self, request_id: str) -> None:
        """The request's blocks are all free again. Mutates."""

    # Empty on purpose, not abstract: see the class.
    def move_to(self, step: int, get: Callable[[str], Request | None]) -> None:  # noqa: B027
        """`step` is the next to be planned, and commits have released what they release. get: of the live. Mutates."""

    def running(self, request: Request, first_step: int) -> None:  # noqa: B027
        """The request starts, lost a choice or stalled: its next rows are in first_step. Mutates."""

    def resume(self, request: Request, num_blocks: int) -> bool:
        """As `promise`, for one that was preempted and comes back with num_blocks blocks in the next step."""
        return True

    def hold(self, request_id: str, num_blocks: int, last_step: int) -> None:  # noqa: B027
        """It keeps these blocks until last_step is committed, and no longer. Mutates."""

    def choice_ended(self, num_tokens: int) -> None:
        """Learn from it. Mutates."""
        if self.estimator is not None:
            self.estimator.observe(num_tokens)


class MemoryBudget(Budget):
    """Promises once and for all what a request can ever need, so an admitted request never waits for memory."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks)
        self._block_size = block_size
        self._promised: dict[str, int] = {}
        self._total_promised = 0

    @property
    def available(self) -> int:
        return self.num_blocks - self.promised

    @property
    def promised(self) -> int:
        return self._total_promised + self.num_shared

    def promise(self, request: Request, joined: Mapping[str, int] = NOBODY) -> bool:
        if not self.promise_blocks(request.request_id, self._needed(request)):
            return False
        for request_id, num_blocks in joined.items():
            self._promised[request_id] -= num_blocks
        self._total_promised -= sum(joined.values())
        self.num_shared += sum(joined.values())
        return True

    def fits(self, request: Request) -> bool:
        return self._needed(request) <= self.available

    def _needed(self, request: Request) -> int:
        return blocks_needed(request, self._block_size) - request.num_shared

    def promise_blocks(self, request_id: str, num_blocks: int) -> bool:
        """Promise blocks to a request if they are available; mutates only then."""
        assert request_id not in self._promised, f"{request_id} already has a promise"
        if num_blocks > self.available:
            return False
        self._promised[request_id] = num_blocks
        self._total_promised += num_blocks
        return True

    def shrink(self, request_id: str, num_blocks: int) -> None:
        assert num_blocks <= self._promised[request_id], f"{request_id} holds more than its promise"
        self._total_promised -= self._promised[request_id] - num_blocks
        self._promised[request_id] = num_blocks

    def end(self, request_id: str) -> None:
        self._total_promised -= self._promised.pop(request_id)

"""The budget of engines that decode: who is admitted, by the projection of what everybody will use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from scheduler.length_estimator import LengthEstimator
from scheduler.memory_budget import (
    NOBODY,
    Budget,
    blocks_for_generation,
    blocks_needed,
    num_blocks_for,
    tokens_moved_in,
)
from scheduler.memory_projection import NO_END, MemoryProjection, Profile, constant, growing, unstarted
from scheduler.request import Request, RequestState
from scheduler.request import Sequence as Choice

# Distances, in steps, at which the room to come is reported: requests end, and a newcomer grows into what they leave.
LATER_STEPS = (16, 64, 256, 1024)


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """quantile None: every choice is taken to generate all of its max_tokens, and memory never runs short. Else its
    length is taken to be that quantile of what was seen (max_tokens until min_samples were), and when it was too
    little, somebody is preempted.

    watermark_fraction: share of the blocks that admission leaves free. max_overtakes: later arrivals that may be
    admitted before one that does not fit yet.
    """

    quantile: float | None = None
    watermark_fraction: float = 0.0
    max_overtakes: int = 8
    min_samples: int = 64


class ProjectedBudget(Budget):
    """Keeps the projection in step with the requests. lag: steps that may be in flight when one is planned."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        policy: AdmissionPolicy,
        lag: int,
        max_drafts: int = 0,
        num_reserved: int = 0,
    ) -> None:
        """max_drafts: of a row. num_reserved: blocks that only requests that hand over may have."""
        super().__init__(num_blocks)
        self._num_reserved = num_reserved
        self.projection = MemoryProjection(block_size)
        self.estimator = None if policy.quantile is None else LengthEstimator(policy.quantile, policy.min_samples)
        self.limit = num_blocks - int(policy.watermark_fraction * num_blocks)
        self.step = 0  # the next one to be planned: all projections begin here
        self._block_size = block_size
        self._lag = lag
        self._max_drafts = max_drafts

    @property
    def promised(self) -> int:
        return self.projection.peak(self.step) + self.num_shared

    @property
    def available(self) -> int:
        return max(0, self.limit - self.promised)

    def free_from(self, num_steps: int) -> int:
        """O(log requests)."""
        return max(0, self._limit_now - self.num_shared - self.projection.peak(self.step + num_steps))

    def start_of(self, request: Request) -> int | None:
        """O(log requests)."""
        limit = self.num_blocks if request.hands_over else self.limit - self._num_reserved
        room = limit - self.num_shared - self.newcomer(request).peak(self._block_size)
        return self.projection.falls_to(room, self.step)

    def fits_ever(self, num_blocks: int, *, hands_over: bool = False) -> bool:
        return num_blocks <= self.num_blocks - (0 if hands_over else self._num_reserved)

    def num_ahead(self) -> int:
        """Blocks by which the highest use may rise if requests get further than was projected. Alone one may hold what
        there is. O(log requests)."""
        return self.num_blocks if len(self.projection) <= 1 else self.free_from(0)

    def later_free(self) -> tuple[int, ...]:
        return tuple([self.free_from(num_steps) for num_steps in LATER_STEPS])

    def promise(self, request: Request, joined: Mapping[str, int] = NOBODY) -> bool:
        assert request.request_id not in self.projection, f"{request.request_id} already has a promise"
        profile = self.newcomer(request)
        for request_id, num_blocks in joined.items():  # they stay when those end whose they were
            self._give_to_shared(request_id, num_blocks)
        if not self._fits(profile, request.hands_over):
            for request_id, num_blocks in joined.items():
                self._give_to_shared(request_id, -num_blocks)
            return False
        self.projection.set(request.request_id, profile)
        return True

    def fits(self, request: Request) -> bool:
        return self._fits(self.newcomer(request), request.hands_over)

    def _give_to_shared(self, request_id: str, num_blocks: int) -> None:
        profile = self.projection.get(request_id)
        assert profile is not None, f"{request_id} holds blocks without a promise"
        self.projection.set(request_id, replace(profile, base=profile.base - num_blocks))
        self.num_shared += num_blocks

    def newcomer(self, request: Request) -> Profile:
        """What a request would use that is admitted now, besides what it shares."""
        if request.hands_over:
            return constant(num_blocks_for(request.prompt_len, self._block_size) - request.num_shared)
        if request.search is not None:
            return self._worst_case(request)
        num_choices = len(request.spec.choices)
        if request.num_generated:
            return self._moved(request, num_choices)
        num_rows = self._rows_left(request, 1)
        profile = unstarted(request.prompt_len, num_choices, num_rows, self.step, self._block_size)
        return replace(profile, base=profile.base - request.num_shared) if request.num_shared else profile

    def _moved(self, request: Request, num_choices: int) -> Profile:
        """Of one that goes on here: as `unstarted`, from where it is elsewhere."""
        prompt_len, num_tokens = request.prompt_len, tokens_moved_in(request, self._block_size)
        num_held = blocks_for_generation(prompt_len, num_tokens, num_choices, self._block_size)
        num_rows, position = max(0, self._rows_left(request, num_tokens)), prompt_len + num_tokens - 1
        profile = growing(num_held, num_choices, 1, position, num_rows, self.step, NO_END, self._block_size)
        return replace(profile, base=profile.base - request.num_shared) if request.num_shared else profile

    def resume(self, request: Request, num_blocks: int) -> bool:
        if not self._fits(self._running_profile(request, num_blocks, self.step)):
            return False
        self.projection.set(request.request_id, self._running_profile(request, num_blocks, self.step))
        return True

    def running(self, request: Request, first_step: int) -> None:
        profile = self._running_profile(request, num_own_blocks(request), first_step)
        self.projection.set(request.request_id, profile)

    def shrink(self, request_id: str, num_blocks: int) -> None:
        self.projection.set(request_id, constant(num_blocks))

    def hold(self, request_id: str, num_blocks: int, last_step: int) -> None:
        self.projection.set(request_id, constant(num_blocks, last_step + self._lag))

    def end(self, request_id: str) -> None:
        self.projection.remove(request_id)

    def move_to(self, step: int, get: Callable[[str], Request | None]) -> None:
        self.step = step
        for request_id in self.projection.overdue(step):
            request = get(request_id)
            if request is not None and request.state is RequestState.RUNNING:
                self.running(request, step)  # it is longer than was estimated
            profile = self.projection.get(request_id)
            if profile is not None and profile.until < step:
                self.shrink(request_id, profile.peak(self._block_size))

    def _fits(self, newcomer: Profile, hands_over: bool = False) -> bool:
        limit = self.num_blocks if hands_over else self._limit_now
        return self.projection.fits(newcomer, self.step, limit - self.num_shared)

    @property
    def _limit_now(self) -> int:
        # Alone it need not leave anything free: whatever can fit does get in.
        return (self.limit if len(self.projection) else self.num_blocks) - self._num_reserved

    def _worst_case(self, request: Request) -> Profile:
        """Of a beam search, from its admission to its end: when it has rows depends on the lag, what its beams share on
        their tokens.
        """
        return constant(blocks_needed(request, self._block_size) - request.num_shared)

    def _running_profile(self, request: Request, num_held: int, first_step: int) -> Profile:
        if request.search is not None:
            return self._worst_case(request)
        live = [sequence for sequence in request.sequences if sequence.finish_reason is None]
        if request.may_draft and live:
            return self._drafting_profile(request, live, num_held, first_step)
        num_planned = max((sequence.num_planned for sequence in live), default=request.spec.max_tokens)
        num_rows = self._rows_left(request, num_planned)
        # One that sits out until its tokens are known may be there for so many times as long; it grows no faster.
        pace = self._lag + 1 if request.needs_known_tokens else 1
        last_step = first_step + num_rows * pace - 1 if num_rows else request.last_step_id
        profile = growing(
            num_held=num_held,
            num_live=len(live),
            num_sharing=_num_sharing(request, num_planned),
            position=request.prompt_len + num_planned - 1,
            num_rows=num_rows,
            first_step=first_step,
            until=last_step + self._lag,
            block_size=self._block_size,
        )
        return replace(profile, is_estimate=num_rows < request.spec.max_tokens - num_planned)

    def _drafting_profile(self, request: Request, live: Sequence[Choice], num_held: int, first_step: int) -> Profile:
        """Of one whose choices may be at different positions, as more drafts of one have held than of another.

        It grows as if drafts in flight will count, and stays as if they will not. Where somebody may run short of
        memory, it goes on at its own pace, with blocks for the drafts of a row; where nobody may, at the slowest, and
        drafts have to fit in (`num_ahead`).
        """
        pace, num_spare = 1, 0
        if self.estimator is not None:
            num_known = min([choice.num_known for choice in live])
            pace = max(1, int(request.pace.looked_at(first_step, num_known)))
            num_spare = self._max_drafts
        sure = min([choice.num_planned - choice.num_unsure for choice in live])
        num_tokens = self._rows_left(request, sure)
        last_step = first_step + -(-num_tokens // pace) - 1 if num_tokens else request.last_step_id
        until = last_step + self._lag

        def of(num_planned: int, num_held: int, num_live: int, num_sharing: int) -> Profile:
            num_left = sure + num_tokens - num_planned
            spare = min(num_spare, max(0, num_left - 1))
            num_rows = max(0, num_left - spare + pace - 1) // pace  # until it has all its blocks
            position = request.prompt_len + num_planned - 1
            return growing(
                num_held, num_live, num_sharing, position, num_rows, first_step, until, self._block_size, pace, spare
            )

        first, *others = [choice.num_planned for choice in live]
        if others.count(first) == len(others):
            profile = of(first, num_held, len(live), _num_sharing(request, sure))
        else:
            profile = replace(of(first, num_held, 1, 1), others=tuple([of(other, 0, 1, 1) for other in others]))
        return replace(profile, is_estimate=num_tokens < request.spec.max_tokens - sure)

    def _rows_left(self, request: Request, num_planned: int) -> int:
        """Rows still to come of a choice with so many tokens planned, as bounded or estimated."""
        length = self.estimator.estimate(num_planned) if self.estimator is not None else None
        most = request.spec.max_tokens
        return (most if length is None else min(length, most)) - num_planned


def _num_sharing(request: Request, num_planned: int) -> int:
    """Before its first row every choice, ended ones too, shares the last block of the prompt."""
    return len(request.sequences) if num_planned == 1 else 1


def num_own_blocks(request: Request) -> int:
    """Blocks that its sequences hold, each once, but for those that other requests hold too."""
    if len(request.sequences) == 1:
        return len(request.sequences[0].block_ids) - request.num_shared
    return len(distinct_blocks(sequence.block_ids for sequence in request.sequences)) - request.num_shared


def distinct_blocks(tables: Iterable[list[int]]) -> list[int]:
    """Blocks of some tables, each once, in order of first mention."""
    return list(dict.fromkeys(block_id for table in tables for block_id in table))

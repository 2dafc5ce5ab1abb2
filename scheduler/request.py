"""A request inside one engine, its sequences, and its states.

States and what each means (prefill engine: P, decode engine: D):

    QUEUED      P D  no memory promised yet
    ADMITTED    P D  memory promised; D: waiting for a handoff, or for its own prefill to start
    PREFILLING  P D  some of the prompt has been planned (D: a prompt that it prefills itself)
    LOADING       D  blocks allocated, KV being read from the source
    RUNNING       D  its sequences take part in every step (unless there is no free block for them)
    PREEMPTED     D  gave way: its blocks are in host memory, it comes back before anybody new is admitted
    LEASED      P    prompt computed; the blocks wait for their reader under a lease
    FINISHED, CANCELLED, FAILED   terminal
    EVICTED       D  terminal: gave way and there was no host memory; its router replays it
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from scheduler.sampling_params import SamplingParams


class RequestState(Enum):
    QUEUED = auto()
    ADMITTED = auto()
    PREFILLING = auto()
    LOADING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    LEASED = auto()
    FINISHED = auto()
    CANCELLED = auto()
    FAILED = auto()
    EVICTED = auto()


_ENDS = frozenset({RequestState.CANCELLED, RequestState.FAILED})
LEGAL_TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.QUEUED: frozenset({RequestState.ADMITTED}) | _ENDS,
    RequestState.ADMITTED: frozenset({RequestState.PREFILLING, RequestState.LOADING}) | _ENDS,
    RequestState.PREFILLING: frozenset({RequestState.RUNNING, RequestState.LEASED, RequestState.FINISHED}) | _ENDS,
    RequestState.LOADING: frozenset({RequestState.RUNNING}) | _ENDS,
    RequestState.RUNNING: frozenset({RequestState.FINISHED, RequestState.PREEMPTED, RequestState.EVICTED}) | _ENDS,
    RequestState.PREEMPTED: frozenset({RequestState.RUNNING, RequestState.FINISHED}) | _ENDS,
    RequestState.LEASED: frozenset({RequestState.FINISHED}) | _ENDS,
    RequestState.FINISHED: frozenset(),
    RequestState.CANCELLED: frozenset(),
    RequestState.FAILED: frozenset(),
    RequestState.EVICTED: frozenset(),
}
TERMINAL_STATES = frozenset(state for state, successors in LEGAL_TRANSITIONS.items() if not successors)


class IllegalTransition(AssertionError):
    """A request was asked to take a step that its state does not allow: a bug of ours."""

    def __init__(self, request_id: str, state: RequestState, wanted: RequestState) -> None:
        super().__init__(request_id, state, wanted)
        self.request_id, self.state, self.wanted = request_id, state, wanted

    def __str__(self) -> str:
        return f"request {self.request_id}: {self.state.name} -> {self.wanted.name} is not legal"


@dataclass(slots=True)
class Sequence:
    """One choice of a request: its slot, its blocks, and how far it is planned and known."""

    choice: int
    slot: int
    block_ids: list[int] = field(default_factory=list)
    # Generated tokens: planned counts those whose sampling is in some plan, known those read back.
    num_planned: int = 0
    num_known: int = 0
    # "stop" or "length" once its last token is known.
    finish_reason: str | None = None


@dataclass(slots=True)
class Request:
    """What a scheduler keeps of one request. Mutated by its scheduler only."""

    request_id: str
    prompt_ids: tuple[int, ...]
    choices: tuple[int, ...]
    max_tokens: int
    stop_token_ids: frozenset[int]
    sampling: SamplingParams
    deadline_s: float
    local_prefill: bool = True
    priority: int = 0  # higher is more important
    client: str = ""  # whose it is: clients share fairly
    state: RequestState = RequestState.QUEUED
    # When each state was first entered: every latency is a difference of two.
    entered_s: dict[RequestState, float] = field(default_factory=dict)
    sequences: list[Sequence] = field(default_factory=list)
    num_prefilled: int = 0  # prompt tokens planned
    last_step_id: int = -1  # last step that computes on its blocks
    num_overtaken: int = 0  # requests behind it that were admitted before it
    admission_number: int = -1  # counts admissions
    protected_until: int = 0  # it is not preempted while fewer tokens than this are planned

    def __post_init__(self) -> None:
        assert self.prompt_ids, f"{self.request_id} has no prompt"
        assert self.max_tokens >= 1, f"{self.request_id} asks for {self.max_tokens} tokens"
        assert self.choices, f"{self.request_id} has no choices"
        assert len(set(self.choices)) == len(self.choices), f"{self.request_id} names a choice twice"

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def is_over(self) -> bool:
        return self.state in TERMINAL_STATES

    def enter(self, state: RequestState, now_s: float) -> None:
        """Move to `state`. Mutates. Raises IllegalTransition."""
        if state not in LEGAL_TRANSITIONS[self.state]:
            raise IllegalTransition(self.request_id, self.state, state)
        self.state = state
        self.entered_s.setdefault(state, now_s)

    def finish_reason_of(self, token_id: int, num_known: int) -> str | None:
        """Why a choice ends with this token as its `num_known`-th, or None if it goes on."""
        if token_id in self.stop_token_ids:
            return "stop"
        return "length" if num_known >= self.max_tokens else None

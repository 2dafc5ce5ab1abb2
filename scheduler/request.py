"""A request inside one engine, its sequences, and its states.

States and what each means (of one whose KV is offered: O, of one that is decoded here: D):

    QUEUED      O D  no memory promised yet
    ADMITTED    O D  memory promised; waiting for its prompt's turn, or for a handoff
    PREFILLING  O D  some of the prompt has been planned
    LOADING       D  blocks allocated, KV being read from the source
    RUNNING       D  its sequences take part in every step (unless there is no free block, or a token is to be known)
    PREEMPTED     D  gave way: its blocks are in host memory, it comes back before anybody new is admitted
    LEASED      O D  prompt computed, or moved to another engine; the blocks wait for their reader under a lease
    FINISHED, CANCELLED, FAILED   terminal
    EVICTED       D  terminal: gave way and there was no host memory; its router replays it
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from scheduler.beam_search import BeamSearch, Candidate
from scheduler.block_chain import OutputChain, PromptChain
from scheduler.generated_token import FinishReason
from scheduler.generation_spec import GenerationSpec
from scheduler.pace import Pace
from scheduler.plan import RuleContext, SlotInit
from scheduler.speculation import SpeculationState


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
    RequestState.RUNNING: frozenset(
        {RequestState.FINISHED, RequestState.PREEMPTED, RequestState.EVICTED, RequestState.LEASED}
    )
    | _ENDS,
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
    num_unsure: int = 0  # of the planned ones: drafts in flight, which may not count
    # Once its last token is known; or why it rests all the same.
    finish_reason: str | None = None
    # Of a beam search: what may come next, as the last committed step has it.
    candidates: tuple[Candidate, ...] = ()
    # Where blocks are found by content: the one that its tokens fill.
    chain: OutputChain | None = None


@dataclass(slots=True)
class Request:
    """What a scheduler keeps of one request. Mutated by its scheduler only."""

    request_id: str
    spec: GenerationSpec
    deadline_s: float
    local_prefill: bool = True  # its prompt is computed here; else its KV comes from a source
    hands_over: bool = False  # its KV is offered to a reader; else it is decoded here
    has_begun: bool = (
        False  # a client has tokens of it, or it comes with KV from where it ran: it goes before newcomers
    )
    # Replicas have died while it was computed there: it is let in alone among its like (`scheduler.suspects`).
    is_suspect: bool = False
    # Its next row is planned only when all its planned tokens are known: with a lag it sits out some steps. Always of a
    # beam search: which beams get the next row depends on them.
    needs_known_tokens: bool = False
    # Of one that is decoded elsewhere and goes on here: as many tokens its longest choice had when that was said.
    num_generated: int = 0
    may_draft: bool = False  # whether its rows may have drafts, of the runner or of its grammar
    gave_up_drafts: bool = False  # nobody makes any for it any more
    speculation: SpeculationState = field(default_factory=SpeculationState)
    pace: Pace = field(default_factory=Pace)
    search: BeamSearch | None = field(init=False)  # a beam search, as far as it has come
    state: RequestState = RequestState.QUEUED
    # When each state was first entered: every latency is a difference of two.
    entered_s: dict[RequestState, float] = field(default_factory=dict)
    sequences: list[Sequence] = field(default_factory=list)
    num_prefilled: int = 0  # prompt tokens planned, or found
    last_step_id: int = -1  # last step that computes on its blocks
    num_overtaken: int = 0  # requests behind it that were admitted before it, and are not over before it could be
    starts_at: int | None = (
        None  # the step from which on it would fit, by the earliest projection so far; None: unknown
    )
    admission_number: int = -1  # counts admissions
    admission_step: int = -1  # the next one to be planned then
    protected_until: int = 0  # it is not preempted while fewer tokens than this are planned
    # Where blocks are found by content (`PrefixBook`, which alone changes these, but for num_shared before admission).
    chain: PromptChain | None = None
    num_cached: int = 0  # prompt tokens whose KV was found: neither computed nor read
    num_entered: int = 0  # blocks of its prompt that can be found or could not be entered
    num_shared: int = 0  # blocks that it holds and that are counted for several requests together
    generation: int = 0  # of the cache, at its admission

    def __post_init__(self) -> None:
        spec = self.spec
        self.search = None if spec.beam is None else BeamSearch(spec.beam, spec.stop_token_ids, spec.max_tokens)
        self.needs_known_tokens = self.needs_known_tokens or self.search is not None
        self.speculation.is_forced = spec.grammar is not None

    @property
    def prompt_len(self) -> int:
        return len(self.spec.prompt_ids)

    @property
    def slot_choices(self) -> tuple[int, ...]:
        """Choices that have a sequence, and a slot, of their own: they only part where they are decoded."""
        return self.spec.choices[:1] if self.hands_over else self.spec.choices

    @property
    def is_drafted_for(self) -> bool:
        """Whether its runner may make drafts for it: with a grammar it only has those that this forces."""
        return self.may_draft and self.spec.grammar is None

    @property
    def is_over(self) -> bool:
        return self.state in TERMINAL_STATES

    @property
    def prompt_choices(self) -> tuple[int, ...]:
        """Choices for which a token is sampled at the end of the prompt: beams have not parted there."""
        return self.spec.choices if self.search is None else self.spec.choices[:1]

    @property
    def awaits_tokens(self) -> bool:
        """Whether it sits out the next step: it needs tokens that are in flight."""
        return self.needs_known_tokens and any(
            sequence.num_known < sequence.num_planned for sequence in self.sequences if sequence.finish_reason is None
        )

    def slot_init(
        self, sequence: Sequence, last_token: int | None = None, earlier_ids: tuple[int, ...] = ()
    ) -> SlotInit:
        """What the runner is told when a sequence of this request takes its slot. earlier_ids: generated elsewhere,
        before the last token."""
        spec = self.spec
        prompt_ids = (*spec.prompt_ids, *earlier_ids) if earlier_ids else spec.prompt_ids
        context = RuleContext(prompt_ids, spec.output_start, spec.stop_token_ids, spec.predicted_ids)
        position = None if last_token is None else self.prompt_len + sequence.num_planned - 1
        is_drafted_for = self.is_drafted_for
        return SlotInit(sequence.slot, sequence.choice, spec.sampling, last_token, context, position, is_drafted_for)

    def enter(self, state: RequestState, now_s: float) -> None:
        """Move to `state`. Mutates. Raises IllegalTransition."""
        if state not in LEGAL_TRANSITIONS[self.state]:
            raise IllegalTransition(self.request_id, self.state, state)
        self.state = state
        self.entered_s.setdefault(state, now_s)

    def finish_reason_of(self, token_id: int, num_known: int) -> FinishReason | None:
        """Why a choice ends with this token as its `num_known`-th, or None if it goes on."""
        spec = self.spec
        if token_id in spec.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_known >= spec.max_tokens else None

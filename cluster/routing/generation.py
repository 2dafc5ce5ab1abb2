"""One prompt being generated: what the router keeps of it, over all attempts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cluster.monitoring.request_trace import RequestTrace
from cluster.routing.batch_queue import BatchQueue
from cluster.routing.model_binding import ModelBinding
from replicas.messages import (
    BeamParams,
    FinishReason,
    FirstToken,
    GenerationRequest,
    PromptLogprobs,
    TokenItem,
    TokenLogprobs,
)
from scheduler.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """What a client asked for, validated. generation_id is ours, never the client's. timeout_s: for all of it."""

    generation_id: str
    prompt_ids: tuple[int, ...]
    num_choices: int
    max_tokens: int
    stop_token_ids: frozenset[int]
    sampling: SamplingParams
    timeout_s: float
    # Beam search: num_choices is how many of the best texts are returned, at most its width; sampling is not used.
    beam: BeamParams | None = None
    priority: int = 0  # higher is more important
    client: str = ""  # an opaque label: clients share fairly
    trace: RequestTrace = field(default_factory=RequestTrace, compare=False, repr=False)
    binding: ModelBinding = field(default_factory=ModelBinding, compare=False, repr=False)  # of the whole request


class GeneratedToken(NamedTuple):
    """One token for the client, in order within its choice; finish_reason on the last one.

    A tuple, as it is made once per token and choice: a frozen dataclass takes three times as long.
    """

    choice: int
    token_id: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """What the model thought of the prompt: one for each of its tokens, None of the first. Before any token."""

    positions: tuple[TokenLogprobs | None, ...]


GenerationItem = GeneratedToken | ScoredPrompt


@dataclass(slots=True)
class ChoiceState:
    """Tokens of one choice that have been passed on: each exactly once (design law 9)."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Leg:
    """Choices with the same history, generated together: one `generate` call per attempt.

    A generation starts as one leg. When an attempt fails after its choices have parted, each unfinished choice
    goes on as a leg of its own, replaying prompt + emitted tokens as a new prompt (design section 6).

    Of a beam search nothing is emitted before all of it is here, so that it can be searched again from the prompt.
    """

    def __init__(
        self, spec: GenerationSpec, choices: dict[int, ChoiceState], output: BatchQueue[GenerationItem]
    ) -> None:
        self.spec = spec
        self.model = ""  # who is asked in this attempt
        self._choices = choices
        self._output = output
        self._base = len(next(iter(choices.values())).token_ids)  # tokens emitted before this attempt
        self._owes_prompt = spec.sampling.num_prompt_logprobs is not None  # its scores, before the first token
        self._scores: list[TokenLogprobs | None] = []  # of the prompt, as this attempt has brought them so far
        self._withheld: list[GeneratedToken] = []  # of a beam search that is not complete
        self.open_choices = tuple(c for c, state in choices.items() if state.finish_reason is None)

    @property
    def is_done(self) -> bool:
        return all(state.finish_reason for state in self._choices.values())

    @property
    def has_emitted(self) -> bool:
        return self.spec.beam is None and any(state.token_ids for state in self._choices.values())

    @property
    def has_advanced(self) -> bool:
        """Whether this attempt has brought a token that the next one need not bring again."""
        return self.spec.beam is None and any(map(self.num_taken, self.open_choices))

    def request(self, request_id: str, timeout_s: float) -> GenerationRequest:
        """The attempt's request: what has been emitted has become part of the prompt."""
        beam = self.spec.beam
        emitted = self._choices[self.open_choices[0]].token_ids[: self._base]
        return GenerationRequest(
            request_id=request_id,
            prompt_ids=(*self.spec.prompt_ids, *emitted),
            choices=self.open_choices if beam is None else tuple(range(beam.width)),
            max_tokens=self.spec.max_tokens - self._base,
            stop_token_ids=self.spec.stop_token_ids,
            sampling=self._sampling(),
            timeout_s=timeout_s,
            priority=self.spec.priority,
            client=self.spec.client,
            num_output_in_prompt=self._base,
            beam=beam,
            num_returned=0 if beam is None else self.spec.num_choices,
        )

    def take_first(self, first_tokens: tuple[FirstToken, ...]) -> None:
        """Prefill's answer: token 0 of each choice. Mutates; emits. Raises OtherModel."""
        for token in first_tokens:
            self._take(token.choice, 0, token.token_id, token.finish_reason, token.logprobs)

    def take_prompt(self, part: PromptLogprobs) -> None:
        """What the model thought of the prompt's next tokens. Mutates; they are emitted before the first token.

        Raises ProtocolError when it was not asked for or is not the next part.
        """
        if not self._owes_prompt or part.start != len(self._scores):
            raise ProtocolError(f"prompt: logprobs of token {part.start} after {len(self._scores)}")
        self._scores += part.positions

    def take(self, item: TokenItem) -> None:
        """One token of a frame. Mutates; emits. Raises OtherModel, ProtocolError for one out of turn."""
        self._take(item.choice, item.index, item.token_id, item.finish_reason, item.logprobs)

    def num_taken(self, choice: int) -> int:
        """Tokens of a choice taken in this attempt."""
        return len(self._choices[choice].token_ids) - self._base

    def split(self) -> list[Leg]:
        """The unfinished choices as legs to try again: together while they still share their history."""
        if self.spec.beam is not None:
            return [self._leg_of({choice: ChoiceState() for choice in self._choices})]
        unfinished = {c: state for c, state in self._choices.items() if state.finish_reason is None}
        if len({tuple(state.token_ids) for state in unfinished.values()}) == 1:
            return [self._leg_of(unfinished)]
        return [self._leg_of({c: state}) for c, state in unfinished.items()]

    def _leg_of(self, choices: dict[int, ChoiceState]) -> Leg:
        leg = Leg(self.spec, choices, self._output)
        leg._owes_prompt = self._owes_prompt
        return leg

    def _sampling(self) -> SamplingParams:
        """A replay need not score the prompt again: the client has got that."""
        return self.spec.sampling if self._owes_prompt else replace(self.spec.sampling, num_prompt_logprobs=None)

    def _emit_prompt(self) -> None:
        if len(self._scores) != len(self.spec.prompt_ids):
            raise ProtocolError(f"prompt: logprobs of {len(self._scores)} tokens, it has {len(self.spec.prompt_ids)}")
        self._pass_on(ScoredPrompt(tuple(self._scores)))
        self._owes_prompt = False

    def _take(
        self,
        choice: int,
        index: int,
        token_id: int,
        finish_reason: FinishReason | None,
        logprobs: TokenLogprobs | None,
    ) -> None:
        state = self._choices[choice]
        if state.finish_reason is not None or index != len(state.token_ids) - self._base:
            raise ProtocolError(f"choice {choice}: token {index} after {len(state.token_ids) - self._base}")
        if self._owes_prompt:
            self._emit_prompt()
        token = GeneratedToken(choice, token_id, finish_reason, logprobs)
        if self.spec.beam is None:
            self._pass_on(token)
        state.token_ids.append(token_id)
        state.finish_reason = finish_reason
        if self.spec.beam is None:
            return
        self._withheld.append(token)
        if self.is_done:
            for token in self._withheld:
                self._pass_on(token)

    def _pass_on(self, item: GenerationItem) -> None:
        """Raises OtherModel, and then nothing is passed on."""
        self.spec.binding.decide(self.model)
        self._output.put(item)


class ProtocolError(AssertionError):
    """A token came twice or out of turn, though frames are ordered and complete: a bug of ours."""

"""One prompt being generated: what the router keeps of it, over all attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cluster.monitoring.cache_finding import CacheFinding
from cluster.monitoring.draft_finding import DraftFinding
from cluster.monitoring.request_trace import RequestTrace
from cluster.routing.batch_queue import BatchQueue
from cluster.routing.model_binding import ModelBinding
from cluster.routing.prompt_forecast import PromptForecast
from replicas.channels.wire import decode_scores
from replicas.messages import FinishReason, GenerationSpec, PromptLogprobs, Token, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Generation:
    """A prompt of a client's request, with what is the router's own: the engines get its spec, attempt by attempt.

    generation_id is ours, never the client's. timeout_s: for all of it. binding: of the whole request.
    """

    generation_id: str
    spec: GenerationSpec
    timeout_s: float
    trace: RequestTrace = field(default_factory=RequestTrace, compare=False, repr=False)
    binding: ModelBinding = field(default_factory=ModelBinding, compare=False, repr=False)
    finding: CacheFinding = field(default_factory=CacheFinding, compare=False, repr=False)
    drafts: DraftFinding = field(default_factory=DraftFinding, compare=False, repr=False)


# For the client, in order within each choice; what the model thought of the prompt, all of it, before any token.
GenerationItem = Token | PromptLogprobs


@dataclass(slots=True)
class ChoiceState:
    """Tokens of one choice that have been passed on: each exactly once."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Leg:
    """Choices with the same history, generated together: one `generate` call per attempt.

    A generation starts as one leg. When an attempt fails after its choices have parted, each unfinished choice
    goes on as a leg of its own, replaying prompt + emitted tokens as a new prompt.

    Of a beam search nothing is emitted before all of it is here, so that it can be searched again from the prompt.
    """

    def __init__(
        self,
        generation: Generation,
        choices: dict[int, ChoiceState],
        output: BatchQueue[GenerationItem],
        came_s: float = 0.0,
    ) -> None:
        """came_s: when its request came, by which it has its place among those that wait."""
        self.generation, self.came_s = generation, came_s
        self.waited_s = 0.0  # for a replica to be there and to admit it, over all attempts
        self.is_search = generation.spec.beam is not None
        self.model = ""  # who is asked in this attempt
        self.forecast: PromptForecast | None = None  # of its prompt, once somebody has asked
        self._choices = choices
        self._output = output
        self._base = len(next(iter(choices.values())).token_ids)  # tokens emitted before this attempt
        # The prompt's scores, before the first token.
        self._owes_prompt = generation.spec.sampling.num_prompt_logprobs is not None
        self._scores: list[TokenLogprobs | None] = []  # of the prompt, as this attempt has brought them so far
        self._withheld: list[Token] = []  # of a beam search that is not complete
        self.open_choices = tuple(c for c, state in choices.items() if state.finish_reason is None)

    @property
    def is_done(self) -> bool:
        return all(state.finish_reason for state in self._choices.values())

    @property
    def has_emitted(self) -> bool:
        return not self.is_search and any(state.token_ids for state in self._choices.values())

    @property
    def has_begun(self) -> bool:
        """Whether the client has something of its request: an error would break that."""
        return self.has_emitted or self.generation.binding.is_final

    @property
    def has_run(self) -> bool:
        """Whether this attempt has brought a token by a row of its own: one more than a prompt gives."""
        return any(self.num_taken(choice) > 1 for choice in self.open_choices)

    @property
    def has_advanced(self) -> bool:
        """Whether this attempt has brought a token that the next one need not bring again."""
        return not self.is_search and any(map(self.num_taken, self.open_choices))

    def attempt_spec(self) -> GenerationSpec:
        """What this attempt asks for: of the generation what is left; what has been emitted has become prompt."""
        spec = self.generation.spec
        if not self._owes_prompt and spec.sampling.num_prompt_logprobs is not None:
            # A replay need not score the prompt again: the client has got that.
            spec = replace(spec, sampling=replace(spec.sampling, num_prompt_logprobs=None))
        if self.is_search or (self.open_choices == spec.choices and not self._base):
            return spec
        emitted = self._choices[self.open_choices[0]].token_ids[: self._base]
        return replace(
            spec,
            prompt_ids=(*spec.prompt_ids, *emitted),
            choices=self.open_choices,
            max_tokens=spec.max_tokens - self._base,
            num_output_in_prompt=self._base,
        )

    def moved_spec(self) -> GenerationSpec:
        """What another replica is asked for that goes on with this attempt: the same, without choices that ended."""
        return replace(self.attempt_spec(), choices=self.going_choices)

    @property
    def going_choices(self) -> tuple[int, ...]:
        """Those that have not ended yet, in this attempt either."""
        return tuple(c for c in self.open_choices if self._choices[c].finish_reason is None)

    def take_prompt(self, part: PromptLogprobs) -> None:
        """What the model thought of the prompt's next tokens. Mutates; they are emitted before the first token.

        Raises ProtocolError when it was not asked for or is not the next part.
        """
        if not self._owes_prompt or part.start != len(self._scores):
            raise ProtocolError(f"prompt: logprobs of token {part.start} after {len(self._scores)}")
        self._scores += part.positions

    async def take_scores(self, parts: Sequence[bytes]) -> None:
        """What prefill thought of the prompt, as `take_prompt`. Each part takes its time, and other requests theirs in
        between. Raises MalformedMessage too."""
        start = 0
        for part in parts:
            positions = decode_scores(part)
            self.take_prompt(PromptLogprobs(self.generation.generation_id, start, positions))
            start += len(positions)
            await asyncio.sleep(0)

    def take(self, token: Token) -> None:
        """The next token of a choice, by prefill's answer or by a frame. Mutates; emits.

        Raises OtherModel, ProtocolError for one out of turn.
        """
        state = self._choices[token.choice]
        num_taken = len(state.token_ids) - self._base
        if state.finish_reason is not None or token.index != num_taken:
            raise ProtocolError(f"choice {token.choice}: token {token.index} after {num_taken}")
        if self._owes_prompt:
            self._emit_prompt()
        if not self.is_search:
            self._pass_on(token)
        state.token_ids.append(token.token_id)
        state.finish_reason = token.finish_reason
        if not self.is_search:
            return
        self._withheld.append(token)
        if self.is_done:
            for token in self._withheld:
                self._pass_on(token)

    def found(self, request_id: str, num_tokens: int, is_local: bool) -> None:
        """So much of an attempt's prompt was in the prefix cache of the engine that computes it; is_local: decode."""
        generation = self.generation
        generation.finding.tell(request_id, min(num_tokens, generation.spec.prompt_len), is_local)

    def num_taken(self, choice: int) -> int:
        """Tokens of a choice taken in this attempt."""
        return len(self._choices[choice].token_ids) - self._base

    def split(self) -> list[Leg]:
        """The unfinished choices as legs to try again: together while they still share their history."""
        if self.is_search:
            return [self._leg_of({choice: ChoiceState() for choice in self._choices})]
        unfinished = {c: state for c, state in self._choices.items() if state.finish_reason is None}
        if len({tuple(state.token_ids) for state in unfinished.values()}) == 1:
            return [self._leg_of(unfinished)]
        return [self._leg_of({c: state}) for c, state in unfinished.items()]

    def _leg_of(self, choices: dict[int, ChoiceState]) -> Leg:
        leg = Leg(self.generation, choices, self._output, self.came_s)
        leg._owes_prompt, leg.waited_s = self._owes_prompt, self.waited_s
        return leg

    def _emit_prompt(self) -> None:
        num_tokens = self.generation.spec.prompt_len
        if len(self._scores) != num_tokens:
            raise ProtocolError(f"prompt: logprobs of {len(self._scores)} tokens, it has {num_tokens}")
        self._pass_on(PromptLogprobs(self.generation.generation_id, 0, tuple(self._scores)))
        self._owes_prompt = False

    def _pass_on(self, item: GenerationItem) -> None:
        """Raises OtherModel, and then nothing is passed on."""
        self.generation.binding.decide(self.model)
        self._output.put(item)


class ProtocolError(AssertionError):
    """A token came twice or out of turn, though frames are ordered and complete: a bug of ours."""

"""One prompt being generated: what the router keeps of it, over all attempts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from replicas.messages import FinishReason, FirstToken, GenerationRequest, TokenItem
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
    priority: int = 0  # higher is more important
    client: str = ""  # an opaque label: clients share fairly


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One token for the client, in order within its choice; finish_reason on the last one."""

    choice: int
    token_id: int
    finish_reason: FinishReason | None


@dataclass(slots=True)
class ChoiceState:
    """Tokens of one choice that have been passed on: each exactly once (design law 9)."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Leg:
    """Choices with the same history, generated together: one `generate` call per attempt.

    A generation starts as one leg. When an attempt fails after its choices have parted, each unfinished choice
    goes on as a leg of its own, replaying prompt + emitted tokens as a new prompt (design section 6).
    """

    def __init__(
        self, spec: GenerationSpec, choices: dict[int, ChoiceState], output: asyncio.Queue[GeneratedToken | None]
    ) -> None:
        self.spec = spec
        self._choices = choices
        self._output = output
        self._base = len(next(iter(choices.values())).token_ids)  # tokens emitted before this attempt
        self.open_choices = tuple(c for c, state in choices.items() if state.finish_reason is None)

    @property
    def is_done(self) -> bool:
        return all(state.finish_reason for state in self._choices.values())

    @property
    def has_emitted(self) -> bool:
        return any(state.token_ids for state in self._choices.values())

    def request(self, request_id: str, timeout_s: float) -> GenerationRequest:
        """The attempt's request: what has been emitted has become part of the prompt."""
        emitted = self._choices[self.open_choices[0]].token_ids[: self._base]
        return GenerationRequest(
            request_id=request_id,
            prompt_ids=(*self.spec.prompt_ids, *emitted),
            choices=self.open_choices,
            max_tokens=self.spec.max_tokens - self._base,
            stop_token_ids=self.spec.stop_token_ids,
            sampling=self.spec.sampling,
            timeout_s=timeout_s,
            priority=self.spec.priority,
            client=self.spec.client,
        )

    def take_first(self, first_tokens: tuple[FirstToken, ...]) -> None:
        """Prefill's answer: token 0 of each choice. Mutates; emits."""
        for token in first_tokens:
            self._take(token.choice, 0, token.token_id, token.finish_reason)

    def take(self, item: TokenItem) -> None:
        """One token of a frame. Mutates; emits. Raises ProtocolError when it is not the choice's next one."""
        self._take(item.choice, item.index, item.token_id, item.finish_reason)

    def num_taken(self, choice: int) -> int:
        """Tokens of a choice taken in this attempt."""
        return len(self._choices[choice].token_ids) - self._base

    def split(self) -> list[Leg]:
        """The unfinished choices as legs to try again: together while they still share their history."""
        unfinished = {c: state for c, state in self._choices.items() if state.finish_reason is None}
        if len({tuple(state.token_ids) for state in unfinished.values()}) == 1:
            return [Leg(self.spec, unfinished, self._output)]
        return [Leg(self.spec, {c: state}, self._output) for c, state in unfinished.items()]

    def _take(self, choice: int, index: int, token_id: int, finish_reason: FinishReason | None) -> None:
        state = self._choices[choice]
        if state.finish_reason is not None or index != len(state.token_ids) - self._base:
            raise ProtocolError(f"choice {choice}: token {index} after {len(state.token_ids) - self._base}")
        state.token_ids.append(token_id)
        state.finish_reason = finish_reason
        self._output.put_nowait(GeneratedToken(choice, token_id, finish_reason))


class ProtocolError(AssertionError):
    """A token came twice or out of turn, though frames are ordered and complete: a bug of ours."""

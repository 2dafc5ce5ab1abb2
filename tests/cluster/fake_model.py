"""What the fake replicas generate, and scripts of how they fail.

The "model" is a function of all that a token may depend on, so a retry that replays the right history
gives the same tokens as an undisturbed run, and any other does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from zlib import crc32

from cluster.routing.generation import Generation
from replicas.messages import CallStatus, FinishReason, GenerationSpec
from scheduler.sampling_params import SamplingParams

VOCABULARY = 97
MODEL = "f"
Token = tuple[int, FinishReason | None]


def generation_of(
    *prompt_ids: int, n: int = 1, max_tokens: int = 8, stop: Iterable[int] = (), seed: int = 7, **values: Any
) -> Generation:
    """One whose choices part with their first token; temperature=0.0 keeps them together."""
    temperature, timeout_s = values.get("temperature", 1.0), values.get("timeout_s", 20.0)
    sampling = SamplingParams(temperature, 0, 1.0, seed)
    spec = GenerationSpec(prompt_ids or (1, 2, 3, 4, 5), tuple(range(n)), max_tokens, frozenset(stop), sampling)
    return Generation("g", spec, timeout_s)


def model_tokens(
    prompt_ids: tuple[int, ...],
    sampling: SamplingParams,
    choice: int,
    max_tokens: int,
    stop: frozenset[int],
    model: str = MODEL,
) -> list[Token]:
    """All tokens of one choice, the last with its finish reason."""
    noise = (model,) if sampling.temperature == 0.0 else (model, sampling.seed, choice)
    history, tokens = prompt_ids, list[Token]()
    while not tokens or tokens[-1][1] is None:
        token_id = crc32(repr((history, len(history), noise)).encode()) % VOCABULARY  # in every process the same
        history = (*history, token_id)
        length = FinishReason.LENGTH if len(tokens) + 1 == max_tokens else None
        tokens.append((token_id, FinishReason.STOP if token_id in stop else length))
    return tokens


def tokens_of(spec: GenerationSpec, model: str = MODEL) -> dict[int, list[Token]]:
    """What an attempt generates, by choice."""
    given = spec.max_tokens, spec.stop_token_ids, model
    return {c: model_tokens(spec.prompt_ids, spec.sampling, c, *given) for c in spec.choices}


def undisturbed(generation: Generation, model: str = MODEL) -> dict[int, list[Token]]:
    """What a client must get, whatever happens on the way."""
    return tokens_of(generation.spec, model)


class Phase(StrEnum):
    """Where a fault strikes: before admission; at decode, before the handoff comes; in the prefill call; after the
    handoff (or, without one, before the first token); after `Fault.steps` frames with tokens; after the last of them.
    In the call that has it move.
    """

    QUEUE = "queue"
    ADMITTED = "admitted"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    REPLY = "reply"
    MOVE = "move"


@dataclass(frozen=True, slots=True)
class Fault:
    """what: a status to reply, or "gone", "dead" and "frozen" (the whole replica), "hang", "raise", "cancelled"."""

    phase: Phase
    what: CallStatus | str
    steps: int = 2


@dataclass(frozen=True, slots=True)
class Script:
    """How one attempt goes. answer_s: from handoff to prefill's answer; reply_s: from last frame to decode's reply.
    cached: of the prompt, what decode finds, and what prefill does. drafted: with each of decode's tokens,
    drafts so far and those that held.
    """

    fault: Fault | None = None
    admit_s: float = 0.0
    prefill_s: float = 0.0
    answer_s: float = 0.0
    transfer_s: float = 0.0
    token_s: float = 0.0
    reply_s: float = 0.0
    cached: tuple[int, int] = (0, 0)
    drafted: tuple[tuple[int, int], ...] = ()


PLAIN = Script()

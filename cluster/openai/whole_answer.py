"""An answer in one piece: all deltas put together, and of best_of choices the best."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cluster.answers.answer_part import AnswerPart
from cluster.openai.logprobs import prompt_logprobs
from cluster.openai.response import Choice
from cluster.text.scored_token import ScoredToken

if TYPE_CHECKING:
    from cluster.openai.response import Answer
    from cluster.text.choice import TextChoice
    from cluster.text.generation import TextGeneration


@dataclass(slots=True)
class _Parts:
    """Of one choice."""

    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    tokens: list[ScoredToken] = field(default_factory=list)
    parts: list[AnswerPart] | None = None


async def whole_answer(generation: TextGeneration, answer: Answer, num_kept: int) -> tuple[dict[str, Any], list[str]]:
    """The body, and why each choice in it ended. num_kept: choices to answer with, of each prompt. Runs to the end.

    Raises ApiError.
    """
    parts: defaultdict[int, _Parts] = defaultdict(_Parts)
    async with aclosing(generation.deltas()) as batches:
        async for deltas in batches:
            for delta in deltas:
                of_choice = parts[delta.index]
                of_choice.texts.append(delta.text)
                if delta.parts is not None:
                    of_choice.parts = of_choice.parts or []
                    of_choice.parts += delta.parts
                of_choice.tokens += delta.scored
                if delta.token_id is not None:
                    of_choice.ids.append(delta.token_id)
    if answer.report is None:
        return _put_together(generation, answer, parts, num_kept)
    # Many small objects: other requests' tokens must not wait for them.
    return await asyncio.to_thread(_put_together, generation, answer, parts, num_kept)


def _put_together(
    generation: TextGeneration, answer: Answer, parts: Mapping[int, _Parts], num_kept: int
) -> tuple[dict[str, Any], list[str]]:
    kept = generation.best(num_kept)
    of_prompt: dict[int, list[dict[str, Any] | None] | None] = {}  # by the list that all choices of a prompt share
    for choice in kept:
        if id(choice.prompt_logprobs) not in of_prompt:
            of_prompt[id(choice.prompt_logprobs)] = _prompt_logprobs(generation, choice, answer)
    choices = [
        Choice(
            index,
            "".join(parts[choice.index].texts),
            str(choice.finish_reason),
            tuple(parts[choice.index].ids) if answer.return_token_ids else None,
            tuple(parts[choice.index].tokens),
            of_prompt[id(choice.prompt_logprobs)],
            None if (found := parts[choice.index].parts) is None else tuple(found),
        )
        for index, choice in enumerate(kept)
    ]
    return answer.whole(choices, generation.usage), [choice.finish_reason for choice in choices]


def _prompt_logprobs(
    generation: TextGeneration, choice: TextChoice, answer: Answer
) -> list[dict[str, Any] | None] | None:
    report = answer.report
    if report is None or report.num_prompt_top is None or choice.prompt_logprobs is None:
        return None
    ids = generation.prompt_ids(choice.index)
    return prompt_logprobs(ids, choice.prompt_logprobs, report.num_prompt_top, report.names)

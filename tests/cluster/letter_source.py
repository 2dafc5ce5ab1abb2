"""A source of tokens that answers any prompt: letters, as many as were asked for, with log-probabilities if asked."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator

from cluster.routing.generation import Generation, GenerationItem
from replicas.messages import FinishReason, GenerationSpec, PromptLogprobs, Token, TokenLogprobs
from tests.cluster.fake_ingress import EOS

_LETTERS = list(b"abcdefghij ")


class LetterSource:
    """In the router's place, over ByteTokenizer. An answer ends by itself after `most` tokens.

    A token depends on prompt, seed, choice and position, as in the real thing.
    """

    def __init__(self, most: int = 24) -> None:
        self.generations: list[Generation] = []
        self._most = most

    @property
    def specs(self) -> list[GenerationSpec]:
        return [generation.spec for generation in self.generations]

    async def generate(self, generation: Generation) -> AsyncGenerator[list[GenerationItem], None]:
        spec = generation.spec
        self.generations.append(generation)
        await asyncio.sleep(0)
        wanted = spec.sampling.num_prompt_logprobs
        if wanted is not None:
            scores = [logprobs_of(token_id, i, wanted) for i, token_id in enumerate(spec.prompt_ids)]
            yield [PromptLogprobs("", 0, (None, *scores[1:]))]
        texts = [self._ids(spec, choice) for choice in range(spec.num_answers)]
        for position in range(max(map(len, texts))):
            await asyncio.sleep(0)
            yield [self._token(spec, choice, position, ids) for choice, ids in enumerate(texts) if position < len(ids)]

    def _ids(self, spec: GenerationSpec, choice: int) -> list[int]:
        noise = (spec.sampling.seed, choice) if spec.sampling.temperature >= 1e-5 else ()
        rng = random.Random(str((spec.prompt_ids, noise)))
        ids = [rng.choice(_LETTERS) for _ in range(min(self._most, spec.max_tokens))]
        if EOS in spec.stop_token_ids and len(ids) == self._most < spec.max_tokens:
            ids.append(EOS)
        for i, token_id in enumerate(ids):
            if token_id in spec.stop_token_ids and i >= spec.sampling.min_tokens:
                return ids[: i + 1]
        return ids

    def _token(self, spec: GenerationSpec, choice: int, position: int, ids: list[int]) -> Token:
        token_id, end = ids[position], None
        if position + 1 == len(ids):
            end = FinishReason.STOP if token_id in spec.stop_token_ids else FinishReason.LENGTH
        wanted = spec.sampling.num_logprobs
        scores = None if wanted is None else logprobs_of(token_id, position, wanted)
        return Token("", choice, position, token_id, end, scores)


def logprobs_of(token_id: int, position: int, num_top: int) -> TokenLogprobs:
    """What the "model" thinks of a token; at every third position it thinks others likelier."""
    others = [(97 + i, -1.0 - i) for i in range(num_top + 1) if 97 + i != token_id][:num_top]
    if position % 3 == 0:
        return TokenLogprobs(-30.0 - token_id / 1000, tuple(others))
    mine = (token_id, -0.25 - position / 1000)
    return TokenLogprobs(mine[1], tuple([mine, *others][:num_top]))

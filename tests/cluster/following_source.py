"""A source of tokens that follows the grammar of a request, as an engine does, by the definition of `Grammar`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator

from llguidance import LLMatcher, LLTokenizer

from cluster.routing.generation import Generation, GenerationItem
from replicas.messages import FinishReason, GenerationSpec, Token
from tests.cluster.byte_tokenizer import EOS, byte_tokenizer_json
from tests.cluster.fake_ingress import ByteTokenizer

_LIKED = b' ",}0123456789\n<'


class FollowingSource:
    """begins: token ids that an answer begins with, where the grammar lets it; then whatever it allows is drawn, and
    what ends things more often than else.
    """

    def __init__(self, tokenizer: ByteTokenizer, begins: list[int] | None = None, seed: int = 0) -> None:
        text = byte_tokenizer_json(tokenizer.special, tokenizer.plain)
        self._tokenizer = LLTokenizer(text, n_vocab=tokenizer.vocab_size, eos_token=[EOS])
        self._vocab_size = tokenizer.vocab_size
        self._begins = begins or []
        self._rng = random.Random(seed)
        self.specs: list[GenerationSpec] = []

    async def generate(self, generation: Generation) -> AsyncGenerator[list[GenerationItem], None]:
        spec = generation.spec
        self.specs.append(spec)
        for choice in spec.choices:
            ids = self._answer(spec)
            for position, token_id in enumerate(ids):
                await asyncio.sleep(0)
                end = FinishReason.LENGTH if position + 1 == len(ids) else None
                end = FinishReason.STOP if token_id == EOS else end
                yield [Token("", choice, position, token_id, end)]

    def _answer(self, spec: GenerationSpec) -> list[int]:
        grammar = spec.grammar
        matcher = None if grammar is None or grammar.begins_after else self._matcher(grammar.text)
        has_ended = False
        ids: list[int] = []
        while len(ids) < spec.max_tokens and (not ids or ids[-1] != EOS):
            allowed = [EOS] if has_ended else self._allowed(matcher)
            token_id = self._next(allowed, len(ids))
            ids.append(token_id)
            if matcher is not None and token_id != EOS:
                assert matcher.consume_token(token_id), matcher.get_error()
                if matcher.is_stopped() or (grammar is not None and grammar.repeats and matcher.is_accepting()):
                    has_ended = grammar is not None and not grammar.repeats
                    matcher = None
            elif matcher is None and grammar is not None and token_id in grammar.begins_after:
                matcher = self._matcher(grammar.text)
        return ids

    def _next(self, allowed: list[int], position: int) -> int:
        if position < len(self._begins):
            return self._begins[position] if self._begins[position] in allowed else self._rng.choice(allowed)
        liked = [id_ for id_ in allowed if id_ >= EOS or id_ in _LIKED] if self._rng.random() < 0.85 else []
        ends = [id_ for id_ in liked if id_ >= EOS]
        printable = [id_ for id_ in allowed if 32 <= id_ < 127 or id_ >= EOS] or allowed
        return self._rng.choice((ends if len(ends) <= 2 else []) or liked or printable)

    def _matcher(self, text: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, text)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def _allowed(self, matcher: LLMatcher | None) -> list[int]:
        if matcher is None:
            return list(range(self._vocab_size))
        mask = matcher.compute_bitmask()
        return [id_ for id_ in range(self._vocab_size) if mask[id_ // 8] >> (id_ % 8) & 1]

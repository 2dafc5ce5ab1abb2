"""Constrained and free texts by transformers' own generate, with a processor that draws as is promised and holds them
against llguidance itself."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from transformers import LogitsProcessor, LogitsProcessorList

from replicas.messages import GenerationSpec
from replicas.sampling.draw import SamplingBatch, sample
from scheduler.grammar import Grammar
from tests.replicas.rule_reference import Row, expected

NOISE = 5e-5  # of logits in float32, as sums run in another order


class GrammarReference:
    """Each text is computed once: every layout is compared with it."""

    def __init__(self, model: Any, folder: str | Path, vocab_size: int, ends: Iterable[int]) -> None:
        self.tokenizer = LLTokenizer(
            (Path(folder) / "tokenizer.json").read_text(), n_vocab=vocab_size, eos_token=[*ends]
        )
        self._model = model
        self._texts: dict[tuple[Any, ...], list[int]] = {}

    def text(self, spec: GenerationSpec, choice: int = 0) -> list[int]:
        key = _key(spec, choice)
        if key not in self._texts:
            self._texts[key] = self._text(spec, choice)
        return self._texts[key]

    def is_text(self, spec: GenerationSpec, ids: list[int], choice: int = 0) -> bool:
        """Whether `text` is that, in a fraction of its time: one pass of the model over all of it shows that each token
        is the one that comes next. Where one is not, a near tie may be why, and `text` decides."""
        key = _key(spec, choice)
        if key not in self._texts and self._comes_next(spec, ids, choice):
            self._texts[key] = ids
        return ids == self.text(spec, choice)

    @torch.inference_mode()
    def parts_at_near_tie(self, spec: GenerationSpec, ids: list[int], choice: int = 0) -> bool:
        """Whether it parts from `text` where a change of two logits by as little as float noise makes its token come
        next. What follows has another history, and is not judged."""
        text = self.text(spec, choice)
        at = next((at for at, (token, other) in enumerate(zip(text, ids, strict=False)) if token != other), None)
        if at is None:
            return False
        before = torch.tensor([[*spec.prompt_ids, *text[:at]]])
        logits = self._model(before, logits_to_keep=1).logits[0]
        logits[0, ids[at]] += NOISE
        logits[0, text[at]] -= NOISE
        return _OneToken(spec, choice, self.tokenizer).drawn(before, logits) == ids[at]

    @torch.inference_mode()
    def _comes_next(self, spec: GenerationSpec, ids: list[int], choice: int) -> bool:
        has_ended = [token in spec.stop_token_ids for token in ids]
        if any(has_ended[:-1]) or not (len(ids) == spec.max_tokens or has_ended[-1:] == [True]):
            return False
        one_token, whole = _OneToken(spec, choice, self.tokenizer), torch.tensor([[*spec.prompt_ids, *ids]])
        start = len(spec.prompt_ids)
        logits = self._model(whole[:, :-1], logits_to_keep=len(ids)).logits[0]
        return all(
            one_token.drawn(whole[:, : start + number], logits[None, number]) == token
            for number, token in enumerate(ids)
        )

    @torch.inference_mode()
    def _text(self, spec: GenerationSpec, choice: int) -> list[int]:
        prompt = torch.tensor([spec.prompt_ids])
        output = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=spec.max_tokens,
            eos_token_id=sorted(spec.stop_token_ids),
            pad_token_id=0,
            logits_processor=LogitsProcessorList([_OneToken(spec, choice, self.tokenizer)]),
        )
        ids: list[int] = output[0, len(spec.prompt_ids) :].tolist()
        return ids


class _OneToken(LogitsProcessor):
    """Leaves the one token that is to come: drawn from what the rules make of the logits and the grammar allows."""

    def __init__(self, spec: GenerationSpec, choice: int, tokenizer: LLTokenizer) -> None:
        self._spec, self._choice = spec, choice
        self._walk = None if spec.grammar is None else Walk(spec.grammar, tokenizer)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        only = torch.full_like(scores, -torch.inf)
        only[0, self.drawn(input_ids, scores)] = 0.0
        return only

    def drawn(self, input_ids: torch.Tensor, scores: torch.Tensor) -> int:
        """The token that comes next. scores: [1, vocabulary], the model's own."""
        spec = self._spec
        output = tuple(input_ids[0, len(spec.prompt_ids) :].tolist())
        allowed = None if self._walk is None else self._walk.allowed(output)
        params = spec.sampling
        if allowed is not None and not set(allowed.nonzero()[0].tolist()) - spec.stop_token_ids:
            params = type(params)(**{**_fields(params), "min_tokens": 0})  # nothing else may come
        row = expected(scores[0].float(), Row(params, spec.prompt_ids, output, 0, spec.stop_token_ids))
        if allowed is not None:
            row[torch.from_numpy(~allowed[: len(row)])] = -torch.inf
        batch = SamplingBatch.from_rows([(params, self._choice, input_ids.shape[1])])
        return int(sample(row[None], batch))


class Walk:
    """The grammar's state after some tokens, made anew from the first of them each time."""

    def __init__(self, grammar: Grammar, tokenizer: LLTokenizer) -> None:
        self._grammar, self._tokenizer = grammar, tokenizer

    def allowed(self, output: tuple[int, ...]) -> np.ndarray | None:
        """bool [vocabulary]; None: any token."""
        matcher = None if self._grammar.begins_after else self._matcher()
        for token in output:
            if matcher is None:
                matcher = self._matcher() if token in self._grammar.begins_after else None
                continue
            assert matcher.consume_token(token), (output, matcher.get_error())
            if self._grammar.repeats and matcher.is_accepting() and matcher.is_stopped():
                matcher = None
        if matcher is None:
            return None
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        assert not matcher.is_error(), matcher.get_error()
        return bits.astype(bool)

    def _matcher(self) -> LLMatcher:
        return LLMatcher(self._tokenizer, self._grammar.text, log_level=0)


def _key(spec: GenerationSpec, choice: int) -> tuple[Any, ...]:
    return spec.prompt_ids, spec.max_tokens, spec.stop_token_ids, spec.sampling, spec.grammar, choice


def _fields(params: Any) -> dict[str, Any]:
    return {name: getattr(params, name) for name in type(params).__dataclass_fields__}

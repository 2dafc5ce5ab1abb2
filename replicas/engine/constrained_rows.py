"""Requests with grammars, seen from the steps: which rows have masks, and what their tokens do to the texts."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from replicas.engine.open_call import OpenCall
from replicas.grammars.choice_texts import ChoiceTexts
from replicas.grammars.followed_text import FollowedText
from replicas.grammars.grammar_cache import GrammarCache
from replicas.grammars.mask_maker import MaskMaker
from replicas.messages import CallStatus, Token
from replicas.metrics.engine_metrics import EngineMetrics
from replicas.sampling.rules.token_masks import TokenMasks
from scheduler.plan import Slice, StepPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Grammars:
    """What an engine needs to hold texts against grammars."""

    cache: GrammarCache
    maker: MaskMaker
    vocab_size: int  # the model's; a tokenizer may know more


@dataclass(frozen=True, slots=True)
class Strayed:
    """A request whose text its grammar cannot be followed for any more."""

    request_id: str
    status: CallStatus
    detail: str


class _HeldRow(NamedTuple):
    """row: of logits. is_guessed: the text is a copy, for what is chosen behind a guess."""

    request_id: str
    row: int
    text: FollowedText
    is_guessed: bool


class ConstrainedRows:
    """Engine thread only. Nothing here travels: a text is made of its grammar and its tokens, wherever it goes on."""

    def __init__(self, grammars: Grammars | None, metrics: EngineMetrics, by_id: Mapping[str, OpenCall]) -> None:
        """by_id: the open calls; who is not among them has ended."""
        self._maker = None if grammars is None else grammars.maker
        self._vocab_size = 0 if grammars is None else grammars.vocab_size
        self._metrics, self._by_id = metrics, by_id
        self._known: set[str] = set()  # requests with texts, some of which may have ended

    def follow(self, request_id: str) -> None:
        """Its texts begin. Mutates."""
        self._known.add(request_id)

    def concern(self, plan: StepPlan) -> bool:
        """Whether some row of the plan may have a mask. Mutates. Free while nobody has a grammar."""
        if not self._known:
            return False
        self._known.intersection_update(self._by_id)
        return any(part.request_id in self._known for part in plan.slices if part.num_sampled)

    def may_force(self, plan: StepPlan) -> bool:
        """Whether its drafts are to be had here, and the tokens in front of it to be known before that."""
        return plan.has_drafts and any(part.num_drafts and part.request_id in self._known for part in plan.slices)

    def guessed(self, plan: StepPlan) -> StepPlan:
        """With what grammars force in place of the drafts of their rows, now that all tokens in front of it are known.
        Mutates the texts. Blocks: 10 to 100 microseconds for each such row."""
        assert self._maker is not None
        texts = {index: text for index, part in enumerate(plan.slices) if (text := self._drafted(part)) is not None}
        self._maker.catch_up(list(texts.values()))
        slices = list(plan.slices)
        for index, text in texts.items():
            slices[index] = _with_guesses(slices[index], self._tokens(text.forced(slices[index].num_drafts)))
        return replace(plan, slices=tuple(slices))

    def _drafted(self, part: Slice) -> FollowedText | None:
        """Of a row that may have drafts."""
        opened = self._by_id.get(part.request_id) if part.num_drafts and part.request_id in self._known else None
        return None if opened is None or opened.texts is None else opened.texts.of(part.choice)

    def _tokens(self, forced: tuple[int, ...]) -> tuple[int, ...]:
        """As far as the model knows them."""
        end = next((index for index, id_ in enumerate(forced) if id_ >= self._vocab_size), len(forced))
        return forced[:end]

    def took(self, tokens: Iterable[Token]) -> None:
        """Tokens that count. Mutates."""
        if not self._known:
            return
        for token in tokens:
            opened = self._by_id.get(token.request_id)
            if opened is not None and opened.texts is not None and token.finish_reason is None:
                opened.texts.of(token.choice).take(token.token_id)

    def masks(self, plan: StepPlan) -> tuple[TokenMasks | None, tuple[Strayed, ...]]:
        """Of the plan's rows, now that all tokens in front of it are known; and who fails. Mutates the texts.

        Blocks: 50 to 1000 microseconds for each row that has one, shared by threads.
        """
        assert self._maker is not None
        started_s = time.monotonic()
        rows = list(self._rows(plan))
        held, words = self._maker.masks([one.text for one in rows])
        failed = [one for one in rows if one.text.failure is not None]
        strayed = {one.request_id: _strayed(one.request_id, one.text) for one in failed if not one.is_guessed}
        self._metrics.masks_made(len(held), time.monotonic() - started_s)
        of_rows = dict(zip([rows[index].row for index in held], words, strict=True))
        # Behind a guess that is not allowed, or takes the text beyond its limits, no token is: none counts there. If
        # the text does get there, its next row finds out why.
        of_rows |= {one.row: np.zeros_like(words, shape=words.shape[1:]) for one in failed if one.is_guessed}
        if len(of_rows) > len(held):
            of_rows = dict(sorted(of_rows.items()))
            words = np.stack(list(of_rows.values()))
        return TokenMasks(tuple(of_rows), words) if of_rows else None, tuple(strayed.values())

    def _rows(self, plan: StepPlan) -> Iterator[_HeldRow]:
        """Each row of logits that may have a mask."""
        row = 0
        for part in plan.slices:
            opened = self._by_id.get(part.request_id) if part.request_id in self._known else None
            if opened is not None and opened.texts is not None:
                for offset, text in enumerate(_texts_of(part, opened.texts)):
                    yield _HeldRow(part.request_id, row + offset, text, 0 < offset < part.num_sampled)
            row += part.most_sampled + len(part.forks)


def _with_guesses(part: Slice, token_ids: tuple[int, ...]) -> Slice:
    """A row with these drafts, and no others. token_ids: none, or at most its drafts."""
    count = 1 + len(token_ids)
    return part._replace(num_tokens=count, num_sampled=count, token_ids=token_ids)


def _texts_of(part: Slice, texts: ChoiceTexts) -> Iterator[FollowedText]:
    """In the order of the tokens that the slice samples."""
    if part.num_sampled > 1:
        yield from _guessed(part, texts.of(part.choice))
    elif part.num_sampled:
        yield texts.of(part.choice)
    yield from (texts.of(fork.choice) for fork in part.forks)


def _guessed(part: Slice, text: FollowedText) -> Iterator[FollowedText]:
    """Behind each guess the text that has it, which has failed from one on that the grammar does not allow."""
    yield text
    for guess in part.token_ids[len(part.token_ids) - part.num_sampled + 1 :]:
        text = text.copy()
        text.take(guess)
        text.catch_up()
        yield text


def _strayed(request_id: str, text: FollowedText) -> Strayed:
    """Says so in the log."""
    status = CallStatus.ERROR if text.has_strayed else CallStatus.GRAMMAR_LIMIT
    extra = {"event": "grammar_failed", "request": request_id, "status": status.value, "reason": text.failure}
    logger.warning("a text can't follow its grammar any further", extra=extra)
    return Strayed(request_id, status, text.failure or "")

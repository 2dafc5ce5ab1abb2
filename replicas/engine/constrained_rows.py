"""Requests with grammars, seen from the steps: which rows have masks, and what their tokens do to the texts."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Strayed:
    """A request whose text its grammar cannot be followed for any more."""

    request_id: str
    status: CallStatus
    detail: str


class ConstrainedRows:
    """Engine thread only. Nothing here travels: a text is made of its grammar and its tokens, wherever it goes on."""

    def __init__(self, grammars: Grammars | None, metrics: EngineMetrics, by_id: Mapping[str, OpenCall]) -> None:
        """by_id: the open calls; who is not among them has ended."""
        self._maker = None if grammars is None else grammars.maker
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
        held, words = self._maker.masks([text for _, _, text in rows])
        strayed = {request_id: _strayed(request_id, text) for request_id, _, text in rows if text.failure is not None}
        self._metrics.masks_made(len(held), time.monotonic() - started_s)
        masks = TokenMasks(tuple(rows[index][1] for index in held), words) if held else None
        return masks, tuple(strayed.values())

    def _rows(self, plan: StepPlan) -> Iterator[tuple[str, int, FollowedText]]:
        """Request, row of logits and text of each row that may have a mask."""
        row = 0
        for part in plan.slices:
            opened = self._by_id.get(part.request_id) if part.request_id in self._known else None
            if opened is not None and opened.texts is not None:
                for offset, text in enumerate(_texts_of(part, opened.texts)):
                    yield part.request_id, row + offset, text
            row += part.num_sampled + len(part.forks)


def _texts_of(part: Slice, texts: ChoiceTexts) -> Iterator[FollowedText]:
    """In the order of the tokens that the slice samples."""
    if part.num_sampled > 1:
        yield from _guessed(part, texts.of(part.choice))
    elif part.num_sampled:
        yield texts.of(part.choice)
    yield from (texts.of(fork.choice) for fork in part.forks)


def _guessed(part: Slice, text: FollowedText) -> Iterator[FollowedText]:
    """Behind each guess the text that has it. One that the grammar does not allow is not chosen, so nothing behind it
    counts: there the text before it stands for it."""
    yield text
    text = text.copy()
    for guess in part.token_ids[len(part.token_ids) - part.num_sampled + 1 :]:
        tried = text.copy()
        tried.take(guess)
        tried.catch_up()
        text = text if tried.failure is not None else tried
        yield text.copy()


def _strayed(request_id: str, text: FollowedText) -> Strayed:
    """Says so in the log."""
    status = CallStatus.ERROR if text.has_strayed else CallStatus.GRAMMAR_LIMIT
    extra = {"event": "grammar_failed", "request": request_id, "status": status.value, "reason": text.failure}
    logger.warning("a text can't follow its grammar any further", extra=extra)
    return Strayed(request_id, status, text.failure or "")

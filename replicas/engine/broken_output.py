"""Which requests of a step got what is no token: their output must not go out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from replicas.messages import CallStatus, TokenLogprobs
from replicas.metrics.engine_metrics import EngineMetrics
from replicas.sampling.sampled_tokens import NOT_A_TOKEN, NOTHING_ALLOWED
from scheduler.plan import SampledToken, StepOutput

logger = logging.getLogger(__name__)

_BROKEN = {
    NOT_A_TOKEN: (CallStatus.ERROR, "the model's output was not a number"),
    NOTHING_ALLOWED: (CallStatus.NOTHING_ALLOWED, "its rules of token choice leave no token to choose"),
}

_DAMAGED = (CallStatus.ERROR, "its KV came back from host memory damaged")

Broken = dict[str, tuple[CallStatus, str]]


def broken_requests(
    output: StepOutput,
    counts: Callable[[SampledToken], bool],
    running_on: Callable[[Collection[int]], Iterable[str]],
) -> Broken:
    """By request id, why it can't go on. Of the scheduler: counts, as what comes behind a choice's end may be anything;
    running_on: who computes from any of these blocks."""
    broken = {prompt.request_id: _BROKEN[NOT_A_TOKEN] for prompt in output.prompts if _has_nan(prompt.positions)}
    suspects = [token for token in output.tokens if token.token_id < 0 or token.logprobs is not None]
    for token in suspects:
        kind = NOT_A_TOKEN if _has_nan((token.logprobs,)) else token.token_id
        if kind in _BROKEN and counts(token):
            broken[token.request_id] = _BROKEN[kind]
    if output.damaged:
        broken |= dict.fromkeys(running_on({swap.device for swap in output.damaged}), _DAMAGED)
    return broken


def tell_damage(engine: str, num_blocks: int, metrics: EngineMetrics) -> None:
    """So many blocks came back from host memory other than they went: logged, and counted."""
    extra = {"event": "host_blocks_damaged", "engine": engine, "num_blocks": num_blocks}
    logger.error("KV blocks came back from host memory damaged: is its memory faulty?", extra=extra)
    metrics.host_blocks_damaged(num_blocks)


def without(output: StepOutput, broken: Broken) -> StepOutput:
    """The step of the others."""
    tokens = tuple(token for token in output.tokens if token.request_id not in broken)
    prompts = tuple(prompt for prompt in output.prompts if prompt.request_id not in broken)
    return replace(output, tokens=tokens, prompts=prompts)


def _has_nan(positions: Iterable[TokenLogprobs | None]) -> bool:
    return any(position is not None and math.isnan(position.logprob) for position in positions)

"""Log-probabilities of prompt tokens, computed by the forward pass that prefills them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from replicas.device_copy import to_device
from replicas.sampling.slot_state import SlotState
from replicas.sampling.token_scores import TokenScores
from scheduler.plan import Slice, StepPlan
from scheduler.token_logprobs import PromptLogprobs

# Logits that are there at once, 32 MiB in float32 and some times that to find the largest: a prompt's logits as a
# whole are gigabytes.
LOGITS_AT_ONCE = 1 << 23


class KeptHiddenStates:
    """Context manager: what the decoder layers return while it is entered is kept, and gives logits of any position.

    They come from the model's own forward method, its decoder replaced by what it returned before: so whatever a
    model does between its last layer and its logits is done here too. Steps on other threads notice nothing of it.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._decoder = model.base_model
        self._inputs: Tensor | None = None
        self._output: Any = None
        self._thread = threading.get_ident()

    def __enter__(self) -> KeptHiddenStates:
        self._hook = self._decoder.register_forward_hook(self._keep, with_kwargs=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()

    def _keep(self, decoder: Any, arguments: Any, keywords: dict[str, Any], output: Any) -> None:
        if threading.get_ident() == self._thread:
            self._inputs, self._output = keywords["input_ids"], output

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    @property
    def vocab_size(self) -> int:
        return int(self._model.config.vocab_size)

    def logits(self, rows: Tensor) -> Tensor:
        """float32 [n, V] of flat tokens, int64 [n]. After leaving the context."""
        decode = self._decoder.forward

        def forward(*arguments: Any, **keywords: Any) -> Any:
            is_ours = threading.get_ident() == self._thread
            return self._output if is_ours else decode(*arguments, **keywords)

        self._decoder.forward = forward
        try:
            output = self._model(input_ids=self._inputs, use_cache=False, logits_to_keep=rows)
        finally:
            del self._decoder.forward
        logits: Tensor = output.logits[0].float()
        return logits


@dataclass(frozen=True, slots=True)
class ChunkScores:
    """Of a chunk's scored tokens, on the device; None when there are none of them (a prompt of one token)."""

    chunk: Slice
    num_top: int
    scores: TokenScores | None

    def read(self) -> PromptLogprobs:
        """Blocks until they are there. The first chunk has the first token's None, too."""
        scores = self.scores.read([self.num_top] * len(self.chunk.scored_ids or ())) if self.scores else []
        if self.chunk.start == 0:
            return PromptLogprobs(self.chunk.request_id, 0, (None, *scores))
        return PromptLogprobs(self.chunk.request_id, self.chunk.start + 1, tuple(scores))


def score_chunks(hidden: KeptHiddenStates, plan: StepPlan, slots: SlotState) -> tuple[ChunkScores, ...]:
    """Scores of a plan's chunks, where they are asked for. hidden: of the plan's pass. Does not synchronise."""
    scored = []
    row = 0
    for chunk in plan.slices:
        if chunk.scored_ids is not None:
            num_top = slots.sampling[chunk.slot].num_prompt_logprobs or 0
            scored.append(ChunkScores(chunk, num_top, _scores(hidden, row, chunk.scored_ids, num_top)))
        row += chunk.num_tokens
    return tuple(scored)


def _scores(hidden: KeptHiddenStates, first_row: int, ids: Sequence[int], num_top: int) -> TokenScores | None:
    """Of ids, each by the logits of one row, from first_row on."""
    if not ids:
        return None
    rows = torch.arange(first_row, first_row + len(ids), device=hidden.device)
    token_ids = to_device(torch.tensor(ids, dtype=torch.int64), hidden.device)
    size = max(1, LOGITS_AT_ONCE // hidden.vocab_size)
    pieces = zip(rows.split(size), token_ids.split(size), strict=True)
    return TokenScores.join([TokenScores.of(hidden.logits(piece), ids, num_top) for piece, ids in pieces])

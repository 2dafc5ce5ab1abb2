"""A step on a card whose pass was launched and whose tokens are not chosen yet."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.cuda.drawn_rows import DrawnRows
from replicas.kernels.row_feed import FedRows
from replicas.model.model_runner import ForwardHandle


@dataclass(frozen=True, slots=True)
class CardForward(ForwardHandle):
    """fed: the plan's rows with drafts, as they were fed, until the next step; None: the plan has none. drawn: of its
    rows of logits, which there are; on its way before anybody waits for masks. None: other code chooses."""

    fed: FedRows | None = None
    drawn: DrawnRows | None = None

"""CUDA graphs of whole passes, from a step's slots and positions to its logits.

Decode: one graph for each size of batch. Prompts: one for each of some lengths, alone and with room for decode rows
beside it: launching a pass by hand takes the host longer than the card needs to compute some thousand tokens. A step of
a few prompts is several passes, one behind the other, the rows in the first. Tokens are drawn behind each, by kernels
chosen for the step's parameters, whose launches hide behind the pass. Rows with drafts: one graph for each of some
numbers of their tokens, with no prompt beside them.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from replicas.cuda.card_drafts import CardDrafts, DraftShape, draft_shapes
from replicas.cuda.graph_passes import DecodePass, DraftPass, Pass, PassModel, PromptPass, PromptShape
from replicas.cuda.slots import CudaSlots
from replicas.kernels.row_feed import FedRows
from replicas.kernels.token_draw import draw_tokens
from replicas.kernels.token_mask import forbid_tokens
from replicas.kernels.work_sharing import WorkSharing
from replicas.start_step import start_step
from scheduler.plan import Slice, StepPlan

logger = logging.getLogger(__name__)

# Each pass reads all weights: more prompts than these are computed together, by hand.
_MOST_PROMPTS = 4
# A pass more takes as long as so many tokens more in one.
_TOKENS_A_PASS = 200

_Given = TypeVar("_Given")


class StepGraph(Generic[_Given]):
    """One captured pass. Its static input is filled by a pinned copy that torch keeps until it has run."""

    def __init__(
        self, static_input: torch.Tensor, run: Callable[[], _Given], pool: Any, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Capture `run`, which reads static_input. Launches it once before. Blocks. stream: whose multiprocessors it
        keeps to; None: all of them."""
        self._input = static_input
        self._run = run  # what it holds (tensors made outside of the capture) must live as long as the graph
        captured_on, stream = stream, stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # whatever is compiled or allocated lazily must be so before
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=captured_on):
            self.given = run()

    def replay(self, values: torch.Tensor) -> _Given:
        """values: in pinned memory or on the device, in the static input's shape. Does not wait."""
        self._input.copy_(values, non_blocking=True)
        return self.repeat()

    def repeat(self) -> _Given:
        """Once more, by the input as it is: at first that with which it was captured. Does not wait."""
        self._graph.replay()
        return self.given


@dataclass(frozen=True, slots=True)
class PlannedPass:
    """A pass that a graph does for a plan. num_samples: of how many of its rows of logits, the first ones, the plan
    wants tokens. used: the slots that get them, one each. rows: those with drafts instead, which come to lie in
    `drafts`. chunk: of a prompt, if it has one."""

    graph: StepGraph[Pass]
    values: torch.Tensor
    num_samples: int
    used: tuple[int, ...] = ()
    rows: tuple[Slice, ...] = ()
    drafts: torch.Tensor | None = None
    chunk: Slice | None = None

    def launch(self, drafting: CardDrafts | None = None) -> Pass:
        """Does not wait. What the last pass of any graph gave is overwritten. drafting: makes its drafts."""
        if self.drafts is not None and drafting is not None:
            drafting.drafts(self.rows, self.drafts)
        return self.graph.replay(self.values)


def run_passes(passes: Sequence[PlannedPass], drafts: CardDrafts | None) -> tuple[torch.Tensor, FedRows | None]:
    """Their logits, and what rows with drafts were fed. Of several copies: each pass overwrites what the last one gave.
    Of one its own, until the next pass."""
    if len(passes) == 1:
        launched = passes[0].launch(drafts)
        return launched.logits[: passes[0].num_samples], launched.fed
    logits: list[torch.Tensor] = []
    fed = None
    for planned in passes:
        launched = planned.launch(drafts)
        logits.append(launched.logits[: planned.num_samples].clone())
        fed = launched.fed.copied() if launched.fed is not None else fed
    return torch.cat(logits), fed


class StepGraphs:
    """All graphs of one runner. Capturing them writes KV at no position, so it harms nothing."""

    def __init__(
        self,
        model: Any,
        slots: CudaSlots,
        sharing: WorkSharing,
        sizes: Sequence[int],
        shapes: Sequence[PromptShape],
        *,
        memory: Any = None,
        stream: torch.cuda.Stream | None = None,
        drafts: CardDrafts | None = None,
    ) -> None:
        """sizes: of batches, ascending; shapes: of prompts' passes, those of the fewest tokens first. memory: a pool of
        graphs that never run while these do; None: their own. stream: as for `StepGraph`. drafts: of rows, if they may
        have any.
        """
        self._model = PassModel(model, slots, sharing, drafts)
        self._drafts = drafts
        self._draft_shapes = draft_shapes(len(slots.sampling), drafts.max_drafts) if drafts else []
        self._drafting: dict[DraftShape, tuple[DraftPass, StepGraph[Pass]]] = {}
        self._slots = slots
        self._pool = torch.cuda.graph_pool_handle() if memory is None else memory
        self._stream = stream
        self._batch_sizes = list(sizes)
        self._shapes = list(shapes)
        self._decode: dict[int, tuple[DecodePass, StepGraph[Pass]]] = {}
        self._prompts: dict[PromptShape, tuple[PromptPass, StepGraph[Pass]]] = {}

    def capture(self) -> int:
        """Capture everything, large before small so that memory is shared; how many graphs there are. Blocks."""
        num_graphs = len(self._shapes) + len(self._batch_sizes) + len(self._draft_shapes)
        with start_step("capturing graphs", num_graphs, "graphs") as step:
            for shape in reversed(list(self._shapes)):
                self._capture_prompt(shape)
                step.advance()
            for size in reversed(self._batch_sizes):
                decode = DecodePass(self._model, size)
                self._decode[size] = decode, self._captured(decode)
                step.advance()
            for rows_shape in sorted(self._draft_shapes, key=lambda shape: -shape.num_tokens):
                assert self._drafts is not None
                drafting = DraftPass(self._model, self._drafts, rows_shape)
                self._drafting[rows_shape] = drafting, self._captured(drafting)
                step.advance()
        return num_graphs

    def captured(self) -> list[StepGraph[Pass]]:
        """All that there are, large before small."""
        return [graph for passes in (self._prompts, self._decode, self._drafting) for _, graph in passes.values()]

    @property
    def memory(self) -> Any:
        """That they take, for others that never run while they do."""
        return self._pool

    @property
    def most_row_tokens(self) -> int:
        """Of a step with drafts."""
        return max([shape.num_tokens for shape in self._drafting], default=0)

    def _capture_prompt(self, shape: PromptShape) -> None:
        """Mutates. Where the library can't attend behind earlier tokens there is none of those shapes."""
        if shape not in self._shapes:
            return
        prompt = PromptPass(self._model, shape)
        try:
            self._prompts[shape] = prompt, self._captured(prompt)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not shape.num_earlier:
                raise
            self._shapes = [other for other in self._shapes if not other.num_earlier]
            extra = {"event": "no_library_behind", "reason": str(error)}
            logger.warning("long prompts' later chunks take longer: our kernel attends, not a library", extra=extra)

    def _captured(self, captured: PromptPass | DecodePass | DraftPass) -> StepGraph[Pass]:
        return StepGraph(captured.static_input, captured.run, self._pool, self._stream)

    def draw_all_ways(self) -> None:
        """Compile the kernels that draw tokens, whatever they are asked for. Blocks. The slots stay as they are."""
        for size in {1, 2, 16} & set(self._batch_sizes):
            decode, graph = self._decode[size]
            launched = graph.replay(decode.values(()))
            rows = torch.arange(size, dtype=torch.int32, device=launched.logits.device)
            num_words = -(-launched.logits.shape[1] // 32)
            forbid_tokens(
                launched.logits, torch.full((size, num_words), -1, dtype=torch.int32, device=rows.device), rows
            )
            for has_sampled, has_filtered, most_kept in (
                (False, False, 0), (True, False, 0), (True, True, 0), (True, True, 1)
            ):  # fmt: skip
                for mask_places in (None, rows):
                    draw_tokens(
                        launched.logits, self._slots.state, launched.slots, launched.positions, launched.choices,
                        has_sampled=has_sampled, has_filtered=has_filtered, most_kept=most_kept,
                        mask_places=mask_places,
                    )  # fmt: skip
        self._accept_once()

    def _accept_once(self) -> None:
        """Compile what settles drafts, if there are any: else the first step with drafts waits for it."""
        if self._drafts is None or not self._draft_shapes:
            return
        drafting, graph = self._drafting[self._draft_shapes[0]]
        launched = graph.replay(drafting.values(()))
        assert launched.fed is not None
        state = self._slots.state
        drawn = draw_tokens(launched.logits, state, launched.slots, launched.positions, launched.choices)
        self._drafts.accept((), drawn, launched.fed)

    def passes(self, plan: StepPlan) -> list[PlannedPass] | None:
        """The plan's passes, after `slots.apply(plan)`, in the order of its tokens; None if no graphs do it."""
        rows, chunks, planned = plan.rows, plan.chunks, []
        if len(chunks) > _MOST_PROMPTS or len(rows) > max(self._batch_sizes, default=0):
            return None
        if plan.has_drafts and any(row.num_tokens > 1 for row in rows):
            planned.append(self._plan_drafting(rows))
            rows = ()
        for chunk in chunks:
            shape = self._shape_of(chunk, 0)
            if shape is None:
                return None
            if rows:
                together = self._shape_of(chunk, len(rows))
                if together and together.num_tokens <= shape.num_tokens + len(rows) + _TOKENS_A_PASS:
                    shape = together
                else:
                    planned.append(self._plan_decode(rows))
                    rows = ()
            planned.append(self._plan_prompt(shape, chunk, rows))
            rows = ()
        if rows:
            planned.append(self._plan_decode(rows))
        return planned

    def _shape_of(self, chunk: Slice, num_rows: int) -> PromptShape | None:
        """Of the fewest tokens; None where no shape holds them."""
        return next((shape for shape in self._shapes if shape.holds(chunk, num_rows)), None)

    def _plan_decode(self, rows: Sequence[Slice]) -> PlannedPass:
        decode, graph = self._decode[self._batch_sizes[bisect_left(self._batch_sizes, len(rows))]]
        return PlannedPass(graph, decode.values(rows), len(rows), tuple([row.slot for row in rows]))

    def _plan_drafting(self, rows: tuple[Slice, ...]) -> PlannedPass:
        num_tokens = sum([row.num_tokens for row in rows])
        shape = next(shape for shape in self._draft_shapes if shape.holds(len(rows), num_tokens))
        drafting, graph = self._drafting[shape]
        return PlannedPass(graph, drafting.values(rows), num_tokens, (), rows, drafting.drafts)

    def _plan_prompt(self, shape: PromptShape, chunk: Slice, rows: Sequence[Slice]) -> PlannedPass:
        prompt, graph = self._prompts[shape]
        used = (*(row.slot for row in rows), *([chunk.slot] * chunk.num_sampled), *(fork.slot for fork in chunk.forks))
        return PlannedPass(graph, prompt.values(chunk, rows), len(used), used, chunk=chunk)

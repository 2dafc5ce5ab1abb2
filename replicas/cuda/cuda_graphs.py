"""CUDA graphs of whole passes, from a step's slots and positions to its logits.

Decode: one graph for each size of batch. Prefill: one for each size of a single fresh prompt, which without a graph
would wait for the host at every layer: launching a pass by hand takes longer than computing some hundred tokens. A step
of rows and a short prompt or two is several passes, one behind the other. What a pass is made of goes into one static
tensor by one pinned copy; a graph reads nothing else but the slots' matrix, the weights and the pool. Tokens are drawn
behind it, by kernels chosen for the step's parameters, whose launches hide behind the pass.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from replicas.cuda.cuda_slots import CudaSlots
from replicas.cuda.cuda_step import CudaStep, Launches, tokens_while_launching
from replicas.cuda.kernels.token_draw import draw_tokens
from replicas.cuda.kernels.work_sharing import WorkSharing
from scheduler.plan import DecodeRow, PrefillChunk, StepPlan

_PREFILL_LENGTHS = (64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048)
# Each pass reads all weights: more prompts than these are computed together, by hand.
_MOST_PROMPTS = 2


def batch_sizes(largest: int) -> list[int]:
    """Sizes of batch that get a graph of their own, ascending; others are padded to the next."""
    sizes = [size for size in (1, 2, 4, 8) if size < largest] + list(range(16, min(largest, 128), 16))
    return sorted({*sizes, *range(128, largest, 32), largest})


@dataclass(frozen=True, slots=True)
class Pass:
    """A launched pass. logits [samples or more, vocab_size], valid until the graph's next replay.

    slots, positions (of the token that was fed), choices: int32, one for each row of logits, padding included.
    """

    logits: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    choices: torch.Tensor


class StepGraph:
    """One captured pass. Its static input is filled by a pinned copy that torch keeps until it has run."""

    def __init__(self, static_input: torch.Tensor, run: Callable[[], Pass], pool: Any) -> None:
        """Capture `run`, which reads static_input. Launches it once before. Blocks."""
        self._input = static_input
        self._run = run  # what it holds (tensors made outside of the capture) must live as long as the graph
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # whatever is compiled or allocated lazily must be so before
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._pass = run()

    def replay(self, values: torch.Tensor) -> Pass:
        """values: int32 in pinned memory, in the static input's shape. Does not wait."""
        self._input.copy_(values, non_blocking=True)
        self._graph.replay()
        return self._pass


@dataclass(frozen=True, slots=True)
class PlannedPass:
    """A pass that a graph does for a plan. num_samples: of how many of its rows of logits, the first ones, the plan
    wants tokens."""

    graph: StepGraph
    values: torch.Tensor
    num_samples: int

    def launch(self) -> Pass:
        """Does not wait. What the last pass of any graph gave is overwritten."""
        return self.graph.replay(self.values)


class StepGraphs:
    """All graphs of one runner. Capturing them writes KV at no position, so it harms nothing."""

    def __init__(self, model: Any, slots: CudaSlots, sharing: WorkSharing, max_prefill: int) -> None:
        """max_prefill: longest prompt that gets a graph; 0 for none."""
        self._model = model
        self._slots = slots
        self._sharing = sharing
        device = slots.state.device
        self._no_shares = sharing.share_out(torch.full((1,), -1, dtype=torch.int32, device=device))
        self._pool = torch.cuda.graph_pool_handle()
        self._no_chunks = torch.zeros(2, 3, dtype=torch.int32, device=device)
        self._batch_sizes = batch_sizes(len(slots.sampling))
        self._lengths = [n for n in _PREFILL_LENGTHS if n <= max_prefill]
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._most_beside_rows = tokens_while_launching(num_parameters, model.config.num_hidden_layers)
        self._decode: dict[int, StepGraph] = {}
        self._prefill: dict[int, StepGraph] = {}

    def capture(self) -> int:
        """Capture everything, large before small so that memory is shared; how many graphs there are. Blocks."""
        for length in reversed(self._lengths):
            self._prefill[length] = self._capture_prefill(length)
        for size in reversed(self._batch_sizes):
            self._decode[size] = self._capture_decode(size)
        return len(self._decode) + len(self._prefill)

    def draw_all_ways(self) -> None:
        """Compile the kernels that draw tokens, whatever they are asked for. Blocks. The slots stay as they are."""
        for size in {1, 2, 16} & set(self._batch_sizes):
            launched = self._decode[size].replay(_pinned([[self._slots.padding_slot] * size, [-1] * size, [0] * size]))
            for kinds in ((False, False), (True, False), (True, True)):
                draw_tokens(
                    launched.logits, self._slots.state, launched.slots, launched.positions, launched.choices,
                    has_sampled=kinds[0], has_filtered=kinds[1],
                )  # fmt: skip

    def passes(self, plan: StepPlan) -> list[PlannedPass] | None:
        """The plan's passes, after `slots.apply(plan)`, in the order of its tokens; None if no graphs do it."""
        if len(plan.chunks) > _MOST_PROMPTS or len(plan.rows) > self._batch_sizes[-1]:
            return None
        if plan.rows and plan.num_prefill_tokens > self._most_beside_rows:
            return None  # launching is hidden behind so many tokens: one pass for all reads the weights once
        planned = [self._plan_prefill(chunk) for chunk in plan.chunks]
        if plan.rows:
            planned.insert(0, self._plan_decode(plan.rows))
        found = [one for one in planned if one is not None]
        return found if len(found) == len(planned) else None

    # -- decode ------------------------------------------------------------------------------------

    def _plan_decode(self, rows: Sequence[DecodeRow]) -> PlannedPass:
        size = self._batch_sizes[bisect_left(self._batch_sizes, len(rows))]
        padding = size - len(rows)
        values = [
            [row.slot for row in rows] + [self._slots.padding_slot] * padding,
            [row.position for row in rows] + [-1] * padding,
            [row.choice for row in rows] + [0] * padding,
        ]
        return PlannedPass(self._decode[size], _pinned(values), len(rows))

    def _capture_decode(self, size: int) -> StepGraph:
        layout = Launches(size, self._sharing.most_pieces(size), self._sharing.tile_len(size), 0, 0, ()).pack()
        rows = torch.zeros(3, size, dtype=torch.int32, device=self._slots.state.device)
        rows[0], rows[1] = self._slots.padding_slot, -1

        def run() -> Pass:
            slots, positions, choices = rows
            shares = self._sharing.share_out(positions)
            step = CudaStep(self._slots.block_table, rows[:2].view(-1), self._no_chunks, shares, layout)
            input_ids = self._slots.last_token.index_select(0, slots)
            logits = self._forward(input_ids, positions, 0, step)
            return Pass(logits, slots, positions, choices)

        return StepGraph(rows, run, self._pool)

    # -- prefill -----------------------------------------------------------------------------------

    def _plan_prefill(self, chunk: PrefillChunk) -> PlannedPass | None:
        """None unless it is a whole prompt of one choice, not scored, that is no longer than the largest graph's."""
        length = len(chunk.token_ids)
        index = bisect_left(self._lengths, length)
        is_whole = chunk.start == 0 and len(chunk.targets) == 1 and chunk.targets[0].slot == chunk.slot
        if index == len(self._lengths) or not is_whole or chunk.scored_ids is not None:
            return None
        padding = [0] * (self._lengths[index] - length)
        values = [*chunk.token_ids, *padding, length, chunk.slot, chunk.targets[0].choice]
        return PlannedPass(self._prefill[self._lengths[index]], _pinned(values), 1)

    def _capture_prefill(self, length: int) -> StepGraph:
        device = self._slots.state.device
        packed = torch.zeros(length + 3, dtype=torch.int32, device=device)  # ids, then length, slot, choice
        packed[length + 1] = self._slots.padding_slot
        layout = Launches(0, 0, 0, 0, 0, ((0, length, 1),)).pack()
        places = torch.arange(length, dtype=torch.int32, device=device)

        def run() -> Pass:
            count, slot, choice = packed[length:].split(1)
            positions = torch.where(places < count, places, -1)
            tokens = torch.cat([slot.expand(length), positions])
            step = CudaStep(self._slots.block_table, tokens, self._no_chunks, self._no_shares, layout)
            last = count - 1
            logits = self._forward(packed[:length], positions, last.clamp(min=0).long(), step)
            return Pass(logits, slot, last, choice)

        return StepGraph(packed, run, self._pool)

    def _forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, keep: int | torch.Tensor, step: CudaStep
    ) -> torch.Tensor:
        """Logits [samples, vocab_size] in the model's type."""
        output = self._model(
            input_ids=input_ids.long()[None],
            position_ids=positions.clamp(min=0).long()[None],
            use_cache=False,
            logits_to_keep=keep,
            paged=step,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def _pinned(values: list[list[int]] | list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).pin_memory()

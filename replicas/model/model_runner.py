"""Applies a plan in two phases: a forward pass over the pool, then the choice of tokens by its logits.

Knows nothing of requests' lives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replicas.kv.host_pool import HostPool, MovedBlocks
from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import LoadedModel
from replicas.model.paged_context import PagedStep
from replicas.model.step_inputs import build_step_inputs
from replicas.model_support import UnsupportedModel
from replicas.sampling.prompt_scores import ChunkScores, KeptHiddenStates, score_chunks
from replicas.sampling.rules.token_masks import TokenMasks
from replicas.sampling.sample_place import SamplePlace, accepted_of, counting, settled_by_device
from replicas.sampling.sampled_tokens import SampledTokens, sample_tokens
from replicas.sampling.slot_state import SlotState
from scheduler.lane_split import LaneShare
from scheduler.plan import SampledToken, StepOutput, StepPlan
from scheduler.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ForwardHandle:
    """A step whose pass was launched and whose tokens are not chosen yet.

    logits: [num_samples, vocab_size], of the tokens that the plan samples, in their order: float32, on a card as its
    kernels give them; None when it has nothing to compute. prompts: scores of its chunks. moved: what went to host
    memory and back, if anything did. states: what a drafter wants of the model's hidden states, of each token.
    """

    plan: StepPlan
    logits: Tensor | None = None
    prompts: tuple[ChunkScores, ...] = ()
    moved: MovedBlocks | None = None
    states: Tensor | None = None


class StepHandle:
    """A launched step. On the CPU its tokens are there already; on a GPU `result` waits for an event."""

    def __init__(
        self,
        plan: StepPlan,
        choice: SampledTokens | None = None,
        prompts: tuple[ChunkScores, ...] = (),
        moved: MovedBlocks | None = None,
    ) -> None:
        """choice: of the plan's tokens; None when it has nothing to compute. prompts: scores of its chunks. moved: as
        ForwardHandle's."""
        self.plan = plan
        self._choice = choice
        self._prompts = prompts
        self._moved = moved

    @property
    def is_running(self) -> bool:
        """Whether it may not have ended when it was launched: `result` tells."""
        if self._moved is not None and self._moved.is_on_the_way:
            return True
        return self._choice is not None and self._choice.is_on_the_way

    def read_tokens(self) -> list[int]:
        """Of every place of its plan, whether they count or not. Blocks until they are there."""
        return [] if self._choice is None else self._choice.read_tokens()

    def result(self) -> StepOutput:
        """The step's tokens that count, in plan order. Blocks until they are there, and everything that it moves."""
        output = self._tokens()
        return output if self._moved is None else replace(output, damaged=self._moved.damaged())

    def _tokens(self) -> StepOutput:
        plan = self.plan
        if self._choice is None:
            return StepOutput(plan.step_id, ())
        token_ids = self._choice.read_tokens()
        names = [(row.request_id, row.choice) for row in plan.rows]
        names += [(chunk.request_id, choice) for chunk in plan.chunks for choice in chunk.sampled_choices]
        has_guesses = plan.has_drafts or len(names) != len(token_ids)
        if has_guesses:
            names = [(part.request_id, choice) for part in plan.slices for choice in part.sampled_choices]
        logprobs = self._choice.read_logprobs()
        tokens = tuple(
            [
                SampledToken(request_id, choice, token_id, logprobs.get(index) if logprobs else None)
                for index, ((request_id, choice), token_id) in enumerate(zip(names, token_ids, strict=True))
            ]
        )
        prompts = tuple(chunk.read() for chunk in self._prompts)
        if not has_guesses:
            return StepOutput(plan.step_id, tokens, prompts)
        numbers = self._choice.read_accepted()
        if numbers is not None:
            counts, accepted = settled_by_device(plan, numbers)
        else:
            counts = counting(SamplePlace.all_of(plan), token_ids)
            accepted = accepted_of(plan, counts)
        return StepOutput(plan.step_id, tuple(compress(tokens, counts)), prompts, accepted)


class NotDivisible(Exception):
    """The device can't compute prompts beside rows; says why."""


class ModelRunner:
    """Owns the model, the pool's contents and the slots. Engine thread only; with two lanes, a thread of each."""

    most_drafting_rows: int | None = None  # of a step with drafts; None: any number
    most_drafting_tokens: int | None = None  # likewise
    pads_drafts = False  # whether drafts that are planned cost time where there are none
    takes_forced = False  # whether rows with grammars may have as drafts what these force
    shares: tuple[LaneShare, ...] = ()  # ways to divide the device between two lanes; none: they just run side by side

    def __init__(
        self, loaded: LoadedModel, pool: KvPool, num_slots: int, max_model_len: int, num_host_blocks: int = 0
    ) -> None:
        """Raises UnsupportedModel for a pool that no attention here reads."""
        if pool.layout.head_groups > 1:
            groups = pool.layout.head_groups
            raise UnsupportedModel(f"a KV pool with its heads in {groups} groups: attention here knows one group only")
        self._model: Any = loaded.model
        self._loaded = loaded
        self.pool = pool
        self.host_pool = HostPool(pool, num_host_blocks)
        self._slots = SlotState(num_slots, -(-max_model_len // pool.layout.block_size), max_model_len)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Run one step, both phases. Mutates pool and slots. On the CPU blocks for the whole step."""
        return self.choose(self.forward(plan))

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> ForwardHandle:
        """The first phase: everything up to the logits. Mutates pool and slots. On the CPU blocks for it.

        What the choice needs besides may be made while it runs; `choose` comes next, before another step's.
        """
        moved = self._prepare(plan)
        forwarded = self._run(plan)
        return forwarded if moved is None else replace(forwarded, moved=moved)

    @torch.inference_mode()
    def choose(self, forwarded: ForwardHandle, masks: TokenMasks | None = None) -> StepHandle:
        """The second phase: a token for each row of logits, which the slots keep too. Mutates the slots and the logits.

        masks: of the rows whose grammars allow some tokens only.
        """
        plan = forwarded.plan
        if forwarded.logits is None:
            return StepHandle(plan, moved=forwarded.moved)
        choice = sample_tokens(forwarded.logits, SamplePlace.all_of(plan), self._slots, masks)
        on_the_way = self._on_the_way(self._settled(forwarded, choice), forwarded.prompts)
        return StepHandle(plan, *on_the_way, forwarded.moved)

    @property
    def num_slots(self) -> int:
        return len(self._slots.sampling)

    def can_draft(self, sampling: SamplingParams) -> bool:
        """Whether rows with these parameters may be planned with drafts."""
        return False

    @property
    def num_failed_drafters(self) -> int:
        """Drafters that are asked no more. Any thread."""
        return 0

    @torch.inference_mode()
    def know(self, slot: int, start: int, ids: NDArray[np.int32]) -> None:
        """A sequence's tokens from position start on, at least one, which another runner has chosen: its next row feeds
        the last one, which stands in front of it. Mutates the slot."""
        self._slots.know(slot, start, ids)

    def expect(self, slot: int, prompt_ids: tuple[int, ...]) -> None:
        """A sequence with this prompt, which may have drafts, will take a slot when its KV is here."""

    def read_ahead(self) -> bool:
        """While there is nothing else to compute: what drafts for sequences to come will need, a part of it. Blocks for
        that. False if nothing is left of it."""
        return False

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Run one step, which must not be empty, up to its logits: no token is chosen. For checks.

        float32 [num_samples, vocab_size], as serving computes them, whichever way it takes. Mutates pool and slots.
        """
        logits = self.forward(plan).logits
        assert logits is not None, "an empty step has no logits"
        return logits

    def beside(self, share: LaneShare) -> ModelRunner:
        """What runs prompts beside this runner's rows, on that part of the device. After `warm_up`."""
        return self

    def warm_up(self) -> bool:
        """Prepare what would delay the first steps. Blocks. Mutates pool blocks and slot 0; before serving.

        Whether it changed how steps are computed: then what was checked before is to be checked again.
        """
        return False

    def prepare_thread(self, max_step_tokens: int) -> None:
        """Called on the thread that will launch, before its first step. Blocks. max_step_tokens: of prompts, in one."""

    def finish(self) -> None:
        """Block until nothing that was launched runs any more. Raises what has become of it, if the device tells."""

    def _prepare(self, plan: StepPlan) -> MovedBlocks | None:
        """What goes before the pass, or beside it: slots, swaps, copies. What was moved to host memory and back."""
        self._slots.apply(plan)
        moved = self.host_pool.move(plan)
        for copy in plan.copies:
            self.pool.copy_block(copy.source, copy.destination)
        return moved

    def _settled(self, forwarded: ForwardHandle, choice: SampledTokens) -> SampledTokens:
        """What was chosen behind a pass, once it is held against drafts that only the device knows. Mutates slots."""
        return choice

    def _on_the_way(
        self, choice: SampledTokens, prompts: tuple[ChunkScores, ...]
    ) -> tuple[SampledTokens, tuple[ChunkScores, ...]]:
        """What was chosen and scored as its reader gets it: on a GPU, without waiting for later steps."""
        return choice, prompts

    def _run(self, plan: StepPlan) -> ForwardHandle:
        """The pass of a plan that is prepared, if it has one, and scores of the chunks whose prompt's are asked for."""
        if plan.is_empty:
            return ForwardHandle(plan)
        if all(chunk.scored_ids is None for chunk in plan.chunks):
            return ForwardHandle(plan, self._forward(plan))
        with KeptHiddenStates(self._model) as hidden:
            logits = self._forward(plan)
        return ForwardHandle(plan, logits, score_chunks(hidden, plan, self._slots))

    def _forward(self, plan: StepPlan) -> torch.Tensor:
        """Logits, float32 [num_samples, vocab_size], of each token that the plan samples."""
        inputs = build_step_inputs(plan, self._slots, self.pool.layout.block_size)
        self.pool.clear(inputs.fresh_blocks, inputs.tails)
        step = PagedStep(self.pool, inputs, self._loaded.dtype)
        output = self._model(
            input_ids=inputs.input_ids[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            logits_to_keep=inputs.logit_rows,
            paged=step,
        )
        if step.num_calls != self._loaded.num_layers:
            raise UnsupportedModel(
                f"{type(self._model).__name__}: {step.num_calls} of {self._loaded.num_layers} layers used our attention"
            )
        logits: torch.Tensor = output.logits[0].float()
        return logits

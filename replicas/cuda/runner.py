"""The model runner on a CUDA card: the same plans, over kernels, compiled layers and graphs.

A step that graphs know is a replay or some. Any other (chunks of prompts, many prompts) takes the base's way, layer by
layer, with the same kernels. Either way nothing waits for the device: a step's tokens come through pinned memory and an
event.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from replicas.cuda.attention import bind_attention, library_attention, prepare_library, refuse_numbers
from replicas.cuda.card_drafts import MOST_ROW_TOKENS, MOST_ROWS, CardDrafting, CardDrafts, refuse_guesses
from replicas.cuda.card_forward import CardForward
from replicas.cuda.card_layers import card_layers
from replicas.cuda.compiled_layers import compile_decoder_layers
from replicas.cuda.drawn_rows import DrawnRows
from replicas.cuda.graph_passes import Pass, PromptShape
from replicas.cuda.graph_shapes import batch_sizes, prompt_shapes
from replicas.cuda.graphs import PlannedPass, StepGraphs, run_passes
from replicas.cuda.slots import CudaSlots, SamplingKinds, is_plain
from replicas.cuda.step import CudaInputs, build_cuda_inputs, fresh_runs
from replicas.cuda.tokens_in_flight import SettledTokens, TokensInFlight
from replicas.device_copy import to_device
from replicas.kernels.row_feed import FedRows
from replicas.kernels.token_draw import draw_tokens
from replicas.kernels.token_mask import forbid_tokens
from replicas.kernels.work_sharing import WorkSharing
from replicas.kv.host_pool import MovedBlocks
from replicas.kv.kv_pool import KvPool
from replicas.layers.replaced_layers import replace_layers
from replicas.model.model_loader import LoadedModel
from replicas.model.model_runner import ForwardHandle, ModelRunner, StepHandle
from replicas.sampling.prompt_scores import ChunkScores
from replicas.sampling.rules.token_masks import TokenMasks
from replicas.sampling.sample_place import SamplePlace
from replicas.sampling.sampled_tokens import SampledTokens
from replicas.speculation.drafting_runner import computed_rows
from replicas.start_step import start_step
from scheduler.plan import SampleTarget, Slice, SlotInit, StepPlan, TableWrite
from scheduler.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# Prompt lengths of the steps that compile the layers: no two sizes in them are equal, or they would be taken for one.
_WARM_UP_LENGTHS = (37, 23)


class CudaRunner(ModelRunner):
    """Owns what ModelRunner owns, and graphs once `warm_up` has run. Engine thread only, after that."""

    most_drafting_rows, most_drafting_tokens = MOST_ROWS, MOST_ROW_TOKENS
    pads_drafts = True

    def __init__(
        self,
        loaded: LoadedModel,
        pool: KvPool,
        num_slots: int,
        max_model_len: int,
        num_host_blocks: int = 0,
        *,
        drafting: CardDrafting | None = None,
    ) -> None:
        """drafting: who makes drafts, and how many of a row; None: there are none, and rows are where plans say."""
        super().__init__(loaded, pool, num_slots, max_model_len, num_host_blocks)
        device = pool.tensor.device
        refuse_numbers(pool.layout.dtype, loaded.dtype, device)
        self._max_model_len = max_model_len
        num_blocks = -(-max_model_len // pool.layout.block_size)
        self._slots: CudaSlots = CudaSlots(num_slots, num_blocks, max_model_len, device, drafting is not None)
        self._drafts = CardDrafts(self._slots, drafting) if drafting else None
        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._sharing = WorkSharing.of(
            pool.layout.num_kv_heads, pool.layout.head_dim, loaded.dtype, num_processors, num_slots,
            num_slots if drafting else 0,
        )  # fmt: skip
        # Library kernels of float32 attention round to tf32 or are slow; ours does neither.
        self._has_fresh = loaded.dtype is not torch.float32
        self._graphs: StepGraphs | None = None
        self._fed: FedRows | None = None  # of the last pass by hand
        bind_attention(loaded.model, pool)
        replace_layers(loaded.model, card_layers())

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """As the base's. Where graphs do the step and nothing has to come in between, both phases are one: tokens are
        drawn behind each pass."""
        moved, plan = self._prepare(plan), self._resolved(plan)
        passes = self._passes(plan)
        if passes and (kinds := self._slots.kinds(plan)).is_plain:
            return self._keeping_fed(
                plan, lambda: StepHandle(plan, *self._on_the_way(self._draw(passes, kinds), ()), moved)
            )
        forwarded = self._run_passes(passes, plan)
        return self.choose(forwarded if moved is None else replace(forwarded, moved=moved))

    def can_draft(self, sampling: SamplingParams) -> bool:
        """The drawing kernels choose behind each draft, and only they."""
        return self._drafts is not None and self._drafts.is_alive and is_plain(sampling)

    def expect(self, slot: int, prompt_ids: tuple[int, ...]) -> None:
        if self._drafts is not None:
            self._drafts.expect(slot, prompt_ids)

    def read_ahead(self) -> bool:
        return self._drafts is not None and self._drafts.read_ahead()

    @property
    def num_failed_drafters(self) -> int:
        return 0 if self._drafts is None else self._drafts.num_failed

    @torch.inference_mode()
    def choose(self, forwarded: ForwardHandle, masks: TokenMasks | None = None) -> StepHandle:
        """As the base's. What `forward` has prepared is drawn by the kernels that draw other steps' tokens."""
        plan = forwarded.plan
        if masks is not None and plan.has_drafts:
            masks = masks.at(computed_rows(plan))
        if isinstance(forwarded, CardForward) and (drawn := forwarded.drawn) is not None:
            return self._keeping_fed(plan, lambda: self._draw_rows(forwarded, drawn, masks))
        if forwarded.logits is not None:
            forwarded = replace(forwarded, logits=forwarded.logits.to(torch.float32, copy=True))
        return self._keeping_fed(plan, lambda: super(CudaRunner, self).choose(forwarded, masks))

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        return super().logits(plan).to(torch.float32, copy=True)

    def _run(self, plan: StepPlan) -> ForwardHandle:
        """Whatever the choice needs but masks is on its way, too: once these are there, the host is waited for."""
        plan = self._resolved(plan)
        forwarded = self._run_passes(self._passes(plan), plan)
        if forwarded.logits is None or not (kinds := self._slots.kinds(plan)).is_plain:
            return forwarded
        return replace(forwarded, drawn=DrawnRows.of(plan, kinds, self._slots))

    def _resolved(self, plan: StepPlan) -> StepPlan:
        """The plan as it is computed: perhaps without drafts. By hand rows may have as many as they like."""
        if self._drafts is None or not plan.has_drafts:
            return plan
        return self._drafts.resolved(plan, self._graphs.most_row_tokens if self._graphs else None)

    def _passes(self, plan: StepPlan) -> list[PlannedPass] | None:
        """Of the graphs that do the plan; None or empty if it is launched by hand."""
        return self._graphs.passes(plan) if self._graphs else None

    def _run_passes(self, passes: list[PlannedPass] | None, plan: StepPlan) -> CardForward:
        if passes:
            logits, fed = run_passes(passes, self._drafts)
            return CardForward(plan, logits, fed=fed)
        self._fed = None
        forwarded = super()._run(plan)
        return CardForward(plan, forwarded.logits, forwarded.prompts, fed=self._fed)

    def _keeping_fed(self, plan: StepPlan, choose: Callable[[], StepHandle]) -> StepHandle:
        """If it fails, the step will be run again, in pieces: from the tokens it was planned with. Those of other slots
        are another lane's."""
        moved = self._slots.moved()
        try:
            return choose()
        except Exception:
            self._slots.move_back(sorted({place.next_slot for place in SamplePlace.all_of(plan)}), moved)
            raise

    def _prepare(self, plan: StepPlan) -> MovedBlocks | None:
        """Raises ValueError for what no kernel here computes."""
        refuse_guesses(plan, self._drafts.max_drafts if self._drafts else 0)
        if self._drafts is not None:
            self._drafts.start(plan.slot_inits)
        return super()._prepare(plan)

    def _draw(self, passes: Sequence[PlannedPass], kinds: SamplingKinds) -> SampledTokens:
        """Run the passes; the drawing kernel behind each chooses its tokens and feeds them to the next step."""
        tokens, accepted = [], None
        for planned in passes:
            launched = planned.launch(self._drafts)
            drawn = draw_tokens(
                launched.logits, self._slots.state, launched.slots, launched.positions, launched.choices,
                has_sampled=kinds.has_sampled, has_filtered=kinds.has_filtered, most_kept=kinds.most_kept,
            )  # fmt: skip
            tokens.append(drawn[: planned.num_samples])
            if self._drafts is not None and (counted := self._held(self._drafts, planned, launched, drawn)) is not None:
                accepted = counted
        return SettledTokens(torch.cat(tokens), accepted=accepted)

    def _held(
        self, drafts: CardDrafts, planned: PlannedPass, launched: Pass, drawn: torch.Tensor
    ) -> torch.Tensor | None:
        """What was drawn behind a pass, held against its drafts: as `CardDrafts.accept`, None without. Mutates."""
        if launched.fed is not None:
            return drafts.accept(planned.rows, drawn, launched.fed)
        drafts.follow(planned.used, drawn, launched.slots, launched.positions)
        return None

    def _draw_rows(self, forwarded: ForwardHandle, drawn: DrawnRows, masks: TokenMasks | None) -> StepHandle:
        logits, kinds, mask_places = forwarded.logits, drawn.kinds, None
        assert logits is not None
        if masks is not None:
            words = to_device(torch.from_numpy(masks.words), logits.device)
            mask_places = to_device(torch.from_numpy(masks.places(len(logits))), logits.device)
            forbid_tokens(logits, words, mask_places)
        tokens = draw_tokens(
            logits, self._slots.state, drawn.slots, drawn.positions, drawn.choices, has_sampled=kinds.has_sampled,
            has_filtered=kinds.has_filtered, most_kept=kinds.most_kept, mask_places=mask_places,
        )  # fmt: skip
        on_the_way = self._on_the_way(self._settled(forwarded, SampledTokens(tokens)), forwarded.prompts)
        return StepHandle(forwarded.plan, *on_the_way, forwarded.moved)

    def _settled(self, forwarded: ForwardHandle, choice: SampledTokens) -> SampledTokens:
        if self._drafts is None:
            return choice
        fed = forwarded.fed if isinstance(forwarded, CardForward) else None
        return self._drafts.settle(forwarded.plan, fed, choice)

    def _on_the_way(
        self, choice: SampledTokens, prompts: tuple[ChunkScores, ...]
    ) -> tuple[SampledTokens, tuple[ChunkScores, ...]]:
        return TokensInFlight.of(choice, prompts)

    @torch.inference_mode()
    def warm_up(self) -> bool:
        """Compile the layers, capture the graphs. Blocks for seconds (a minute without a compile cache); logs.

        Mutates pool blocks and slot 0.
        """
        started_s = time.monotonic()
        with start_step("compiling layers"):
            self.compile_layers()
        compiled_s = time.monotonic()
        sizes = batch_sizes(self.num_slots)
        self._graphs = StepGraphs(
            self._model, self._slots, self._sharing, sizes, self._prompt_shapes(), drafts=self._drafts
        )
        num_graphs = self._graphs.capture()
        self._graphs.draw_all_ways()
        torch.cuda.synchronize()
        logger.info(
            "layers compiled, graphs captured",
            extra={
                "event": "warm_up",
                "graphs": num_graphs,
                "compile_s": round(compiled_s - started_s, 1),
                "capture_s": round(time.monotonic() - compiled_s, 1),
            },
        )
        return True

    def compile_layers(self) -> None:
        """And run them once for each way they are compiled. Blocks. Mutates pool blocks and slot 0."""
        compile_decoder_layers(self._model, self._loaded.num_layers, self.pool.tensor.device)
        for length in _WARM_UP_LENGTHS:
            self._run_prompt(min(length, self._max_model_len))
        torch.cuda.synchronize()

    def _prompt_shapes(self) -> list[PromptShape]:
        """Of the graphs that compute prompts."""
        return prompt_shapes(self.num_slots, self._max_model_len, has_fresh=self._has_fresh)

    @torch.inference_mode()
    def prepare_thread(self, max_step_tokens: int) -> None:
        if self._has_fresh:
            num_heads = self._model.config.get_text_config().num_attention_heads
            prepare_library(num_heads, self.pool, self._loaded.dtype, fresh_runs(max_step_tokens, self._max_model_len))
            torch.cuda.synchronize()

    def finish(self) -> None:
        torch.cuda.synchronize()

    def _run_prompt(self, length: int) -> None:
        """A prompt of this length in slot 0, and a decode step behind it."""
        blocks = tuple(range(-(-(length + 1) // self.pool.layout.block_size)))
        init = SlotInit(0, 0, SamplingParams(temperature=0.0), 1)
        chunk = Slice.of_prompt("warm-up", 0, 0, tuple(range(1, length + 1)), (SampleTarget(0, 0),))
        self.launch(StepPlan(-1, (init,), (TableWrite(0, 0, blocks),), (), (chunk,))).result()

    def _are_fed(self, rows: Sequence[Slice]) -> bool:
        """Whether rows by hand are laid out with what drafts they have; else each is its last token."""
        return any(row.num_tokens > 1 for row in rows)

    def _inputs(self, plan: StepPlan) -> CudaInputs:
        """Of a pass by hand. Mutates: what it feeds its rows."""
        if self._drafts is not None and self._are_fed(plan.rows):
            self._fed = self._drafts.fed(plan.rows, self._sharing)
        return build_cuda_inputs(plan, self._slots, self._sharing, self._has_fresh, self._fed)

    def _forward(self, plan: StepPlan) -> torch.Tensor:
        inputs = self._inputs(plan)
        with library_attention():
            output = self._model(
                input_ids=inputs.input_ids[None],
                position_ids=inputs.step.positions.long()[None],
                use_cache=False, logits_to_keep=inputs.logit_rows, paged=inputs.step,
            )  # fmt: skip
        logits: torch.Tensor = output.logits[0].float()
        return logits

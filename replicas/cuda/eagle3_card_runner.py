"""The model runner on a card with an EAGLE-3 head, which follows each of its steps, in front of prompts too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from replicas.cuda.card_drafts import CardDrafting, CardDrafts
from replicas.cuda.card_eagle3 import CardEagle3
from replicas.cuda.card_forward import CardForward
from replicas.cuda.graph_passes import Pass
from replicas.cuda.graphs import PlannedPass, StepGraph
from replicas.cuda.head_follow import FollowedStates, FollowPass, follow_by_hand
from replicas.cuda.layer_taps import LayerTaps
from replicas.cuda.runner import CudaRunner
from replicas.cuda.step import CudaInputs
from replicas.cuda.tokens_in_flight import SettledTokens
from replicas.kv.host_pool import MovedBlocks
from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import LoadedModel
from replicas.model.model_runner import ForwardHandle
from replicas.sampling.sampled_tokens import SampledTokens
from replicas.start_step import start_step
from scheduler.plan import Slice, StepPlan

# Of a captured pass: the longest prompt's part, and rows beside it; or rows alone.
_MOST_TOKENS = 2304 + 128


@dataclass(frozen=True, slots=True)
class _Follows:
    """A captured pass's, and the graph of it."""

    made: FollowPass
    graph: StepGraph[None]


class Eagle3CardRunner(CudaRunner):
    """As its base. One thread. A head that fails is asked no more; texts go on."""

    def __init__(
        self,
        loaded: LoadedModel,
        pool: KvPool,
        num_slots: int,
        max_model_len: int,
        num_host_blocks: int = 0,
        *,
        drafting: CardDrafting,
    ) -> None:
        """pool: with a layer for the head behind the model's. drafting: makes a CardEagle3. Raises UnsupportedModel for
        a model that no head can look into."""
        super().__init__(loaded, pool, num_slots, max_model_len, num_host_blocks, drafting=drafting)
        assert self._drafts is not None
        drafter = self._drafts.drafter
        assert isinstance(drafter, CardEagle3)
        self._eagle = drafter
        taps = LayerTaps(loaded.model, loaded.num_layers, drafter.head.layer_ids)
        self._states = FollowedStates(drafter.head, taps, _MOST_TOKENS)
        self._model.register_forward_hook(self._states.take)
        self._follows: dict[StepGraph[Pass], _Follows] = {}
        self._prompts: dict[int, tuple[int, ...]] = {}
        # Of the last pass, until its tokens are chosen: by a graph, or by hand.
        self._by_graph: tuple[PlannedPass, Pass] | None = None
        self._by_hand: CudaInputs | None = None

    @torch.inference_mode()
    def warm_up(self) -> bool:
        """As the base's."""
        super().warm_up()
        assert self._graphs is not None
        captured = self._graphs.captured()
        with start_step("capturing the head's layer behind each graph", len(captured), "graphs") as step:
            for graph in captured:
                # What was captured has not run yet: where its tokens lie stands in its memory behind the first replay.
                made = FollowPass(self._eagle.head, self._states, graph.repeat())
                self._follows[graph] = _Follows(made, StepGraph(made.static_input, made.run, self._graphs.memory, None))
                step.advance()
        torch.cuda.synchronize()
        return True

    def _prepare(self, plan: StepPlan) -> MovedBlocks | None:
        moved = super()._prepare(plan)
        for init in plan.slot_inits:
            self._prompts[init.slot] = init.context.prompt_ids
        self._eagle.tell()
        return moved

    def _run_passes(self, passes: list[PlannedPass] | None, plan: StepPlan) -> CardForward:
        """Several passes, of which each overwrites what the one in front gave, are one by hand."""
        self._by_graph = self._by_hand = None
        if not passes or len(passes) > 1:
            return super()._run_passes(None, plan)
        launched = passes[0].launch(self._drafts)
        self._by_graph = passes[0], launched
        return CardForward(plan, launched.logits[: passes[0].num_samples], fed=launched.fed)

    def _are_fed(self, rows: Sequence[Slice]) -> bool:
        """The head follows all of them."""
        return bool(rows)

    def _inputs(self, plan: StepPlan) -> CudaInputs:
        self._by_hand = super()._inputs(plan)
        return self._by_hand

    def _held(
        self, drafts: CardDrafts, planned: PlannedPass, launched: Pass, drawn: torch.Tensor
    ) -> torch.Tensor | None:
        accepted = super()._held(drafts, planned, launched, drawn)
        self._follow(lambda: self._behind_graph(planned, drawn, accepted))
        return accepted

    def _settled(self, forwarded: ForwardHandle, choice: SampledTokens) -> SampledTokens:
        settled = super()._settled(forwarded, choice)
        accepted = settled.accepted if isinstance(settled, SettledTokens) else None
        if (by_graph := self._by_graph) is not None:
            self._follow(lambda: self._behind_graph(by_graph[0], choice.tokens, accepted))
        elif (inputs := self._by_hand) is not None:
            plan, fed = forwarded.plan, self._fed
            next_ids = [self._next_id(chunk) for chunk in plan.chunks]
            self._follow(
                lambda: follow_by_hand(
                    self._eagle.head, self._states.of(len(inputs.input_ids)), plan, inputs, fed, choice.tokens,
                    accepted, self._has_fresh, next_ids,
                )
            )  # fmt: skip
        self._by_graph = self._by_hand = None
        return settled

    def _behind_graph(self, planned: PlannedPass, drawn: torch.Tensor, accepted: torch.Tensor | None) -> None:
        """drawn: of the pass's rows of logits, the first ones at least that the plan wants."""
        follows = self._follows[planned.graph]
        made = follows.made
        if len(made.counts):
            made.counts[: len(planned.rows)].copy_(accepted) if accepted is not None else made.counts.fill_(1)
        if planned.chunk is not None:
            made.next_id.fill_(self._next_id(planned.chunk))
        made.static_input[: len(drawn)].copy_(drawn)
        follows.graph.repeat()

    def _next_id(self, chunk: Slice) -> int:
        """Of the prompt, behind a chunk; -1: it is drawn."""
        if chunk.num_sampled:
            return -1
        prompt = self._prompts.get(chunk.slot, ())
        return prompt[chunk.end] if chunk.end < len(prompt) else 0

    def _follow(self, follow: Callable[[], None]) -> None:
        if self._drafts is not None:
            self._drafts.asking(lambda _: follow())

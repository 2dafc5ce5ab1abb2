"""Picks the model runner for a pool's device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from replicas.kv.kv_pool import KvPool
from replicas.model.model_loader import LoadedModel
from replicas.model.model_runner import ModelRunner
from replicas.speculation.drafter import Drafter
from replicas.speculation.drafting_runner import DraftingRunner
from replicas.speculation.eagle3_head import Eagle3Head
from replicas.speculation.eagle3_runner import Eagle3Runner
from replicas.speculation.history import TokenHistory
from scheduler.draft_planner import Speculation
from scheduler.speculation import SpeculationPolicy
from scheduler.speculator import Speculator

if TYPE_CHECKING:
    from replicas.cuda.card_drafts import CardDrafting


def make_runner(
    loaded: LoadedModel,
    pool: KvPool,
    num_slots: int,
    max_model_len: int,
    num_host_blocks: int = 0,
    has_two_lanes: bool = False,
    *,
    make_drafter: Callable[[TokenHistory], Drafter | None] | None = None,
    head: Eagle3Head | None = None,
    card_drafting: Callable[[], CardDrafting] | None = None,
) -> ModelRunner:
    """The runner for the pool's device. make_drafter: as of a DraftingRunner; head: as of an Eagle3Runner;
    card_drafting: what drafts on a card, with a head by that; none of them: it has no drafts.

    Raises UnsupportedModel, and NotDivisible if it can't have two lanes.
    """
    drafting = card_drafting() if card_drafting is not None and pool.tensor.is_cuda else None
    if pool.tensor.is_cuda and has_two_lanes:
        from replicas.cuda.lane_runner import DividedRunner

        return DividedRunner(loaded, pool, num_slots, max_model_len, num_host_blocks, drafting=drafting)
    if pool.tensor.is_cuda and head is not None and drafting is not None:
        from replicas.cuda.eagle3_card_runner import Eagle3CardRunner

        return Eagle3CardRunner(loaded, pool, num_slots, max_model_len, num_host_blocks, drafting=drafting)
    if pool.tensor.is_cuda:
        from replicas.cuda.runner import CudaRunner  # its kernels need triton, which a CPU torch lacks

        return CudaRunner(loaded, pool, num_slots, max_model_len, num_host_blocks, drafting=drafting)
    if head is not None:
        return Eagle3Runner(loaded, pool, num_slots, max_model_len, num_host_blocks, head=head)
    if make_drafter is not None:
        return DraftingRunner(loaded, pool, num_slots, max_model_len, num_host_blocks, make_drafter=make_drafter)
    return ModelRunner(loaded, pool, num_slots, max_model_len, num_host_blocks)


def speculation_of(runner: ModelRunner, max_drafts: int) -> Speculation:
    """Who chooses how many drafts there are, by what they cost this runner. max_drafts: of a row."""
    policy = SpeculationPolicy(
        max_drafts, runner.most_drafting_rows, runner.pads_drafts, max_tokens=runner.most_drafting_tokens
    )
    return Speculation(Speculator(policy), max_drafts, runner.can_draft, runner.pads_drafts, runner.takes_forced)

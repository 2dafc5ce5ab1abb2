"""Tokens guessed ahead on one H200 in the simulator: what the shipped choice makes of them, beside fixed numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from benchmarks.simulation.lanes import STEP_TIMES
from cluster.config.root import Config
from cluster.simulation.client import Job
from cluster.simulation.cost_model import load_costs
from cluster.simulation.draft_shape import DraftShape
from cluster.simulation.simulated_system import SimulatedSystem, shipped_decode
from cluster.simulation.step_model import StepModel
from cluster.simulation.system_shape import SystemShape, shape_of
from scheduler.constant_drafts import ConstantDrafts
from scheduler.draft_acceptance import DRAFT_COUNTS
from scheduler.draft_planner import Speculation

BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)
_NUM_OUT = 512
# Llama-3.1-8B in bfloat16 on an H200, measured: rows of a step, and its ms. That is with a context of each row: drafts
# read none of their own, so beyond 64 tokens steps with drafts are somewhat shorter than this has them.
_STEPS_MS = ((1, 4.2), (16, 5.2), (32, 6.1), (64, 7.3), (128, 9.9), (256, 16.0))


@dataclass(frozen=True, slots=True)
class Drafts:
    """first, further: how often a first draft holds, and one behind another that did. drafting_s: what makes them."""

    first: float
    further: float
    drafting_s: float = 0.0


# Nothing to find; n-grams, now and then; n-grams of edits; a head of EAGLE-3.
KINDS = {
    "nothing": Drafts(0.03, 0.2),
    "seldom": Drafts(0.2, 0.6),
    "edits": Drafts(0.7, 0.9),
    "head": Drafts(0.7, 0.62, 0.0016),
}


class MeasuredSteps(StepModel):
    """On lines between what was measured, by the tokens of rows; beyond as between the last two."""

    def step_s(self, num_rows: int, num_context_tokens: int, num_prompt_tokens: int = 0, num_pairs: int = 0) -> float:
        if not num_rows:
            return self.base_s + self.prompt_token_s * num_prompt_tokens
        index = min(max(1, bisect_left(_STEPS_MS, (num_rows, 0.0))), len(_STEPS_MS) - 1)
        (low, low_ms), (high, high_ms) = _STEPS_MS[index - 1], _STEPS_MS[index]
        rows_ms = low_ms + (high_ms - low_ms) * (num_rows - low) / (high - low)
        return rows_ms / 1e3 + self.prompt_token_s * num_prompt_tokens


def tpot_ms(batch: int, kind: Drafts, num_drafts: int | None, *, is_on: bool = True) -> float:
    """Mean of so many requests side by side. num_drafts: of each row in each step; None: as is chosen. is_on: false:
    none at all. Blocks for seconds."""
    costs = load_costs(STEP_TIMES)
    steps = MeasuredSteps.model_validate(costs.decode.model_dump() | {"drafting_s": kind.drafting_s})
    shape = _shape(costs.kv_bytes_per_token, is_on=is_on)

    def make(of: SystemShape, prefixes: Any) -> Any:
        if num_drafts is None or of.decode.drafts is None:
            return shipped_decode(of, prefixes)
        constant = _Constant(of.decode.drafts.max_drafts, None, True, num_drafts)
        return shipped_decode(replace(of, decode=replace(of.decode, drafts=constant)), prefixes)

    system = SimulatedSystem(shape, costs.model_copy(update={"decode": steps}), make_decode=make)
    jobs = [Job(i, 0.0, 16, _NUM_OUT, _NUM_OUT, acceptance=(kind.first, kind.further)) for i in range(batch)]
    return 1e3 * fmean([client.tpot_s or 0.0 for client in system.run(jobs).clients])


def compare_drafts(names: Sequence[str], batches: Sequence[int], say: Callable[[str], None]) -> dict[str, Any]:
    """TPOT in ms, by kind and batch: with none, with as many in each step, and with what is chosen."""
    found: dict[str, Any] = {}
    for name in names:
        say(f"{name}: TPOT ms, plain | 2, 4, 7 in each step | chosen")
        found[name] = {}
        for batch in batches:
            kind = KINDS[name]
            plain = tpot_ms(batch, kind, None, is_on=False)
            fixed = [tpot_ms(batch, kind, count) for count in DRAFT_COUNTS]
            chosen = tpot_ms(batch, kind, None)
            found[name][batch] = {
                "plain": plain,
                "fixed": dict(zip(DRAFT_COUNTS, fixed, strict=True)),
                "chosen": chosen,
            }
            columns = " ".join(f"{value:6.2f}" for value in fixed)
            say(f"  {batch:3} rows: {plain:6.2f} | {columns} | {chosen:6.2f}  {plain / chosen:5.2f} x")
    return found


@dataclass(frozen=True, slots=True)
class _Constant(DraftShape):
    num_drafts: int

    def speculation(self) -> Speculation:
        return replace(super(_Constant, self).speculation(), speculator=ConstantDrafts(self.num_drafts))


def _shape(kv_bytes_per_token: int, *, is_on: bool) -> SystemShape:
    pool = {"kv_capacity_tokens": 400_000, "device": "cuda", "num_gpus": 1, "max_running_sequences": 256, "lag": 1}
    config = Config.model_validate(
        {
            "model": {"source": "bundled", "dtype": "bfloat16"},
            "layout": "colocated",
            "speculative": {"method": "ngram" if is_on else "none"},
            "pools": {"decode": {**pool, "max_batch_tokens": 8192}},
        }
    )
    return shape_of(config, kv_bytes_per_token)

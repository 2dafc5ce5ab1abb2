"""The net under `model_support`: what is served is compared with transformers alone, with neighbours, before serving.

A model that slips through there answers wrongly here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from replicas.model.layer_check import compare_layers
from replicas.model.model_loader import LoadedModel
from replicas.model.model_runner import ModelRunner
from replicas.model.reference_logits import CheckedPrompt
from replicas.model_support import UnsupportedModel
from replicas.quantisation.scheme import Activations
from replicas.stored_numbers import FP8
from scheduler.plan import SampleTarget, Slice, SlotInit, StepPlan, TableWrite
from scheduler.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# Of the largest logit of a position.
_TOLERANCE_FLOAT32 = 1e-4
_TOLERANCE_LOW_PRECISION = 0.1
# With KV in 8 bits: a key that another order of sums moves over the middle between two numbers is a sixteenth larger.
_TOLERANCE_FLOAT32_OVER_FP8 = 0.05
_TOLERANCE_LOW_PRECISION_OVER_FP8 = 0.25
# Inputs of products that are rounded to 8 bits: where the last bit decides how, they come out a whole step apart.
_TOLERANCE_ROUNDED_INPUTS = 0.1
_TOLERANCE_LOW_PRECISION_ROUNDED_INPUTS = 0.25
# Layer by layer that grows until two right computations have little of their rounding in common; then they are about as
# far apart as rounding moves logits at all, at most the root of two times that. How far that is depends on the weights:
# random ones of tiny widths are 0.06 apart behind 32 layers of fp8, of Llama-3.1-8B's 0.30 (an H200; sums that differ
# by 2**-16 are enough). Logits that have nothing in common are more than 1 apart: that is seen still, and `layer_check`
# sees what one quantised layer does wrong.
_OF_ROUNDING = 1.5
_MOST_BY_ROUNDING = 0.7
# In low precision rounding may send a token to another expert, which changes its logits at will: one position in so
# many may differ then.
_POSITIONS_PER_OTHER_EXPERT = 8
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class _Compared:
    """Logits of one position: largest difference, largest logit of transformers' own. moved: as of CheckedPrompt."""

    difference: float
    scale: float
    moved: float
    position: int
    prompt_len: int
    num_neighbours: int

    def is_within(self, tolerance: float) -> bool:
        """False for what is no number, too."""
        by_rounding = min(_OF_ROUNDING * self.moved, _MOST_BY_ROUNDING * self.scale)
        return self.difference <= max(self.scale * tolerance, by_rounding)


def self_check(runner: ModelRunner, loaded: LoadedModel) -> float:
    """Compute the reference's prompts as they are served: side by side, in chunks, then token by token, over the pool.

    Each position's logits are compared with those of transformers alone, which rounded KV as the pool does. Returns the
    largest absolute difference; raises UnsupportedModel when one is beyond rounding. Blocks for less than a second.
    Mutates pool blocks and slots, so it runs before serving.
    """
    is_exact = loaded.dtype is torch.float32
    if runner.pool.layout.dtype is FP8:
        tolerance = _TOLERANCE_FLOAT32_OVER_FP8 if is_exact else _TOLERANCE_LOW_PRECISION_OVER_FP8
    else:
        tolerance = _TOLERANCE_FLOAT32 if is_exact else _TOLERANCE_LOW_PRECISION
    if loaded.scheme is not None and loaded.scheme.activations is not Activations.NONE:
        rounded = _TOLERANCE_ROUNDED_INPUTS if is_exact else _TOLERANCE_LOW_PRECISION_ROUNDED_INPUTS
        tolerance = max(tolerance, rounded)
    compared = list(_compare(runner, loaded))
    beyond = [one for one in compared if not one.is_within(tolerance)]
    has_experts = any("expert" in name for name, _ in loaded.model.named_modules())
    num_excused = 0 if is_exact or not has_experts else len(compared) // _POSITIONS_PER_OTHER_EXPERT
    if len(beyond) > num_excused:
        first = beyond[0]
        raise UnsupportedModel(
            f"{type(loaded.model).__name__}: logits over the paged pool differ from transformers' own by "
            f"{first.difference:.3g} (largest logit {first.scale:.3g}) at position {first.position} of a prompt of "
            f"{first.prompt_len} tokens beside {first.num_neighbours} others; serving it would give wrong text"
            f"{_where(loaded)}"
        )
    largest = max(one.difference for one in compared)
    log = logger.warning if beyond else logger.info
    log("self-check passed", extra={"event": "self_check", "max_difference": largest, "other_experts": len(beyond)})
    return largest


def _where(loaded: LoadedModel) -> str:
    """What is known of quantised layers, behind a refusal."""
    compared = list(compare_layers(loaded.model, loaded.dtype))
    if not compared:
        return ""
    wrong = next((one for one in compared if not one.is_right), None)
    if wrong is not None:
        return f". The first quantised layer that is wrong: {wrong.describe()}"
    return f". It is not its quantised layers: {max(compared, key=lambda one: one.error).describe()}, and no other more"


def _compare(runner: ModelRunner, loaded: LoadedModel) -> Iterator[_Compared]:
    """Run all prompts; each position that the reference has."""
    for together in _rounds(loaded.reference, runner):
        for step in _steps(together, runner):
            ours = runner.logits(step.plan()).cpu()
            for logits, (prompt, row) in zip(ours, step.expected, strict=True):
                reference = prompt.logits[row]
                yield _Compared(
                    difference=float((logits - reference).abs().max()),
                    scale=float(reference.abs().max()),
                    moved=0.0 if prompt.moved is None else float(prompt.moved[row]),
                    position=prompt.prompt_len - 1 + row,
                    prompt_len=prompt.prompt_len,
                    num_neighbours=len(together) - 1,
                )


@dataclass(slots=True)
class _Step:
    """A plan while it is put together, and whose logits its rows and chunks give: prompt, row of its reference."""

    inits: list[SlotInit] = field(default_factory=list)
    writes: list[TableWrite] = field(default_factory=list)
    chunks: list[Slice] = field(default_factory=list)
    rows: list[Slice] = field(default_factory=list)
    of_rows: list[tuple[CheckedPrompt, int]] = field(default_factory=list)
    of_chunks: list[tuple[CheckedPrompt, int]] = field(default_factory=list)

    @property
    def expected(self) -> list[tuple[CheckedPrompt, int]]:
        """In the order of the step's logits."""
        return self.of_rows + self.of_chunks

    def plan(self) -> StepPlan:
        return StepPlan(-1, tuple(self.inits), tuple(self.writes), (), (*self.rows, *self.chunks))

    def add_chunk(self, prompt: CheckedPrompt, slot: int, number: int) -> None:
        start, end = (0, *prompt.chunk_ends)[number : number + 2]
        ends_prompt = end == prompt.prompt_len
        if start == 0:
            self.inits.append(SlotInit(slot, 0, _GREEDY, None))
        targets = (SampleTarget(slot, 0),) if ends_prompt else ()
        self.chunks.append(Slice.of_prompt(f"self-check-{slot}", slot, start, prompt.token_ids[start:end], targets))
        if ends_prompt:
            self.of_chunks.append((prompt, 0))

    def add_row(self, prompt: CheckedPrompt, slot: int, position: int) -> None:
        """Whatever the last step would have chosen, the prompt's token is fed."""
        self.inits.append(SlotInit(slot, 0, _GREEDY, prompt.token_ids[position]))
        self.rows.append(Slice(f"self-check-{slot}", 0, slot, position))
        self.of_rows.append((prompt, position - prompt.prompt_len + 1))


def _rounds(prompts: Sequence[CheckedPrompt], runner: ModelRunner) -> Iterator[list[CheckedPrompt]]:
    """As many at once as there are slots and blocks for. Each alone fits: the pool holds one request of full length."""
    num_blocks, together = 0, list[CheckedPrompt]()
    for prompt in prompts:
        needed = _num_blocks(prompt, runner)
        if together and (len(together) == runner.num_slots or num_blocks + needed > runner.pool.num_blocks):
            yield together
            num_blocks, together = 0, []
        num_blocks += needed
        together.append(prompt)
    yield together


def _steps(prompts: Sequence[CheckedPrompt], runner: ModelRunner) -> Iterator[_Step]:
    """Steps of one round, each prompt in a slot of its own. Blocks are given out backwards."""
    free = list(range(runner.pool.num_blocks))
    tables = [tuple(free.pop() for _ in range(_num_blocks(prompt, runner))) for prompt in prompts]
    num_steps = max(p.first_step + len(p.chunk_ends) + len(p.token_ids) - p.prompt_len for p in prompts)
    for number in range(min(p.first_step for p in prompts), num_steps):
        step = _Step()
        for slot, prompt in enumerate(prompts):
            chunk = number - prompt.first_step
            position = prompt.prompt_len + chunk - len(prompt.chunk_ends)
            if chunk == 0:
                step.writes.append(TableWrite(slot, 0, tables[slot]))
            if 0 <= chunk < len(prompt.chunk_ends):
                step.add_chunk(prompt, slot, chunk)
            elif prompt.prompt_len <= position < len(prompt.token_ids):
                step.add_row(prompt, slot, position)
        yield step


def _num_blocks(prompt: CheckedPrompt, runner: ModelRunner) -> int:
    return -(-len(prompt.token_ids) // runner.pool.layout.block_size)

"""Masks of a step are made while its pass runs, one step ahead: the device has its next pass before they are begun.

In the order of events, so that no speed of a machine matters.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicas.grammars import grammar_text
from replicas.model.model_runner import ForwardHandle, StepHandle
from replicas.sampling.rules.token_masks import TokenMasks
from scheduler.grammar import Grammar
from scheduler.plan import StepOutput, StepPlan
from tests.engines.grammar_reference import GrammarReference
from tests.engines.local_system import GREEDY, LocalSystem
from tests.engines.tiny_model import tiny_settings
from tests.engines.tiny_tokenizer import END_ID

LIST = Grammar(
    grammar_text.json_schema(
        {"type": "array", "items": {"type": "boolean"}, "minItems": 4, "maxItems": 6}, strict=False
    )
)
PROMPTS = [[(7 * number + 13 * index) % 500 for index in range(9)] for number in range(6)]


@pytest.fixture
def system(tiny_folder: Path) -> Iterator[LocalSystem]:
    system = LocalSystem(tiny_settings("decode", tiny_folder, lag=1), None)
    yield system
    asyncio.run(system.wait_for_baseline())
    system.close()


def noted(system: LocalSystem, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What the engine does of each step, as it happens."""
    events: list[tuple[str, int]] = []
    engine = system.decode.engine
    runner, calls = engine.runner, engine.calls
    forward, choose, masks, result = runner.forward, runner.choose, calls.masks, StepHandle.result

    def noting_forward(plan: StepPlan) -> ForwardHandle:
        events.append(("pass", plan.step_id))
        return forward(plan)

    def noting_masks(plan: StepPlan) -> TokenMasks | None:
        events.append(("masks", plan.step_id))
        return masks(plan)

    def noting_choose(forwarded: ForwardHandle, masks: TokenMasks | None = None) -> StepHandle:
        events.append(("choice", forwarded.plan.step_id))
        return choose(forwarded, masks)

    def noting_result(handle: StepHandle) -> StepOutput:
        events.append(("tokens", handle.plan.step_id))
        return result(handle)

    monkeypatch.setattr(runner, "forward", noting_forward)
    monkeypatch.setattr(runner, "choose", noting_choose)
    monkeypatch.setattr(calls, "masks", noting_masks)
    monkeypatch.setattr(StepHandle, "result", noting_result)
    return events


def test_the_next_pass_is_on_its_way_before_masks_are_begun(
    system: LocalSystem, tiny_reference: GrammarReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = noted(system, monkeypatch)
    asked = [
        system.generation(prompt, 24, GREEDY, stop_token_ids=frozenset({END_ID}), grammar=LIST) for prompt in PROMPTS
    ]
    for generation, got in zip(asked, system.run(asked), strict=True):
        assert got.token_ids[0] == tiny_reference.text(generation.spec, 0)
    at: dict[str, dict[int, int]] = defaultdict(dict)
    for index, (what, step) in enumerate(events):
        at[what].setdefault(step, index)
    held = sorted(at["masks"])
    assert len(held) > 8
    for step in held:
        assert at["pass"][step] < at["masks"][step] < at["choice"][step], "a pass runs while its masks are made"
        assert at["choice"][step] < at["tokens"][step]
    follows = [step for step in held if step - 1 in at["masks"]]
    assert len(follows) > 6
    for step in follows:
        assert at["pass"][step] < at["tokens"][step - 1] < at["masks"][step], "its tokens are not waited for before"

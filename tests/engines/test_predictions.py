"""What a client expects of an answer, in engines: drafts are looked for in it, the text stays, and counts are told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.routing.generation import Generation
from tests.engines.drafting_system import draft_with, drafting
from tests.engines.local_system import LocalSystem
from tests.engines.tiny_model import save_tiny_model, tiny_settings

PROMPT = list(range(100, 140))  # nothing in it comes twice
LENGTH = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="module", params=["colocated", "split"])
def system(request: pytest.FixtureRequest, folder: Path) -> Iterator[LocalSystem]:
    prefill = tiny_settings("prefill", folder) if request.param == "split" else None
    running = LocalSystem(drafting(tiny_settings("decode", folder, lag=1)), prefill)
    draft_with(running.decode, 7)
    try:
        yield running
    finally:
        running.close()


def predicting(system: LocalSystem, predicted_ids: list[int], num_choices: int = 1) -> Generation:
    asked = system.generation(PROMPT, LENGTH, num_choices=num_choices)
    return replace(asked, spec=replace(asked.spec, predicted_ids=tuple(predicted_ids)))


def num_steps(system: LocalSystem) -> int:
    return system.decode.engine.steps.num_steps


def test_what_was_right_comes_in_fewer_steps(system: LocalSystem) -> None:
    alone = predicting(system, [])
    (expected,) = system.run([alone])
    assert (alone.drafts.num_accepted, alone.drafts.num_rejected) == (0, 0), "who predicted nothing is told nothing"
    text = expected.token_ids[0]
    before, asked = num_steps(system), predicting(system, text)
    (got,) = system.run([asked])
    assert got.token_ids == expected.token_ids
    num_accepted = asked.drafts.num_accepted
    assert num_accepted > LENGTH // 2
    # Each step brings a token of its own; the first token came with the prompt.
    assert num_steps(system) - before <= LENGTH - num_accepted + 5


def test_what_was_wrong_changes_nothing(system: LocalSystem) -> None:
    (expected,) = system.run([predicting(system, [])])
    text = expected.token_ids[0]
    # Right for three tokens at a time, then something else.
    wrong = [(token + 1) % 300 if place % 4 == 3 else token for place, token in enumerate(text)]
    asked = predicting(system, wrong)
    (got,) = system.run([asked])
    assert got.token_ids == expected.token_ids
    assert asked.drafts.num_rejected > 0


def test_every_choice_has_it(system: LocalSystem) -> None:
    (expected,) = system.run([predicting(system, [])])
    one = predicting(system, expected.token_ids[0])
    three = predicting(system, expected.token_ids[0], num_choices=3)
    system.run([one])
    (got,) = system.run([three])
    assert list(got.token_ids.values()) == [expected.token_ids[0]] * 3  # greedy
    assert three.drafts.num_accepted >= 2 * one.drafts.num_accepted > 0


def test_metrics(system: LocalSystem) -> None:
    (expected,) = system.run([predicting(system, [])])
    system.run([predicting(system, expected.token_ids[0])])
    found = {
        (family["name"], labels.get("position")): value
        for family in system.decode.metrics_snapshot()
        for _, labels, value in family["samples"]
        if family["name"].startswith("splitserve_speculative")
    }
    drafted, accepted = (
        [found[f"splitserve_speculative_{name}_tokens", str(place)] for place in range(1, 8)]
        for name in ("drafted", "accepted")
    )
    assert drafted[0] >= drafted[6] > 0
    assert accepted[0] >= accepted[6] > 0
    assert all(right <= made for right, made in zip(accepted, drafted, strict=True))

"""Every phase of a request is timed where it happens, and once: split and colocated, plain and beam search."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from scheduler.beam_search import BeamParams
from tests.engines.local_system import LocalSystem
from tests.engines.tiny_model import save_tiny_model, tiny_settings

PROMPT = list(range(40, 140))
NUM_TOKENS = 12


@pytest.fixture(scope="module", params=["split", "colocated"])
def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSystem]:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    prefill = tiny_settings("prefill", folder) if request.param == "split" else None
    system = LocalSystem(tiny_settings("decode", folder), prefill)
    yield system
    system.close()


def _timed(system: LocalSystem) -> dict[str, tuple[float, float]]:
    """Count and sum of each phase's histogram, by "phase pool"."""
    found: dict[str, tuple[float, float]] = {}
    for built, pool in zip(system.engines, ("decode", "prefill"), strict=False):
        for family in built.metrics_snapshot():
            name = family["name"].removeprefix("splitserve_").removesuffix("_seconds")
            if name in ("queue_time", "prefill_time", "kv_transfer", "decode_time"):
                values = {suffix: value for suffix, _, value in family["samples"] if suffix in ("_count", "_sum")}
                found[f"{name} {pool}"] = (values["_count"], values["_sum"])
    return found


@pytest.mark.parametrize("beam", [None, BeamParams(2, 1.0, False)], ids=["plain", "beam search"])
def test_each_phase_is_observed_once_where_it_happens(system: LocalSystem, beam: BeamParams | None) -> None:
    before = _timed(system)
    system.run([system.generation(PROMPT, NUM_TOKENS, beam=beam)])
    where = "prefill" if system.prefill else "decode"
    expected = {"queue_time decode", "decode_time decode"}
    if system.prefill or beam is None:  # a beam search that decode prefills is all decode's time
        expected.add(f"prefill_time {where}")
    expected |= {"queue_time prefill", "kv_transfer decode"} if system.prefill else set()
    deadline_s = time.monotonic() + 120.0
    while True:  # decode's reply, which is what is counted, comes behind the last token
        grown = {name: (count - before[name][0], s - before[name][1]) for name, (count, s) in _timed(system).items()}
        if {name for name, (count, _) in grown.items() if count} == expected:
            break
        assert time.monotonic() < deadline_s, grown
        time.sleep(0.01)
    assert all(count == 1 for count, _ in grown.values() if count)
    assert all(seconds > 0 for name, (count, seconds) in grown.items() if count and "queue" not in name)


def test_a_prompt_that_decode_computes_ends_with_its_first_token(system: LocalSystem) -> None:
    """Of one token there is nothing to decode: all of it is prefill's time, wherever that is."""
    before = _timed(system)
    system.run([system.generation(PROMPT, 1)])
    where = "prefill" if system.prefill else "decode"
    deadline_s = time.monotonic() + 120.0
    while (after := _timed(system))[f"prefill_time {where}"][0] == before[f"prefill_time {where}"][0]:
        assert time.monotonic() < deadline_s, after
        time.sleep(0.01)
    assert after[f"prefill_time {where}"][0] == before[f"prefill_time {where}"][0] + 1
    assert after["decode_time decode"][1] == before["decode_time decode"][1]

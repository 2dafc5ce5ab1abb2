"""The scheduler benchmark measures what it says."""

from __future__ import annotations

from benchmarks.scheduler.decision_costs import DecisionCosts, measure_decisions, scheduler_tables


def test_every_decision_takes_time_and_no_decision_looks_at_the_whole_queue() -> None:
    few, many = (measure_decisions(num_queued, repeats=20, rounds=3) for num_queued in (20, 2000))
    assert isinstance(few, DecisionCosts)
    for name in ("submit_us", "admit_none_us", "admit_one_us", "cancel_us"):
        assert getattr(few, name) > 0.0
        assert getattr(many, name) < 20 * getattr(few, name), "a hundred times the queue"


def test_the_table() -> None:
    row = {"num_queued": 10_000, "submit_us": 1.25, "admit_none_us": 2.0, "admit_one_us": 3.0, "cancel_us": 4.0}
    steps = [{"num_rows": 16, "plan_us": 18.25, "commit_us": 10.0}]
    parts = {"submit_us": 5.0, "admit_us": 30.25, "plan_us": 16.0, "commit_us": 98.0, "release_us": 70.0}
    measured = {"decisions": [row], "steps": steps, "cached_steps": steps, "prompts": [{"what": "found", **parts}]}
    text = scheduler_tables({"num_running": 7, "num_clients": 8, **measured})
    assert "| 10,000 | " in text
    assert "18.2 |" in text
    assert "1.2 |" in text
    assert "| found " in text

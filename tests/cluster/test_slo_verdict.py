"""Which objectives a request met: by what was measured of it, and by how it ended."""

from __future__ import annotations

import pytest

from cluster.config.slo import SloConfig
from cluster.monitoring.slo_verdict import RequestTimes, judge

SLO = SloConfig(ttft_s=1.0, tpot_s=0.1, e2e_s=10.0)


@pytest.mark.parametrize(
    ("times", "outcome", "met"),
    [
        (RequestTimes(5.0, 0.5, 0.05), "ok", {"ttft": True, "tpot": True, "e2e": True, "any": True}),
        (RequestTimes(10.0, 1.0, 0.1), "ok", {"ttft": True, "tpot": True, "e2e": True, "any": True}),
        (RequestTimes(5.0, 1.5, 0.05), "ok", {"ttft": False, "tpot": True, "e2e": True, "any": False}),
        (RequestTimes(5.0, 0.5, 0.2), "ok", {"ttft": True, "tpot": False, "e2e": True, "any": False}),
        (RequestTimes(11.0, 0.5, 0.05), "ok", {"ttft": True, "tpot": True, "e2e": False, "any": False}),
        (RequestTimes(0.6, 0.5), "ok", {"ttft": True, "e2e": True, "any": True}),  # a single token
        (RequestTimes(9.0, comes_whole=True), "ok", {"e2e": True, "any": True}),  # a beam search
        # Failed before the first token: quickly, and after a wait that was too long by itself.
        (RequestTimes(0.1), "rejected", {"any": False}),
        (RequestTimes(30.0), "timeout", {"ttft": False, "e2e": False, "any": False}),
        (RequestTimes(3.0, 0.5, 0.05), "server_error", {"ttft": True, "tpot": True, "any": False}),
        # Who leaves says nothing, unless there was reason to.
        (RequestTimes(0.5), "cancelled", {}),
        (RequestTimes(1.5), "cancelled", {"ttft": False, "any": False}),
        (RequestTimes(3.0, 0.5, 0.05), "cancelled", {"ttft": True, "tpot": True}),
        (RequestTimes(30.0), "client_error", {}),
    ],
)
def test_verdicts(times: RequestTimes, outcome: str, met: dict[str, bool]) -> None:
    assert judge(times, outcome, SLO) == met


def test_no_objective_for_the_end_judges_none() -> None:
    assert "e2e" not in judge(RequestTimes(500.0, 0.5, 0.05), "ok", SloConfig())

"""The field's definitions against examples worked out by hand."""

from __future__ import annotations

import math
from array import array

import pytest

from cluster.load.client import Target
from cluster.load.goodput import parse_goodput
from cluster.load.load_plan import LoadPlan
from cluster.load.processes import ClientUsage, LoadResult
from cluster.load.report import as_text, percentile, summarise, warnings
from cluster.load.request_record import RequestRecord

PLAN = LoadPlan(Target("http://127.0.0.1:1", "m"))


def _record(index: int, sent_s: float, token_times_s: list[float], ended_s: float, **changes: object) -> RequestRecord:
    values = {"num_input_tokens": 10, "num_output_tokens": len(token_times_s), **changes}
    times_s = array("d", token_times_s)
    return RequestRecord(index, sent_s, sent_s, ended_s, times_s, num_wanted_tokens=len(token_times_s), **values)  # type: ignore[arg-type]


def test_metrics_of_a_request() -> None:
    record = _record(0, 10.0, [10.5, 10.6, 10.9, 11.0], 11.01)
    assert record.ttft_s == pytest.approx(0.5)
    assert record.tpot_s == pytest.approx(0.5 / 3)
    assert record.itl_s == pytest.approx([0.1, 0.3, 0.1])
    assert record.e2el_s == pytest.approx(1.01)


def test_an_event_may_carry_several_tokens() -> None:
    record = _record(0, 0.0, [1.0, 2.0, 3.0], 3.0, num_output_tokens=9)
    assert record.tpot_s == pytest.approx(2.0 / 8)
    assert record.itl_s == pytest.approx([1.0, 1.0])


def test_one_token_has_no_tpot_and_meets_any_limit_on_it() -> None:
    record = _record(0, 0.0, [0.2], 0.2)
    assert record.tpot_s is None
    assert record.itl_s == []
    assert record.meets({"ttft": 0.3, "tpot": 0.001})
    assert not record.meets({"ttft": 0.1, "tpot": 0.001})


def test_without_a_stream_there_is_only_e2e() -> None:
    record = _record(0, 1.0, [], 3.0, num_output_tokens=5)
    assert (record.ttft_s, record.tpot_s, record.e2el_s) == (None, None, 2.0)
    assert record.meets({"e2el": 2.0, "ttft": 0.1})


def test_a_failed_request_never_meets_a_limit() -> None:
    assert not _record(0, 0.0, [0.1, 0.2], 0.2, error="cut").meets({"ttft": 1.0})
    assert not _record(0, 0.0, [0.1, 0.2], 0.2, error="cut").meets({})


@pytest.mark.parametrize(("percent", "expected"), [(0, 1), (50, 2.5), (90, 3.7), (100, 4)])
def test_percentiles_are_numpys(percent: float, expected: float) -> None:
    assert percentile([4, 1, 3, 2], percent) == pytest.approx(expected)


def test_percentile_of_little() -> None:
    assert percentile([7.0], 99) == 7.0
    assert math.isnan(percentile([], 50))


def test_summary() -> None:
    records = [
        _record(0, 0.0, [0.1, 0.2, 0.3], 0.3),  # TTFT 100 ms, TPOT 100 ms
        _record(1, 1.0, [1.4, 1.45, 1.5], 1.5),  # 400, 50
        _record(2, 2.0, [2.1], 4.0, error="cut"),
        _record(3, 3.0, [3.2, 3.23, 3.26], 3.3),  # 200, 30
    ]
    result = LoadResult(records, [ClientUsage(0.5, 4.0)], duration_s=4.0)
    summary = summarise(PLAN, result, parse_goodput(["ttft:300", "tpot:60"]))
    assert (summary["completed"], summary["failed"], summary["errors"]) == (3, 1, {"cut": 1})
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (30, 9)
    assert summary["request_throughput"] == 0.75
    assert summary["output_throughput"] == 2.25
    assert summary["total_token_throughput"] == 9.75
    # Only the last one is within both: one of four sent, in four seconds.
    assert (summary["request_goodput"], summary["goodput_fraction"]) == (0.25, 0.25)
    assert summary["mean_ttft_ms"] == pytest.approx(700 / 3)
    assert summary["median_ttft_ms"] == pytest.approx(200)
    assert summary["p90_ttft_ms"] == pytest.approx(360)
    assert summary["std_ttft_ms"] == pytest.approx(124.722, abs=0.01)
    assert summary["p50_tpot_ms"] == pytest.approx(50)
    assert summary["mean_itl_ms"] == pytest.approx((100 + 100 + 50 + 50 + 30 + 30) / 6)
    assert summary["max_e2el_ms"] == pytest.approx(500)
    assert summary["client_cpu_cores"] == [0.125]
    assert "1 x cut" in as_text(summary)


def test_nothing_succeeded() -> None:
    result = LoadResult([_record(0, 0.0, [], 1.0, error="refused")], [ClientUsage(0.1, 1.0)], 1.0)
    summary = summarise(PLAN, result, {})
    assert summary["completed"] == 0
    assert "mean_ttft_ms" not in summary
    assert "1 x refused" in as_text(summary)


def test_a_busy_or_late_client_is_told() -> None:
    late = _record(0, 0.0, [0.2, 0.3], 0.3)
    late.scheduled_s = -0.05
    summary = summarise(PLAN, LoadResult([late], [ClientUsage(0.95, 1.0)], 1.0), {})
    busy, behind = warnings(summary)
    assert "more --processes" in busy
    assert "50 ms" in behind


def test_goodput_limits() -> None:
    assert parse_goodput(["ttft:500", "e2el:1500.5"]) == {"ttft": 0.5, "e2el": 1.5005}
    for wrong in ("itl:5", "ttft", "ttft:fast"):
        with pytest.raises(ValueError):
            parse_goodput([wrong])

"""What `splitserve check` says of patience that is shorter than a start."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config.file import config_of
from cluster.launch.start_waits import start_wait_findings

SCALING = {"min_replicas": 1, "max_replicas": 4}


def findings(ingress: dict[str, Any], **scaling: dict[str, Any] | None) -> list[str]:
    pools = {name: {"kv_capacity_tokens": 4096} for name in ("prefill", "decode")}
    for name, of_pool in scaling.items():
        if of_pool is not None:
            pools[name]["autoscaling"] = of_pool  # type: ignore[assignment]
    found = list(start_wait_findings(config_of({"ingress": ingress, "pools": pools})))
    assert not any(finding.is_error for finding in found)
    return [finding.text for finding in found]


@pytest.mark.parametrize(
    ("ingress", "decode", "begin"),
    [
        ({}, None, []),
        ({}, SCALING, []),
        ({"cold_start_timeout_s": 40.0}, None, []),  # nothing is ordered that they would wait for
        ({"cold_start_timeout_s": 40.0}, {"min_replicas": 2, "max_replicas": 2}, []),
        ({"cold_start_timeout_s": 40.0}, SCALING, ["ingress.cold_start_timeout_s: 40 s is less than a start takes"]),
        ({}, SCALING | {"expected_start_s": 400.0}, ["ingress.cold_start_timeout_s: 300 s is less than a start takes"]),
        ({"queue_timeout_s": 10.0}, SCALING, ["ingress.queue_timeout_s: 10 s is over before the replicas are ordered"]),
        ({"queue_timeout_s": 15.0}, SCALING, []),
        (
            {},
            SCALING | {"upscale_delay_s": 60.0},
            ["ingress.queue_timeout_s: 30 s is over before the replicas are"],
        ),
        ({"queue_timeout_s": 5.0}, SCALING | {"upscale_delay_s": 0.0}, []),
        ({"queue_timeout_s": 1.0}, SCALING | {"upscale_delay_s": 0.0}, ["ingress.queue_timeout_s: 1 s is over before"]),
        # The first one is ordered at once.
        ({"queue_timeout_s": 1.0}, {"min_replicas": 0, "max_replicas": 1}, []),
        (
            {"request_timeout_s": 65.0, "cold_start_timeout_s": 65.0, "queue_timeout_s": 30.0},
            SCALING,
            ["ingress.request_timeout_s: 65 s is over before a replica can be there"],
        ),
    ],
)
def test_what_is_warned_of(ingress: dict[str, Any], decode: dict[str, Any] | None, begin: list[str]) -> None:
    found = findings(ingress, decode=decode)
    assert len(found) == len(begin), found
    assert all(text.startswith(start) for text, start in zip(found, begin, strict=True)), found


def test_each_pool_by_its_own_guess() -> None:
    of_prefill = SCALING | {"expected_start_s": 500.0}
    (text,) = findings({"request_timeout_s": 700.0}, prefill=of_prefill, decode=SCALING)
    assert "pools.prefill.autoscaling.expected_start_s 500" in text

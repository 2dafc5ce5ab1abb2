"""Layout two_lanes from its config to its metrics: a whole server, whose engine computes prompts beside rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.golden.golden_set import load_goldens
from tests.server.generate import golden_request, post_all
from tests.server.running_server import RunningServer, run_server

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    changes = {"layout": "two_lanes", "pools.decode.num_threads": 1}
    with run_server("colocated.yaml", tmp_path_factory.mktemp("two lanes"), changes) as server:
        yield server


def test_texts_are_those_of_transformers_and_both_lanes_made_them(server: RunningServer) -> None:
    goldens = load_goldens()[::12]
    answers = post_all(server, [golden_request(golden) for golden in goldens], num_at_once=16)
    for golden, (answer,) in zip(goldens, answers, strict=True):
        golden.check(answer.token_ids)
        assert answer.finish_reason == "length"
    server.wait_for_baseline()
    assert server.total("splitserve_lanes") == 2
    assert server.total("splitserve_lane_steps_total", lane="prefill") > 0
    assert server.total("splitserve_lane_steps_total", lane="decode") > 0

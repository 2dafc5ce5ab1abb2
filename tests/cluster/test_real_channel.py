"""What decode sends over a real socket: tokens, how many of a prompt's it had already, and how its drafts held."""

from __future__ import annotations

import pytest

from tests.cluster.fake_model import Script, generation_of, undisturbed
from tests.cluster.fake_pools import FakeCluster
from tests.cluster.router_rig import PATIENT, running_router


@pytest.mark.parametrize("num_prefill", [0, 1], ids=["colocated", "split"])
async def test_tokens_and_what_is_told_with_them_arrive_once(num_prefill: int) -> None:
    generation = generation_of(n=3, max_tokens=8, timeout_s=120.0)
    async with running_router(FakeCluster(num_prefill=num_prefill, real_channel=True), **PATIENT) as rig:
        rig.cluster.play(Script(cached=(4, 1), drafted=((2, 1), (6, 5))))
        assert await rig.tokens(generation) == undisturbed(generation)
        assert len(rig.cluster.requests) == 1
        assert generation.finding.num_tokens == 4 or num_prefill, "prefill's own reply tells that, too"
        assert (generation.drafts.num_accepted, generation.drafts.num_rejected) == (5, 1)

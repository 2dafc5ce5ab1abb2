"""The figure of handoffs in parts, from the simulator: what is left to read when the first token is there."""

from __future__ import annotations

import pytest

from benchmarks.simulation.parts import NETWORKS, STEP_TIMES, first_two_tokens
from cluster.simulation.cost_model import load_costs


@pytest.mark.parametrize("network", NETWORKS)
def test_only_the_last_chunk_is_read_after_the_first_token(network: str) -> None:
    """Of 32,768 tokens: all of them where they are one chunk, and the fewer the smaller chunks are."""
    costs = load_costs(STEP_TIMES)
    transfer = costs.transfer.model_copy(update={"bytes_per_s": NETWORKS[network]})
    costs = costs.model_copy(update={"transfer": transfer})
    gaps_s = {size: first_two_tokens(costs, 32_768, size)[1] for size in (2048, 8192, 32_768)}
    moved_s = {size: costs.read_s(size) + 2 * costs.digest_s(size) for size in gaps_s}
    for size, gap_s in gaps_s.items():
        # Messages and a step of decode are the rest.
        assert gap_s - moved_s[size] == pytest.approx(gaps_s[2048] - moved_s[2048], abs=2e-3)
        assert 0.0 < gap_s - moved_s[size] < 0.01
    if network == "100 Gb/s":
        assert gaps_s[32_768] > 0.34
        assert gaps_s[8192] < 0.11

"""Whatever befalls the cluster, texts are right or end with an honest error, and nothing is left behind or hangs.

Which seed fails is said with the command that tells its whole story.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from tests.simulated_cluster.seed_run import Run, Simulation

_NUM_SEEDS = 200
_NUM_ALL = 20_000
_CHUNK = 1000
_MOST_TOLD = 60  # lines of a story in a test's report

# Of each of these something must have happened, or the seeds would show nothing.
_KINDS = {
    "KV read", "cancel", "freeze", "kill", "leave", "swap", "links break", "link breaks", "channel stuck",
    "note lost", "note twice", "note late", "note garbled", "read fails", "read hangs", "read falsified",
    "frame lost", "frame late", "frame garbled", "migrate", "move: moved", "move: lost", "move: refused",
    "retry: queue", "retry: prefill", "retry: transfer", "retry: decode", "retry: frames",
}  # fmt: skip


def run_all(one: Simulation, seeds: Iterable[int]) -> tuple[Counter[str], Counter[str]]:
    """What was seen in them, and how their clients ended. Fails at the first in which something is wrong."""
    seen, ends = Counter[str](), Counter[str]()
    for seed in seeds:
        run = one.run(seed)
        assert not run.wrong, told(run)
        seen += run.seen
        ends += run.ends
    return seen, ends


def told(run: Run) -> str:
    return "\n".join([str(run), "how it ended:", *run.trace[-_MOST_TOLD:]])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_few_hundred_seeds(one: Simulation) -> None:
    seen, ends = run_all(one, range(_NUM_SEEDS))
    assert seen.keys() >= _KINDS, f"never seen: {sorted(_KINDS - seen.keys())}"
    assert ends["finished"] > 0.6 * ends.total()
    assert ends["open"] == ends["broken"] == 0


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, _NUM_ALL, _CHUNK))
def test_twenty_thousand_seeds(one: Simulation, first: int) -> None:
    run_all(one, range(first, first + _CHUNK))


def test_the_same_seed_gives_the_same_story(one: Simulation) -> None:
    for seed in (1, 9, 26):
        story = one.run(seed, keeps_trace=True).trace
        assert len(story) > 20
        assert one.run(seed, keeps_trace=True).trace == story
    assert one.run(2, keeps_trace=True).trace != story

"""The parts of the engine benchmark that need no engine."""

from __future__ import annotations

import pytest

from benchmarks.engine.engine_streams import Stream, steady_tokens_per_s
from benchmarks.engine.step_plans import decode_step, prefill_steps, set_up
from cluster.load.tables import table


def test_tables_of_a_batch_do_not_overlap_and_hold_the_fed_token() -> None:
    plan = set_up(batch=3, context=32, block_size=16)
    blocks = [block for write in plan.table_writes for block in write.block_ids]
    assert len(blocks) == len(set(blocks)) == 3 * 3  # 33 tokens are 3 blocks
    assert [row.start for row in decode_step(3, 32).rows] == [32, 32, 32]
    assert plan.rows == decode_step(3, 32).rows


def test_a_prompt_is_cut_and_sampled_once_at_its_end() -> None:
    plans = prefill_steps(list(range(100)), step_tokens=40, block_size=16)
    chunks = [plan.chunks[0] for plan in plans]
    assert [(chunk.start, len(chunk.token_ids), chunk.num_sampled) for chunk in chunks] == [
        (0, 40, 0),
        (40, 40, 0),
        (80, 20, 1),
    ]
    assert len(plans[0].table_writes[0].block_ids) == 7
    assert [len(plan.slot_inits) for plan in plans] == [1, 0, 0]


def test_steady_rate_counts_only_while_all_decode() -> None:
    early = Stream([1] * 5, [0.0, 1.0, 2.0, 3.0, 4.0])
    late = Stream([1] * 5, [2.0, 3.0, 4.0, 5.0, 6.0])
    # From 2 to 4: the tokens at 3 and 4 of both.
    assert steady_tokens_per_s([early, late]) == 2.0
    with pytest.raises(ValueError, match="max_tokens"):
        steady_tokens_per_s([Stream([1, 1], [0.0, 1.0]), Stream([1, 1], [2.0, 3.0])])


def test_rate_of_a_stream_leaves_the_first_token_out() -> None:
    assert Stream([1, 2, 3], [10.0, 10.5, 11.0]).tokens_per_s == 2.0


def test_table() -> None:
    assert table(["a", "ms"], [["long name", 1.5], ["b", 22]]) == (
        "| a         |  ms |\n| --------- | --: |\n| long name | 1.5 |\n| b         |  22 |"
    )

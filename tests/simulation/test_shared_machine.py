"""Steps that slow each other down, against the same worked out piece by piece."""

from __future__ import annotations

import random

import pytest

from cluster.simulation.shared_machine import SharedMachine, slowed_s

_PIECE_S = 1e-4


def test_a_step_beside_one_that_is_known() -> None:
    machine = SharedMachine()
    assert machine.launch(0, "decode", 0.0, 1.0, 2.0, False) == 1.0
    # Half of a second beside it does a quarter of the work.
    assert machine.launch(1, "prefill", 0.5, 1.0, 2.0, False) == pytest.approx(0.5 + 0.5 + 0.75)


def test_beside_one_that_goes_on_all_of_it_is_slowed() -> None:
    machine = SharedMachine()
    machine.launch(0, "decode", 0.0, 0.1, 1.5, True)
    assert machine.launch(1, "prefill", 0.05, 1.0, 1.2, False) == pytest.approx(0.05 + 1.2)


def test_what_begins_later_delays_the_next_step() -> None:
    machine = SharedMachine()
    machine.launch(0, "decode", 0.0, 1.0, 2.0, True)
    machine.launch(1, "prefill", 0.5, 10.0, 1.0, False)
    # Half a second was left, which takes a whole one now; the next is beside the prompt altogether.
    assert machine.launch(0, "decode", 1.0, 1.0, 2.0, True) == pytest.approx(1.5 + 2.0)


def test_engines_of_a_pool_leave_each_other_alone() -> None:
    machine = SharedMachine()
    machine.launch(0, "decode", 0.0, 1.0, 2.0, True)
    assert machine.launch(1, "decode", 0.5, 1.0, 2.0, True) == 1.5


def test_slowed_by_pieces() -> None:
    rng = random.Random(3)
    for _ in range(20):
        alone_s, contention, beside_s = rng.uniform(0.1, 1), rng.uniform(1, 3), rng.uniform(0, 3)
        now_s = done_s = 0.0
        while done_s < alone_s:
            done_s += _PIECE_S / (contention if now_s < beside_s else 1.0)
            now_s += _PIECE_S
        assert slowed_s(alone_s, contention, beside_s) == pytest.approx(now_s, abs=3 * _PIECE_S)


def test_many_steps_take_as_long_as_piece_by_piece() -> None:
    """Decode without a pause, prompts now and then: both end as if each had gone at its pace of every moment."""
    rng = random.Random(4)
    decode = [rng.uniform(0.05, 0.15) for _ in range(200)]
    prompts = [(0.4 * index + rng.uniform(0, 0.2), rng.uniform(0.05, 0.15)) for index in range(20)]
    machine, decode_end_s, prompt_ends_s, begun = SharedMachine(), 0.0, [], 0
    for alone_s in decode:
        start_s = decode_end_s
        decode_end_s = machine.launch(0, "decode", start_s, alone_s, 1.5, True)
        while begun < len(prompts) and prompts[begun][0] < decode_end_s:
            prompt_ends_s.append(machine.launch(1, "prefill", *prompts[begun], 1.2, False))
            begun += 1
    busy = [(start_s, start_s + 1.2 * alone_s) for start_s, alone_s in prompts]
    assert prompt_ends_s == pytest.approx([end_s for _, end_s in busy[:begun]])
    now_s, left_s = 0.0, sum(decode)
    while left_s > 0:
        left_s -= _PIECE_S / (1.5 if any(start_s <= now_s < end_s for start_s, end_s in busy) else 1.0)
        now_s += _PIECE_S
    assert decode_end_s == pytest.approx(now_s, rel=0.005)

"""The life of a request: which transitions are legal, and nothing else."""

from __future__ import annotations

import pickle

import pytest

from scheduler.generation_spec import GenerationSpec
from scheduler.request import (
    LEGAL_TRANSITIONS,
    TERMINAL_STATES,
    IllegalTransition,
    Request,
    RequestState,
)
from scheduler.sampling_params import SamplingParams

QUEUED, ADMITTED, PREFILLING, LOADING, RUNNING, PREEMPTED, LEASED, FINISHED, CANCELLED, FAILED, EVICTED = RequestState

# Written out once more: the table of the code is not its own proof.
LEGAL = {
    (QUEUED, ADMITTED),
    (ADMITTED, PREFILLING),
    (ADMITTED, LOADING),
    (PREFILLING, RUNNING),
    (PREFILLING, LEASED),
    (PREFILLING, FINISHED),
    (LOADING, RUNNING),
    (RUNNING, FINISHED),
    (RUNNING, PREEMPTED),
    (RUNNING, EVICTED),
    (RUNNING, LEASED),  # it goes on elsewhere
    (PREEMPTED, RUNNING),
    (PREEMPTED, FINISHED),
    (LEASED, FINISHED),
    *(
        (state, end)
        for state in (QUEUED, ADMITTED, PREFILLING, LOADING, RUNNING, PREEMPTED, LEASED)
        for end in (CANCELLED, FAILED)
    ),
}
ALL_PAIRS = [(state, wanted) for state in RequestState for wanted in RequestState]


def request_in(state: RequestState, max_tokens: int = 4, stop_token_ids: frozenset[int] = frozenset()) -> Request:
    spec = GenerationSpec((1, 2, 3), (0,), max_tokens, stop_token_ids, SamplingParams())
    request = Request("r", spec, deadline_s=10.0)
    request.state = state
    return request


@pytest.mark.parametrize(("state", "wanted"), ALL_PAIRS, ids=lambda state: state.name)
def test_every_pair_of_states(state: RequestState, wanted: RequestState) -> None:
    request = request_in(state)
    if (state, wanted) in LEGAL:
        request.enter(wanted, 5.0)
        assert request.state is wanted
        assert request.entered_s == {wanted: 5.0}
    else:
        with pytest.raises(IllegalTransition, match=f"request r: {state.name} -> {wanted.name} is not legal"):
            request.enter(wanted, 5.0)
        assert request.state is state
        assert request.entered_s == {}


def test_the_table_names_every_state() -> None:
    assert LEGAL_TRANSITIONS.keys() == set(RequestState)
    assert {FINISHED, CANCELLED, FAILED, EVICTED} == TERMINAL_STATES


@pytest.mark.parametrize("state", RequestState, ids=lambda state: state.name)
def test_over_is_terminal(state: RequestState) -> None:
    assert request_in(state).is_over == (state in {FINISHED, CANCELLED, FAILED, EVICTED})


def test_the_first_time_in_a_state_counts() -> None:
    request = request_in(RUNNING)
    for state, now_s in ((PREEMPTED, 1.0), (RUNNING, 2.0), (PREEMPTED, 3.0), (RUNNING, 4.0)):
        request.enter(state, now_s)
    assert request.entered_s == {PREEMPTED: 1.0, RUNNING: 2.0}


def test_illegal_transition_survives_a_process_boundary() -> None:
    error = pickle.loads(pickle.dumps(IllegalTransition("r", QUEUED, RUNNING)))
    assert (error.request_id, error.state, error.wanted) == ("r", QUEUED, RUNNING)


@pytest.mark.parametrize(
    ("token_id", "num_known", "reason"),
    [
        (7, 1, "stop"),
        (7, 4, "stop"),  # also as the last token that max_tokens allows
        (8, 3, None),
        (8, 4, "length"),
    ],
)
def test_finish_reason(token_id: int, num_known: int, reason: str | None) -> None:
    request = request_in(RUNNING, max_tokens=4, stop_token_ids=frozenset({7}))
    assert request.finish_reason_of(token_id, num_known) == reason

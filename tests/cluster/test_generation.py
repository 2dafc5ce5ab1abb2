"""A leg's books over attempts and splits, and the mailboxes its tokens come through."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.routing.batch_queue import BatchQueue
from cluster.routing.generation import ChoiceState, GenerationItem, Leg, ProtocolError
from cluster.routing.mailboxes import Admitted, ChannelLost, Mail, Mailbox, Mailboxes
from replicas.messages import (
    BeamParams,
    EngineLoad,
    FinishReason,
    Frame,
    PromptLogprobs,
    Token,
    TokenLogprobs,
)
from tests.cluster.fake_model import generation_of

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
LOAD = EngineLoad(0, 0, 0, 10, 10, 0.0)
Output = BatchQueue[GenerationItem]


def new_leg(n: int, output: Output | None = None, max_tokens: int = 6) -> Leg:
    spec = generation_of(1, 2, 3, n=n, max_tokens=max_tokens)
    return Leg(spec, {choice: ChoiceState() for choice in range(n)}, output or BatchQueue())


def item(choice: int, index: int, token_id: int, reason: FinishReason | None = None) -> Token:
    return Token("request", choice, index, token_id, reason)


def emitted(output: Output) -> list[tuple[int, int]]:
    output.close()
    return [(token.choice, token.token_id) for token in asyncio.run(output.take()) if isinstance(token, Token)]


# -- a leg -----------------------------------------------------------------------------------------


def test_the_first_attempt_asks_for_everything() -> None:
    leg = new_leg(3)
    assert leg.attempt_spec() is leg.generation.spec
    spec = leg.attempt_spec()
    assert (spec.prompt_ids, spec.choices, spec.max_tokens) == ((1, 2, 3), (0, 1, 2), 6)


def new_search(output: Output) -> Leg:
    beam = BeamParams(4, early_stopping=True)
    generation = generation_of(1, 2, 3, n=4, max_tokens=6)
    spec = replace(generation.spec, beam=beam, num_returned=2, sampling=beam.sampling(0))
    return Leg(replace(generation, spec=spec), {0: ChoiceState(), 1: ChoiceState()}, output)


def test_a_search_asks_for_all_beams_and_emits_nothing_before_everything_is_here() -> None:
    output: Output = BatchQueue()
    leg = new_search(output)
    request = leg.attempt_spec()
    assert (request.choices, request.num_returned, request.beam) == ((0, 1, 2, 3), 2, leg.generation.spec.beam)
    for index, token_id in enumerate((10, 11)):
        leg.take(item(0, index, token_id, STOP if index else None))
    assert not leg.is_done
    assert not leg.has_emitted
    assert not output._items
    leg.take(item(1, 0, 20, LENGTH))
    assert leg.is_done
    assert emitted(output) == [(0, 10), (0, 11), (1, 20)]


def test_a_search_that_failed_halfway_begins_again_as_one() -> None:
    output: Output = BatchQueue()
    failed = new_search(output)
    failed.take(item(0, 0, 10, STOP))
    (leg,) = failed.split()
    request = leg.attempt_spec()
    assert (request.prompt_ids, request.choices, request.max_tokens) == ((1, 2, 3), (0, 1, 2, 3), 6)
    leg.take(item(0, 0, 10, STOP))
    leg.take(item(1, 0, 20, STOP))
    assert emitted(output) == [(0, 10), (1, 20)]


def test_a_search_of_one_token_is_over_with_prefill() -> None:
    output: Output = BatchQueue()
    leg = new_search(output)
    leg.take(item(0, 0, 10, LENGTH))
    leg.take(item(1, 0, 20, LENGTH))
    assert leg.is_done
    assert emitted(output) == [(0, 10), (1, 20)]


def test_tokens_come_out_once_and_in_order() -> None:
    output: Output = BatchQueue()
    leg = new_leg(2, output, max_tokens=3)
    assert not leg.has_emitted
    leg.take(item(0, 0, 10))
    leg.take(item(1, 0, 20, STOP))
    assert leg.has_emitted
    leg.take(item(0, 1, 11))
    assert not leg.is_done
    leg.take(item(0, 2, 12, LENGTH))
    assert leg.is_done
    assert emitted(output) == [(0, 10), (1, 20), (0, 11), (0, 12)]
    assert [leg.num_taken(choice) for choice in (0, 1)] == [3, 1]


@pytest.mark.parametrize("bad", [item(0, 0, 9), item(0, 2, 9), item(1, 1, 9)], ids=["again", "ahead", "after its end"])
def test_a_token_out_of_turn_is_not_passed_on(bad: Token) -> None:
    output: Output = BatchQueue()
    leg = new_leg(2, output)
    leg.take(item(0, 0, 10))
    leg.take(item(1, 0, 20, STOP))
    with pytest.raises(ProtocolError):
        leg.take(bad)
    assert emitted(output) == [(0, 10), (1, 20)]


def test_choices_with_one_history_stay_together() -> None:
    leg = new_leg(3)
    for choice in range(3):
        leg.take(item(choice, 0, 10))
    (again,) = leg.split()
    request = again.attempt_spec()
    assert (request.prompt_ids, request.choices, request.max_tokens) == ((1, 2, 3, 10), (0, 1, 2), 5)
    again.take(item(1, 0, 11))
    assert (again.num_taken(1), again.num_taken(0)) == (1, 0)


@pytest.mark.parametrize("ahead", [10, 99], ids=["one is a token ahead", "other tokens"])
def test_choices_that_have_parted_go_on_each_by_itself(ahead: int) -> None:
    leg = new_leg(3)
    leg.take(item(0, 0, 10))
    leg.take(item(0, 1, 11))
    leg.take(item(1, 0, ahead))
    leg.take(item(2, 0, 5, STOP))
    requests = [part.attempt_spec() for part in leg.split()]
    assert [(r.prompt_ids, r.choices, r.max_tokens) for r in requests] == [
        ((1, 2, 3, 10, 11), (0,), 4),
        ((1, 2, 3, ahead), (1,), 5),
    ]


def test_a_finished_choice_is_never_asked_for_again() -> None:
    leg = new_leg(2)
    leg.take(item(0, 0, 10, STOP))
    leg.take(item(1, 0, 10))
    (rest,) = leg.split()
    assert rest.open_choices == (1,)
    assert rest.attempt_spec().prompt_ids == (1, 2, 3, 10)
    rest.take(item(1, 0, 11, STOP))
    assert rest.is_done
    assert leg.is_done


def test_three_attempts_keep_one_account() -> None:
    output: Output = BatchQueue()
    leg = new_leg(1, output)
    for start in (0, 2, 4):
        request = leg.attempt_spec()
        assert request.prompt_ids == (1, 2, 3, *range(10, 10 + start))
        assert request.max_tokens == 6 - start
        leg.take(item(0, 0, 10 + start))
        leg.take(item(0, 1, 11 + start, LENGTH if start == 4 else None))
        if not leg.is_done:
            (leg,) = leg.split()
    assert emitted(output) == [(0, token_id) for token_id in range(10, 16)]


PARTS = (
    PromptLogprobs("request", 0, (None, TokenLogprobs(-1.0))),
    PromptLogprobs("request", 2, (TokenLogprobs(-2.0, ((7, -0.5),)),)),
)


def scored_leg(n: int, output: Output) -> Leg:
    generation = generation_of(1, 2, 3, n=n, max_tokens=6)
    sampling = replace(generation.spec.sampling, num_prompt_logprobs=1)
    generation = replace(generation, spec=replace(generation.spec, sampling=sampling))
    return Leg(generation, {choice: ChoiceState() for choice in range(n)}, output)


def test_a_prompts_logprobs_come_once_and_before_any_token() -> None:
    output: Output = BatchQueue()
    leg = scored_leg(2, output)
    assert leg.attempt_spec().sampling.num_prompt_logprobs == 1
    leg.take_prompt(PARTS[0])  # this attempt fails before its first token
    (leg,) = leg.split()
    for part in PARTS:
        leg.take_prompt(part)
    (leg,) = leg.split()  # so does this
    request = leg.attempt_spec()
    assert (request.sampling.num_prompt_logprobs, request.num_output_in_prompt) == (1, 0)
    for part in PARTS:
        leg.take_prompt(part)
    leg.take(item(0, 0, 10))
    for rest in leg.split():  # choice 1 has nothing yet, and still the prompt is not scored again
        request = rest.attempt_spec()
        assert request.sampling.num_prompt_logprobs is None
        assert request.num_output_in_prompt == len(request.prompt_ids) - 3
        rest.take(item(rest.open_choices[0], 0, 11))
    output.close()
    scored, *tokens = asyncio.run(output.take())
    assert scored == PromptLogprobs("g", 0, (None, TokenLogprobs(-1.0), TokenLogprobs(-2.0, ((7, -0.5),))))
    assert tokens == [item(0, 0, 10), item(0, 0, 11), item(1, 0, 11)]


def test_logprobs_of_a_prompt_that_are_missing_or_unasked_for_are_a_bug() -> None:
    leg = scored_leg(1, BatchQueue())
    with pytest.raises(ProtocolError):
        leg.take_prompt(PARTS[1])
    leg.take_prompt(PARTS[0])
    with pytest.raises(ProtocolError):
        leg.take(item(0, 0, 10))
    with pytest.raises(ProtocolError):
        new_leg(1).take_prompt(PARTS[0])


# -- mailboxes -------------------------------------------------------------------------------------


def frame(replica_id: str, admitted: tuple[str, ...] = (), tokens: tuple[Token, ...] = ()) -> Frame:
    return Frame(replica_id, "e", 0, LOAD, admitted, tokens, (), (), ())


def contents(box: Mailbox) -> list[Mail]:
    return list(iter(box.get_nowait, None))  # type: ignore[arg-type]


def test_admission_comes_before_the_tokens_of_the_same_frame() -> None:
    boxes = Mailboxes()
    box = boxes.open("request", "decode")
    boxes.deliver(frame("decode", ("request",), (item(0, 0, 1), item(0, 1, 2))))
    assert contents(box) == [Admitted(), item(0, 0, 1), item(0, 1, 2)]


def test_mail_goes_to_its_request_and_only_from_its_replica() -> None:
    boxes = Mailboxes()
    box, other = boxes.open("request", "decode"), boxes.open("other", "decode")
    boxes.deliver(frame("stranger", ("request",), (item(0, 0, 1),)))
    boxes.deliver(frame("decode", ("unknown",), (item(0, 0, 2),)))
    assert (contents(box), contents(other)) == ([item(0, 0, 2)], [])


def test_a_closed_box_takes_nothing() -> None:
    boxes = Mailboxes()
    box = boxes.open("request", "decode")
    assert len(boxes) == 1
    boxes.close("request")
    boxes.close("request")
    boxes.deliver(frame("decode", ("request",), (item(0, 0, 1),)))
    boxes.lose("decode", "gone")
    assert (len(boxes), contents(box)) == (0, [])


def test_lost_frames_are_told_to_everybody_at_that_replica() -> None:
    boxes = Mailboxes()
    here, too, elsewhere = (boxes.open(name, name[0]) for name in ("a1", "a2", "b1"))
    boxes.lose("a", "gone")
    assert [contents(box) for box in (here, too, elsewhere)] == [[ChannelLost("gone")], [ChannelLost("gone")], []]

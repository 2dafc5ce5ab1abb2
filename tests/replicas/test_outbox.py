"""A step's tokens and scores in frames of bounded cost: all of them, in order, nothing twice."""

from __future__ import annotations

from itertools import pairwise

import pytest

from replicas.channels.outbox import NUM_ENTRIES, Outbox, prompt_parts
from replicas.channels.wire import MalformedMessage, decode_scores, encode_scores
from replicas.messages import PromptLogprobs, Token, TokenLogprobs


def scores(num_positions: int, num_top: int) -> tuple[TokenLogprobs | None, ...]:
    """Of a prompt's beginning: its first token has none."""
    top = tuple((token_id, -2.0 - token_id) for token_id in range(num_top))
    return (None, *(TokenLogprobs(-float(index), top) for index in range(1, num_positions)))


def num_entries(positions: tuple[TokenLogprobs | None, ...]) -> int:
    return sum(1 if scored is None else 1 + len(scored.top) for scored in positions)


@pytest.mark.parametrize("num_top", [0, 1, 20, 5000])
def test_a_prompt_in_parts_is_the_prompt(num_top: int) -> None:
    prompt = PromptLogprobs("r", 7, scores(5000 if num_top < 100 else 4, num_top))
    parts = list(prompt_parts(prompt))
    assert tuple(position for part in parts for position in part.positions) == prompt.positions
    assert [part.start for part in parts] == [
        7 + sum(len(before.positions) for before in parts[:index]) for index in range(len(parts))
    ]
    for part in parts:
        assert num_entries(part.positions) <= NUM_ENTRIES or len(part.positions) == 1
        assert part.positions
    for one, two in pairwise(parts):
        assert num_entries((*one.positions, two.positions[0])) > NUM_ENTRIES, "not smaller than need be"


def test_frames_of_a_step_admissions_first_and_tokens_last() -> None:
    top = tuple((token_id, -1.0) for token_id in range(20))
    tokens = [Token("b", 0, index, 9, None, TokenLogprobs(-0.5, top)) for index in range(1000)]
    prompts = [PromptLogprobs("b", 0, scores(600, 20)), PromptLogprobs("c", 3, scores(2, 0))]
    outbox = Outbox(["a", "b"], prompts, tokens, [("b", 32), ("c", 16)], [("b", 9, 7)])
    parts = list(outbox.parts())
    assert [admitted for admitted, _, _, _, _ in parts] == [("a", "b"), *[()] * (len(parts) - 1)]
    assert [cached for _, _, _, cached, _ in parts] == [(("b", 32), ("c", 16)), *[()] * (len(parts) - 1)]
    assert [drafted for _, _, _, _, drafted in parts] == [(("b", 9, 7),), *[()] * (len(parts) - 1)]
    assert [item for _, items, _, _, _ in parts for item in items] == tokens
    assert max(len(items) for _, items, _, _, _ in parts) <= NUM_ENTRIES // 21
    positions = tuple(p for _, _, of_prompts, _, _ in parts for part in of_prompts for p in part.positions)
    assert positions == (*prompts[0].positions, *prompts[1].positions)
    first_token = next(index for index, (_, items, _, _, _) in enumerate(parts) if items)
    assert not any(of_prompts for _, _, of_prompts, _, _ in parts[first_token:])
    plain = [Token("b", 0, index, 9, None) for index in range(300)]
    assert list(Outbox(["a"], [], plain).parts()) == [(("a",), tuple(plain), (), (), ())]
    assert list(Outbox(["a"]).parts()) == [(("a",), (), (), (), ())]
    assert list(Outbox(drafted=[("b", 1, 0)]).parts()) == [((), (), (), (), (("b", 1, 0),))]


def test_scores_in_a_reply_are_parts_that_can_be_decoded_one_by_one() -> None:
    prompt = PromptLogprobs("r", 0, scores(1000, 20))
    parts = encode_scores(prompt)
    assert len(parts) == 6
    assert tuple(scored for part in parts for scored in decode_scores(part)) == prompt.positions
    with pytest.raises(MalformedMessage):
        decode_scores(parts[0][:-1])

"""What nobody could generate is refused where it is said, or where it arrives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.beam_search import BeamParams
from scheduler.generation_spec import SALT_BYTES, GenerationSpec
from scheduler.grammar import Grammar
from scheduler.sampling_params import SamplingParams

SPEC = GenerationSpec((1, 2, 3), (0, 1), 4, frozenset({9}), SamplingParams())


@pytest.mark.parametrize(
    "change",
    [{"prompt_ids": ()}, {"choices": ()}, {"choices": (0, 0)}, {"max_tokens": 0}],
    ids=["no prompt", "no choice", "a choice twice", "no tokens"],
)
def test_nonsense_is_refused_where_it_is_made(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(change)).removesuffix('_ids')}"):
        replace(SPEC, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("salt", [b"s", bytes(15), bytes(17), bytes(4096)])
def test_a_salt_is_of_one_length_or_none(salt: bytes) -> None:
    assert replace(SPEC, cache_salt=bytes(SALT_BYTES)).cache_salt == bytes(16)
    assert (SPEC.cache_salt, SPEC.use_cache) == (b"", True)
    with pytest.raises(ValueError, match=f"cache_salt has {len(salt)} bytes, it must have 16 or none"):
        replace(SPEC, cache_salt=salt)


def test_a_search_has_beams_for_choices_and_asks_each_row_for_enough_candidates() -> None:
    beam = BeamParams(2)
    sampling = beam.sampling(len(SPEC.stop_token_ids), num_prompt_logprobs=5)
    assert (sampling.temperature, sampling.num_logprobs, sampling.num_prompt_logprobs) == (0.0, 3, 5)
    search = replace(SPEC, beam=beam, num_returned=1, sampling=sampling)
    assert (search.num_answers, SPEC.num_answers) == (1, 2)
    for change in (
        {"choices": (0, 2)},
        {"choices": (0, 1, 2)},
        {"num_returned": 0},
        {"num_returned": 3},
        {"sampling": SamplingParams()},
        {"grammar": Grammar("start: /a/")},
        {"stop_token_ids": frozenset({8, 9})},
    ):
        with pytest.raises(ValueError, match="beam"):
            replace(search, **change)


def test_output_begins_behind_the_prompt_but_in_a_replay() -> None:
    assert (SPEC.prompt_len, SPEC.output_start) == (3, 3)
    assert replace(SPEC, num_output_in_prompt=2).output_start == 1


@pytest.mark.parametrize(("values", "reason"), [({"text": ""}, "no text"), ({"repeats": True}, "begins after")])
def test_a_grammar_has_a_text_and_one_that_repeats_a_beginning(values: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        replace(Grammar("start: /a/"), **values)  # type: ignore[arg-type]

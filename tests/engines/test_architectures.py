"""Each architecture, as a tiny random model through real engines: the text that transformers gives alone, or refused.

A transformers that makes one change sides fails here, either way.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from replicas.model_support import UnsupportedModel
from tests.engines.architectures import REFUSED, SERVED, Case
from tests.engines.random_model import (
    PROMPT_LENGTHS,
    assert_same_text,
    generated_alone,
    prompts_of,
    save_random_model,
    served,
    tiny_config,
)

# Those of the default suite: of each way to differ one.
_OFTEN = {"ministral3", "mixtral", "gpt-bigcode", "gptj"}
_OFTEN_REFUSED = {"phi3-longrope", "falcon", "nemotron", "diffllama", "doge", "bert"}


def _parameters(cases: list[Case], often: set[str]) -> list[object]:
    assert often <= {case.name for case in cases}
    return [
        pytest.param(case, id=case.name, marks=() if case.name in often else pytest.mark.exhaustive) for case in cases
    ]


def _saved(case: Case, folder: Path) -> None:
    if not hasattr(transformers, case.config_class):
        pytest.skip(f"this transformers has no {case.config_class}")
    save_random_model(tiny_config(case.config_class, **case.changes), folder)


@pytest.mark.parametrize("case", _parameters(SERVED, _OFTEN))
def test_served_with_neighbours_as_transformers_does_alone(case: Case, tmp_path: Path) -> None:
    _saved(case, tmp_path)
    prompts = prompts_of(PROMPT_LENGTHS)
    alone = generated_alone(tmp_path, prompts)
    assert len({token for text in alone for token in text}) > 4, "texts that could not differ show nothing"
    for is_split in (True, False):
        ours = served(tmp_path, prompts, case.max_model_len, is_split=is_split)
        for prompt, text, expected in zip(prompts, ours, alone, strict=True):
            assert_same_text(tmp_path, prompt, text, expected)


@pytest.mark.parametrize("case", _parameters(REFUSED, _OFTEN_REFUSED))
def test_refused_by_name(case: Case, tmp_path: Path) -> None:
    _saved(case, tmp_path)
    with pytest.raises(UnsupportedModel, match=case.refusal):
        served(tmp_path, prompts_of((5,)), case.max_model_len)

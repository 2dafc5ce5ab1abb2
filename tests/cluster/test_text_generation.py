"""Prompts x choices as one sequence of deltas: order, stop strings, the first failure, and leaving at any moment."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import cast

import pytest

from cluster.api_error import ApiError
from cluster.config.slo import SloConfig
from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.monitoring.request_timer import RequestTimer
from cluster.text.choice import TextChoice
from cluster.text.generation import TextGeneration
from cluster.text.tokenizer import Tokenizer
from tests.cluster.fake_ingress import HANG, LENGTH, STOP, ByteTokenizer, ScriptedSource, Step, text
from tests.cluster.fake_model import generation_of

OVERLOADED = ApiError(429, "later", retry_after_s=1.0)


class Rig:
    def __init__(self, script: dict[str, Sequence[Step]], n: int = 1, stops: Sequence[str] = ()) -> None:
        self.source = ScriptedSource(**script)
        self.metrics = IngressMetrics("model", "1", "2")
        generations = [generation_of(*prompt.encode(), n=n, max_tokens=100) for prompt in script]
        tokenizer = cast("Tokenizer", ByteTokenizer())
        self.choices = [TextChoice(index, tokenizer, stops, False) for index in range(len(script) * n)]
        self.generation = TextGeneration(
            self.source, generations, self.choices, RequestTimer(self.metrics, "/v1/completions", SloConfig())
        )

    async def texts(self) -> dict[int, tuple[str, str]]:
        texts: defaultdict[int, str] = defaultdict(str)
        ends: dict[int, str] = {}
        async for deltas in self.generation.deltas():
            for delta in deltas:
                assert delta.index not in ends, "nothing comes after the end of a choice"
                texts[delta.index] += delta.text
                if delta.finish_reason is not None:
                    ends[delta.index] = delta.finish_reason
        return {index: (texts[index], ends[index]) for index in texts}


async def test_prompts_run_side_by_side_and_keep_their_indices() -> None:
    script = {
        "a": [*text(0, "A0", STOP), *text(1, "A1", LENGTH)],
        "b": [*text(1, "B1", STOP), *text(0, "B0-long", LENGTH)],
        "c": [*text(0, "C0", STOP), *text(1, "C1", STOP)],
    }
    rig = Rig(script, n=2)
    assert await rig.texts() == {
        0: ("A0", "stop"),
        1: ("A1", "length"),
        2: ("B0-long", "length"),
        3: ("B1", "stop"),
        4: ("C0", "stop"),
        5: ("C1", "stop"),
    }
    assert (rig.generation.usage.prompt_tokens, rig.generation.usage.completion_tokens) == (3, 17)


@pytest.mark.parametrize(
    ("stops", "stopped", "num_tokens"),
    [(["lo w"], "hel", 7), (["world"], "hello ", 11), (["h"], "", 1), (["xyz", "ld!"], "hello wor", 12), ([], "", 0)],
)
async def test_a_stop_string_ends_the_work_for_its_choice(stops: list[str], stopped: str, num_tokens: int) -> None:
    """At once: the source is closed though it has more, and usage ends with the token that completed the stop."""
    rig = Rig({"p": [*text(0, "hello world!"), *([HANG] if stops else text(0, "!", LENGTH))]}, stops=stops)
    text_, reason = (await rig.texts())[0]
    if stops:
        assert (text_, reason, rig.generation.usage.completion_tokens) == (stopped, "stop", num_tokens)
    else:
        assert (text_, reason) == ("hello world!!", "length")
    assert rig.source.open_prompts == []


async def test_one_choice_stops_early_and_the_others_go_on() -> None:
    """What is still generated for it is neither shown nor counted."""
    steps = [*text(0, "ab#"), *text(1, "xy"), *text(0, "never", LENGTH), *text(1, "z", LENGTH), HANG]
    rig = Rig({"p": steps}, n=2, stops=["#"])
    assert await rig.texts() == {0: ("ab", "stop"), 1: ("xyz", "length")}
    assert rig.generation.usage.completion_tokens == 6
    assert rig.source.open_prompts == []


async def test_the_first_failure_ends_the_others_after_what_came_before_it() -> None:
    rig = Rig({"a": [*text(0, "aaa"), HANG], "b": [*text(0, "bbb"), OVERLOADED], "c": [HANG]})
    shown: list[str] = []

    async def consume() -> None:
        async for deltas in rig.generation.deltas():
            shown.extend(delta.text for delta in deltas)

    with pytest.raises(ApiError, match="later"):
        await consume()
    assert sorted(shown) == list("aaabbb")
    assert rig.source.open_prompts == []


async def test_a_failure_after_another_prompt_has_finished() -> None:
    rig = Rig({"a": text(0, "a", STOP), "b": [*text(0, "bbb"), OVERLOADED]})
    with pytest.raises(ApiError, match="later"):
        await rig.texts()


async def test_a_bug_in_the_source_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        await Rig({"a": [*text(0, "a"), ZeroDivisionError()]}).texts()


@pytest.mark.parametrize("steps", [[], text(0, "abc"), [*text(0, "a", STOP), *text(1, "b")]])
async def test_tokens_that_end_too_early_are_no_answer(steps: list[Step]) -> None:
    """Never a text that is cut short in silence."""
    with pytest.raises(AssertionError, match="ended before"):
        await Rig({"p": steps}, n=2).texts()


@pytest.mark.parametrize("script", [{"a": [*text(0, "abcd", STOP)], "b": [*text(0, "wxyz"), HANG]}, {"a": [HANG]}])
async def test_leaving_at_any_moment_ends_all_work(script: dict[str, list[Step]]) -> None:
    before = asyncio.all_tasks()
    for turns in range(60):
        rig = Rig(script)
        consumer = asyncio.create_task(rig.texts())
        for _ in range(turns):
            await asyncio.sleep(0)
        consumer.cancel()
        await asyncio.wait({consumer})
        assert consumer.cancelled()
        assert rig.source.open_prompts == []
        assert asyncio.all_tasks() == before


async def test_closing_without_a_single_step_starts_nothing() -> None:
    rig = Rig({"a": [HANG]})
    await rig.generation.deltas().aclose()
    assert rig.source.specs == []

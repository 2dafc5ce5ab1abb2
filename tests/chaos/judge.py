"""Whether a text is the undisturbed one: what the server says when left alone, or transformers where they part."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from scheduler.generation_spec import GenerationSpec
from scheduler.grammar import Grammar
from scheduler.sampling_params import SamplingParams
from tests.chaos.asked import Asked
from tests.chaos.chaos_client import Choice, Stream
from tests.model_folder import model_folder

Verdict = Literal["right", "near tie", "wrong"]


@dataclass(slots=True)
class Undisturbed:
    """Outputs by request, as they were without any fault."""

    choices: dict[str, dict[int, Choice]] = field(default_factory=dict)

    def learn(self, stream: Stream) -> None:
        """Fails where a stream did not end, or a greedy one is not transformers'."""
        assert stream.is_whole, (stream.asked.name, stream.error)
        if stream.asked.golden is not None:
            stream.asked.golden.check(stream.choices[0].token_ids)
        self.choices[stream.asked.name] = stream.choices


class Judge:
    """Loads transformers' model only when a text differs: then float noise may be why, or a fault."""

    def __init__(self, undisturbed: Undisturbed) -> None:
        self._undisturbed = undisturbed

    def verdict(self, stream: Stream) -> Verdict:
        """Of all that came, also of a stream that failed or whose client left: that must be how the right text begins.

        What follows a near tie has another history, and is not judged.
        """
        expected = self._undisturbed.choices[stream.asked.name]
        unlike = [index for index, got in stream.choices.items() if not _agree(expected[index], got)]
        if not unlike:
            return "right"
        is_tie = all(self._is_near_tie(stream.asked, index, stream.choices[index].token_ids) for index in unlike)
        return "near tie" if is_tie else "wrong"

    def _is_near_tie(self, asked: Asked, index: int, ids: list[int]) -> bool:
        """Whether it is transformers' text, or parts from that where float noise decides."""
        reference, spec = self._reference, self._spec(asked)
        text = reference.text(spec, index)
        return text[: len(ids)] == ids or reference.parts_at_near_tie(spec, ids, index)

    @cached_property
    def _reference(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        from cluster.text.tokenizer import Tokenizer
        from tests.engines.grammar_reference import GrammarReference

        folder = model_folder()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return GrammarReference(model, folder, model.config.vocab_size, Tokenizer(folder).eos_token_ids)

    def _spec(self, asked: Asked) -> GenerationSpec:
        from transformers import AutoTokenizer

        from cluster.text.tokenizer import Tokenizer
        from replicas.grammars import grammar_text

        body, folder = asked.body, model_folder()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if asked.golden is not None:
            ids = asked.golden.prompt_ids
        elif "messages" in body:
            ids = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
        else:
            ids = tokenizer(body["prompt"])["input_ids"]
        grammar = None
        if "response_format" in body:
            grammar = Grammar(grammar_text.json_schema(body["response_format"]["json_schema"]["schema"]))
        params = SamplingParams(
            body["temperature"], body.get("top_k", 0), body.get("top_p", 1.0), seed=body.get("seed", 0)
        )
        ends = frozenset() if body.get("ignore_eos") else frozenset(Tokenizer(folder).eos_token_ids)
        choices = tuple(range(asked.num_choices))
        return GenerationSpec(tuple(ids), choices, body["max_tokens"], ends, params, grammar=grammar)


def _agree(expected: Choice, got: Choice) -> bool:
    """Whether what has come is the expected one, or its beginning if there is no end yet."""
    if got.finish_reason is not None:
        return got == expected
    ids = expected.token_ids[: len(got.token_ids)]
    return ids == got.token_ids and expected.text.startswith(got.text)

"""How the answers of the model that is served are taken apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from cluster.answers.answer_format import CallSyntax, FormatRow, ReasoningTags
from cluster.answers.answer_splitter import AnswerSplitter, TagSplitter
from cluster.answers.format_table import HERMES, ROWS, calls_in, reasoning_in
from cluster.answers.template_splitter import TemplateSplitter

if TYPE_CHECKING:
    from cluster.text.tokenizer import Tokenizer

# What a prompt ends with is looked for in so many last tokens: tags, and line ends behind them.
_TAIL_TOKENS = 16
_FIRST_OF_MARKERS = ("<", "[")  # not, for example, a token of three line ends
# A response template looks for where the answer begins.
_ANCHOR_TOKENS = 512


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """How the answers to one request are read.

    splitter: makes one for a choice. shown: special tokens that it must see, though text is shown without them.
    parser: by which of the table's syntaxes calls are read, for metrics. is_in_reasoning: the prompt has opened it.
    may_think: the answer may begin with reasoning: the model thinks, and the prompt has not closed it already.
    """

    splitter: Callable[[], AnswerSplitter]
    shown: Mapping[int, bytes]
    parser: str
    is_in_reasoning: bool = False
    may_think: bool = False


class AnswerParser:
    """One per ingress. Immutable.

    name: what the config says, or what "auto" has found. reasoning: None: the model does not think. calls: how it
    writes calls when it is forced to, which is some way in any case. reads_calls: whether calls are found in what it
    writes of itself. knows_calls: whether `calls` is the model's own way. has_own_template: its answers are read by the
    checkpoint's response template, but for those that are forced. shows_tools: whether it is told of tools. token_ids:
    of the tokens, by their text, that stand in tags.
    """

    def __init__(self, tokenizer: Tokenizer, name: str = "auto") -> None:
        """name: "auto", "none", or a row of `format_table`.

        auto: by the checkpoint's own response template where there is one, else by its chat template.
        """
        self._tokenizer = tokenizer
        row = ROWS.get(name)
        is_auto = name == "auto"
        if is_auto:
            row = FormatRow("auto", (), reasoning_in(tokenizer.template), calls_in(tokenizer.template))
        self.reasoning: ReasoningTags | None = None if row is None else row.reasoning
        found = None if row is None else row.calls
        self._template = _loaded(tokenizer.response_template) if is_auto and tokenizer.response_template else None
        self.calls: CallSyntax = found or HERMES
        self.reads_calls = found is not None or self._template is not None
        self.knows_calls = found is not None
        self.has_own_template = self._template is not None
        self.shows_tools = tokenizer.shows_tools
        names = [self.reasoning.opener if self.reasoning else None, found.name if found else None]
        described = " and ".join(part for part in names if part) or "none"
        self.name = "the checkpoint's response template" if self._template else described if is_auto else name
        self.token_ids: Mapping[str, int] = self._markers()
        self._template_text = orjson.dumps(tokenizer.response_template).decode().replace("\\", "")

    @property
    def reasoning_ids(self) -> tuple[int, int] | None:
        """The tokens that open and close what the model thinks, where each tag is one."""
        if self.reasoning is None:
            return None
        ids = self.token_ids
        opener, closer = ids.get(self.reasoning.opener), ids.get(self.reasoning.closer)
        return None if opener is None or closer is None else (opener, closer)

    def _markers(self) -> dict[str, int]:
        texts = [*self.calls.texts, *((self.reasoning.opener, self.reasoning.closer) if self.reasoning else ())]
        return {
            text: token_id
            for text, token_id in self._tokenizer.added_ids.items()
            if text[:1] in _FIRST_OF_MARKERS and any(text in each for each in texts)
        }

    def reading(
        self,
        prompt_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        is_forced: bool = False,
        continued: str | None = None,
    ) -> AnswerReading | None:
        """How the answers to a prompt are read; None: they are text and nothing else.

        tools: those that may be called, as OpenAI writes them. is_forced: a grammar has the model write calls as
        self.calls, if it calls. continued: the assistant's text that the prompt ends with, if the answer goes on with
        it.
        """
        offered = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        is_in_reasoning = self._is_in_reasoning(prompt_ids, continued)
        if self._template is not None and not is_forced:
            return self._by_template(prompt_ids, list(tools), is_in_reasoning)
        calls = self.calls if offered and (self.reads_calls or is_forced) else None
        if calls is None and self.reasoning is None:
            return None
        tags = () if self.reasoning is None else (self.reasoning.opener, self.reasoning.closer)
        texts = [*tags, *(calls.texts if calls is not None else ())]
        shown = self._special([marker for marker in self.token_ids if any(marker in text for text in texts)])
        parser = "none" if calls is None else calls.name
        return AnswerReading(
            lambda: TagSplitter(self.reasoning, calls, offered, is_in_reasoning),
            shown,
            parser,
            is_in_reasoning,
            self._may_think(prompt_ids, continued),
        )

    def _by_template(self, prompt_ids: Sequence[int], tools: list[Any], is_in_reasoning: bool) -> AnswerReading:
        from transformers.utils.chat_parsing import ResponseParser

        prompt = self._tokenizer.decode(prompt_ids[-_ANCHOR_TOKENS:], skip_special_tokens=False)
        named = [text for text in self._tokenizer.added_ids if text in self._template_text]
        return AnswerReading(
            lambda: TemplateSplitter(ResponseParser(self._template, prefix=prompt, tools=tools), bool(tools)),
            self._special(named),
            "response_template",
            is_in_reasoning,
            self.reasoning is not None,
        )

    def _special(self, texts: Sequence[str]) -> dict[int, bytes]:
        ids = self._tokenizer.added_ids
        known = {ids[text]: text.encode() for text in texts if text in ids}
        return {token_id: text for token_id, text in known.items() if token_id in self._tokenizer.special_ids}

    def _is_in_reasoning(self, prompt_ids: Sequence[int], continued: str | None) -> bool:
        """A template may open it itself; or open and close it at once, for a model that shall not think."""
        if self.reasoning is None:
            return False
        if continued is not None:
            return continued.rfind(self.reasoning.opener) > continued.rfind(self.reasoning.closer)
        tail = self._tokenizer.decode(prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
        return tail.rstrip().endswith(self.reasoning.opener)

    def _may_think(self, prompt_ids: Sequence[int], continued: str | None) -> bool:
        if self.reasoning is None:
            return False
        if continued is not None:
            return not continued.strip() or self._is_in_reasoning(prompt_ids, continued)
        tail = self._tokenizer.decode(prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
        return not tail.rstrip().endswith(self.reasoning.closer)


def _loaded(template: Any) -> Any:
    """Raises ValueError for a response template that transformers does not take."""
    try:
        from transformers.utils.chat_parsing.response_templates import load_response_template
    except ImportError:
        raise ValueError(
            "this checkpoint has a response_template, which this version of transformers does not know; set "
            "model.answer_parser to a name, or install a newer one"
        ) from None
    return load_response_template(template)

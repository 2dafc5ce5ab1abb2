"""An ingress without Ray: the real service over a tokenizer of bytes and a scripted source of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, cast

from starlette.types import ASGIApp

from cluster.api_error import ApiError
from cluster.config.limits import LimitsConfig
from cluster.config.root import Config
from cluster.grammars.compile_process import Settings
from cluster.grammars.grammar_compiler import GrammarCompiler
from cluster.grammars.grammar_source import GrammarSource
from cluster.grammars.known_grammars import KnownGrammars
from cluster.grammars.source_bounds import GrammarBounds
from cluster.http.app import build_http_app
from cluster.lifecycle.ingress_drain import IngressDrain
from cluster.lifecycle.readiness import Readiness
from cluster.monitoring.ingress_metrics import IngressMetrics
from cluster.monitoring.otel_tracing import Tracing
from cluster.openai.answer_grammar import AnswerGrammars
from cluster.openai.generation_service import GenerationService
from cluster.openai.responses.responses_service import ResponsesService
from cluster.openai.sampling_defaults import SamplingDefaults
from cluster.openai.tokenize_service import TokenizeService
from cluster.routing.generation import Generation, GenerationItem
from cluster.routing.slow_transfers import SlowestRead
from cluster.same_names import by_names
from cluster.text.answer_parser import AnswerParser
from cluster.text.chat_template import TemplateOptions
from cluster.text.length import check_length
from cluster.text.tokenizer import Tokenizer
from cluster.text.work_threads import WorkThreads
from replicas.messages import FinishReason, GenerationSpec, Token
from tests.cluster.byte_tokenizer import EOS, byte_tokenizer_json

MODEL = "the-model"
HANG = "hang"
Step = Token | Exception | str
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def text(choice: int, content: str | bytes, end: FinishReason | None = None, *, eos: bool = False) -> list[Token]:
    """One token for each byte; the last one ends the choice, if end is given. eos: that is one more, without text."""
    ids = list(content.encode() if isinstance(content, str) else content) + [EOS] * eos
    last = len(ids) - 1
    return [Token("", choice, i, token_id, end if i == last else None) for i, token_id in enumerate(ids)]


class ByteTokenizer:
    """Token ids are bytes, and one that ends an answer. Markers that a test adds come behind it."""

    eos_token_ids = frozenset({EOS})
    visible_bytes: Mapping[int, bytes] = {value: bytes([value]) for value in range(256)}
    response_template: Any = None

    def __init__(self, template: str = "", special: Sequence[str] = (), plain: Sequence[str] = ()) -> None:
        """special, plain: added tokens, special ones and others, of ids from 257 on."""
        self.template, self.special, self.plain = template, special, plain
        self.shows_tools = "tools" in template
        self.added_ids = {text: EOS + 1 + index for index, text in enumerate((*special, *plain))}
        self.vocab_size = EOS + 1 + len(self.added_ids)
        added = {id_: text.encode() for text, id_ in self.added_ids.items()}
        self.special_ids = frozenset({EOS, *(self.added_ids[text] for text in special)})
        self.bytes_of_token: Mapping[int, bytes] = {**self.visible_bytes, EOS: b"<eos>", **added}
        self.visible_bytes = {id_: text for id_, text in self.bytes_of_token.items() if id_ not in self.special_ids}
        self.rendered: list[tuple[list[Mapping[str, Any]], TemplateOptions | None]] = []

    def encode(self, text: str, *, add_special_tokens: bool, parse_special_tokens: bool = False) -> list[int]:
        return list(text.encode())

    def encode_prediction(self, text: str, max_tokens: int) -> tuple[int, ...]:
        return tuple(text.encode())[:max_tokens]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        names = self.visible_bytes if skip_special_tokens else self.bytes_of_token
        return b"".join(names.get(token_id, b"") for token_id in ids).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.bytes_of_token.get(token_id, b"").decode(errors="replace")

    def bad_word_sequences(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple((space + word.lstrip(" ")).encode()) for word in words for space in ("", " "))

    def encode_prompt(
        self,
        prompt: str | Sequence[int],
        max_tokens: int | None = None,
        keep_last: int | None = None,
        max_chars: int | None = None,
        param: str = "prompt",
    ) -> list[int]:
        if isinstance(prompt, str) and max_chars is not None and (max_tokens is None or keep_last):
            check_length(len(prompt), max_chars, param)
        ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise ApiError(400, "the prompt is empty", param="prompt", code="empty_prompt")
        ids = ids if keep_last is None else ids[-keep_last:]
        self.check_ids(ids, "prompt")
        if max_tokens is not None and len(ids) > max_tokens:
            raise ApiError(400, "too long", param="prompt", code="context_length_exceeded")
        return ids

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int | None = None,
        options: TemplateOptions | None = None,
        keep_last: int | None = None,
        max_chars: int | None = None,
    ) -> list[int]:
        self.rendered.append((list(messages), options))
        prompt = "".join(message["content"] for message in messages)
        return self.encode_prompt(prompt, max_tokens, keep_last, max_chars, "messages")

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            raise ApiError(400, f"{param} has an unknown id", param=param, code="invalid_token_id")


class ScriptedSource:
    """In the router's place. script: prompt text -> what comes, step by step. open_prompts: whose work goes on."""

    def __init__(self, **script: Sequence[Step]) -> None:
        self.script = script
        self.generations: list[Generation] = []
        self.open_prompts: list[str] = []

    @property
    def specs(self) -> list[GenerationSpec]:
        return [generation.spec for generation in self.generations]

    async def generate(self, generation: Generation) -> AsyncGenerator[list[GenerationItem], None]:
        prompt = bytes(generation.spec.prompt_ids).decode()
        self.generations.append(generation)
        self.open_prompts.append(prompt)
        try:
            for step in self.script[prompt]:
                await asyncio.sleep(0)
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, str):
                    await asyncio.Event().wait()
                else:
                    yield [step]
        finally:
            try:
                await asyncio.sleep(0)  # ending takes a moment, in which it may be cancelled again
            finally:
                self.open_prompts.remove(prompt)


class ByteCompiler:
    """Compiles grammars for ByteTokenizer, in a process that starts with the first of them."""

    def __init__(self, bounds: GrammarBounds, special: Sequence[str] = (), plain: Sequence[str] = ()) -> None:
        """special, plain: the tokenizer's added tokens."""
        self._bounds = bounds
        self._json = byte_tokenizer_json(special, plain)
        self._compiler: GrammarCompiler | None = None

    async def compile(self, source: GrammarSource, client: str) -> str:
        if self._compiler is None:
            self._compiler = GrammarCompiler(Settings(self._json, (EOS,), self._bounds))
        return await self._compiler.compile(source, client)

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()


class FakeIngress:
    """An HttpBackend without Serve."""

    model_name, max_model_len, started_at = MODEL, 512, 1_700_000_000

    def __init__(
        self,
        source: Any,
        sections: dict[str, Any] | None = None,
        defaults: SamplingDefaults | None = None,
        tokenizer: ByteTokenizer | None = None,
        parser: str = "auto",
        compiler: ByteCompiler | None = None,
        **limits: float,
    ) -> None:
        """sections: of the config, beside its limits. defaults: of the checkpoint. parser: model.answer_parser.
        compiler: for the same tokenizer, shared with others: a process takes a while to start.
        """
        self.sampling_defaults = defaults or SamplingDefaults()
        self.config = config = Config.model_validate(
            {
                "model": {"name": MODEL, "max_model_len": self.max_model_len},
                "pools": {"prefill": {"kv_capacity_tokens": 4096}, "decode": {"kv_capacity_tokens": 4096}},
                "limits": limits,
                **(sections or {}),
            }
        )
        self.limits: LimitsConfig = config.limits
        self.fairness = config.fairness
        self.missing: list[str] = []
        self.source = source
        self.metrics = IngressMetrics(MODEL, "1", "2")
        self.slowest_read: SlowestRead | None = None
        self.drain = IngressDrain(self.metrics)
        self.tracing: Tracing | None = None
        self.tokenizer = tokenizer or ByteTokenizer()
        real = cast("Tokenizer", self.tokenizer)
        self.threads = WorkThreads()
        added = (self.tokenizer.special, self.tokenizer.plain)
        self.compiler = compiler or ByteCompiler(by_names(GrammarBounds, self.limits), *added)
        grammars = AnswerGrammars(KnownGrammars(self.compiler, self.metrics))
        answers = AnswerParser(real, parser)
        self.service = GenerationService(
            config, real, source, self.metrics, self.threads, self.sampling_defaults, grammars, answers
        )
        self.responses_service = ResponsesService(self.service, self.limits, self.threads, self.sampling_defaults)
        self.tokenize_service = TokenizeService(config, real, self.threads)

    def app(self) -> ASGIApp:
        return build_http_app(self)

    def readiness(self) -> Readiness:
        missing = tuple(self.missing)
        return Readiness(missing, tuple(f"no {name}" for name in missing), slowest_read=self.slowest_read)

    async def render_metrics(self) -> bytes:
        return b"# EOF\n"

    def samples(self, name: str, suffix: str = "_total", **labels: str) -> float:
        """Sum of a family's samples with these labels."""
        (family,) = (family for family in self.metrics.snapshot() if family["name"] == name)
        return sum(v for end, of, v in family["samples"] if end == suffix and labels.items() <= of.items())

    def outcomes(self) -> dict[str, float]:
        """Requests ended, by outcome, those of no request left out."""
        (family,) = (family for family in self.metrics.snapshot() if family["name"] == "splitserve_requests")
        return {of["outcome"]: value for end, of, value in family["samples"] if end == "_total" and value}

    @property
    def num_in_flight(self) -> float:
        return self.samples("splitserve_requests_in_flight", "")

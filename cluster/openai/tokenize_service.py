"""Text to tokens and back for clients: what a request would be made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster.openai.served_model import check_model
from cluster.text.chat_template import TemplateOptions
from cluster.text.length import size_up_to
from cluster.text.work_threads import LONG

if TYPE_CHECKING:
    from cluster.config.serving import ServingConfig
    from cluster.openai.tokenize_request import DetokenizeBody, TokenizeBody
    from cluster.text.tokenizer import Tokenizer
    from cluster.text.work_threads import WorkThreads


class TokenizeService:
    """One per ingress replica. Stateless but for its tokenizer, which works in threads: texts may be long."""

    def __init__(self, config: ServingConfig, tokenizer: Tokenizer, threads: WorkThreads) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._threads = threads

    async def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        """The answer of /tokenize. Raises ApiError 4xx. Longer texts than the model takes are counted too, up to
        limits.max_text_chars.
        """
        check_model(body.model, self._config.model.name)
        messages = [message.for_template() for message in body.messages]
        size = len(body.prompt or "") + size_up_to(messages, LONG)
        return await self._threads.run(size, self._tokenize, body, messages)

    async def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        """The answer of /detokenize. Raises ApiError 4xx."""
        check_model(body.model, self._config.model.name)
        return await self._threads.run(len(body.tokens), self._detokenize, body)

    def _tokenize(self, body: TokenizeBody, messages: list[dict[str, Any]]) -> dict[str, Any]:
        ids = self._encode(body, messages)
        texts = [self._tokenizer.token_text(token_id) for token_id in ids] if body.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": self._config.model.max_model_len,
            "tokens": ids,
            "token_strs": texts,
        }

    def _detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        self._tokenizer.check_ids(body.tokens, "tokens")
        return {"prompt": self._tokenizer.decode(body.tokens, False)}

    def _encode(self, body: TokenizeBody, messages: list[dict[str, Any]]) -> list[int]:
        if messages:
            options = TemplateOptions(
                body.add_generation_prompt,
                body.continue_final_message,
                body.chat_template_kwargs,
                [tool.for_template() for tool in body.tools],
            )
            return self._tokenizer.apply_chat_template(
                messages, options=options, max_chars=self._config.limits.max_text_chars
            )
        assert body.prompt is not None
        return self._tokenizer.encode(
            body.prompt, add_special_tokens=body.add_special_tokens, parse_special_tokens=True
        )

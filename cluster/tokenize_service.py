"""Text to tokens and back for clients: what a request would be made of."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from cluster.chat_template import TemplateOptions
from cluster.served_model import check_model

if TYPE_CHECKING:
    from cluster.config import Config
    from cluster.tokenize_request import DetokenizeBody, TokenizeBody
    from cluster.tokenizer import Tokenizer


class TokenizeService:
    """One per ingress replica. Stateless but for its tokenizer, which works in threads: texts may be long."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer

    async def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        """The answer of /tokenize. Raises ApiError 4xx. Longer texts than the model takes are counted too."""
        check_model(body.model, self._config.model.name)
        ids = await asyncio.to_thread(self._encode, body)
        return {
            "count": len(ids),
            "max_model_len": self._config.model.max_model_len,
            "tokens": ids,
            "token_strs": [self._tokenizer.token_text(token_id) for token_id in ids]
            if body.return_token_strs
            else None,
        }

    async def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        """The answer of /detokenize. Raises ApiError 4xx."""
        check_model(body.model, self._config.model.name)
        self._tokenizer.check_ids(body.tokens, "tokens")
        return {"prompt": await asyncio.to_thread(self._tokenizer.decode, body.tokens, False)}

    def _encode(self, body: TokenizeBody) -> list[int]:
        if body.messages:
            options = TemplateOptions(
                body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs
            )
            messages = [message.for_template() for message in body.messages]
            return self._tokenizer.apply_chat_template(messages, options=options)
        assert body.prompt is not None
        return self._tokenizer.encode(
            body.prompt, add_special_tokens=body.add_special_tokens, parse_special_tokens=True
        )

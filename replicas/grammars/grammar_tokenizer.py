"""A checkpoint's tokenizer as grammars need it: the bytes of every token, and the tokens that end an answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llguidance import LLTokenizer

from replicas.grammars.control_tokens import without_control_texts


def grammar_tokenizer(
    folder: str, vocab_size: int, eos_token_ids: Iterable[int], trust_remote_code: bool = False
) -> LLTokenizer:
    """Of a checkpoint's folder or id on the Hub (of a GGUF: the folder it was converted into). Immutable, any thread.

    vocab_size: how many logits the model gives; more than the tokenizer knows are never allowed. If the tokenizer knows
    more, masks are wider than the logits, and what is beyond these counts for nothing. eos_token_ids: all that end an
    answer, to which the tokenizer's own end is added; unknown ones are left out.

    Blocks: a second for 128k tokens, and imports transformers. Raises OSError when there is no tokenizer; ValueError
    when it has no Rust implementation, is one that grammars can't be made for, or knows none of the ends.
    """
    from transformers import AutoTokenizer  # takes seconds

    loaded: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if not loaded.is_fast:
        raise ValueError(f"{type(loaded).__name__} has no Rust implementation: no grammars for it")
    backend = loaded.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    num_known = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    own = () if loaded.eos_token_id is None else (loaded.eos_token_id,)
    ends = sorted({id_ for id_ in (*eos_token_ids, *own) if 0 <= id_ < min(num_known, vocab_size)})
    if not ends:
        raise ValueError("the model has no token that ends an answer: a grammar could not end one")
    return LLTokenizer(without_control_texts(backend.to_str()), n_vocab=max(vocab_size, num_known), eos_token=ends)

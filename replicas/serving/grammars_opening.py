"""What an engine needs to hold texts against grammars, made ready while its weights are prepared."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from llguidance import LLTokenizer
from numpy.typing import NDArray

from replicas.answer_ends import answer_ends
from replicas.engine.constrained_rows import Grammars
from replicas.gguf.conversion import resolve_source
from replicas.grammars.grammar_cache import GrammarCache
from replicas.grammars.grammar_tokenizer import grammar_tokenizer
from replicas.grammars.mask_maker import MaskMaker
from replicas.settings import GrammarSettings, ModelSettings

logger = logging.getLogger(__name__)


class GrammarsOpening:
    """Begins on a thread of its own when it is made: half a second of one core, two for 128k tokens."""

    def __init__(self, model: ModelSettings, chosen: GrammarSettings, device: str, vocab_size: int) -> None:
        """After the weights were loaded: what must be converted or fetched has been. device: "cpu" | "cuda", to which
        masks go. vocab_size: the model's."""
        self._model, self._chosen, self._device, self._vocab_size = model, chosen, device, vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-tokenizer")
        self._tokenizer = self._thread.submit(self._open_tokenizer, vocab_size)
        self._thread.shutdown(wait=False)

    def result(self, compiled: Callable[[float], None]) -> Grammars | None:
        """Blocks for what is left to do. None, and a line in the log, if the model has no tokenizer that allows it.

        compiled: as GrammarCache has it.
        """
        try:
            tokenizer = self._tokenizer.result()
        except Exception as error:  # of tokenizers there are many kinds, each with errors of its own
            extra = {"event": "no_grammars", "reason": str(error)}
            logger.warning("no structured outputs with this model: requests for some are refused", extra=extra)
            return None
        chosen = self._chosen
        cache = GrammarCache(
            tokenizer,
            chosen.fuel,
            num_threads=chosen.grammar_threads,
            max_entries=chosen.cache_entries,
            max_bytes=chosen.cache_bytes,
            compiled=compiled,
        )
        new_words = _pinned_words if self._device == "cuda" else _words
        return Grammars(cache, MaskMaker(tokenizer, chosen.grammar_threads, new_words), self._vocab_size)

    def _open_tokenizer(self, vocab_size: int) -> LLTokenizer:
        folder = resolve_source(self._model.source, self._model.cache_dir)
        return grammar_tokenizer(folder, vocab_size, answer_ends(folder), self._model.trust_remote_code)


def _words(num_rows: int, num_words: int) -> NDArray[np.int32]:
    return np.empty((num_rows, num_words), dtype=np.int32)


def _pinned_words(num_rows: int, num_words: int) -> NDArray[np.int32]:
    """Memory that torch keeps and gives out again when no copy to the card reads it any more."""
    words: NDArray[np.int32] = torch.empty(num_rows, num_words, dtype=torch.int32, pin_memory=True).numpy()
    return words

"""What an engine needs to hold texts against grammars, made ready while its weights are prepared."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLTokenizer

from replicas.answer_ends import answer_ends
from replicas.engine.constrained_rows import Grammars
from replicas.gguf.conversion import resolve_source
from replicas.grammars.grammar_cache import GrammarCache
from replicas.grammars.grammar_tokenizer import grammar_tokenizer
from replicas.grammars.mask_maker import MaskMaker
from replicas.settings import EngineSettings

logger = logging.getLogger(__name__)


class GrammarsOpening:
    """Begins on a thread of its own when it is made: half a second of one core, two for 128k tokens."""

    def __init__(self, settings: EngineSettings, vocab_size: int) -> None:
        """After the weights were loaded: what must be converted or fetched has been. vocab_size: the model's."""
        self._settings = settings
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
        chosen = self._settings.structured_outputs
        cache = GrammarCache(
            tokenizer,
            chosen.fuel,
            num_threads=chosen.num_threads,
            max_entries=chosen.cache_entries,
            max_bytes=chosen.cache_bytes,
            compiled=compiled,
        )
        return Grammars(cache, MaskMaker(tokenizer, chosen.num_threads))

    def _open_tokenizer(self, vocab_size: int) -> LLTokenizer:
        model = self._settings.model
        folder = resolve_source(model.source, model.cache_dir)
        return grammar_tokenizer(folder, vocab_size, answer_ends(folder), model.trust_remote_code)

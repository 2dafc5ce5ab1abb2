"""What an ingress makes of a checkpoint besides its tokenizer: how answers end, how they are taken apart, grammars."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cluster.grammars.compile_process import Settings
from cluster.grammars.grammar_compiler import GrammarCompiler
from cluster.grammars.source_bounds import GrammarBounds
from cluster.openai.sampling_defaults import SamplingDefaults, checkpoint_defaults
from cluster.same_names import by_names
from cluster.text.answer_parser import AnswerParser
from cluster.user_error import ConfigError
from replicas.grammars.grammar_fuel import GrammarFuel

if TYPE_CHECKING:
    from cluster.config.serving import ServingConfig
    from cluster.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def answer_parser(config: ServingConfig, tokenizer: Tokenizer) -> AnswerParser:
    """Raises ConfigError where a checkpoint's own response template can't be used."""
    try:
        parser = AnswerParser(tokenizer, config.model.answer_parser)
    except ValueError as error:
        raise ConfigError(f"model.answer_parser: {error}") from error
    extra = {"event": "answer_parser", "parser": parser.name, "shows_tools": tokenizer.shows_tools}
    logger.info("how answers are taken apart", extra=extra)
    return parser


def grammar_compiler(tokenizer: Tokenizer, config: ServingConfig) -> GrammarCompiler:
    """Its process is started later."""
    ends = tuple(sorted(id_ for id_ in tokenizer.eos_token_ids if id_ < tokenizer.vocab_size))
    bounds, fuel = by_names(GrammarBounds, config.limits), by_names(GrammarFuel, config.structured_outputs.fuel)
    return GrammarCompiler(Settings(tokenizer.to_json(), ends, bounds, fuel))


def load_defaults(folder: str, config: ServingConfig, tokenizer: Tokenizer) -> SamplingDefaults:
    """Also says in the log what no config shows, and every answer depends on."""
    kind = config.model.sampling_defaults
    defaults = checkpoint_defaults(folder) if kind == "checkpoint" else SamplingDefaults()
    known = {"eos_token_ids": sorted(tokenizer.eos_token_ids), "sampling_defaults": kind, **defaults.described()}
    logger.info("ends and defaults of the checkpoint", extra={"event": "checkpoint_defaults", **known})
    return defaults

"""How answers are held to grammars, and how much work one grammar may cause."""

from __future__ import annotations

from pydantic import Field

from cluster.config.section import Section
from replicas.grammars.grammar_fuel import GrammarFuel

_FUEL = GrammarFuel()


class FuelConfig(Section):
    """Limits on one grammar, counted in steps of llguidance, so that they strike at the same place on every machine."""

    max_items: int = Field(
        default=_FUEL.max_items,
        ge=100,
        le=100_000,
        description="Most ways to go on at one place of an answer; an object of n optional properties has 4 n",
    )
    lexer_fuel: int = Field(
        default=_FUEL.lexer_fuel, ge=1_000, le=100_000_000, description="Most steps to prepare regular expressions"
    )
    mask_fuel: int = Field(
        default=_FUEL.mask_fuel, ge=1_000, le=10_000_000, description="Most steps of regular expressions for one token"
    )
    mask_items: int = Field(
        default=_FUEL.mask_items, ge=1_000, le=10_000_000, description="Most steps of rules for one token"
    )
    max_lexer_states: int = Field(
        default=_FUEL.max_lexer_states,
        ge=1_000,
        le=10_000_000,
        description="Most states kept, of 0.7 kB each, and as much for what they are made of",
    )
    max_symbols: int = Field(
        default=_FUEL.max_symbols, ge=1_000, le=10_000_000, description="Most symbols of a whole grammar"
    )
    max_joined_patterns: int = Field(
        default=_FUEL.max_joined_patterns,
        ge=1,
        le=16,
        description="Most regular expressions that one string must match all together; each doubles the time it takes",
    )


class StructuredOutputsConfig(Section):
    """What ingresses and engines go by alike."""

    grammar_threads: int = Field(
        default=2,
        ge=1,
        le=64,
        description="Threads of each replica that compile grammars, and that find the tokens which may come next; they "
        "work while the device computes. A grammar that many answers follow is compiled once for each. On a card 4 to "
        "8, with as many pools.*.num_cpus",
    )
    cache_entries: int = Field(
        default=512, ge=1, le=100_000, description="Compiled grammars that each replica keeps for requests to come"
    )
    cache_bytes: int = Field(
        default=256_000_000,
        ge=1_000_000,
        le=1024**4,
        description="Memory they may take together, in bytes, with what texts learn of them: 1 MB each, and more for "
        "long or hostile ones. Beyond: the longest unused is forgotten, and compiled again when it is asked for",
    )
    fuel: FuelConfig = Field(default=FuelConfig(), description="Work that one grammar may cause. Beyond: status 400")

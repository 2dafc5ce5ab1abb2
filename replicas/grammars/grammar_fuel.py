"""How much work one grammar may cause."""

from __future__ import annotations

from dataclasses import dataclass

from llguidance import LLParserLimits


@dataclass(frozen=True, slots=True)
class GrammarFuel:
    """Limits of llguidance, counted in its own steps, so that they strike at the same place on every machine; and one
    that it lacks. By default no known text takes a second of one core: not to be compiled, nor for any mask.

    max_items: alternatives at one place of a text; an object of n optional properties has 4 n. lexer_fuel, mask_fuel:
    steps of the lexer while it is built, and for one mask. mask_items: items of the parser for one mask.
    max_lexer_states: of 0.7 kB each, and as much for what they are made of (`learned`). max_symbols: of the whole
    grammar.
    max_joined_patterns: regular expressions that one string must match all together: each one doubles the time, which
    nothing else bounds (18 of `a.*1`, `a.*2`, ...: 0.3 s of a core; 20: 1.6 s).
    """

    max_items: int = 4_000
    lexer_fuel: int = 1_000_000
    mask_fuel: int = 200_000
    mask_items: int = 50_000
    max_lexer_states: int = 50_000
    max_symbols: int = 250_000
    max_joined_patterns: int = 12

    def limits(self, max_lexer_states: int) -> LLParserLimits:
        """As llguidance takes them. Its errors then say what has been learned (`replicas.grammars.learned`)."""
        return LLParserLimits(
            max_items_in_row=self.max_items,
            initial_lexer_fuel=self.lexer_fuel,
            step_lexer_fuel=self.mask_fuel,
            step_max_items=self.mask_items,
            max_lexer_states=max_lexer_states,
            max_grammar_size=self.max_symbols,
            verbose_errors=True,
        )

"""The texts of one request's choices, each held against the request's grammar."""

from __future__ import annotations

from collections.abc import Iterable

from replicas.grammars.compiled_grammar import CompiledGrammar
from replicas.grammars.followed_text import FollowedText
from scheduler.grammar import Grammar


class ChoiceTexts:
    """One thread at a time."""

    def __init__(self, grammar: Grammar, compiled: CompiledGrammar, begun_ids: Iterable[int]) -> None:
        """begun_ids: output that the prompt ends with, of a replay. Some 20 microseconds for each."""
        self._grammar, self._compiled = grammar, compiled
        begun_ids = tuple(begun_ids)
        self._begun: FollowedText | None = FollowedText(grammar, compiled, begun_ids) if begun_ids else None
        if self._begun is not None:
            self._begun.catch_up()
        self._by_choice: dict[int, FollowedText] = {}

    def of(self, choice: int) -> FollowedText:
        """Its text as far as it is known. Mutates."""
        if choice not in self._by_choice:
            begun = self._begun
            self._by_choice[choice] = FollowedText(self._grammar, self._compiled) if begun is None else begun.copy()
        return self._by_choice[choice]

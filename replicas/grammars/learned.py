"""What llguidance has learned of a grammar's words while texts were held against it, and the memory that this takes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llguidance import LLMatcher

# More tokens than any text has. llguidance tells its figures in the text of an error, and nowhere else.
_NEVER = 1 << 30
_LEXER_STEPS = re.compile(r'"lexer_cost": (\d+)')

# Bytes of one lexer, each an upper bound by what was measured (glibc's mallinfo2, 219 grammars of
# tests/cluster/hostile_grammars.py and tests/golden/schemas.json, 80 to 3,000 tokens of texts each): of any, for each
# character of the grammar's text, for each step spent on it (22 where each makes a state, else less), and for each
# state, of which products of many words have more than steps.
_OF_ANY, _OF_CHAR, _OF_STEP, _OF_STATE = 500_000, 200, 25, 650

# Tokens of a lexer's texts until its steps are asked for: at first; then four times as many, up to so many, and to as
# many as will have it spend so many steps if it goes on so.
_FIRST_LOOK, _LOOK_EVERY, _LOOK_STEPS = 4, 256, 50_000


@dataclass(slots=True)
class Looks:
    """When the steps of a lexer are asked for: of all texts that share it one does, for them all. Those of several
    threads may miscount, by tokens that are under way."""

    num_steps: int  # when they were last asked for
    _every: int = _FIRST_LOOK
    _left: int = _FIRST_LOOK

    def is_due(self) -> bool:
        """Behind another token. Mutates."""
        self._left -= 1
        return self._left <= 0

    def looked(self, num_steps: int) -> None:
        """So many are spent by now. Mutates."""
        of_token = max(1, (num_steps - self.num_steps) // self._every)
        self._every = max(1, min(_LOOK_EVERY, 4 * self._every, _LOOK_STEPS // of_token))
        self.num_steps, self._left = num_steps, self._every

    def again(self) -> None:
        """Each other text looks as well, behind its next token. Mutates."""
        self._left = 0


def num_steps(matcher: LLMatcher) -> int:
    """Steps that its lexer has spent up to this matcher's last mask: of all copies together, compiling included. 50 to
    250 microseconds, the longer the more tokens it has."""
    asked = matcher.deep_copy()
    asked.rollback(_NEVER)
    found = _LEXER_STEPS.search(asked.get_error())
    return int(found[1]) if found is not None else 0


def most_bytes(num_chars: int, num_steps: int, max_states: int) -> int:
    """What the lexer of a text of so many characters takes, at most. max_states: that it may have."""
    return _OF_ANY + _OF_CHAR * num_chars + _OF_STEP * num_steps + _OF_STATE * max_states


def most_steps(max_states: int) -> int:
    """As many as take the memory of so many states."""
    return max_states * _OF_STATE // _OF_STEP

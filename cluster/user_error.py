"""Errors whose text is meant for the person at the keyboard."""

from __future__ import annotations

from typing import ClassVar


class UserError(Exception):
    """Something the user can mend. The command line prints the text as it is, without a traceback.

    All arguments go to `Exception.__init__`, so that it survives pickling between processes.
    """

    exit_code: ClassVar[int] = 1


class ConfigError(UserError):
    """A config file that cannot be used. Each argument is one line: file, key path, what is wrong, what is allowed."""

    exit_code: ClassVar[int] = 2

    def __init__(self, *lines: str) -> None:
        super().__init__(*lines)
        self.lines = lines

    def __str__(self) -> str:
        return "\n".join(self.lines)

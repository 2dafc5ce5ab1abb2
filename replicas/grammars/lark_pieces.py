"""What a text in llguidance's Lark is made of, as far as one must know to find something in it."""

from __future__ import annotations

import re

# As llguidance 1.9's lexer takes them: a string, a regular expression (which may have several lines) and a comment are
# pieces without a name; `token` is the name of a control token, and `json` says that JSON follows.
LARK_PIECES = re.compile(
    r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/|(?://|#)[^\n]*|(?P<token><[^\s<>]+>)|(?P<json>%json)', re.DOTALL
)

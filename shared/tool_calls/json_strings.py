"""Quoted strings as models write them: what can end one, and what the text between the quotes says."""

from __future__ import annotations

import json
import re

_TYPOGRAPHIC = ("“”„‟＂", "‘’‚‛＇")

ENDS = {quote: quote for quote in "\"'`"} | {quote: group for group in _TYPOGRAPHIC for quote in group}
"""By opening quote: the characters that can end its string."""
APOSTROPHES = ("'", "’")

_ESCAPE = re.compile(r'\\u[0-9a-fA-F]{4}|\\\\"|\\.|"', re.DOTALL)
_ESCAPE_IN_SINGLE = re.compile(r"\\u[0-9a-fA-F]{4}|\\\\'|\\.|\"", re.DOTALL)


def decoded(body: str, quote: str) -> str:
    """What the text between two quotes says. Doubly escaped inner quotes are quotes."""
    escape = _ESCAPE_IN_SINGLE if quote == "'" else _ESCAPE
    return str(json.loads('"' + escape.sub(_as_json_escape, body.rstrip("\\") + _even(body)) + '"', strict=False))


def _even(body: str) -> str:
    """The backslashes at the end of a body, made a whole number of escapes."""
    count = len(body) - len(body.rstrip("\\"))
    return "\\" * (count + count % 2)


def _as_json_escape(match: re.Match[str]) -> str:
    token = match[0]
    if token in ('"', '\\\\"'):
        return '\\"'
    if token in ("\\'", "\\\\'"):
        return "'"
    if token == "\\\n":  # a line that goes on, as in Python
        return ""
    return token if len(token) > 2 or token[1] in '"\\/bfnrt' else "\\" + token

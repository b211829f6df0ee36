"""A reader for almost-JSON, for mistakes whose meaning is certain.

It accepts, beyond JSON: single quotes, raw newlines in strings, unknown escapes (`\\'` is a quote, any other keeps its
backslash), trailing commas, a missing comma before a key, `//` comments, True / False / None, and closing braces missing
right before a closing tag. It never guesses a value: a string without its closing quote is an error. Linear time.
"""

from __future__ import annotations

import json
import re
from typing import Any

_MAX_DEPTH = 64
_SPACE = re.compile(r"(?:\s|//[^\n]*)*+")
_STRING = re.compile(r'"([^"\\]*+(?:\\.[^"\\]*+)*+)"|\'([^\'\\]*+(?:\\.[^\'\\]*+)*+)\'', re.DOTALL)
_ESCAPE = re.compile(r'\\u[0-9a-fA-F]{4}|\\.|"', re.DOTALL)
_LITERAL = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null|True|False|None")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_KEY_AHEAD = re.compile(r"""["'][\w ]+["']\s*:""")


class Unreadable(ValueError):
    """No value can be read; `position` is where reading stopped."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(reason)
        self.position = position


def read(text: str, start: int, end: int) -> tuple[Any, int]:
    """The value that begins at `start` and the position after it; `end` bounds the reading. Raises Unreadable."""
    return _Reader(text, end).value(start, 0)


class _Reader:
    def __init__(self, text: str, end: int) -> None:
        self.text = text
        self.end = end

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        if depth > _MAX_DEPTH:
            raise Unreadable("it is nested too deeply", at)
        opener = self.text[at : at + 1] if at < self.end else ""
        if opener == "{":
            return self._object(at, depth)
        if opener == "[":
            return self._array(at, depth)
        if opener in ('"', "'") and opener:
            return self._string(at)
        return self._literal(at)

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        members: dict[str, Any] = {}
        at = self._skip(at + 1)
        while not self._at(at, "}"):
            key, at = self._string(at)
            at = self._skip(at)
            if not self._at(at, ":"):
                raise Unreadable('a ":" is missing', at)
            members[key], at = self.value(self._skip(at + 1), depth + 1)
            at = self._skip(at)
            if self.text.startswith("</", at):  # all that is missing are closing braces
                return members, at
            at = self._separator(at, "}", key_follows=True)
        return members, at + 1

    def _array(self, at: int, depth: int) -> tuple[list[Any], int]:
        items = []
        at = self._skip(at + 1)
        while not self._at(at, "]"):
            item, at = self.value(at, depth + 1)
            items.append(item)
            at = self._separator(self._skip(at), "]", key_follows=False)
        return items, at + 1

    def _separator(self, at: int, closer: str, *, key_follows: bool) -> int:
        if self._at(at, ","):
            return self._skip(at + 1)
        if self._at(at, closer) or (key_follows and _KEY_AHEAD.match(self.text, at, self.end)):
            return at
        raise Unreadable(f'a "," or "{closer}" is missing', at)

    def _string(self, at: int) -> tuple[str, int]:
        match = _STRING.match(self.text, at, self.end)
        if not match:
            quoted = self._at(at, '"') or self._at(at, "'")
            raise Unreadable("a string is not closed" if quoted else "a string is missing", self.end if quoted else at)
        body = match[1] if match[1] is not None else match[2]
        return json.loads('"' + _ESCAPE.sub(_as_json_escape, body) + '"', strict=False), match.end()

    def _literal(self, at: int) -> tuple[Any, int]:
        match = _LITERAL.match(self.text, at, self.end)
        if not match:
            raise Unreadable("a value is missing", at)
        try:
            return json.loads(_PYTHON.get(match[0], match[0])), match.end()
        except ValueError as error:  # a number with leading zeros or thousands of digits
            raise Unreadable(f"{match[0][:20]} is not a JSON number", at) from error

    def _skip(self, at: int) -> int:
        match = _SPACE.match(self.text, at, self.end)
        return match.end() if match else at

    def _at(self, at: int, character: str) -> bool:
        return at < self.end and self.text[at] == character


def _as_json_escape(match: re.Match[str]) -> str:
    token = match[0]
    if token == '"':  # inside single quotes
        return '\\"'
    if token == "\\'":
        return "'"
    return token if len(token) > 2 or token[1] in '"\\/bfnrt' else "\\" + token

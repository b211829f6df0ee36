"""JSON as models write it: strict JSON as it is, then mistakes whose meaning is certain.

Accepted beyond JSON: raw newlines in strings; single, triple, typographic and unescaped inner quotes; unknown escapes;
bare keys; comments; trailing commas; a missing comma before a key; doubled braces; Python's constants; JSON written
with its quotes escaped; and missing closing brackets where no string can have been cut: before markup that ends a call,
or at the end of the text behind a complete inner value. A quote ends a string only where the structure can go on behind
it, and no string but a strict one runs over markup that ends a call, so a broken call cannot swallow the next.
"""

from __future__ import annotations

import bisect
import json
import re
from dataclasses import dataclass, field
from typing import Any

from .text import LINE_SPACE, NEWLINE, SPACE, Text, Unreadable, Wait

_UNCLOSED = "a string is not closed"
_MAX_DEPTH = 64
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_ENDS = {'"': '"', "'": "'", "`": "`", **dict.fromkeys("“”„", "“”„"), **dict.fromkeys("‘’", "‘’")}
_IN_STRING = {quote: re.compile(rf"[^{ends}\\<\n]*") for quote, ends in _ENDS.items()}
_IN_KEY = {quote: re.compile(rf"[^{ends}\\\n]*") for quote, ends in _ENDS.items()}
_TRIPLE = {quote: re.compile(quote * 3) for quote in "\"'"}
_WORD = re.compile(r"[\w.$+-]*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,4000})(?:\.\d+)?(?:[eE][+-]?\d+)?")
_CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_LIMIT = re.compile(r"<(?:/[\w-]*(?:tool|func|call|invoke|json|response|param)|tool_call>)", re.IGNORECASE)
_LIMIT_PART = re.compile(r"<(?:/[\w-]*|[a-z_]{0,9})\Z", re.IGNORECASE)
_ESCAPE = re.compile(r"""(\\u[0-9a-fA-F]{4}|\\[/bfnrt]|\\\\(?!["']))|\\{0,2}(["'])|(\\\n)|\\""")
_ESCAPED_START = re.compile(r"[{\[]\s*\{?\s*\\")
_ESCAPED_TEXT = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)
_ESCAPED_TOKEN = re.compile(r"\\u[0-9a-fA-F]{4}|\\?.", re.DOTALL)
DECODER = json.JSONDecoder(strict=False, parse_constant=int)  # raw newlines are read, `int` refuses NaN


def read_value(text: Text, at: int) -> tuple[Any, int]:
    """The object or array that begins here, and the position behind it. Raises Unreadable."""
    try:
        return DECODER.raw_decode(text.known, at)
    except json.JSONDecodeError as error:
        open_end = error.msg.startswith("Unterminated") or error.pos + 16 > len(text.known)
        if open_end and not text.final:
            raise Wait from None
    except (ValueError, RecursionError):
        pass
    if not _ESCAPED_START.match(text.known, at):
        return Reader(text).value(at)
    # The quotes are escaped as if the value stood in a string: chat templates show calls that way and models copy it.
    match = _ESCAPED_TEXT.match(text.known, at)
    region = match[0] if match else ""
    closed = text.known.startswith('"', at + len(region))
    try:
        value, length = Reader(Text(decoded(region), final=text.final or closed)).value(0)
    except Unreadable as error:
        if not text.final and not closed:
            raise Wait from None
        raise Unreadable(error.reason, at + len(region), error.cut) from None
    ends = [token.end() for token in _ESCAPED_TOKEN.finditer(region)]
    return value, at + ends[bisect.bisect_left(ends, length, key=lambda end: len(decoded(region[:end])))]


def value_of(text: str) -> Any:
    """The value of a text that is nothing but JSON, or an object or array in almost-JSON; None if it is not."""
    try:
        return json.loads(text, strict=False, parse_constant=int)
    except (ValueError, RecursionError):
        start = len(text) - len(text.lstrip())
    if not text.startswith(("{", "["), start):
        return None
    try:
        value, end = Reader(Text(text, final=True)).value(start)
    except Unreadable:
        return None
    return value if not text[end:].strip() else None


def decoded(body: str) -> str:
    """What the text between two quotes says.

    Doubly escaped quotes are quotes, a line may go on, unknown escapes stay.
    """
    quotes = {'"': '\\"', "'": "'"}
    json_text = _ESCAPE.sub(lambda m: m[1] or (quotes[m[2]] if m[2] else "" if m[3] else "\\\\"), body)
    return str(json.loads(f'"{json_text}"', strict=False))


@dataclass
class Reader:
    """Reads one value of almost-JSON, or the arguments of a Python call."""

    text: Text
    _open: list[str] = field(default_factory=list)  # the closing brackets that are due, innermost last
    _mended: bool = False  # whether a string held quotes that had to be told from its end

    def value(self, at: int) -> tuple[Any, int]:
        char = self.text.char(at)
        if char in ("{", "["):
            return self.container(at)
        if char in _ENDS or (char == "\\" and self.text.char(at + 1) == '"'):  # perhaps with a stray backslash
            return self._string(at + (char == "\\"))
        end = self.text.run(_WORD, at)
        word = self.text.known[at:end]
        if word in _CONSTANTS:
            return _CONSTANTS[word], end
        if not _NUMBER.fullmatch(word):
            raise Unreadable("a value is missing", at)
        return json.loads(word), end

    def container(self, at: int) -> tuple[Any, int]:
        """An object, an array, or the arguments of a call as (positional, named)."""
        text, opener = self.text, self.text.char(at)
        at, closer = self.skip(at + 1), _CLOSERS[opener]
        if len(self._open) >= _MAX_DEPTH:
            raise Unreadable("it is nested too deeply", at)
        self._open.append(closer)
        items: list[Any] = []
        members: dict[str, Any] = {}
        while text.char(at) != closer:
            if opener == "{" == text.char(at) and not members:  # doubled braces, as templates write them
                members, at = self.container(at)
                at = self.skip(at)
                if text.char(at) == "" or self.at_limit(at):
                    break
                continue
            key, at = self._key(at) if opener != "[" else ("", at)
            if not key and (opener == "{" or members):
                raise Unreadable("a key is missing", at)
            value, at = self.value(at)
            while opener == "(" and isinstance(value, str) and text.char(self.skip(at)) in _TRIPLE:
                piece, at = self._string(self.skip(at))  # neighbouring strings are one string
                value += piece
            if opener == "(" and key in members:
                raise Unreadable("an argument stands twice", at)
            if key:
                members[key] = value
            else:
                items.append(value)
            at = self.skip(at)
            char = text.char(at)
            complete = isinstance(value, dict | list) and not self._mended
            if opener != "(" and (complete if char == "" else self.at_limit(at)):
                break
            if char == ",":
                at = self.skip(at + 1)
            elif char != closer and not (opener == "{" and self._key(at, quoted=True)[0]):
                raise Unreadable(f'a "," or "{closer}" is missing', at)
        else:
            at += 1
        self._open.pop()
        return ((items, members) if opener == "(" else members if opener == "{" else items), at

    def _key(self, at: int, *, quoted: bool = False) -> tuple[str, int]:
        """The key that stands here and the position of its value; "" if none does."""
        text, quote = self.text, self.text.char(at)
        end = at
        if quote in _ENDS:
            end = text.run(_IN_KEY[quote], at + 1)
            key = text.known[at + 1 : end]
            end = end + 1 if text.char(end) and text.char(end) in _ENDS[quote] else at
        elif not quoted:
            end = text.run(_WORD, at)
            key = text.known[at:end]
        colon = text.run(SPACE, end)
        char = text.char(colon)
        if end > at and (char == ":" or (char == "=" and self._open == [")"] and text.char(colon + 1) != "=")):
            return key, self.skip(colon + 1)
        return "", at

    def _string(self, at: int) -> tuple[str, int]:
        """A string in any kind of quotes. Inner ones come in pairs, so the second of a pair does not end it."""
        text, quote = self.text, self.text.char(at)
        if quote in _TRIPLE and text.holds(quote * 3, at):
            match = text.search(_TRIPLE[quote], at + 3)
            if match is None:
                raise Unreadable(_UNCLOSED, len(text.known), cut=True)
            return decoded(text.known[at + 3 : match.start()]), match.end()
        start, ends = at + 1, _ENDS[quote]
        plain = escaped = 0  # inner quotes; one of a pair may be escaped
        at = text.run(_IN_STRING[quote], start)
        while True:
            char = text.char(at)
            if not char or self.at_limit(at):
                raise Unreadable(_UNCLOSED, at, cut=True)
            if char in ends:
                if (plain % 2 == 0 or (plain + escaped) % 2 == 0) and self._closes(at + 1):
                    return decoded(text.known[start:at]), at + 1
                self._mended = True
                within_word = char in "'’" and text.known[at - 1].isalpha() and text.char(at + 1).isalpha()
                plain += not within_word
            elif char == "\\":
                escaped += text.char(at + 1) == quote
                at += 1
            at = text.run(_IN_STRING[quote], at + 1)

    def _closes(self, at: int) -> bool:
        """Whether the structure goes on behind a quote, so that the quote ends its string. In Python it always does."""
        if self._open[:1] == [")"]:
            return True
        text, depth, start = self.text, len(self._open), at
        at = self.skip(at)
        while depth and text.char(at) == self._open[depth - 1]:
            depth, start = depth - 1, at + 1
            at = self.skip(start) if depth else text.run(SPACE, start)
        char = text.char(at)
        if not char or self.at_limit(at):
            return True
        if not depth:
            return char in "`{[,;)}]<" or "\n" in text.known[start:at]
        if char != ",":
            return self._open[depth - 1] == "}" and bool(self._key(at, quoted=True)[0])
        at = self.skip(at + 1)
        after = text.char(at)
        if self._open[depth - 1] == "}":
            return after == "}" or bool(self._key(at)[0])
        return after in _ENDS or after.isdigit() or bool(after and after in "{[]-tfnTFN")

    def at_limit(self, at: int) -> bool:
        """Whether markup stands here that ends a call or begins the next one: a tag, or a line with a code fence."""
        char = self.text.char(at)
        if char == "<":
            return self.text.token(_LIMIT, _LIMIT_PART, at) is not None
        if char == "\n":
            at = self.text.run(LINE_SPACE, at + 1)
        return char in ("\n", "`") and self.text.holds("```", at)

    def skip(self, at: int) -> int:
        """Past white space and comments."""
        while True:
            at = self.text.run(SPACE, at)
            char = self.text.char(at)
            if char != "#" and not (char == "/" and self.text.char(at + 1) == "/"):
                return at
            newline = self.text.search(NEWLINE, at)
            at = newline.end() if newline else len(self.text.known)

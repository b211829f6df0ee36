"""A reader for almost-JSON, for mistakes whose meaning is certain.

It accepts, beyond JSON: raw newlines in strings, single, triple, typographic and
unescaped inner quotes, strings joined from pieces, unknown escapes (`\\'` is a quote, any other keeps its backslash), bare
keys, comments, trailing commas, a missing comma before a key, doubled braces, Python's True / False / None, and missing
closing brackets where no text of a string can be lost: before a closing tag or fence, or at the end of the text behind a
complete inner value.

A quote ends a string only where the structure can go on behind it; a string that is not plain JSON never runs over a
closing tag or fence, so that a broken call cannot swallow the next one.
"""

from __future__ import annotations

import json
import re
from typing import Any

from shared.tool_calls.json_strings import APOSTROPHES, ENDS, decoded
from shared.tool_calls.source import Reading, Source

UNCLOSED = "a string is not closed"
_MAX_DEPTH = 64

_CLOSERS = {"}": "{", "]": "[", ")": "("}
_IN_STRING = {quote: re.compile(rf"[^{ends}\\<\n]*") for quote, ends in ENDS.items()}
_KEY = {quote: re.compile(rf"[^{ends}\\\n]*") for quote, ends in ENDS.items() if quote != "`"}
_WORD = re.compile(r"[\w$]*")
_NUMBER_OR_WORD = re.compile(r"[\w.+-]*")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_TAG_NAME = re.compile(r"/?[\w|-]{0,40}")
_LIMIT_TAG = re.compile(r"/[\w-]*(?:tool|func|call|invoke|json|response|param)[\w-]*|tool_call", re.IGNORECASE)


class Unreadable(ValueError):
    """No value can be read; `position` is where reading stopped, `unclosed` whether it was inside a string."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(reason)
        self.position = position
        self.unclosed = reason == UNCLOSED


class Reader:
    """Reads one value; `open` are the brackets around the place where it stands, innermost last."""

    def __init__(self, source: Source, open_brackets: str = "") -> None:
        self.source = source
        self.open = list(open_brackets)
        self.mended = False  # whether a string held quotes that had to be told from its end

    def value(self, at: int) -> Reading[tuple[Any, int]]:
        char = yield from self.source.char(at)
        if len(self.open) > _MAX_DEPTH:
            raise Unreadable("it is nested too deeply", at)
        if char == "{":
            return (yield from self._object(at))
        if char == "[":
            return (yield from self._array(at))
        if char in ENDS:
            return (yield from self._joined(at) if self.open[-1:] == ["{"] else self.string(at))
        return (yield from self._literal(at))

    def skip(self, at: int) -> Reading[int]:
        """Past white space and comments."""
        while True:
            at = yield from self.source.spaces(at)
            char = yield from self.source.char(at)
            after = (yield from self.source.char(at + 1)) if char == "/" else ""
            if char == "#" or after == "/":
                end = yield from self.source.find("\n", at)
            elif after == "*":
                end = (yield from self.source.find("*/", at + 2)) + 1
            else:
                return at
            at = end + 1 if end > 0 else len(self.source.text)

    def _object(self, at: int) -> Reading[tuple[dict[str, Any], int]]:
        self.open.append("{")
        at = yield from self.skip(at + 1)
        if (yield from self.source.char(at)) == "{":
            return (yield from self._doubled(at))
        return (yield from self._members(at))

    def unopened(self, at: int) -> Reading[tuple[dict[str, Any], int]]:
        """An object whose opening brace is missing, from its first key on."""
        self.open.append("{")
        return (yield from self._members(at))

    def _members(self, at: int) -> Reading[tuple[dict[str, Any], int]]:
        members: dict[str, Any] = {}
        while (yield from self.source.char(at)) != "}":
            key, at = yield from self._key(at)
            at = yield from self.skip(at)
            if (yield from self.source.char(at)) != ":":
                raise Unreadable('a ":" is missing', at)
            members[key], at = yield from self.value((yield from self.skip(at + 1)))
            at = yield from self.skip(at)
            if (yield from self._only_brackets_missing(at, members[key])):
                self.open.pop()
                return members, at
            at = yield from self._separator(at, "}")
        self.open.pop()
        return members, at + 1

    def _doubled(self, at: int) -> Reading[tuple[dict[str, Any], int]]:
        """An object in doubled braces, as templates write them, from its second brace on."""
        members, at = yield from self.value(at)
        at = yield from self.skip(at)
        missing = yield from self._only_brackets_missing(at, members)
        if not missing and (yield from self.source.char(at)) != "}":
            raise Unreadable('a "}" is missing', at)
        self.open.pop()
        return members, at if missing else at + 1

    def _array(self, at: int) -> Reading[tuple[list[Any], int]]:
        items: list[Any] = []
        self.open.append("[")
        at = yield from self.skip(at + 1)
        while (yield from self.source.char(at)) != "]":
            item, at = yield from self.value(at)
            items.append(item)
            at = yield from self.skip(at)
            if (yield from self._only_brackets_missing(at, item)):
                self.open.pop()
                return items, at
            at = yield from self._separator(at, "]")
        self.open.pop()
        return items, at + 1

    def _only_brackets_missing(self, at: int, last: Any) -> Reading[bool]:
        """Whether the text of the value ends here although brackets are open, and no string can have been cut."""
        char = yield from self.source.char(at)
        if char == "":
            return isinstance(last, dict | list) and not self.mended
        return (char == "<" and (yield from self._limit_tag(at))) or (yield from self._fence_line(at))

    def _separator(self, at: int, closer: str) -> Reading[int]:
        char = yield from self.source.char(at)
        if char == ",":
            return (yield from self.skip(at + 1))
        if char == closer or (closer == "}" and (yield from self._key_ahead(at, quoted=True))):
            return at
        raise Unreadable(f'a "," or "{closer}" is missing', at)

    def _key(self, at: int) -> Reading[tuple[str, int]]:
        quote = yield from self.source.char(at)
        if quote not in _KEY:
            end = yield from self.source.run(_WORD, at)
            if end == at:
                raise Unreadable("a string is missing", at)
            return self.source.text[at:end], end
        end = yield from self._quoted_key_end(at, quote)
        if (yield from self.source.char(end)) not in [*ENDS[quote]]:
            raise Unreadable(UNCLOSED, end)
        return decoded(self.source.text[at + 1 : end], quote), end + 1

    def _quoted_key_end(self, at: int, quote: str) -> Reading[int]:
        end = at + 1
        while True:
            end = yield from self.source.run(_KEY[quote], end)
            if (yield from self.source.char(end)) != "\\":
                return end
            yield from self.source.char(end + 1)
            end += 2

    def _key_ahead(self, at: int, *, quoted: bool = False) -> Reading[bool]:
        """Whether a key and its colon stand here."""
        quote = yield from self.source.char(at)
        if quote in _KEY:
            end = (yield from self._quoted_key_end(at, quote)) + 1
        elif quoted:
            return False
        else:
            end = yield from self.source.run(_WORD, at)
        colon = yield from self.source.spaces(end)
        return end > at and (yield from self.source.char(colon)) == ":"

    def _joined(self, at: int) -> Reading[tuple[str, int]]:
        """The value of a member: one string, or pieces of one that stand on lines of their own or have a `+` between."""
        text, at = yield from self.string(at)
        while (more := (yield from self._next_piece(at))) >= 0:
            piece, at = yield from self.string(more)
            text += piece
        return text, at

    def _next_piece(self, at: int) -> Reading[int]:
        """Where the next piece of a joined string begins, or -1. In place of it there could only be a key."""
        start = yield from self.source.spaces(at)
        plus = (yield from self.source.char(start)) == "+"
        if not plus and "\n" not in self.source.text[at:start]:
            return -1
        start = (yield from self.source.spaces(start + 1)) if plus else start
        if (yield from self.source.char(start)) not in ('"', "'") or (yield from self._key_ahead(start, quoted=True)):
            return -1
        return start

    def string(self, at: int, *, raw: bool = False) -> Reading[tuple[str, int]]:
        """A string in any kind of quotes; `raw` leaves backslashes as they are."""
        quote = yield from self.source.char(at)
        if quote in "\"'" and (yield from self.source.holds(quote * 3, at)):
            end = yield from self.source.find(quote * 3, at + 3)
            if end < 0:
                next_call = self.source.text.find("<tool_call>", at)
                raise Unreadable(UNCLOSED, next_call if next_call >= 0 else len(self.source.text))
            body, end = self.source.text[at + 3 : end], end + 3
        else:
            end = yield from self._string_end(at, quote)
            body = self.source.text[at + 1 : end - 1]
        return (body if raw else decoded(body, quote)), end

    def _string_end(self, start: int, quote: str) -> Reading[int]:
        at, paired, ends = start + 1, True, ENDS[quote]  # inner quotes come in pairs; the second of one ends no string
        while True:
            at = yield from self.source.run(_IN_STRING[quote], at)
            char = yield from self.source.char(at)
            if char and char in ends:
                if (yield from self._closes(at + 1)) and paired:
                    return at + 1
                self.mended = True
                paired = paired == (char in APOSTROPHES and self._within_word(at))
            elif char == "\\":
                yield from self.source.char(at + 1)
                at += 1
            elif not char or (char == "<" and (yield from self._limit_tag(at))) or (yield from self._fence_line(at)):
                raise Unreadable(UNCLOSED, min(at, len(self.source.text)))
            at += 1

    def _within_word(self, at: int) -> bool:
        return self.source.text[at - 1].isalpha() and self.source.text[at + 1 : at + 2].isalpha()

    def _closes(self, at: int) -> Reading[bool]:
        """Whether the structure goes on behind a quote, so that the quote ends its string. In Python it always does."""
        if self.open[:1] == ["("]:
            return True
        depth, behind = len(self.open), at
        start, at = at, (yield from self.skip(at))
        char = yield from self.source.char(at)
        while depth and char in _CLOSERS and _CLOSERS[char] == self.open[depth - 1]:
            depth -= 1
            start, at = at + 1, (yield from (self.skip if depth else self.source.spaces)(at + 1))
            char = yield from self.source.char(at)
        if char == "" or (char == "<" and (yield from self._limit_tag(at))) or (yield from self._fence_line(at)):
            return True
        if not depth:  # the whole value ends, unless what follows directly shows that this is still the string
            if start != at and char not in "`{[,;)}]<" and "\n" not in self.source.text[start:at]:
                raise Unreadable("text follows on the same line", at)
            return start != at or char in "`{[,;)}]<"
        in_object = self.open[depth - 1] == "{"
        if char != ",":
            return in_object and (
                (yield from self._key_ahead(at, quoted=True))
                or (start == behind and (yield from self._next_piece(behind)) >= 0)
            )
        at = yield from self.skip(at + 1)
        char = yield from self.source.char(at)
        if in_object:
            return char == "}" or (yield from self._key_ahead(at))
        return char in ENDS or char in "{[]-tfnTFN" or char.isdigit()

    def _limit_tag(self, at: int) -> Reading[bool]:
        """Whether a tag stands here that ends a call, or begins the next one."""
        while not self.source.final and len(self.source.text) <= at + 41:
            match = _TAG_NAME.match(self.source.text, at + 1)
            if match and match.end() < len(self.source.text):
                break
            yield
        match = _TAG_NAME.match(self.source.text, at + 1)
        if not match or not _LIMIT_TAG.fullmatch(match[0]):
            return False
        return match[0] != "tool_call" or self.source.text.startswith(">", match.end())

    def _fence_line(self, at: int) -> Reading[bool]:
        """Whether a line that begins here, or has only white space before this place, is a fence."""
        if self.source.text.startswith("\n", at):
            at = yield from self.source.line_spaces(at + 1)
        elif not (yield from self.source.holds("```", at)):
            return False
        return (yield from self.source.holds("```", at))

    def _literal(self, at: int) -> Reading[tuple[Any, int]]:
        end = yield from self.source.run(_NUMBER_OR_WORD, at)
        word = self.source.text[at:end]
        if word in _CONSTANTS:
            return _CONSTANTS[word], end
        if "(" in self.open and word in ("r", "R") and (yield from self.source.char(end)) in ("'", '"'):
            return (yield from self.string(end, raw=True))
        if not _NUMBER.fullmatch(word):
            raise Unreadable("a value is missing", at)
        try:
            return json.loads(word), end
        except ValueError as error:  # leading zeros, or thousands of digits
            raise Unreadable(f"{word[:20]} is not a JSON number", at) from error

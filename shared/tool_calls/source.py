"""A text that may still be growing, and the few ways in which the grammar looks at it.

Every rule of the grammar is a coroutine: it yields where it would have to look beyond the text known so far, and goes on
in the same place when more has come. So a text is read the same way however it is cut, and nothing is read twice
because of a cut. On a text that is already final no rule ever yields.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

_T = TypeVar("_T")
Reading = Generator[None, None, _T]  # yields whenever it needs more text; returns what it read

_SPACE = re.compile(r"[\s\u200b\ufeff]*")
_LINE_SPACE = re.compile(r"[ \t\r\xa0\u200b\ufeff]*")


class Source:
    """The text so far; `final` says that no more will come. Positions stay valid while it grows."""

    def __init__(self, text: str = "", *, final: bool = False) -> None:
        self.text = text
        self.final = final

    def append(self, more: str) -> None:
        text, self.text = self.text, ""  # with a single reference CPython appends in place, without copying
        text += more
        self.text = text

    def char(self, at: int) -> Reading[str]:
        """The character at a position; "" at the end of the final text."""
        while at >= len(self.text):
            if self.final:
                return ""
            yield
        return self.text[at]

    def run(self, pattern: re.Pattern[str], at: int) -> Reading[int]:
        """The end of what `pattern` matches; it must be one repeated class of characters, matching also nothing."""
        while True:
            at = pattern.match(self.text, at).end()  # type: ignore[union-attr]  # it always matches
            if at < len(self.text) or self.final:
                return at
            yield

    def spaces(self, at: int) -> Reading[int]:
        """The next position that holds no white space, also none without width."""
        if at < len(self.text) and self.text[at] > " " and self.text[at] < "\x7f":
            return at
        return (yield from self.run(_SPACE, at))

    def line_spaces(self, at: int) -> Reading[int]:
        """The next position that holds no space, tab or other invisible character."""
        return (yield from self.run(_LINE_SPACE, at))

    def holds(self, literal: str, at: int) -> Reading[bool]:
        """Whether `literal` stands at a position; waits only while it still may."""
        while not self.final and at + len(literal) > len(self.text) and literal.startswith(self.text[at:]):
            yield
        return self.text.startswith(literal, at)

    def find(self, literal: str, at: int) -> Reading[int]:
        """The first position of `literal`, or -1, which only the end of the text can tell."""
        while True:
            found = self.text.find(literal, at)
            if found >= 0 or self.final:
                return found
            at = max(at, len(self.text) - len(literal) + 1)
            yield

    def search(self, pattern: re.Pattern[str], at: int) -> Reading[int]:
        """The first position where `pattern`, which matches single characters, does; or the end of the text."""
        while True:
            match = pattern.search(self.text, at)
            at = match.start() if match else len(self.text)
            if match or self.final:
                return at
            match = None  # it would hold a second reference to the text
            yield

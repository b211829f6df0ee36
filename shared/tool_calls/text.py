"""A text that may still grow, and the few ways in which the grammar looks at it.

Looking beyond the known text raises `Wait` until the text is final; the caller repeats its step when more has arrived.
So a text is read the same way however it is cut.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SPACE = re.compile(r"[\s\u200b\ufeff]*")
LINE_SPACE = re.compile(r"[ \t\r\xa0\u200b\ufeff]*")
NEWLINE = re.compile("\n")


class Wait(Exception):
    """The meaning depends on text that has not arrived yet."""


@dataclass(eq=False)
class Unreadable(Exception):
    """No value can be read: `position` is where reading stopped, `cut` whether that was inside a string."""

    reason: str
    position: int
    cut: bool = False


@dataclass
class Text:
    """What is known of a text; `final` says that no more will come. Positions stay valid while it grows."""

    known: str
    final: bool = False

    def char(self, at: int) -> str:
        """The character at a position; "" at the end of the final text."""
        if at < len(self.known):
            return self.known[at]
        if self.final:
            return ""
        raise Wait

    def run(self, pattern: re.Pattern[str], at: int) -> int:
        """The end of what `pattern` matches: a repeated class of characters that may match nothing."""
        match = pattern.match(self.known, at)
        end = match.end() if match else at
        if end >= len(self.known) and not self.final:
            raise Wait
        return end

    def holds(self, literal: str, at: int) -> bool:
        """Whether `literal` stands at a position."""
        if not self.final and at + len(literal) > len(self.known) and literal.startswith(self.known[at:]):
            raise Wait
        return self.known.startswith(literal, at)

    def search(self, pattern: re.Pattern[str], at: int) -> re.Match[str] | None:
        """The first match of `pattern`, or None, which only the end of the text can tell."""
        match = pattern.search(self.known, at)
        if not self.final and (match is None or match.end() == len(self.known)):
            raise Wait
        return match

    def token(self, pattern: re.Pattern[str], part: re.Pattern[str], at: int) -> re.Match[str] | None:
        """The match of `pattern` here; `part` must match all that may still become one, up to the end."""
        match = pattern.match(self.known, at)
        grows = match.end() == len(self.known) and match[0][-1] not in ">]" if match else part.match(self.known, at)
        if grows and not self.final:
            raise Wait
        return match

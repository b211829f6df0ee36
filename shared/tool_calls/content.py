"""The text around the calls, given out piece by piece.

Before the first call the text is kept exactly, but for the one newline that the chat template puts between content and
call: written again by the template it gives the model's own tokens. Behind a call every piece is trimmed and begins
a new line. White space therefore waits until it is known what comes behind it.
"""

from __future__ import annotations


class Content:
    """Takes text and breaks (where calls stand), gives out what is certain."""

    def __init__(self) -> None:
        self._space = ""  # white space at the end of the text so far
        self._blank_start = ""  # all there was before the first call, if that was only white space
        self._begun = False  # whether anything else than white space was given out
        self._broken = False  # whether a call stood since then
        self._any_call = False

    def text(self, piece: str) -> str:
        """More text; returns what can be given out now."""
        body = piece.rstrip()
        if not body:
            self._space += piece
            return ""
        line_break = "\n" if self._begun else ""
        out = line_break + body.lstrip() if self._broken else self._space + body
        self._space = piece[len(body) :]
        self._begun, self._broken, self._blank_start = True, False, ""
        return out

    def break_(self) -> str:
        """A call stands here; returns what is still certain of the text before it."""
        first, self._any_call, self._broken = not self._any_call, True, True
        space, self._space = self._space.removesuffix("\n"), ""
        if first and not self._begun:
            self._blank_start = space
        return space if first and self._begun else ""

    def end(self) -> str:
        """The text has ended; returns the rest."""
        return self._blank_start if self._any_call else self._space

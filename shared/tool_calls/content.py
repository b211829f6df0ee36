"""The text around the calls, given out piece by piece.

Before the first call the text is kept exactly, but for the one newline that the chat template puts between content and
call: written again by the template it gives the model's own tokens. Behind a call every piece is trimmed and begins
a new line. White space therefore waits until it is known what comes behind it.
"""

from __future__ import annotations


class Content:
    """Takes text and breaks (where calls stand); what is certain is in `pieces`."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._space = ""  # white space at the end of the text so far
        self._blank_start = ""  # all there was before the first call, if that was only white space
        self._begun = False  # whether anything else than white space was given out
        self._broken = False  # whether a call stood since then
        self._any_call = False

    def text(self, piece: str) -> None:
        """More text."""
        body = piece.rstrip()
        if not body:
            self._space += piece
            return
        line_break = "\n" if self._begun else ""
        self.pieces.append(line_break + body.lstrip() if self._broken else self._space + body)
        self._space = piece[len(body) :]
        self._begun, self._broken, self._blank_start = True, False, ""

    def call(self) -> None:
        """A call stands here."""
        first, self._any_call, self._broken = not self._any_call, True, True
        space, self._space = self._space.removesuffix("\n"), ""
        if first and self._begun:
            self._add(space)
        elif first:
            self._blank_start = space

    def end(self) -> None:
        """The text has ended."""
        self._add(self._blank_start if self._any_call else self._space)

    def _add(self, piece: str) -> None:
        if piece:
            self.pieces.append(piece)

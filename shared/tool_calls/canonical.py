"""The short ways: for turns exactly as the chat template writes them, which is what models should write, and for words.

They read nothing in another way than the grammar does; they only spare its look at every character.
"""

from __future__ import annotations

import functools
import re

from shared.records import ToolCall
from shared.tool_calls import labelled_calls
from shared.tool_calls.announcements import is_example
from shared.tool_calls.json_values import complete
from shared.tool_calls.offered import NAMESPACES, Offered
from shared.tool_calls.shapes import canonical_call
from shared.tool_calls.source import Source

_OPEN, _CLOSE = "<tool_call>\n", "\n</tool_call>"
_WORDS = re.compile(r"(?:(?:[^\W_][^<`{\[\n]*)?\n)*")  # lines that begin with a word and hold no markup


def read_turn(text: str, offered: Offered) -> tuple[str, tuple[ToolCall, ...]] | None:
    """Content and calls of a canonical turn; None for anything else."""
    start = text.find(_OPEN)
    words = _WORDS.match(text)
    if start < 0 or words is None or words.end() != start or not offered.names():
        return None
    if start and (is_example(text, start, explicit=True) or not _is_plain(text[:start], offered)):
        return None
    calls: list[ToolCall] = []
    at = start
    while text.startswith(_OPEN, at):
        value, end = complete(text, at + len(_OPEN))
        call = canonical_call(value, offered) if end >= 0 and text.startswith(_CLOSE, end) else None
        if call is None:
            return None
        calls.append(call)
        at = end + len(_CLOSE) + 1
    return (text[:start].removesuffix("\n"), tuple(calls)) if at == len(text) + 1 else None


def _is_plain(content: str, offered: Offered) -> bool:
    starts, _ = _line_starts(offered.names())
    for line in content.lower().split("\n"):  # noqa: SIM110  # a generator costs more than what it would look at
        if line.startswith(starts):
            return False
    return True


def is_plain_line(source: Source, start: int, offered: Offered) -> bool:
    """Whether a line surely begins with nothing but words; the short way for running text."""
    starts, lookahead = _line_starts(offered.names())
    head = source.text[start : start + lookahead].lower()
    return (len(head) == lookahead or source.final) and head[:1].isalnum() and not head.startswith(starts)


@functools.lru_cache(maxsize=64)
def _line_starts(names: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
    """How lines begin that may hold a call, in small letters, and how many characters of a line show it."""
    starts = tuple(name.lower() for name in (*names, *NAMESPACES, *labelled_calls.NAME_LABELS))
    return starts, max(map(len, starts))

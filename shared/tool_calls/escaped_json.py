"""JSON that is itself written with escapes, as if it stood in a string: `{\\"name\\": \\"execute_sql\\", ...}`.

Some chat templates show the form of a call with such quotes, and models copy it. Nothing is guessed: what is read is the text
that the escapes spell, up to the bracket that closes the value.
"""

from __future__ import annotations

import json
import re

from shared.tool_calls.almost_json import UNCLOSED, Unreadable
from shared.tool_calls.source import Reading, Source

_PLAIN = re.compile(r'[^\\"<{}\[\]]*')
_BACKSLASHES = re.compile(r"\\*")


def may_begin(source: Source, at: int) -> Reading[bool]:
    """Whether an escape stands behind the first bracket or two, where JSON would have its first string."""
    at = yield from source.spaces(at + 1)
    if (yield from source.char(at)) == "{":
        at = yield from source.spaces(at + 1)
    return (yield from source.char(at)) == "\\"


def read(source: Source, start: int) -> Reading[tuple[str, int]]:
    """The JSON text that the escaped object or array here spells, and the position behind it. Raises Unreadable."""
    at, depth, in_string = start, 0, False
    while True:
        at = yield from source.run(_PLAIN, at)
        char = yield from source.char(at)
        if char in ("", '"') or (char == "<" and (yield from _is_call_tag(source, at))):
            raise Unreadable(UNCLOSED, at)
        if char == "\\":
            start_of_run, at = at, (yield from source.run(_BACKSLASHES, at))
            count = at - start_of_run
            if count % 2:  # they escape the next character
                in_string ^= (yield from source.char(at)) == '"' and count // 2 % 2 == 0
                at += 1
            continue
        if not in_string and char != "<":
            depth += 1 if char in "{[" else -1
        at += 1
        if not depth:
            return _unescaped(source.text[start:at], at), at


def _is_call_tag(source: Source, at: int) -> Reading[bool]:
    return (yield from source.holds("<tool_call>", at)) or (yield from source.holds("</tool_call>", at))


def _unescaped(text: str, end: int) -> str:
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError as error:
        raise Unreadable("an escape spells nothing", end - 1) from error

"""JSON values in a text that may still grow. Strict JSON comes first and is never read in another way; then almost-JSON."""

from __future__ import annotations

import json
import re
from typing import Any

from shared.tool_calls import escaped_json
from shared.tool_calls.almost_json import Reader, Unreadable
from shared.tool_calls.source import Reading, Source

_REST = re.compile(r"[\s\w.,:+-]*")  # what strict JSON holds besides strings and brackets
_IN_STRING = re.compile(r'[^"\\]*')


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON value")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)  # models write raw newlines into SQL strings


def complete(text: str, at: int) -> tuple[Any, int]:
    """The strict JSON value that begins at `at` and the position behind it; the position -1 if there is none yet."""
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, -1


def value_of(text: str) -> Any:
    """The value of a text that is nothing but JSON or an almost-JSON object; None if it is not."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    start = len(text) - len(text.lstrip())
    if not text.startswith("{", start):
        return None
    try:
        next(reading := Reader(Source(text, final=True)).value(start))
    except StopIteration as done:
        value, end = done.value
        return value if not text[end:].strip() else None
    except ValueError:
        return None
    raise AssertionError(f"{reading} waits for text although there is no more")


def read(source: Source, at: int) -> Reading[tuple[Any, int]]:
    """The object or array that begins at `at`, and the position behind it. Raises Unreadable."""
    value, end = complete(source.text, at)
    if end < 0 and not source.final and (yield from _strict_end(source, at)) >= 0:
        value, end = complete(source.text, at)
    if end >= 0:
        return value, end
    if not (yield from escaped_json.may_begin(source, at)):
        return (yield from Reader(source).value(at))
    text, end = yield from escaped_json.read(source, at)
    return _decoded(text, end), end


def read_quoted(source: Source, at: int) -> Reading[tuple[Any, int]]:
    """The value of the JSON text in the JSON string that begins at `at`, and the position behind it. Raises Unreadable."""
    yield from _strict_string_end(source, at + 1)
    text, end = complete(source.text, at)
    if end < 0:
        raise Unreadable("a string is not closed", at + 1)
    return _decoded(text, end), end


def _decoded(text: str, end: int) -> Any:
    value = value_of(text)
    if value is None:
        raise Unreadable("what is quoted is not JSON", end - 1)
    return value


def _strict_end(source: Source, at: int) -> Reading[int]:
    """Where a strict JSON object or array ends; -1 as soon as it cannot be one. Finds an end for some that are not."""
    depth = 0
    while True:
        char = yield from source.char(at)
        if char == '"':
            at = yield from _strict_string_end(source, at + 1)
            behind = yield from source.spaces(at)
            if (yield from source.char(behind)) not in (":", ",", "}", "]"):
                return -1
        elif char and char in "{[":
            depth, at = depth + 1, at + 1
        elif char and char in "}]":
            depth, at = depth - 1, at + 1
            if depth == 0:
                return at
        else:
            start, at = at, (yield from source.run(_REST, at))
            if at == start:
                return -1


def _strict_string_end(source: Source, at: int) -> Reading[int]:
    while True:
        at = yield from source.run(_IN_STRING, at)
        if (yield from source.char(at)) != "\\":
            return at + 1
        yield from source.char(at + 1)
        at += 2

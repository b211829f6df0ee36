"""Calls written as Python: `name("value")`, `name(key=value)`, `[name(...), name(...)]`, `[Calling tool: name({...})]`.

Only calls of offered tools with literal arguments count; positional ones get their names from the schema. Any other
expression makes the text a program, and a program is an answer.
"""

from __future__ import annotations

import re
from typing import Any

from shared.records import ToolCall
from shared.tool_calls.almost_json import Reader, Unreadable
from shared.tool_calls.offered import NAMESPACES, Offered, without_namespace
from shared.tool_calls.shapes import call_of
from shared.tool_calls.source import Reading, Source

_NAME = re.compile(r"[\w.]*")
_LABEL = re.compile(r"[A-Za-z_ ]*")
_CALL_LABEL = re.compile(r"(?:calling )?(?:tool|function)s?(?:[ _]calls?)?|call(?:ing)?", re.IGNORECASE)


def read_calls(source: Source, at: int, offered: Offered) -> Reading[tuple[list[ToolCall], int]]:
    """The calls of one expression that begins here and the position behind it; no calls if it is anything else."""
    if (yield from source.char(at)) == "[":
        return (yield from _list(source, at, offered))
    call, end = yield from _call(source, at, offered)
    return ([call] if call else []), end


def _list(source: Source, at: int, offered: Offered) -> Reading[tuple[list[ToolCall], int]]:
    calls: list[ToolCall] = []
    at = yield from source.spaces((yield from _past_label(source, at + 1)))
    while True:
        call, at = yield from _call(source, at, offered)
        if call is None:
            return [], at
        calls.append(call)
        at = yield from source.spaces(at)
        char = yield from source.char(at)
        if char == ",":
            at = yield from source.spaces(at + 1)
            char = yield from source.char(at)
        if char == "]":
            return calls, at + 1


def _past_label(source: Source, at: int) -> Reading[int]:
    end = yield from source.run(_LABEL, at)
    labelled = _CALL_LABEL.fullmatch(source.text[at:end].strip()) is not None
    return end + 1 if labelled and (yield from source.char(end)) == ":" else at


def may_begin(source: Source, at: int, offered: Offered) -> Reading[bool]:
    """Whether the name of an offered tool and a bracket stand here; waits only while they still may."""
    while not source.final:
        word = _word(source, at)
        if at + len(word) < len(source.text):
            break
        plain = without_namespace(word)
        if not any(name.startswith(plain) for name in offered.names()) and not _may_be_prefix(word):
            return False
        yield
    word = _word(source, at)
    return without_namespace(word) in offered and source.text.startswith("(", at + len(word))


def _word(source: Source, at: int) -> str:
    match = _NAME.match(source.text, at)
    return match[0] if match else ""


def _may_be_prefix(word: str) -> bool:
    return any(prefix.startswith(word) for prefix in NAMESPACES)


def _call(source: Source, at: int, offered: Offered) -> Reading[tuple[ToolCall | None, int]]:
    end = yield from source.run(_NAME, at)
    name = without_namespace(source.text[at:end])
    if name not in offered or (yield from source.char(end)) != "(":
        return None, end
    try:
        positional, named, end = yield from _arguments(source, end + 1)
    except Unreadable as error:
        return None, max(error.position, end)
    arguments = _named(positional, named, offered.parameters(name))
    call = None if arguments is None else call_of(name, arguments, offered, explicit=False)
    return (call if isinstance(call, ToolCall) else None), end


def _arguments(source: Source, at: int) -> Reading[tuple[list[Any], dict[str, Any], int]]:
    """Positional and named literals up to the closing bracket. Raises Unreadable for anything else."""
    reader = Reader(source, "(")
    positional: list[Any] = []
    named: dict[str, Any] = {}
    at = yield from reader.skip(at)
    while (yield from source.char(at)) != ")":
        key, at = yield from _keyword(source, at)
        value, at = yield from _value(reader, (yield from reader.skip(at)))
        if key in named or (positional and named and not key):
            raise Unreadable("an argument stands twice", at)
        if key:
            named[key] = value
        else:
            positional.append(value)
        at = yield from reader.skip(at)
        char = yield from source.char(at)
        if char == ",":
            at = yield from reader.skip(at + 1)
        elif char != ")":
            raise Unreadable('a "," or ")" is missing', at)
    return positional, named, at + 1


def _keyword(source: Source, at: int) -> Reading[tuple[str, int]]:
    end = yield from source.run(_NAME, at)
    equals = yield from source.spaces(end)
    if end > at and (yield from source.char(equals)) == "=" and (yield from source.char(equals + 1)) != "=":
        return source.text[at:end], equals + 1
    return "", at


def _value(reader: Reader, at: int) -> Reading[tuple[Any, int]]:
    """One literal; neighbouring strings are one string, as in Python."""
    value, at = yield from reader.value(at)
    while isinstance(value, str):
        after = yield from reader.skip(at)
        if (yield from reader.source.char(after)) not in ("'", '"'):
            break
        more, at = yield from reader.string(after)
        value += more
    return value, at


def _named(positional: list[Any], named: dict[str, Any], parameters: Any) -> dict[str, Any] | None:
    """All arguments by name; a single dictionary is taken as the arguments themselves."""
    if (
        len(positional) == 1
        and not named
        and isinstance(positional[0], dict)
        and positional[0].keys() <= parameters.keys()
    ):
        return positional[0]
    names = list(parameters)[: len(positional)]
    if len(names) < len(positional) or named.keys() & set(names):
        return None
    return {**dict(zip(names, positional, strict=True)), **named}

"""Calls written as XML: `<function=name><parameter=key>value</parameter></function>` and its relatives.

The name stands in the tag (`<function=name>`, `<invoke name="name">`, `<name>`) or in an element of its own, the arguments in
parameter elements, in elements named as the parameters, as a JSON object, or in attributes. Values are text; the schema gives
them their type. A value whose closing tag is missing has been cut, and a cut call is no call.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from typing import Any

from shared.records import ToolCall
from shared.tool_calls.almost_json import Unreadable
from shared.tool_calls.announcements import goes_on
from shared.tool_calls.json_values import read
from shared.tool_calls.offered import Offered
from shared.tool_calls.shapes import call_of
from shared.tool_calls.source import Reading, Source

_CALL_TAGS = {"function", "invoke", "tool", "tool_call", "function_call", "call", "tool_use", "function-call"}
_NAME_TAGS = {"name", "tool_name", "function_name"}
_PARAMETER_TAGS = {"parameter", "param", "arg", "argument"}
_ARGUMENT_TAGS = {"arguments", "parameters", "args", "input", "params"}
CUT = "The tool call was cut off before it was complete; write it again in full."

_WORD = re.compile(r"[\w.-]*")
_UNQUOTED = re.compile(r"[^\s\"'<>/]*")
_QUOTED = {quote: re.compile(f"[^{quote}]*") for quote in "\"'"}
_TEXT = re.compile("<")
_TEXT_OR_LINE = re.compile("[<\n]")


class _NoCall(Exception):
    """What stands here is no call; `position` is where that showed, and there is a sentence if it was meant as one."""

    def __init__(self, position: int, sentence: str = "") -> None:
        super().__init__(sentence)
        self.position = position


@dataclass
class _Tag:
    name: str
    attributes: dict[str, Any]
    end: int
    closed: bool  # <.../>


def read_call(source: Source, at: int, offered: Offered, *, explicit: bool) -> Reading[tuple[ToolCall | str, int]]:
    """The call whose element begins at the `<` here and the position behind it, or "" or a sentence if it is none
    and where to read on."""
    try:
        tag = yield from _opening_tag(source, at)
        name = yield from _name(source, tag, offered)
        if not isinstance(name, str) or not name or (name not in offered and not explicit):
            return "", at
        given, end = yield from _arguments(source, tag, name, offered)
    except (_NoCall, Unreadable) as error:
        return str(error) if isinstance(error, _NoCall) else "", error.position
    return call_of(name, given, offered, explicit=explicit), end


def _name(source: Source, tag: _Tag, offered: Offered) -> Reading[Any]:
    """The name of the called tool, or "". An element that holds it becomes the beginning of the call."""
    if tag.name in _CALL_TAGS:
        return tag.attributes.pop("name", "")
    if tag.name in offered:
        return tag.name
    if tag.name not in _NAME_TAGS or tag.attributes:
        return ""
    end = yield from source.search(_TEXT, tag.end)
    closer = f"</{tag.name}>"
    if not (yield from source.holds(closer, end)):
        return ""
    name, tag.end = source.text[tag.end : end].strip(), end + len(closer)
    return name


def may_begin(name: str, char: str, offered: Offered) -> bool:
    """Whether a tag with this name, followed by `char`, can begin a call."""
    return (name in _CALL_TAGS and char in ("=", " ", "\n")) or (name in offered and char in (">", " ", "/"))


def _opening_tag(source: Source, at: int) -> Reading[_Tag]:
    end = yield from source.run(_WORD, at + 1)
    tag = _Tag(source.text[at + 1 : end], {}, end, False)
    key = "name" if (yield from source.char(end)) == "=" else ""
    while True:
        if key:
            tag.attributes[key], end = yield from _attribute(source, (yield from source.spaces(end + 1)))
        end = yield from source.spaces(end)
        char = yield from source.char(end)
        if char == "/" and (yield from source.char(end + 1)) == ">":
            tag.end, tag.closed = end + 2, True
            return tag
        if char == ">":
            tag.end = end + 1
            return tag
        start, end = end, (yield from source.run(_WORD, end))
        key = source.text[start:end]
        end = yield from source.spaces(end)
        if not key or (yield from source.char(end)) != "=":
            raise _NoCall(at)


def _attribute(source: Source, at: int) -> Reading[tuple[Any, int]]:
    quote = yield from source.char(at)
    if quote not in _QUOTED:
        end = yield from source.run(_UNQUOTED, at)
        return source.text[at:end], end
    if (yield from source.char(at + 1)) == "{":  # JSON in an attribute need not escape the attribute's own quotes
        try:
            value, end = yield from read(source, at + 1)
        except Unreadable:
            pass
        else:
            if (yield from source.char(end)) == quote:
                return value, end + 1
    end = at
    while True:  # a quote ends the value where the tag goes on behind it
        end = yield from source.run(_QUOTED[quote], end + 1)
        char = yield from source.char(end + 1)
        if (yield from source.char(end)) == "":
            raise _NoCall(end, CUT)
        if char == "" or char.isspace() or char in "/>":
            return html.unescape(source.text[at + 1 : end]), end + 1


def _arguments(source: Source, tag: _Tag, name: str, offered: Offered) -> Reading[tuple[Any, int]]:
    """What stands for the arguments, and the end of the element."""
    key = next((key for key in tag.attributes if key in _ARGUMENT_TAGS), None)
    if key is not None or tag.closed:
        given = tag.attributes[key] if key is not None else tag.attributes
        end = tag.end if tag.closed else (yield from _past_closing_tag(source, tag.end, tag.name))
        return given, end
    arguments: dict[str, Any] = {}
    at = tag.end
    while True:
        start = yield from source.spaces(at)
        char = yield from source.char(start)
        if char == "{" and not arguments:
            arguments, at = yield from read(source, start)
        elif char != "<":
            if char == "" and arguments:
                return arguments, at
            if arguments:
                raise _NoCall(start)
            return (yield from _only_text(source, tag))
        elif (yield from source.char(start + 1)) == "/":
            end = yield from source.run(_WORD, start + 2)
            if source.text[start + 2 : end] not in _ARGUMENT_TAGS:
                own = source.text[start + 2 : end] == tag.name
                return arguments, ((yield from _past_closing_tag(source, at, tag.name)) if own else at)
            at = end + 1
        else:
            inner = yield from _opening_tag(source, start)
            at = inner.end
            if inner.name in _ARGUMENT_TAGS and inner.name not in offered.parameters(name):
                continue
            if inner.name in _CALL_TAGS:
                return arguments, start
            if inner.name not in _PARAMETER_TAGS and inner.name not in offered.parameters(name):
                raise _NoCall(start)
            key = str(inner.attributes.get("name", "")) if inner.name in _PARAMETER_TAGS else inner.name
            if not key or key in arguments:
                raise _NoCall(start)
            arguments[key], at = yield from _value(source, at, inner.name)


def _only_text(source: Source, tag: _Tag) -> Reading[tuple[str, int]]:
    """`<name>value</name>` for a tool with a single argument. Such a tag may as well be one that a sentence names: nothing
    like a tag and no blank line can stand in the value."""
    end = tag.end
    while True:
        end = yield from source.search(_TEXT_OR_LINE, end)
        after = yield from source.char(end + 1)
        if source.text.startswith("<", end) and after == "/":
            closer = f"</{tag.name}>"
            if (yield from source.holds(closer, end)):
                if (yield from goes_on(source, end + len(closer))):
                    raise _NoCall(tag.end)
                return _trimmed(source.text[tag.end : end]), end + len(closer)
        if after in ("", "/", "\n") or (source.text.startswith("<", end) and after.isalpha()):
            raise _NoCall(tag.end)
        end += 1


def _value(source: Source, at: int, tag: str) -> Reading[tuple[str, int]]:
    """The text up to the closing tag, or up to what can only stand behind it where that is missing."""
    end = at
    while True:
        end = yield from source.search(_TEXT, end)
        if (yield from source.char(end)) == "":
            raise _NoCall(end, CUT)
        slash = (yield from source.char(end + 1)) == "/"
        stop = yield from source.run(_WORD, end + 1 + slash)
        name = source.text[end + 1 + slash : stop]
        if slash and name == tag and (yield from source.char(stop)) == ">":
            after = yield from source.spaces(stop + 1)
            if (yield from source.char(after)) in ("", "<") or tag in _CALL_TAGS:
                return _trimmed(source.text[at:end]), stop + 1
        elif tag in _PARAMETER_TAGS and source.text[end - 1] == "\n" and _ends_value(name, slash):
            return _trimmed(source.text[at:end]), end
        elif name == "tool_call" and source.text[end - 1] == "\n":
            raise _NoCall(end, CUT)
        end += 1


def _ends_value(name: str, slash: bool) -> bool:
    return (name in _CALL_TAGS) if slash else (name in _PARAMETER_TAGS)


def _trimmed(value: str) -> str:
    """Without the line breaks next to the tags, and without the indentation of a single line."""
    if not value.startswith("\n"):
        return value
    return value[1:].removesuffix("\n") if "\n" in value.strip() else value.strip()


def _past_closing_tag(source: Source, at: int, name: str) -> Reading[int]:
    start = yield from source.spaces(at)
    closer = f"</{name}>"
    return start + len(closer) if (yield from source.holds(closer, start)) else at

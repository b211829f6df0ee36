"""What can stand behind the openers of a block: one JSON value, one XML element, Python calls, a name with JSON.

Each rule reads one item and says which calls it means, where it ends, and, if it means none, what is wrong with it and where
reading may go on.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from shared.records import ToolCall
from shared.tool_calls import python_calls, xml_calls
from shared.tool_calls.almost_json import Reader, Unreadable
from shared.tool_calls.json_values import read, read_quoted
from shared.tool_calls.markup import Opening, opening, tag_name
from shared.tool_calls.offered import Offered, without_namespace
from shared.tool_calls.shapes import FORM, call_of, calls_in
from shared.tool_calls.source import Reading, Source

_FAR = 64  # characters; shorter failures cost nothing
_NAME = re.compile(r"[\w.-]*")
_INDEX = re.compile(r":?\d*")
_EXAMPLE = re.compile(r"\b(?:example|format|schema|template|usage|syntax)", re.IGNORECASE)
_NAMED_OBJECT = re.compile(r"""[\[\s]*\{\s*["']name["']\s*:\s*["'](\w+)["']""")


@dataclass(frozen=True)
class Item:
    """What was read from one place."""

    calls: tuple[ToolCall, ...]
    end: int  # behind the calls, or where to go on if there are none
    problem: str = ""
    family: str = ""  # where it is not the one of the opening
    far: bool = False  # reading failed far away from where it began


def read_item(source: Source, found: Opening, offered: Offered) -> Reading[Item]:
    """The item at the body of an opening, also behind a comment, unless that says that an example follows."""
    if not (found.tags or found.fence):
        return (yield from _item(source, found, offered))
    body = yield from Reader(source).skip(found.body)
    if body == found.body:
        return (yield from _item(source, found, offered))
    if _EXAMPLE.search(source.text, found.body, min(body, found.body + _FAR)):
        return Item((), found.body)
    item = yield from _item(source, dataclasses.replace(found, body=body), offered)
    far = item.far or body - found.body > _FAR
    return item if item.calls or item.end > body else dataclasses.replace(item, end=found.body, far=far)


def _item(source: Source, found: Opening, offered: Offered) -> Reading[Item]:
    at = found.body
    char = yield from source.char(at)
    if char == '"' and (found.tags or found.fence) and (yield from source.char(at + 1)) in ("{", "["):
        return (yield from _json(source, found, offered, read_quoted(source, at)))
    if char == "{" or (char == "[" and not (yield from _is_python_list(source, at))):
        return (yield from _json(source, found, offered, read(source, at)))
    if found.explicit and (yield from source.holds('"name"', at)):
        return (yield from _json(source, found, offered, Reader(source).unopened(at)))
    if char == "<":
        call, end = yield from xml_calls.read_call(source, at, offered, explicit=found.explicit)
        if isinstance(call, ToolCall):
            return Item((call,), end, family="xml")
        return Item((), end, call if found.explicit else "")
    if not char or not (char.isidentifier() or char in "[#"):
        return Item((), at)
    if found.fence and not found.tags:
        return (yield from _python_program(source, at, offered))
    if char == "[" or (yield from python_calls.may_begin(source, at, offered)):
        calls, end = yield from python_calls.read_calls(source, at, offered)
        fits = found.tags or (yield from _line_ends(source, end, found))
        return Item(tuple(calls), end, family="python") if fits else Item((), end)
    return (yield from _named_json(source, found, offered)) if found.tags else Item((), at)


def next_item(source: Source, at: int, found: Opening, offered: Offered) -> Reading[int]:
    """Where another item of the same block begins, or -1."""
    at = yield from source.spaces(at)
    char = yield from source.char(at)
    if char and char in ",;":
        at = yield from source.spaces(at + 1)
        char = yield from source.char(at)
    if char == "[":
        after = yield from source.spaces(at + 1)
        return at if (yield from source.char(after)) in ("{", "[") else -1
    more = char == "{" or (
        found.tags and char.isidentifier() and (yield from python_calls.may_begin(source, at, offered))
    )
    return at if more else -1


def python_lines(source: Source, at: int, offered: Offered) -> Reading[Item]:
    """Python calls in running text: a paragraph of nothing else."""
    calls: list[ToolCall] = []
    while True:
        found, end = yield from python_calls.read_calls(source, at, offered)
        rest = yield from source.line_spaces(end)
        char = yield from source.char(rest)
        if not found or char not in ("", "\n", "<", ",", ";"):
            return Item((), end)
        calls += found
        separator = char in (",", ";")
        at = yield from source.spaces(rest + separator)
        if (not separator and (yield from source.char(at)) in ("", "<")) or source.text.count("\n", rest, at) > 1:
            return Item(tuple(calls), end, family="python")
        if not (yield from python_calls.may_begin(source, at, offered)):
            return Item((), end)


def _is_python_list(source: Source, at: int) -> Reading[bool]:
    at = yield from source.spaces(at + 1)
    char = yield from source.char(at)
    return char.isidentifier()


def _json(source: Source, found: Opening, offered: Offered, reading: Reading[tuple[Any, int]]) -> Reading[Item]:
    at = found.body
    try:
        value, end = yield from reading
    except Unreadable as error:
        end = max(at + 1, error.position)
        return Item((), end, _complaint(source, at, error, found, offered), far=end - at > _FAR or error.unclosed)
    calls, problem = calls_in(value, offered, explicit=found.explicit)
    if not found.tags and not (yield from _line_ends(source, end, found)):
        return Item((), end)
    return Item(tuple(calls), end, problem)


def _complaint(source: Source, at: int, error: Unreadable, found: Opening, offered: Offered) -> str:
    named = _NAMED_OBJECT.match(source.text, at)
    if not found.explicit and not (named and named[1] in offered):
        return ""
    if error.position >= len(source.text):
        return xml_calls.CUT
    return f"The tool call is not valid JSON ({error}); write {FORM}."


def _line_ends(source: Source, at: int, found: Opening) -> Reading[bool]:
    """Whether nothing but closers and further values stands on the line behind a value without tags."""
    at = yield from source.line_spaces(at)
    char = yield from source.char(at)
    while char and char in "}]":  # one bracket too many
        at = yield from source.line_spaces(at + 1)
        char = yield from source.char(at)
    if found.inline:
        rest = yield from source.line_spaces(at + 1)
        return char == "`" and (yield from source.char(rest)) in ("", "\n", "<")
    if char and char in ",;":
        at = yield from source.spaces(at + 1)
        return (yield from source.char(at)) in ("", "{", "[")
    if found.bare and char.isupper():  # a sentence of its own
        after = yield from source.char(at + 1)
        return after.islower() or after in (" ", "'")
    return char in ("", "\n", "{", "[", "<", "`")


def _python_program(source: Source, at: int, offered: Offered) -> Reading[Item]:
    """The Python calls that fill a fence; anything else in it makes it a program."""
    reader = Reader(source)
    calls: list[ToolCall] = []
    at = yield from reader.skip(at)
    while True:
        found, end = yield from python_calls.read_calls(source, at, offered)
        if not found:
            return Item((), max(at, end))
        calls += found
        at = yield from reader.skip(end)
        if (yield from source.char(at)) in ("", "`", "<"):
            return Item(tuple(calls), end, family="python")


def _named_json(source: Source, found: Opening, offered: Offered) -> Reading[Item]:
    """`name {...}` between tags; other chat templates have a separator, an index, a type before it, a fence around the object."""
    name, at = yield from _name(source, found.body)
    if name == "function" and name not in offered:
        name, at = yield from _name(source, at)
    if name not in offered:
        return Item((), found.body)
    inner = yield from opening(source, at, Opening(at, at))
    at = inner.body
    if inner.tags or (yield from source.char(at)) != "{":
        return Item((), found.body)
    try:
        given, end = yield from read(source, at)
    except Unreadable as error:
        return Item((), max(at + 1, error.position), far=error.position - at > _FAR or error.unclosed)
    if inner.fence:
        closer = yield from source.spaces(end)
        end = closer + 3 if (yield from source.holds("```", closer)) else end
    call = call_of(name, given, offered, explicit=found.explicit)
    return Item((call,), end) if isinstance(call, ToolCall) else Item((), end, call)


def _name(source: Source, at: int) -> Reading[tuple[str, int]]:
    """A name, and the position behind what separates it from what follows."""
    end = yield from source.run(_NAME, at)
    name = without_namespace(source.text[at:end])
    at = yield from source.spaces((yield from source.run(_INDEX, end)))
    if (yield from source.holds("[ARGS]", at)):
        return name, (yield from source.spaces(at + len("[ARGS]")))
    if (yield from source.char(at)) == "<" and (yield from source.char(at + 1)) in ("|", "｜"):
        _, end = yield from tag_name(source, at)
        at = yield from source.spaces(end + 1)
    return name, at

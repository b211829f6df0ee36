"""Calls written with labels: ReAct's `Action: name` / `Action Input: ...` or `Action: name[input]`, and Qwen-Agent's markers.

The input is a JSON object, or bare text for a tool with a single argument: one line, or the lines up to the next label or
blank line where it begins as SQL does. Only offered tools count.
"""

from __future__ import annotations

import re
from typing import Any

from shared.records import ToolCall
from shared.tool_calls.almost_json import Unreadable
from shared.tool_calls.json_values import read
from shared.tool_calls.offered import Offered
from shared.tool_calls.python_calls import read_calls
from shared.tool_calls.shapes import call_of
from shared.tool_calls.source import Reading, Source

NAME_LABELS = {"action", "tool", "function", "tool name", "function name", "tool_name", "function_name", "✿function✿"}
_INPUT_LABELS = {"action input", "action_input", "input", "arguments", "args", "parameters", "params", "tool input",
                 "tool_input", "function arguments", "✿args✿"}  # fmt: skip
_STOP_LABELS = {"observation", "thought", "action", "final answer", "answer", "✿result✿", "✿return✿"}
_LABEL = re.compile(r"[*_#\w ✿]{0,28}")
_DECORATION = "*_# \t"
_NUMBER = "0123456789 "  # of the step: `Action 2:`
_REST = re.compile(r"[^\n]*")
_SQL = re.compile(r"(?:SELECT|WITH|INSERT|UPDATE|DELETE|EXPLAIN|PRAGMA)\b", re.IGNORECASE)
_NAMED = re.compile(r"\w+\s*[=:]")
# A word behind the opening ticks is no part of the text if it ends the line, or if SQL begins behind it.
_INFO = re.compile(rf"\w*[ \t]*\n|(?!{_SQL.pattern})\w+ +(?={_SQL.pattern})", re.IGNORECASE)


def read_call(source: Source, at: int, offered: Offered) -> Reading[tuple[ToolCall | None, int]]:
    """The call whose labels begin at this line, and the position behind it; None if there is none."""
    label, start = yield from _label(source, at, NAME_LABELS)
    if not label:
        return None, at
    start = yield from source.line_spaces(start)
    end = yield from source.run(_REST, start)
    name = source.text[start:end].strip(" \t*_`\"'")
    if name.partition("(")[0] in offered and "(" in name:
        return (yield from _python_action(source, start, offered))
    if label == "action" and name.endswith("]"):
        return _bracketed(name, offered), end
    after = yield from source.spaces(end)
    if name not in offered:
        return None, at
    input_label, start = yield from _label(source, after, _INPUT_LABELS)
    if not input_label:
        return None, at
    try:
        given, end = yield from _input(source, (yield from source.spaces(start)))
    except Unreadable as error:
        return None, max(at, error.position)
    if isinstance(given, str) and (label != "action" or _NAMED.match(given)):
        return None, at  # other labels also describe tools; a name is no part of the value
    call = call_of(name, given, offered, explicit=False)
    return (call, end) if isinstance(call, ToolCall) else (None, at)


def _bracketed(text: str, offered: Offered) -> ToolCall | None:
    """The call in `name[input]`."""
    name, _, given = text[:-1].partition("[")
    if name.strip() not in offered or _NAMED.match(given) or given.count("[") != given.count("]"):
        return None
    call = call_of(name.strip(), _unquoted(given.strip()), offered, explicit=False)
    return call if isinstance(call, ToolCall) else None


def _python_action(source: Source, at: int, offered: Offered) -> Reading[tuple[ToolCall | None, int]]:
    calls, end = yield from read_calls(source, at, offered)
    rest = yield from source.line_spaces(end)
    return (calls[0], end) if calls and (yield from source.char(rest)) in ("", "\n") else (None, at)


def _label(source: Source, at: int, labels: set[str]) -> Reading[tuple[str, int]]:
    """The label that stands here and the position behind its colon; "" if there is none. Waits only while one may come."""
    while True:
        match = _LABEL.match(source.text, at)
        end = match.end() if match else at
        label = source.text[at:end].strip(_DECORATION).rstrip(_NUMBER).lower()
        if source.final or end < len(source.text) or not any(known.startswith(label) for known in labels):
            break
        yield
    if label not in labels or (yield from source.char(end)) != ":":
        return "", at
    while (yield from source.char(end + 1)) == "*":
        end += 1
    return label, end + 1


def _input(source: Source, at: int) -> Reading[tuple[Any, int]]:
    if (yield from source.holds("```", at)):
        body = yield from source.spaces((yield from source.run(re.compile(r"[`\w]*"), at)))
        if (yield from source.char(body)) == "{":
            given, end = yield from read(source, body)
            closer = yield from source.spaces(end)
            return given, closer + 3 if (yield from source.holds("```", closer)) else end
    elif (yield from source.char(at)) == "{":
        return (yield from read(source, at))
    end = yield from _text_end(source, at)
    text = source.text[at:end].strip()
    if text.startswith("`"):
        ticks = "```" if text.startswith("```") else "`"
        if len(text) < 2 * len(ticks) or not text.endswith(ticks):
            return None, end  # a fence that never ends: cut
        text = text[len(ticks) : -len(ticks)]
        info = _INFO.match(text)
        text = text[info.end() if info else 0 :].strip()
    return _unquoted(text), end


def _unquoted(text: str) -> str:
    """A text without the quotes around it, where they are the only ones of their kind."""
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" and text[0] not in text[1:-1]
    return text[1:-1] if quoted else text


def _text_end(source: Source, at: int) -> Reading[int]:
    """Where bare text ends: with its line, or if it is SQL or fenced before the next label or blank line."""
    end = yield from source.run(_REST, at)
    if not _SQL.match(source.text, at) and not source.text.startswith("```", at):
        return end
    while (yield from source.char(end)) == "\n":
        line = yield from source.line_spaces(end + 1)
        stop, _ = yield from _label(source, line, _STOP_LABELS)
        if stop or (yield from source.char(line)) in ("", "\n"):
            break
        end = yield from source.run(_REST, line)
    return end

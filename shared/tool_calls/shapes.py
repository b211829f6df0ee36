"""What a JSON value means: which tool calls, or why none.

Arguments get the types of the schema where nothing is lost by it (`"3"` for an integer is 3); those that have them already,
written again, give the model's own text. How much is demanded beyond that depends on where the value stands. In an explicit
`<tool_call>` it is taken as it is, so that the agent can answer a wrong name or argument. Everywhere else it must name an
offered tool and its arguments must fit, so that JSON answers, echoed tool definitions and log records stay text.
"""

from __future__ import annotations

import math
import re
from typing import Any

from shared.records import ToolCall
from shared.tool_calls.json_values import value_of
from shared.tool_calls.offered import Offered, is_placeholder, without_namespace

FORM = '{"name": ..., "arguments": {...}}'
_NAME = re.compile(r"[^\W\d][\w.:/-]{0,127}")
_NAME_KEYS = ("name", "tool", "function", "tool_name", "function_name", "action")
_ARGUMENT_KEYS = ("arguments", "parameters", "args", "input", "params", "tool_input", "action_input", "kwargs")
_USUAL_KEYS = {"name", "arguments"}
_LIST_KEYS = ("tool_calls", "function_calls")
_WRAPPER_KEYS = ("function", "function_call", "tool_call", "tool")
_OTHER_KEYS = {"id", "index", "type", "call_id", "tool_call_id", "thought", "thoughts", "reason", "reasoning", "role", "content"}  # fmt: skip
_MAX_DEPTH = 64


def calls_in(value: Any, offered: Offered, *, explicit: bool) -> tuple[list[ToolCall], str]:
    """The calls that a JSON value means, or none and what is wrong with it ("" for plain data)."""
    calls = []
    for item in _items(value):
        call = _call(item, offered, explicit)
        if not isinstance(call, ToolCall):
            return [], call
        calls.append(call)
    return calls, ""


def canonical_call(value: Any, offered: Offered) -> ToolCall | None:
    """What `calls_in` says of an explicit call in the usual form; None for any other."""
    if not isinstance(value, dict) or value.keys() != _USUAL_KEYS:
        return None
    name, arguments = value["name"], value["arguments"]
    if not isinstance(name, str) or not isinstance(arguments, dict) or not _NAME.fullmatch(name):
        return None
    if "properties" in arguments and _is_definition(value, "arguments"):
        return None
    arguments = offered.typed(name, arguments)
    return None if _flaw(arguments) else ToolCall(name, arguments)


def call_of(name: str, given: Any, offered: Offered, *, explicit: bool) -> ToolCall | str:
    """A call from a name and what stands for its arguments, or what is wrong with it."""
    if not _NAME.fullmatch(name):
        return f"The <tool_call> names no tool; write {FORM}."
    arguments = _arguments(given, name, offered)
    if arguments is None:
        return f"The arguments of {name} are not a JSON object; write {FORM}."
    arguments = offered.typed(name, arguments)
    if not explicit:
        problem = offered.misfit(name, arguments)
        if problem or is_placeholder(arguments):
            return problem
    flaw = _flaw(arguments)
    return f"The arguments of {name} {flaw}." if flaw else ToolCall(name, arguments)


def _items(value: Any) -> list[Any]:
    """A JSON value as a list of possible calls."""
    if isinstance(value, dict):
        value = next((value[key] for key in _LIST_KEYS if _wraps(value, key, list)), value)
    return (value or [None]) if isinstance(value, list) else [value]


def _call(value: Any, offered: Offered, explicit: bool) -> ToolCall | str:
    fields = _fields(value, offered)
    name_key = next((key for key in _NAME_KEYS if isinstance(fields.get(key), str)), None)
    if name_key is None or not _NAME.fullmatch(fields[name_key].strip()):
        return f"The <tool_call> names no tool; write {FORM}." if explicit else ""
    name = fields[name_key] if explicit else without_namespace(fields[name_key].strip())
    key = next((key for key in _ARGUMENT_KEYS if key in fields), None)
    if not explicit and (name not in offered or key is None or fields.keys() - _OTHER_KEYS - {name_key, key}):
        return ""
    if _is_definition(fields, key):
        return f"The <tool_call> repeats the definition of {name}; write {FORM}." if explicit else ""
    given = _flat_arguments(fields, name_key, offered.parameters(name)) if key is None else fields[key]
    return call_of(name, given, offered, explicit=explicit)


def _fields(value: Any, offered: Offered) -> dict[str, Any]:
    """The object that holds the name, which other objects may wrap, or whose only key the name may be."""
    if not isinstance(value, dict) or "name" in value:
        return value if isinstance(value, dict) else {}
    if len(value) == 1:
        ((name, given),) = value.items()
        if name in offered and isinstance(given, dict) and not offered.misfit(name, offered.typed(name, given)):
            return {"name": name, "arguments": given}
    return next((value[key] for key in _WRAPPER_KEYS if _wraps(value, key, dict)), value)


def _wraps(value: dict[str, Any], key: str, kind: type) -> bool:
    """Whether an object only wraps what stands under `key`; records of a call say more about it."""
    return isinstance(value.get(key), kind) and not value.keys() - _OTHER_KEYS - {key}


def _is_definition(fields: dict[str, Any], key: str | None) -> bool:
    given = fields.get(key or "")
    schema = isinstance(given, dict) and "properties" in given and ("type" in given or "required" in given)
    return schema or (key == "parameters" and "description" in fields)


def _flat_arguments(fields: dict[str, Any], name_key: str, parameters: Any) -> dict[str, Any]:
    """Arguments written beside the name, if all of them are parameters of the tool."""
    rest = {key: value for key, value in fields.items() if key != name_key}
    return rest if rest and rest.keys() <= parameters.keys() else {}


def _arguments(given: Any, name: str, offered: Offered) -> dict[str, Any] | None:
    """Arguments as an object: also from JSON text, encoded once or more, and from the bare value of an only argument."""
    text = ""
    while isinstance(given, str) and given.strip():
        text = given
        given = value_of(text)
        if given is None:
            break
    if isinstance(given, dict):
        return given
    parameters = offered.parameters(name)
    if text and len(parameters) == 1 and not text.lstrip().startswith(("{", "[")):
        return {next(iter(parameters)): text}
    return {} if not text and (given is None or given == "" or given == []) else None


def _flaw(value: Any, depth: int = 0) -> str:
    """What keeps a value from being sent as JSON."""
    kind = type(value)
    if kind is str:
        return "" if value.isascii() or _is_unicode(value) else "hold half of a unicode surrogate pair"
    if kind is float:
        return "" if math.isfinite(value) else "hold a number that is too large"
    if kind is not dict and kind is not list:
        return ""
    if depth == _MAX_DEPTH:
        return "are nested too deeply"
    for item in value if kind is list else (*value, *value.values()):
        if (type(item) is not str or not item.isascii()) and (flaw := _flaw(item, depth + 1)):
            return flaw
    return ""


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

"""The offered tools, and which calls of them a name and a value mean.

Arguments get the types of the schema where nothing is lost by it (`"3"` for an integer is 3). In an explicit call, one
behind `<tool_call>`, name and arguments are taken as they are, so that the agent can answer a wrong one. Everywhere
else the tool must be offered and its arguments must fit, so that JSON answers, echoed tool definitions and log records
stay text.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .json_values import value_of

FORM = '{"name": ..., "arguments": {...}}'
NAMESPACE = re.compile(r"(?:functions?|tools?|default_api)\.")
_JSON_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict,
    "null": type(None),
}  # fmt: skip
_BOOLEANS = {"true": True, "True": True, "false": False, "False": False}
_NULLS = ("null", "None", "NULL")
_NAME = re.compile(r"[^\W\d][\w.:/-]{0,127}")
_NAME_KEYS = ("name", "tool", "function", "tool_name", "function_name", "action")
_ARGUMENT_KEYS = ("arguments", "parameters", "args", "input", "params", "tool_input", "action_input", "kwargs")
_WRAPPER_KEYS = ("function", "function_call", "tool_call", "tool", "tool_calls", "function_calls")
_OTHER_KEYS = set("id index type call_id tool_call_id thought thoughts reason reasoning role content".split())
_PLACEHOLDER = re.compile(r"\s*(?:<[^<>]*>|\{\{?\s*\w+\s*\}?\})\s*|(?:.*\s)?(?:\.\.\.|…)(?:\s.*)?", re.DOTALL)
_ELEMENT = re.compile(r"\s*<(\w+)>(.*)</\1>\s*", re.DOTALL)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_MAX_DEPTH = 64


@dataclass(frozen=True)
class ToolCall:
    """A tool call as the model meant it; `arguments` is the decoded JSON object."""

    name: str
    arguments: dict[str, Any]


class Tools(dict[str, Mapping[str, Any]]):
    """The parameter schemas of the offered tools by name. Only what they say for certain is checked or converted."""

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        functions = [tool.get("function") or tool for tool in tools]
        super().__init__({f["name"]: f.get("parameters") or {} for f in functions if isinstance(f.get("name"), str)})

    def parameters(self, name: str) -> Mapping[str, Any]:
        """The parameters of a tool in their order; none for an unknown one."""
        properties = self.get(name, {}).get("properties")
        return properties if isinstance(properties, dict) else {}

    def calls_in(self, value: Any, *, explicit: bool) -> tuple[list[ToolCall], str]:
        """The calls that a JSON value means, or none and what is wrong with it ("" for plain data)."""
        calls: list[ToolCall] = []
        items = [value]
        while items:
            item = items.pop(0)
            fields = item if isinstance(item, dict) else {}
            if isinstance(item, list) and item:
                items[:0] = item
                continue
            wrappers = () if "name" in fields else _WRAPPER_KEYS
            wrapper = next((key for key in wrappers if isinstance(fields.get(key), dict | list)), "")
            if wrapper and not fields.keys() - _OTHER_KEYS - {wrapper}:
                items.insert(0, fields[wrapper])
                continue
            if len(fields) == 1:  # perhaps arguments under the name of their tool
                ((name, given),) = fields.items()
                if name in self and isinstance(given, dict) and not self._misfit(name, given):
                    fields = {"name": name, "arguments": given}
            name_key = next((key for key in _NAME_KEYS if type(fields.get(key)) is str), "")
            name = fields[name_key].strip() if name_key else ""
            if not _NAME.fullmatch(name):
                return [], f"The <tool_call> names no tool; write {FORM}." if explicit else ""
            if name not in self and NAMESPACE.sub("", name, count=1) in self:
                name = NAMESPACE.sub("", name, count=1)
            key = next((key for key in _ARGUMENT_KEYS if key in fields), "")
            if not explicit and (name not in self or not key or fields.keys() - _OTHER_KEYS - {name_key, key}):
                return [], ""
            given = fields[key] if key else None
            schema = isinstance(given, dict) and "properties" in given and ("type" in given or "required" in given)
            if schema or (key == "parameters" and "description" in fields):
                return [], f"The <tool_call> repeats the definition of {name}; write {FORM}." if explicit else ""
            if not key:  # arguments beside the name, if all of them are parameters of the tool
                rest = {key: value for key, value in fields.items() if key != name_key}
                given = rest if rest.keys() <= self.parameters(name).keys() else {}
            call = self.call(name, given, explicit=explicit)
            if isinstance(call, str):
                return [], call
            calls.append(call)
        return calls, ""

    def call(self, name: str, given: Any, *, explicit: bool, plain: bool = False) -> ToolCall | str:
        """A call from a name and what stands for its arguments, or what is wrong; `plain` texts have no type yet."""
        text, parameters = "", self.parameters(name)
        while isinstance(given, str) and given.strip():  # JSON text, perhaps encoded more than once
            text, given = given, value_of(given)
        if not isinstance(given, dict) and text:
            element = _ELEMENT.fullmatch(text)
            if element and element[1] in parameters:
                given = {element[1]: element[2]}
            elif len(parameters) == 1 and not text.lstrip().startswith(("{", "[")):
                given = dict.fromkeys(parameters, text)
        arguments = given if isinstance(given, dict) else {}
        if not _NAME.fullmatch(name) or (arguments is not given and (text or given not in (None, "", []))):
            return f"The arguments of {name} are not a JSON object; write {FORM}."
        typed = dict(arguments)
        for key, value in arguments.items():
            parameter = parameters.get(key)
            if isinstance(parameter, dict) and not (parameter.get("type") == "string" and isinstance(value, str)):
                optional = key not in (self[name].get("required") or ())
                typed[key] = _converted(value, self._types(name, key), plain=plain, optional=optional)
        if not explicit:
            problem = self._misfit(name, typed)
            if problem or any(isinstance(text, str) and _PLACEHOLDER.fullmatch(text) for text in typed.values()):
                return problem
        try:
            encoded = _ENCODER.encode(typed).encode()
            deep = encoded.count(b"{") + encoded.count(b"[") > _MAX_DEPTH and _depth(typed) > _MAX_DEPTH
        except UnicodeEncodeError:
            return f"The arguments of {name} hold half of a unicode surrogate pair."
        except RecursionError:
            deep = True
        except ValueError:
            return f"The arguments of {name} hold a number that is too large."
        return f"The arguments of {name} are nested too deeply." if deep else ToolCall(name, typed)

    def _types(self, name: str, key: str) -> list[str]:
        """The JSON types that the schema allows for an argument, in its order; none if it allows any."""
        found: list[str] = []
        parts: list[Any] = [self.parameters(name)[key]]
        for part in parts:  # grows by what the parts refer to
            if isinstance(part, dict) and isinstance(part.get("$ref"), str):
                steps, part = part["$ref"].removeprefix("#/").split("/"), self[name]
                for step in steps:
                    part = part.get(step) if isinstance(part, dict) else None
            if not isinstance(part, dict) or len(parts) > _MAX_DEPTH:
                return []
            options = [option for key in ("anyOf", "oneOf", "allOf") for option in part.get(key) or ()]
            kinds = part.get("type") or []
            kinds = kinds if isinstance(kinds, list) else [kinds]
            if not (options or kinds) or not all(kind in _JSON_TYPES for kind in kinds):
                return []
            found += [*kinds, *(["null"] if part.get("nullable") else [])]
            parts += options
        return found

    def _misfit(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What keeps the arguments from being accepted, as a sentence; "" if nothing does."""
        parameters, required = self.parameters(name), self[name].get("required") or ()
        for key in required:
            if key not in arguments:
                return f'{name} needs the argument "{key}".'
        for key, value in arguments.items():
            if key not in parameters and not self[name].get("additionalProperties"):
                return f'{name} has no argument "{key}"; it takes {", ".join(parameters) or "none"}.'
            types = self._types(name, key) if key in parameters else []
            if types and not any(_is(value, kind) for kind in types) and (value is not None or key in required):
                return f'The argument "{key}" of {name} must be of type {" or ".join(types)}.'
        return ""


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, _JSON_TYPES[kind]) and (not isinstance(value, bool) or kind == "boolean")


def _converted(value: Any, kinds: Sequence[str], *, plain: bool, optional: bool) -> Any:
    """A value as the first of these types that it can be read as; a `plain` text has no type of its own yet."""
    plain = plain and isinstance(value, str)
    if not plain and any(_is(value, kind) for kind in kinds):
        return value
    if plain and value.strip() in _NULLS and ("null" in kinds or (optional and kinds and "string" not in kinds)):
        return None
    for kind in kinds:
        new = value
        if kind == "string" and _is(value, "integer"):
            new = str(value)
        elif kind in ("integer", "number"):
            with contextlib.suppress(ValueError):
                new = json.loads(value) if isinstance(value, str) else value
            if kind == "integer" and isinstance(new, float) and new.is_integer() and abs(new) < 2**53:
                new = int(new)
        elif kind in ("boolean", "array", "object") and isinstance(value, str):
            new = _BOOLEANS.get(value.strip()) if kind == "boolean" else value_of(value)
        if _is(new, kind):
            return new
    return value


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)

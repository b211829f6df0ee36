"""The tools that a request offers, what they are called, and whether arguments fit them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_JSON_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict,
    "null": type(None),
}  # fmt: skip
NAMESPACES = ("functions.", "function.", "tools.", "tool.", "default_api.")
_NAMESPACE = re.compile("|".join(map(re.escape, NAMESPACES)))
_INTEGER = re.compile(r"-?(?:0|[1-9]\d{0,300})")
_BOOLEANS = {"true": True, "True": True, "false": False, "False": False}
_PLACEHOLDER = re.compile(r"\s*(?:<[^<>]*>|\{\{?\s*\w+\s*\}?\})\s*")
_ELLIPSIS = re.compile(r"(?:^|\s)(?:\.\.\.|…)(?:\s|$)")


class Offered:
    """Tool schemas by name. Only what the schemas say for certain is checked or converted."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = [tool.get("function") or tool for tool in tools]
        self._schemas = {f["name"]: f.get("parameters") or {} for f in functions if isinstance(f.get("name"), str)}

    def __contains__(self, name: object) -> bool:
        return name in self._schemas

    def names(self) -> tuple[str, ...]:
        return tuple(self._schemas)

    def parameters(self, name: str) -> Mapping[str, Any]:
        """The parameters of a tool in their order; none for an unknown one."""
        properties = self._schemas.get(name, {}).get("properties")
        return properties if isinstance(properties, dict) else {}

    def typed(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments in the types of the schema, where nothing is lost; others stay as they are."""
        parameters = self.parameters(name)
        return {
            key: value if _is_wanted_text(value, parameters.get(key)) else _typed(value, _types(parameters.get(key)))
            for key, value in arguments.items()
        }

    def misfit(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What keeps the arguments from being accepted, as a sentence; "" if nothing does."""
        parameters, schema = self.parameters(name), self._schemas.get(name, {})
        required = schema.get("required") or ()
        for key in required:
            if key not in arguments:
                return f'{name} needs the argument "{key}".'
        for key, value in arguments.items():
            if key not in parameters:
                if schema.get("additionalProperties"):
                    continue
                return f'{name} has no argument "{key}"; it takes {", ".join(parameters) or "none"}.'
            types = _types(parameters[key])
            optional_null = value is None and key not in required
            if types and not optional_null and not any(_is(value, kind) for kind in types):
                return f'The argument "{key}" of {name} must be of type {" or ".join(types)}.'
        return ""


def without_namespace(name: str) -> str:
    """A name as it is offered, where a model writes it as part of a module."""
    prefix = _NAMESPACE.match(name)
    return name[prefix.end() :] if prefix else name


def is_placeholder(arguments: Mapping[str, Any]) -> bool:
    """Whether a text stands for an argument (`<table>`, `{table}`, `SELECT ...`) in place of being one."""
    texts = [value for value in arguments.values() if isinstance(value, str)]
    return any(_PLACEHOLDER.fullmatch(text) or _ELLIPSIS.search(text) for text in texts)


def _is_wanted_text(value: Any, parameter: Any) -> bool:
    """The short way for what most arguments are."""
    return isinstance(value, str) and isinstance(parameter, dict) and parameter.get("type") == "string"


def _types(parameter: Any) -> list[str]:
    kind = parameter.get("type") if isinstance(parameter, dict) else None
    kinds = kind if isinstance(kind, list) else [kind]
    return [kind for kind in kinds if isinstance(kind, str) and kind in _JSON_TYPES] if all(kinds) else []


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, _JSON_TYPES[kind]) and (not isinstance(value, bool) or kind == "boolean")


def _typed(value: Any, types: Sequence[str]) -> Any:
    if not types or any(_is(value, kind) for kind in types):
        return value
    converted = [_converted(value, kind) for kind in types]
    return next((new for new, kind in zip(converted, types, strict=True) if _is(new, kind)), value)


def _converted(value: Any, kind: str) -> Any:
    if kind == "string" and _is(value, "integer"):
        return str(value)
    if kind == "integer" and isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if not isinstance(value, str):
        return value
    text = value.strip()
    if kind == "boolean":
        return _BOOLEANS.get(text, value)
    if kind == "integer":
        return int(text) if _INTEGER.fullmatch(text) else value
    if kind in ("number", "array", "object", "null"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return value
    return value

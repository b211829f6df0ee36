"""The chat template, rendered with Jinja set up as transformers does it, without importing torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE = Path(__file__).resolve().parents[2] / "shared" / "models" / "chatml_tools.jinja"


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _compile() -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


_COMPILED = _compile()


def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, prompt: bool = False) -> str:
    """A conversation as text; `prompt` adds the header of the next assistant turn. Decodes arguments as servers do."""
    return _COMPILED.render(messages=[_decoded(m) for m in messages], tools=tools, add_generation_prompt=prompt)


def _decoded(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or []
    ]
    return {**message, "tool_calls": calls} if calls else message

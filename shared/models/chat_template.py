"""A model folder's chat template, rendered as servers and transformers render it, without importing either.

The text is what the model reads; its length in tokens is what every limit counts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import UserError
from shared.models.folder import TEMPLATE_FILE
from shared.records import Message

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """One compiled template; `special_tokens` are the names and texts it may use."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self.special_tokens = special_tokens
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"The chat template cannot be compiled ({error}); replace the template.") from error

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate:
        """The template of a model folder; raises UserError when there is none or it cannot be read."""
        settings = _settings(folder / "tokenizer_config.json")
        file = folder / TEMPLATE_FILE
        source = file.read_text(encoding="utf-8") if file.exists() else _for_tools(settings.get("chat_template"))
        if not source:
            raise UserError(f"Model folder {folder} has no chat template; stage 1 writes one into its merged model.")
        return cls(source, {name: _text(settings[name]) for name in _SPECIAL_TOKENS if settings.get(name)})

    def render(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, *, prompt: bool = False) -> str:
        """The conversation as text; `prompt` adds the header of the next assistant turn. Raises UserError if it refuses."""
        decoded = [_decoded(message) for message in messages]
        try:
            return self._template.render(
                messages=decoded, tools=tools, add_generation_prompt=prompt, **self.special_tokens
            )
        except jinja2.TemplateError as error:
            raise UserError(f"The chat template refuses a conversation with tools ({error}); replace it.") from error


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja set up as transformers does."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _settings(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} is no JSON object ({error}); copy it again from the model's source.") from error


def _for_tools(template: Any) -> str:
    """Some folders hold several named templates; conversations with tools take the one for them."""
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return str(named.get("tool_use") or named.get("default") or "")
    return template or ""


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _decoded(message: Message) -> Message:
    """The message with call arguments as objects, as servers pass them to a template."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}

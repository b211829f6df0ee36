"""A model folder's chat template, rendered as servers and transformers render it, without torch.

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


class ChatTemplate:
    """One compiled template; `special_tokens` are the names and texts it may use."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self.special_tokens = special_tokens
        jinja = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        jinja.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        jinja.globals["raise_exception"] = _refuse
        jinja.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = jinja.from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"The chat template cannot be compiled ({error}); replace the template.") from error

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate:
        """The template of a model folder; raises UserError when there is none or it cannot be read."""
        file = folder / "tokenizer_config.json"
        try:
            settings: dict[str, Any] = dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}
        except (ValueError, TypeError) as error:
            raise UserError(f"{file} is not a JSON object ({error}); copy it again from the model's source.") from error
        source = settings.get("chat_template")
        if isinstance(source, list):  # several named templates; conversations with tools take the one for them
            named = {entry["name"]: entry["template"] for entry in source}
            source = named.get("tool_use") or named.get("default")
        if (folder / TEMPLATE_FILE).exists():
            source = (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
        if not source:
            raise UserError(f"Model folder {folder} has no chat template; stage 1 writes one into its merged model.")
        tokens = {name: settings.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        texts = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
        return cls(source, {name: text for name, text in texts.items() if text})

    def render(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, *, prompt: bool = False) -> str:
        """The conversation as text; `prompt` adds the next assistant header. Raises UserError if it is refused."""
        decoded = []  # servers pass the arguments of calls to a template as objects
        for message in messages:
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            calls = [{"type": "function", "function": f | {"arguments": json.loads(f["arguments"])}} for f in functions]
            decoded.append({**message, "tool_calls": calls} if calls else message)
        try:
            return self._template.render(
                messages=decoded, tools=tools, add_generation_prompt=prompt, **self.special_tokens
            )
        except jinja2.TemplateError as error:
            raise UserError(f"The chat template refuses a conversation with tools ({error}); replace it.") from error


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)

"""Tool-call text: what models write (`parse`, `Stream`), what stock vLLM reads (`parse_hermes`), our own (`render_*`).

Standard library and relative imports only: `pyproject.toml` beside this file builds the parser as a package of its own.
"""

from .grammar import Parsed, Stream, Update, parse
from .render import is_encodable, parse_hermes, render_call, render_turn
from .tools import ToolCall

__all__ = [
    "Parsed",
    "Stream",
    "ToolCall",
    "Update",
    "is_encodable",
    "parse",
    "parse_hermes",
    "render_call",
    "render_turn",
]

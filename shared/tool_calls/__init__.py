"""Tool-call text: what models write (`parse`, `Stream`), what stock vLLM sees in it (`parse_hermes`), what we teach (`render_*`).

Pure functions over strings, no third-party import; the vLLM adapter, the agent and the trace builder all stand on them.
"""

from shared.tool_calls.hermes import parse_hermes
from shared.tool_calls.render import is_encodable, render_call, render_turn
from shared.tool_calls.stream import Parsed, Stream, Update, parse

__all__ = ["Parsed", "Stream", "Update", "is_encodable", "parse", "parse_hermes", "render_call", "render_turn"]

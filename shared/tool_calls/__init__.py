"""Tool-call text: what models write (`parse`), what stock vLLM sees in it (`parse_hermes`), what we teach (`render_*`).

Pure functions over strings, no third-party import; the vLLM adapter, the agent and the trace builder all stand on them.
"""

from shared.tool_calls.grammar import Parsed, parse, parse_hermes
from shared.tool_calls.render import is_encodable, render_call, render_turn

__all__ = ["Parsed", "is_encodable", "parse", "parse_hermes", "render_call", "render_turn"]

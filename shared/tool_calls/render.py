"""Tool calls as the Qwen2.5 chat template writes them, byte for byte, and as vLLM's stock `hermes` parser reads them.

The next prompt of an episode is rendered by the template from *parsed* calls. Only if a model writes exactly this text
does that prompt start with the tokens it generated, so this is the one form that training teaches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from .grammar import Parsed
from .tools import ToolCall

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)


def render_call(call: ToolCall) -> str:
    """One `<tool_call>` block. Like the template, it writes the name as it is, without JSON escapes."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{call.name}", "arguments": {arguments}}}\n</tool_call>'


def render_turn(content: str, calls: Sequence[ToolCall]) -> str:
    """The text of one assistant turn, without role header and end-of-turn token."""
    return "\n".join([*([content] if content else []), *map(render_call, calls)])


def is_encodable(call: ToolCall) -> bool:
    """Whether the call can be sent at all: JSON escapes can spell half of a surrogate pair, which UTF-8 cannot hold."""
    try:
        render_call(call).encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_hermes(text: str) -> Parsed:
    """Exactly what vLLM's stock `hermes` parser finds: all `<tool_call>` blocks, or none if a single one is broken.

    One difference: arguments that are not an object are left out here, for no agent can use them.
    """
    bodies = [closed or cut for closed, cut in _BLOCK.findall(text)]
    try:
        loaded = [json.loads(body) for body in bodies]
        pairs = [(call["name"], call["arguments"]) for call in loaded]
    except (ValueError, KeyError, TypeError, RecursionError):
        return Parsed(text, (), (), "")
    if not pairs or not all(isinstance(name, str) for name, _ in pairs):
        return Parsed(text, (), (), "")
    calls = tuple(ToolCall(name, arguments) for name, arguments in pairs if isinstance(arguments, dict))
    return Parsed(text[: text.find("<tool_call>")], calls, (), "hermes" if calls else "")

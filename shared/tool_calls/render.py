"""Tool calls as the Qwen2.5 chat template writes them, byte for byte.

The next prompt of an episode is rendered by the template from *parsed* calls. Only if a model writes exactly this text
does that prompt start with the tokens it generated, so this is the one form that training teaches.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from shared.records import ToolCall


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

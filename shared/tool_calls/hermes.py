"""What vLLM's stock `hermes` parser sees in a text: the measure of how well a model already writes calls."""

from __future__ import annotations

import json
import re

from shared.records import ToolCall
from shared.tool_calls.stream import Parsed

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)


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

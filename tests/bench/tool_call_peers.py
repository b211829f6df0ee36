"""Packages that read tool calls out of text, compared by name, offered tools and arguments; content is not judged.

None of them is a dependency. One that is not installed is said to be absent; `pip install --no-deps --target FOLDER
NAME` and PYTHONPATH bring it in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, Any]
Reader = Callable[[str, Sequence[dict[str, Any]]], list[Call]]


def agent_tool_parser(text: str, tools: Sequence[dict[str, Any]]) -> list[Call]:
    from agent_tool_parser import try_parse_tool_calls

    return [(call.name, call.args) for call in try_parse_tool_calls(text) if call.name in _names(tools)]


def toolpatch(text: str, tools: Sequence[dict[str, Any]]) -> list[Call]:
    from toolpatch import extract_tool_calls

    found = extract_tool_calls(text, set(_names(tools)), allow_unterminated_hermes=True)
    return [_openai(call) for call in found.tool_calls] if found else []


def tooletta(text: str, tools: Sequence[dict[str, Any]]) -> list[Call]:
    from tooletta import parse_tool_calls
    from tooletta.errors import ParseError

    try:
        calls = parse_tool_calls(text)
    except ParseError:
        return []
    return [(call.name, call.arguments) for call in calls if call.name in _names(tools)]


def llm_beacon(text: str, tools: Sequence[dict[str, Any]]) -> list[Call]:
    from beacon import parse_tool_calls
    from beacon.errors import NoToolCallFoundError

    try:
        calls = parse_tool_calls(text)
    except NoToolCallFoundError:
        return []
    return [(call["name"], call["arguments"]) for call in calls if call["name"] in _names(tools)]


def sglang_qwen25(text: str, tools: Sequence[dict[str, Any]]) -> list[Call]:
    """SGLang's detector, as the package llm-router-utils extracts it."""
    from llm_router_utils.sglang.srt.entrypoints.openai.protocol import Tool
    from llm_router_utils.sglang.srt.function_call.qwen25_detector import Qwen25Detector

    found = Qwen25Detector().detect_and_parse(text, [Tool(**tool) for tool in tools])
    return [(call.name, json.loads(call.parameters)) for call in found.calls]


PEERS: tuple[Reader, ...] = (agent_tool_parser, toolpatch, tooletta, llm_beacon, sglang_qwen25)


def _names(tools: Sequence[dict[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def _openai(call: dict[str, Any]) -> Call:
    return call["function"]["name"], json.loads(call["function"]["arguments"])

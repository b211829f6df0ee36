"""The vLLM tool parser `qwen25_coder`: a thin adapter over `shared.tool_calls`.

Installed with this package it is known to every vLLM process through the entry point `vllm.general_plugins`; in a plain
vLLM this file is given by its path, and the rest is found beside it:

    vllm serve MODEL --enable-auto-tool-choice --tool-call-parser qwen25_coder --tool-parser-plugin PATH/qwen25_coder_parser.py

Module names are those of vLLM 0.10 to 0.33, tried newest first. Streaming: text flows until something that may begin a call; a
call is sent whole as soon as nothing that follows can change it, one behind `<tool_call>` with its last bracket. Newer vLLM calls
`finish_streaming` at the end. Older vLLM gives no sign of it but the end-of-turn token, a stop token or the request's own token
limit. Where all are missing (a stop string, a full context) what is still undecided is not sent: text behind an opener, or a bare
call without a line end.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if not __name__.startswith("shared."):  # given to vLLM by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from shared.records import ToolCall
from shared.tool_calls import Stream, parse

NAME = "qwen25_coder"

_PARSERS = ("vllm.tool_parsers", "vllm.entrypoints.openai.tool_parsers.abstract_tool_parser")
_PROTOCOLS = (
    "vllm.entrypoints.generate.base.protocol",
    "vllm.entrypoints.openai.engine.protocol",
    "vllm.entrypoints.openai.protocol",
)
_ENCODER = json.JSONEncoder(ensure_ascii=False)
_END_OF_TURN = ("<|im_end|>", "<|endoftext|>")


def _from_vllm(name: str, modules: Sequence[str]) -> Any:
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"This vLLM has no {name} in {', '.join(modules)}; versions 0.10 to 0.33 do.")


ToolParser: Any = _from_vllm("ToolParser", _PARSERS)
DeltaFunctionCall, DeltaMessage, DeltaToolCall, ExtractedToolCallInformation, FunctionCall, VllmToolCall = (
    _from_vllm(name, _PROTOCOLS)
    for name in (
        "DeltaFunctionCall", "DeltaMessage", "DeltaToolCall", "ExtractedToolCallInformation", "FunctionCall", "ToolCall"
    )
)  # fmt: skip


def register() -> None:
    """Make the parser known by its name; harmless when repeated."""
    _from_vllm("ToolParserManager", _PARSERS).register_module(name=NAME, module=Qwen25CoderToolParser)


class Qwen25CoderToolParser(ToolParser):
    """Reads every form of call that `shared.tool_calls` knows. One instance serves one answer."""

    def __init__(self, tokenizer: Any, *tools: Any, **options: Any) -> None:
        super().__init__(tokenizer, *tools, **options)
        self._stream: Stream | None = None
        self._token_limit: int | None = None
        self._end_ids: set[int] = set()

    @functools.cached_property
    def _end_of_turn_ids(self) -> set[int]:
        named = {self.vocab[token] for token in _END_OF_TURN if token in self.vocab}
        return named | {self.model_tokenizer.eos_token_id}

    def adjust_request(self, request: Any) -> Any:
        """Keep special tokens in the text where `<tool_call>` is one."""
        request = super().adjust_request(request)
        if request.tools and request.tool_choice != "none" and "<tool_call>" in self.model_tokenizer.all_special_tokens:
            request.skip_special_tokens = False
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        """Calls and content of a whole answer."""
        parsed = parse(model_output, _tools(request))
        if not parsed.calls:
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
        calls = [VllmToolCall(function=FunctionCall(name=c.name, arguments=_arguments(c))) for c in parsed.calls]
        return ExtractedToolCallInformation(tools_called=True, tool_calls=calls, content=parsed.content or None)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> Any:
        """What can be sent after this delta; None when everything has to wait."""
        if self._stream is None:
            self._stream = self._begin(request)
        update = self._stream.feed(delta_text)
        full = self._token_limit is not None and len(current_token_ids) >= self._token_limit
        if not full and self._end_ids.isdisjoint(delta_token_ids):
            return self._message(*update)
        rest = self._stream.finish()
        return self._message(update.content + rest.content, update.calls + rest.calls)

    def finish_streaming(self, *_: Any, **__: Any) -> Any:
        """What had to wait for the end of the answer, for versions of vLLM that announce it; None if nothing had."""
        rest = self._stream.finish() if self._stream else None
        return self._message(rest.content, rest.calls) if rest else None

    def _begin(self, request: Any) -> Stream:
        """Start on an answer; how it may end depends on the request."""
        self.engine_based_streaming = (
            True  # newer vLLM asks it at the end; earlier it would break `required` and named calls
        )
        options = vars(request)  # reading `max_tokens` as an attribute warns that it is deprecated
        self._token_limit = options.get("max_completion_tokens") or options.get("max_tokens")
        self._end_ids = self._end_of_turn_ids | set(options.get("stop_token_ids") or ())
        return Stream(_tools(request))

    def _message(self, content: str, calls: Sequence[ToolCall]) -> Any:
        if not content and not calls:
            return None
        deltas = [delta for call in calls for delta in self._call_deltas(call)]
        return DeltaMessage(content=content or None, tool_calls=deltas)

    def _call_deltas(self, call: ToolCall) -> list[Any]:
        """A call as two deltas, name first: if the first delta of an answer's last message holds arguments, vLLM
        rebuilds the message from the last call and drops all else in it."""
        index, arguments = len(self.prev_tool_call_arr), _arguments(call)
        self.prev_tool_call_arr.append({"name": call.name, "arguments": arguments})
        self.streamed_args_for_tool.append(arguments)
        head = VllmToolCall(function=FunctionCall(name=call.name, arguments=arguments))  # makes the id
        return [
            DeltaToolCall(index=index, id=head.id, type="function", function=DeltaFunctionCall(name=call.name)),
            DeltaToolCall(index=index, function=DeltaFunctionCall(arguments=arguments)),
        ]


def _tools(request: Any) -> list[Mapping[str, Any]]:
    """The offered tools; none where the request forbids calls, so that all is text."""
    return [] if request.tool_choice == "none" else [_schema(tool) for tool in request.tools or ()]


def _schema(tool: Any) -> Mapping[str, Any]:
    if isinstance(tool, dict):
        return tool
    function = getattr(tool, "function", tool)  # the Responses API has no inner object
    return {"name": getattr(function, "name", None), "parameters": getattr(function, "parameters", None)}


def _arguments(call: ToolCall) -> str:
    return _ENCODER.encode(call.arguments)


register()  # for --tool-parser-plugin, which only imports this file

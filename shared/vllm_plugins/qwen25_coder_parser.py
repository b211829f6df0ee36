"""The vLLM tool parser `qwen25_coder`: a thin adapter over `shared.tool_calls`.

vLLM loads it in each of its processes through the entry point `vllm.general_plugins`; `--enable-auto-tool-choice
--tool-call-parser qwen25_coder` then chooses it. Module names are those of vLLM 0.10 to 0.32, tried newest first.

Streaming is safe rather than early. Text flows until something that may begin a call; a call is sent whole as soon as
nothing that follows can change it; text behind such a beginning waits for the end of the turn. vLLM gives no sign of
the end but the end-of-turn token or the request's own token limit; where both are missing (a stop string, a full
context) the waiting text is not sent. Each possible end of a call reads the whole text again.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Sequence
from typing import Any

from shared.records import ToolCall
from shared.tool_calls import parse

NAME = "qwen25_coder"

_PARSERS = ("vllm.tool_parsers", "vllm.entrypoints.openai.tool_parsers.abstract_tool_parser")
_PROTOCOLS = (
    "vllm.entrypoints.generate.base.protocol",
    "vllm.entrypoints.openai.engine.protocol",
    "vllm.entrypoints.openai.protocol",
)
_MAY_BEGIN_A_CALL = re.compile(
    r"<(?=[a-z_-]{0,14}\Z|tool|function|json>|response>|think>)|\[(?=[A-Z_]*\Z|TOOL_CALLS)|^[ \t\ufeff\u200b]*[`{\[]",
    re.MULTILINE,
)
_MAY_END_A_CALL = re.compile(r"[}\]>\n]")
_FENCE = re.compile(r"^[ \t]*```", re.MULTILINE)
_WAITING_SPACE = " \t\n\r\f\v\u00a0\u2028\u2029\u3000\u200b\ufeff"  # may be dropped or taken off before a call
_END_OF_TURN = ("<|im_end|>", "<|endoftext|>")
_MORE_TO_COME = "\0"  # stands for unknown text, so that the end of the text so far does not count as the end of a line


def _from_vllm(name: str, modules: Sequence[str]) -> Any:
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"This vLLM has no {name} in {', '.join(modules)}; versions 0.10 to 0.32 do.")


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
    """Reads every form of call that `shared.tool_calls.parse` knows. One instance serves one answer."""

    def __init__(self, tokenizer: Any, *tools: Any, **options: Any) -> None:
        super().__init__(tokenizer, *tools, **options)
        self._sent_content = ""
        self._sent_calls = 0

    @functools.cached_property
    def _end_ids(self) -> set[int]:
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
        if self._ended(current_token_ids, delta_token_ids, request):
            parsed = parse(current_text, _tools(request))
            return self._send(parsed.content.removeprefix(self._sent_content), parsed.calls)
        opening = _MAY_BEGIN_A_CALL.search(current_text)
        free = current_text if opening is None else current_text[: opening.start()]
        content = free.rstrip(_WAITING_SPACE)[len(self._sent_content) :]
        if opening is None or not _MAY_END_A_CALL.search(delta_text) or _undecided(current_text):
            return self._send(content, ())
        return self._send(content, parse(current_text + _MORE_TO_COME, _tools(request)).calls)

    def _ended(self, current_token_ids: Sequence[int], delta_token_ids: Sequence[int], request: Any) -> bool:
        options = vars(request)  # reading `max_tokens` as an attribute warns that it is deprecated
        limit = options.get("max_completion_tokens") or options.get("max_tokens")
        full = limit is not None and len(current_token_ids) >= limit
        return full or not self._end_ids.isdisjoint(delta_token_ids)

    def _send(self, content: str, calls: Sequence[ToolCall]) -> Any:
        self._sent_content += content
        new = calls[self._sent_calls :]
        deltas = [delta for call in new for delta in self._call_deltas(call)]
        return DeltaMessage(content=content or None, tool_calls=deltas) if content or deltas else None

    def _call_deltas(self, call: ToolCall) -> list[Any]:
        """A call as two deltas, name first: if the first delta of an answer's last message holds arguments, vLLM
        rebuilds the message from the last call and drops all else in it."""
        index, arguments = self._sent_calls, _arguments(call)
        self._sent_calls += 1
        self.prev_tool_call_arr.append({"name": call.name, "arguments": arguments})
        self.streamed_args_for_tool.append(arguments)
        head = VllmToolCall(function=FunctionCall(name=call.name, arguments=arguments))  # makes the id
        return [
            DeltaToolCall(index=index, id=head.id, type="function", function=DeltaFunctionCall(name=call.name)),
            DeltaToolCall(index=index, function=DeltaFunctionCall(arguments=arguments)),
        ]


def _undecided(text: str) -> bool:
    """Whether the text ends in an open think block or fence: closed, it may turn a call within into a mere example."""
    return text.rfind("<think>") > text.rfind("</think>") or len(_FENCE.findall(text)) % 2 == 1


def _tools(request: Any) -> list[dict[str, Any]]:
    return [tool if isinstance(tool, dict) else tool.model_dump() for tool in request.tools or ()]


def _arguments(call: ToolCall) -> str:
    return json.dumps(call.arguments, ensure_ascii=False)

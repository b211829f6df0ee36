"""The vLLM tool parser `qwen25_coder`, for vLLM 0.10 to 0.33.

Installed, it is found through the entry point `vllm.general_plugins`; without an installation, vLLM takes this file of
a clone by its path (`--tool-parser-plugin`).

Newer vLLM calls `finish_streaming` at the end of an answer. Older vLLM gives no sign of it but the end-of-turn token, a
stop token or the request's token limit; where all are missing (a stop string, a full context), undecided text is not
sent.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # given to vLLM by its path: the rest of the package lies beside it
    __package__, __spec__ = "qwen25_coder_tool_parser", None  # type: ignore[assignment]
    _spec = importlib.util.spec_from_file_location(__package__, Path(__file__).with_name("__init__.py"))
    sys.modules[__package__] = importlib.util.module_from_spec(_spec)  # type: ignore[arg-type]
    _spec.loader.exec_module(sys.modules[__package__])  # type: ignore[union-attr]

from .grammar import Stream, parse
from .tools import ToolCall

NAME = "qwen25_coder"
_PARSERS = ("vllm.tool_parsers", "vllm.entrypoints.openai.tool_parsers.abstract_tool_parser")
_PROTOCOLS = tuple(f"vllm.entrypoints.{x}.protocol" for x in ("generate.base", "openai.engine", "openai"))
_ENCODER = json.JSONEncoder(ensure_ascii=False)


def _from_vllm(name: str, modules: Sequence[str]) -> Any:
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"This vLLM has no {name} in {', '.join(modules)}; versions 0.10 to 0.33 do.")


ToolParser: Any = _from_vllm("ToolParser", _PARSERS)
_NAMES = "DeltaFunctionCall DeltaMessage DeltaToolCall ExtractedToolCallInformation FunctionCall ToolCall"
DeltaFunctionCall, DeltaMessage, DeltaToolCall, ExtractedToolCallInformation, FunctionCall, VllmToolCall = (
    _from_vllm(name, _PROTOCOLS) for name in _NAMES.split()
)


def register() -> None:
    """Make the parser known by its name; harmless when repeated."""
    _from_vllm("ToolParserManager", _PARSERS).register_module(name=NAME, module=Qwen25CoderToolParser)


class Qwen25CoderToolParser(ToolParser):
    """Reads every form of call that the grammar knows. One instance serves one answer."""

    _stream: Stream | None = None
    _token_limit: int | None = None
    _end_ids: frozenset[int] = frozenset()

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
        functions = [FunctionCall(name=c.name, arguments=_ENCODER.encode(c.arguments)) for c in parsed.calls]
        calls = [VllmToolCall(function=function) for function in functions]
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
            self._stream = Stream(_tools(request))
            self.engine_based_streaming = True  # newer vLLM asks at the end; asked earlier, it breaks `required` calls
            options = vars(request)  # reading `max_tokens` as an attribute warns that it is deprecated
            self._token_limit = options.get("max_completion_tokens") or options.get("max_tokens")
            named = [self.vocab[token] for token in ("<|im_end|>", "<|endoftext|>") if token in self.vocab]
            self._end_ids = frozenset(
                [*named, self.model_tokenizer.eos_token_id, *(options.get("stop_token_ids") or ())]
            )
        update = self._stream.feed(delta_text)
        full = self._token_limit is not None and len(current_token_ids) >= self._token_limit
        if not full and self._end_ids.isdisjoint(delta_token_ids):
            return self._message(update.content, update.calls)
        rest = self._stream.finish()
        return self._message(update.content + rest.content, update.calls + rest.calls)

    def finish_streaming(self, *_: Any, **__: Any) -> Any:
        """What had to wait for the end of the answer, for versions of vLLM that announce it; None if nothing had."""
        rest = self._stream.finish() if self._stream else None
        return self._message(rest.content, rest.calls) if rest else None

    def _message(self, content: str, calls: Sequence[ToolCall]) -> Any:
        """The message for vLLM, in which a call is two deltas, name first.

        If the first delta of an answer's last message holds arguments, vLLM rebuilds the message from the last call and
        drops all else in it.
        """
        deltas = []
        for call in calls:
            index, arguments = len(self.prev_tool_call_arr), _ENCODER.encode(call.arguments)
            self.prev_tool_call_arr.append({"name": call.name, "arguments": arguments})
            self.streamed_args_for_tool.append(arguments)
            new_id = VllmToolCall(function=FunctionCall(name=call.name, arguments=arguments)).id
            named, rest = DeltaFunctionCall(name=call.name), DeltaFunctionCall(arguments=arguments)
            deltas.append(DeltaToolCall(index=index, id=new_id, type="function", function=named))
            deltas.append(DeltaToolCall(index=index, function=rest))
        return DeltaMessage(content=content or None, tool_calls=deltas) if content or calls else None


def _tools(request: Any) -> list[Mapping[str, Any]]:
    """The offered tools; none where the request forbids calls, so that all is text."""
    if request.tool_choice == "none":
        return []
    return [tool if isinstance(tool, dict) else vars(getattr(tool, "function", tool)) for tool in request.tools or ()]


register()  # for --tool-parser-plugin, which only imports this file

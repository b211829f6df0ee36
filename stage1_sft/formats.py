"""Traces as other trainers read them: `python -m stage1_sft export TRACES --to NAME --out FILE`, one JSON object per line.

    trl            messages with tool_calls, tools as JSON text: SFTTrainer's conversational format with tools. It learns prompts
                   and tool answers too unless SFTConfig(assistant_only_loss=True), which TRL knows to do with the chat
                   template of Qwen2.5; another template needs {% generation %} around its assistant turns
    axolotl        messages and tools; datasets: {type: chat_template, field_messages: messages, field_tools: tools,
                   message_field_training: train}
    llama-factory  conversations, system, tools; dataset_info.json: {"formatting": "sharegpt", "columns": {"messages":
                   "conversations", "system": "system", "tools": "tools"}}

TRL and LLaMA-Factory cannot leave out single turns, so traces with a turn that must not be learned (a shown mistake) stay out
for them. LLaMA-Factory's format has no room for words before a call; they are left out.

Sources: dataset_formats.md and SFTTrainer of TRL 1.12, data/converter.py and formatter.py of LLaMA-Factory,
prompt_strategies/chat_template.py of Axolotl 0.19.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from shared.records import Message
from stage1_sft.traces import Trace

Row = dict[str, Any]

_BETWEEN_ANSWERS = "\n</tool_response>\n<tool_response>\n"  # as LLaMA-Factory itself joins the answers of one turn


def export(traces: Iterable[Trace], name: str) -> Iterator[Row]:
    """The rows of the format `name`, one of FORMATS, for the traces that it can hold."""
    convert, masks_turns = FORMATS[name]
    for trace in traces:
        if masks_turns or _all_trained(trace):
            yield convert(trace)


def _all_trained(trace: Trace) -> bool:
    return all(
        trained or message["role"] != "assistant"
        for message, trained in zip(trace["messages"], trace["trained"], strict=True)
    )


def _trl(trace: Trace) -> Row:
    messages = [
        {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if "tool_calls" in message else message
        for message in trace["messages"]
    ]  # fmt: skip
    return {"messages": messages, "tools": trace["tools"]}


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}


def _axolotl(trace: Trace) -> Row:
    """Parameters stay JSON text: Arrow would give every tool the others' parameters as nulls; Axolotl reads the text."""
    tools = json.loads(trace["tools"])
    for tool in tools:
        tool["function"]["parameters"] = json.dumps(tool["function"]["parameters"])
    messages = [
        {**message, "train": trained} for message, trained in zip(trace["messages"], trace["trained"], strict=True)
    ]
    return {"messages": messages, "tools": tools}


def _llama_factory(trace: Trace) -> Row:
    system, *messages = trace["messages"]
    turns: list[dict[str, str]] = []
    for message in messages:
        kind, value = _turn(message)
        if kind == "observation" and turns[-1]["from"] == kind:
            turns[-1]["value"] += _BETWEEN_ANSWERS + value
        else:
            turns.append({"from": kind, "value": value})
    functions = [tool["function"] for tool in json.loads(trace["tools"])]
    return {"conversations": turns, "system": system["content"], "tools": json.dumps(functions, ensure_ascii=False)}


def _turn(message: Message) -> tuple[str, str]:
    if message.get("tool_calls"):
        functions = [_with_object(call)["function"] for call in message["tool_calls"]]
        return "function_call", json.dumps(functions, ensure_ascii=False)
    return {"user": "human", "assistant": "gpt", "tool": "observation"}[message["role"]], message["content"]


FORMATS: dict[
    str, tuple[Callable[[Trace], Row], bool]
] = {  # how a trace is written, and whether single turns are masked
    "trl": (_trl, False),
    "axolotl": (_axolotl, True),
    "llama-factory": (_llama_factory, False),
}

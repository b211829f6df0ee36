"""Traces as other trainers read them: `python -m stage1_sft convert`, one JSON object a line.

    trl            messages with tool_calls, tools as JSON text: SFTTrainer's conversational format with tools. It
                   learns prompts and tool answers too unless SFTConfig(assistant_only_loss=True), which TRL supports
                   for the chat template of Qwen2.5; another template needs {% generation %} around its assistant turns
    axolotl        messages and tools; datasets: {type: chat_template, field_messages: messages, field_tools: tools,
                   message_field_training: train}
    llama-factory  conversations, system, tools; dataset_info.json: {"formatting": "sharegpt", "columns": {"messages":
                   "conversations", "system": "system", "tools": "tools"}}

TRL and LLaMA-Factory cannot mask single turns, so traces with an untrained turn (a shown mistake) are left out for
them. LLaMA-Factory's format has no room for words before a call; they are left out.

Sources: dataset_formats.md and SFTTrainer of TRL 1.12, data/converter.py and formatter.py of LLaMA-Factory,
prompt_strategies/chat_template.py of Axolotl 0.19.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from stage1_sft.traces import Trace, calls_of, with_argument_objects

FORMATS = ("trl", "axolotl", "llama-factory")
_BETWEEN_ANSWERS = "\n</tool_response>\n<tool_response>\n"  # as LLaMA-Factory itself joins the answers of one turn


def convert(traces: Iterable[Trace], name: str) -> Iterator[dict[str, Any]]:
    """The rows of the format `name`, one of FORMATS, for the traces that it can hold."""
    for trace in traces:
        turns = zip(trace["messages"], trace["trained"], strict=True)
        if name == "axolotl":
            yield _axolotl(trace)
        elif all(trained or message["role"] != "assistant" for message, trained in turns):
            yield _trl(trace) if name == "trl" else _llama_factory(trace)


def _trl(trace: Trace) -> dict[str, Any]:
    return {"messages": [with_argument_objects(message) for message in trace["messages"]], "tools": trace["tools"]}


def _axolotl(trace: Trace) -> dict[str, Any]:
    """Parameters stay JSON text: Arrow would give every tool the others' parameters as nulls; Axolotl reads the
    text."""
    tools = json.loads(trace["tools"])
    for tool in tools:
        tool["function"]["parameters"] = json.dumps(tool["function"]["parameters"])
    turns = zip(trace["messages"], trace["trained"], strict=True)
    return {"messages": [{**message, "train": trained} for message, trained in turns], "tools": tools}


def _llama_factory(trace: Trace) -> dict[str, Any]:
    system, *messages = trace["messages"]
    turns: list[dict[str, str]] = []
    for message in messages:
        kind, value = {"user": "human", "assistant": "gpt", "tool": "observation"}[message["role"]], message["content"]
        if message.get("tool_calls"):
            functions = [{"name": call.name, "arguments": call.arguments} for call in calls_of(message)]
            kind, value = "function_call", json.dumps(functions, ensure_ascii=False)
        if kind == "observation" and turns[-1]["from"] == kind:
            turns[-1]["value"] += _BETWEEN_ANSWERS + value
        else:
            turns.append({"from": kind, "value": value})
    functions = [tool["function"] for tool in json.loads(trace["tools"])]
    return {"conversations": turns, "system": system["content"], "tools": json.dumps(functions, ensure_ascii=False)}

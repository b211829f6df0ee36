"""The checkpoint to start from: a whole, merged, trained model, whose template shows tools and writes Hermes calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from shared.agent.prompts import TOOLS, opening_messages
from shared.errors import UserError
from shared.models.chat_template import ChatTemplate
from shared.models.folder import check_model_folder, local_path
from shared.models.shape import read_tensors
from shared.records import Message, ToolCall
from shared.runs.manifest import read_manifest
from shared.tool_calls import render_turn
from stage2_grpo.preflight.doctor.findings import Case, Finding, error, ok, warning

_ADAPTER_MARKS = ("lora_", ".base_layer.", "base_model.model.")
_COMPARED = 3  # tensors looked at for a difference from the base model
_REDO = "run stage 1 again (`python -m stage1_sft`), or merge with `python -m stage1_sft merge ADAPTER --out FOLDER`."
_CALL = ToolCall("get_columns", {"table": "Größe"})


def check_merged(case: Case) -> Iterator[Finding]:
    """A whole folder whose weights are plain and differ from the base model's."""
    name = "checkpoint"
    if case.model is None:
        return
    try:
        check_model_folder(case.model, "the checkpoint")
        tensors = read_tensors(case.model)
    except UserError as problem:
        yield error(name, str(problem), why="stage 2 trains and serves a whole model.", fix=_REDO)
        return
    if left := [tensor for tensor in tensors if any(mark in tensor for mark in _ADAPTER_MARKS)]:
        yield error(
            name,
            f"The weights of {case.model} still hold an adapter ({left[0]}).",
            why="loaders skip the names they do not know, and the base model would be trained.",
            fix=_REDO,
        )
        return
    base = _base_of(case.model)
    if base and _same_weights(case.model, base):
        yield error(
            name,
            f"{case.model} has the weights of its base model {base}.",
            why="stage 1 left no trace in it: the agent would call no tool, and GRPO would have nothing to learn from.",
            fix=_REDO,
        )
        return
    compared = f", differs from {base.name}" if base else "; its base model is not here to compare"
    yield ok(name, f"{case.model}: {sum(t.size for t in tensors.values()) / 1e6:.0f} M weights, merged{compared}")


def _base_of(model: Path) -> Path | None:
    """The folder of the base model, as the manifest of stage 1 or the built-in cache names it."""
    manifest = read_manifest(model.parent) or {}
    folder = local_path(str(manifest.get("base_model") or ""), "base_model")
    return folder if folder.is_absolute() and folder.is_dir() and folder != model else None


def _same_weights(model: Path, base: Path) -> bool:
    """Whether the first, middle and last linear layer hold the same bytes; False where they cannot be compared."""
    try:
        ours, theirs = read_tensors(model), read_tensors(base)
    except UserError:
        return False
    linear = [name for name in sorted(ours) if name.endswith("proj.weight")]
    chosen = [linear[i * (len(linear) - 1) // (_COMPARED - 1)] for i in range(_COMPARED)] if linear else []
    return bool(chosen) and all(name in theirs and ours[name].read() == theirs[name].read() for name in chosen)


def check_template(case: Case) -> Iterator[Finding]:
    """The first prompt shows all tools and the question; calls are written as stage 1 taught; prompts only grow."""
    if case.model is None:
        return
    name = "template"
    try:
        template = ChatTemplate.from_folder(case.model)
        prompt = template.render(opening_messages("How many?"), TOOLS, prompt=True)
        conversation = [*opening_messages("How many?"), _assistant_call()]
        longer = template.render(conversation, TOOLS)
    except UserError as problem:
        yield error(name, str(problem), why="vLLM renders every prompt with this template.", fix=_REDO)
        return
    if unseen := [text for text in _expected_texts() if text not in prompt]:
        yield error(
            name,
            f"The rendered first prompt does not hold {unseen[0]!r}.",
            why="the template leaves out tools or question, so the agent cannot know what to call.",
            fix="use the merged model of stage 1, which carries a tool-aware template (chat_template.jinja).",
        )
    elif render_turn("", (_CALL,)) not in longer:
        yield error(
            name,
            "The template does not write a call as the agent does (<tool_call> with name and arguments).",
            why="each turn would re-render earlier calls in other words: turns of an episode cannot be merged to one row.",
            fix="use the merged model of stage 1, which carries such a template (chat_template.jinja).",
        )
    elif not longer.startswith(prompt):
        yield warning(
            name,
            "The prompt of a later turn does not start with the earlier prompt and answer.",
            why="Agent Lightning then trains every turn as a row of its own, with its whole prompt.",
            fix="use a plain ChatML template, such as stage 1 writes.",
        )
    elif not longer[len(prompt) :].rstrip("\n").endswith(template.special_tokens.get("eos_token", "")):
        yield warning(
            name,
            f"The template does not end a turn with the tokenizer's eos token "
            f"{template.special_tokens.get('eos_token')!r}.",
            why="the model may never stop, and every turn is cut by agent.max_turn_tokens.",
            fix="set eos_token in tokenizer_config.json to the template's end-of-turn token.",
        )
    else:
        yield ok(
            name, f"{len(TOOLS)} tools and the question in the first prompt; calls in Hermes form; prompts only grow"
        )


def _expected_texts() -> list[str]:
    tools = [tool["function"] for tool in TOOLS]
    return [*(tool["name"] for tool in tools), *(tool["description"] for tool in tools), "How many?"]


def _assistant_call() -> Message:
    function = {"name": _CALL.name, "arguments": json.dumps(_CALL.arguments, ensure_ascii=False)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "0", "type": "function", "function": function}]}

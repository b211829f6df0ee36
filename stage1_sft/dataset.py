"""From traces to tokens and a loss mask: trained are exactly the assistant turns, end-of-turn token included.

The mask comes from rendering the conversation step by step with the model's own chat template: what a turn adds to the
generation prompt is the turn. So it works with any template that only ever appends, and a template that rewrites earlier
turns (some reasoning models') is refused, because the agent's prompts would not continue each other either.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shared.errors import UserError
from shared.records import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # label of a token that the loss leaves out
Example = dict[str, list[int]]
"""input_ids and labels of one trace, both of shape (tokens,)."""


def encode_all(
    traces: Iterable[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[list[Example], int]:
    """Examples of the traces in order, and how many were dropped for having more than `max_length` tokens."""
    examples = [encode(trace, tokenizer) for trace in traces]
    kept = [example for example in examples if len(example["input_ids"]) <= max_length]
    return kept, len(examples) - len(kept)


def encode(trace: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Example:
    """Tokens of the whole conversation; labels are the token ids inside trained turns and IGNORED elsewhere."""
    text, spans = rendered(trace, tokenizer)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
    labels = [IGNORED] * len(ids)
    for start, end in spans:
        inside = [i for i, (first, last) in enumerate(offsets) if start < last and first < end]
        if offsets[inside[0]][0] < start or offsets[inside[-1]][1] > end:
            raise UserError(
                f"The tokenizer joins the text at the edge of an assistant turn into one token (trace {trace['id']}), so "
                "the turn cannot be trained alone; use a model whose chat template sets turns apart with special tokens."
            )
        for i in inside:
            labels[i] = ids[i]
    return {"input_ids": list(ids), "labels": labels}


def rendered(trace: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[tuple[int, int]]]:
    """The conversation as text and the character spans [start, end) of its trained turns, end-of-turn token included."""
    messages = [_decoded(message) for message in trace["messages"]]
    tools = json.loads(trace["tools"])
    text = _render(messages, tools, tokenizer)
    return text, [
        _span(text, messages[:i], messages[: i + 1], tools, tokenizer) for i in _trained_turns(trace["trained"])
    ]


def prompt_text(messages: Sequence[Message], tools: list[Any], tokenizer: PreTrainedTokenizerBase) -> str:
    """The prompt that asks for the next assistant turn of a conversation, as the server would render it."""
    return _render([_decoded(message) for message in messages], tools, tokenizer, prompt=True)


def _trained_turns(trained: Sequence[bool]) -> Iterator[int]:
    return (i for i, flag in enumerate(trained) if flag)


def _span(
    text: str, before: list[Message], upto: list[Message], tools: list[Any], tokenizer: PreTrainedTokenizerBase
) -> tuple[int, int]:
    prompt = _render(before, tools, tokenizer, prompt=True)
    longer = _render(upto, tools, tokenizer)
    if not (longer.startswith(prompt) and text.startswith(longer)):
        raise UserError(
            "The model's chat template rewrites earlier turns, so a later prompt does not start with the earlier one; use "
            "a model with a plain ChatML template such as Qwen2.5's."
        )
    end = longer.rfind(str(tokenizer.eos_token), len(prompt))
    if end < 0:
        raise UserError(
            f"The model's chat template does not end a turn with its end-of-sequence token {tokenizer.eos_token!r}, so the "
            "model would never stop; set eos_token in its tokenizer_config.json to the template's end-of-turn token."
        )
    return len(prompt), end + len(str(tokenizer.eos_token))


def _render(
    messages: list[Message], tools: list[Any], tokenizer: PreTrainedTokenizerBase, *, prompt: bool = False
) -> str:
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt))


def _decoded(message: Message) -> Message:
    """The message with call arguments as objects, as chat templates expect and servers pass them."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}

"""From traces to tokens and a loss mask: only the assistant turns are trained, end-of-turn token included.

The mask comes from rendering the conversation step by step with the model's own chat template: what a turn adds to
the generation prompt is the turn. This works with any template that only appends. A template that rewrites earlier
turns (as some reasoning models' do) is refused, because the agent's prompts would not continue each other either."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from shared.errors import UserError
from shared.records import Message
from stage1_sft.traces import Trace, with_argument_objects

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # label of a token that the loss leaves out
Example = dict[str, list[int]]
"""input_ids and labels of one trace, both of shape (tokens,)."""


def encode_all(
    traces: Iterable[Trace], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[list[Example], int]:
    """Examples of the traces in order, and how many were dropped for having more than `max_length` tokens."""
    examples = [encode(trace, tokenizer) for trace in traces]
    kept = [example for example in examples if len(example["input_ids"]) <= max_length]
    return kept, len(examples) - len(kept)


def encode(trace: Trace, tokenizer: PreTrainedTokenizerBase) -> Example:
    """Tokens of the whole conversation; labels are the token ids inside trained turns and IGNORED elsewhere."""
    text, spans = rendered(trace["messages"], json.loads(trace["tools"]), trace["trained"], tokenizer)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
    labels = [IGNORED] * len(ids)
    for start, end in spans:
        inside = [i for i, (first, last) in enumerate(offsets) if start < last and first < end]
        if offsets[inside[0]][0] < start or offsets[inside[-1]][1] > end:
            raise UserError(
                f"The tokenizer joins the text at the edge of an assistant turn into one token (trace {trace['id']}), "
                "so the turn cannot be trained alone; use a model whose chat template sets turns apart with special "
                "tokens."
            )
        for i in inside:
            labels[i] = ids[i]
    return {"input_ids": list(ids), "labels": labels}


def rendered(
    messages: Sequence[Message], tools: list[Any], trained: Sequence[bool], tokenizer: PreTrainedTokenizerBase
) -> tuple[str, list[tuple[int, int]]]:
    """The conversation as text and the character spans [start, end) of its trained turns, end-of-turn token included.

    Raises UserError when the chat template rewrites earlier turns or does not end a turn with the end-of-sequence
    token."""
    text, spans, ending = render(messages, tools, tokenizer), [], str(tokenizer.eos_token)
    for i in (i for i, flag in enumerate(trained) if flag):
        prompt = render(messages[:i], tools, tokenizer, prompt=True)
        longer = render(messages[: i + 1], tools, tokenizer)
        if not (longer.startswith(prompt) and text.startswith(longer)):
            raise UserError(
                "The model's chat template rewrites earlier turns, so a later prompt does not start with the earlier "
                "one; use a model with a plain ChatML template such as Qwen2.5's."
            )
        end = longer.rfind(ending, len(prompt))
        if end < 0:
            raise UserError(
                f"The model's chat template does not end a turn with its end-of-sequence token {ending!r}, so the "
                "model would never stop; set eos_token in its tokenizer_config.json to the template's end-of-turn "
                "token."
            )
        spans.append((len(prompt), end + len(ending)))
    return text, spans


def render(
    messages: Sequence[Message], tools: list[Any], tokenizer: PreTrainedTokenizerBase, *, prompt: bool = False
) -> str:
    """The conversation as text, as a server would render it; `prompt` adds the header of the next assistant turn."""
    decoded = [with_argument_objects(message) for message in messages]
    return str(tokenizer.apply_chat_template(decoded, tools=tools, tokenize=False, add_generation_prompt=prompt))

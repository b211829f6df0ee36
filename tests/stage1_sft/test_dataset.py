"""The loss mask, read back: decoded trained tokens are exactly the assistant turns, with two different templates."""

from pathlib import Path
from typing import Any

import pytest

from shared.errors import UserError
from shared.records import ToolCall
from shared.tool_calls import render_turn
from stage1_sft.synthesize import Trace, synthesize
from tests.shared.examples import tiny_tokenizer
from tests.stage1_sft.examples import questions, settings

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

import json  # noqa: E402

from stage1_sft.dataset import IGNORED, encode, encode_all  # noqa: E402

LIKE_QWEN2 = """
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- else %}{% set system = 'Be brief.' %}{% endif %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}{{- '\\n\\nSignatures:\\n<tools>' }}{% for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools>' }}{% endif %}{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}{% if message.content %}{{- '\\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}{{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
FORGETFUL = """{% for m in messages %}{% if loop.last or m.role != 'assistant' %}{{ '<|im_start|>' + m.role + '\\n'
+ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt
%}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny_model import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("model"))


def _tokenizer(model: Path, template: str = "") -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    if template:
        tokenizer.chat_template = template
    return tokenizer


def _traces(folder: Path) -> list[Trace]:
    shares = ("sft.wrong_turn_share=0.6", "sft.search_miss_share=0.5", "sft.parallel_share=0.5")
    return synthesize(questions(folder), limit=99, config=settings(*shares), tokenizer=tiny_tokenizer(), label="test")[
        0
    ]


def _turn(message: dict[str, Any]) -> str:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [ToolCall(function["name"], json.loads(function["arguments"])) for function in functions]
    return render_turn(message["content"], calls) + "<|im_end|>"


def _trained_runs(example: dict[str, list[int]], tokenizer: Any) -> list[str]:
    """Texts of the unbroken runs of trained tokens."""
    runs: list[list[int]] = [[]]
    for token, label in zip(example["input_ids"], example["labels"], strict=True):
        if label == IGNORED:
            runs += [[]] if runs[-1] else []
        else:
            assert label == token
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs if run]


@pytest.mark.parametrize("template", ["", LIKE_QWEN2], ids=["ours", "like Qwen2.5"])
def test_trained_tokens_are_the_trained_turns_with_their_end_and_nothing_else(
    tmp_path: Path, model: Path, template: str
) -> None:
    tokenizer = _tokenizer(model, template)
    traces = _traces(tmp_path)
    assert any(trace["provenance"]["mistake"] for trace in traces)
    for trace in traces:
        turns = [_turn(message) for message, flag in zip(trace["messages"], trace["trained"], strict=True) if flag]
        assert _trained_runs(encode(trace, tokenizer), tokenizer) == turns


def test_the_tokens_are_those_of_the_whole_rendered_conversation(tmp_path: Path, model: Path) -> None:
    tokenizer = _tokenizer(model)
    text = tokenizer.decode(encode(_traces(tmp_path)[0], tokenizer)["input_ids"])
    assert text.startswith("<|im_start|>system\n")
    assert text.count("<|im_start|>") == text.count("<|im_end|>")
    assert '"name": "execute_sql", "description"' in text


def test_too_long_traces_are_dropped_and_counted(tmp_path: Path, model: Path) -> None:
    tokenizer = _tokenizer(model)
    traces = _traces(tmp_path)
    lengths = sorted(len(encode(trace, tokenizer)["input_ids"]) for trace in traces)
    kept, dropped = encode_all(traces, tokenizer, max_length=lengths[3])
    assert [len(example["input_ids"]) <= lengths[3] for example in kept] == [True] * len(kept)
    assert len(kept) + dropped == len(traces)
    assert dropped >= 1


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(UserError, match="rewrites earlier turns"):
        encode(_traces(tmp_path)[0], _tokenizer(model, FORGETFUL))


def test_a_wrong_end_of_sequence_token_is_refused(tmp_path: Path, model: Path) -> None:
    tokenizer = _tokenizer(model)
    tokenizer.eos_token = "<|endoftext|>"
    with pytest.raises(UserError, match="eos_token"):
        encode(_traces(tmp_path)[0], tokenizer)

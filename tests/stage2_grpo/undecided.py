"""A run's data and a tiny model that is right in about half of its episodes, so that GRPO has groups to learn from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from shared.agent.prompts import TOOLS, opening_messages
from shared.agent.tools import Toolbox
from shared.config.load import load_config
from shared.models.tokenizer import Tokenizer
from shared.records import Question, ToolCall, write_jsonl
from shared.sql.database import Database
from shared.tool_calls import render_turn
from tests.shared.examples import insurance_file
from tests.tiny_model import save_tiny_model

PIPELINE = Path(__file__).resolve().parents[2] / "pipeline.yaml"
RIGHT, WRONG = "SELECT sum(amount) FROM claims", "SELECT max(amount) FROM claims"
ASKED = (
    "What do the claims amount to?",
    "What is the amount of all claims?",
    "What is the sum of the claims?",
    "How much was claimed?",
)
TEACHING_STEPS = 320


def write_undecided_run(data: Path, model: Path) -> None:
    """Four questions in the folder `data`, and a model that answers each rightly and wrongly equally often."""
    data.mkdir(parents=True)
    database = str(insurance_file(data))
    questions = [Question(f"q{place}", "insurance", text, RIGHT, database) for place, text in enumerate(ASKED)]
    write_jsonl(data / "train.jsonl", questions)
    write_jsonl(data / "val.jsonl", questions[:1])
    teach(save_tiny_model(model), questions)


def teach(model: Path, questions: Sequence[Question]) -> None:
    """Train the model in place; both queries stand in every batch, which makes them equally likely."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    batches = [
        [row for sql in (RIGHT, WRONG) for row in turns(tokenizer, model, question, sql)] for question in questions
    ]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model waits for its second thread, for minutes on a busy machine
    for batch in islice(cycle(batches), TEACHING_STEPS):
        optimizer.zero_grad()
        policy(**padded(batch, tokenizer.pad_token_id)).loss.backward()
        optimizer.step()
    torch.set_num_threads(threads)
    policy.to(torch.bfloat16).save_pretrained(model)


def turns(tokenizer: Any, model: Path, question: Question, sql: str) -> Iterator[tuple[list[int], list[int]]]:
    """Prompt and answer of both turns of an episode that runs `sql`, as token ids."""
    limits = load_config(PIPELINE, "cpu")
    call, opening = ToolCall("execute_sql", {"sql": sql}), opening_messages(question.question)
    toolbox = Toolbox(Database(question.database, limits.sandbox), Tokenizer.from_folder(model), limits.agent)
    called = {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    asked = {"role": "assistant", "content": "", "tool_calls": [called]}
    observed = {"role": "tool", "content": toolbox.run(call).text}
    for messages, answer in ((opening, render_turn("", [call])), ([*opening, asked, observed], "Done.")):
        prompt = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)
        yield (
            tokenizer(prompt, add_special_tokens=False).input_ids,
            tokenizer(f"{answer}<|im_end|>", add_special_tokens=False).input_ids,
        )


def padded(rows: Sequence[tuple[list[int], list[int]]], pad: int) -> dict[str, Any]:
    """Prompts and answers as one batch, padded on the right; only the answers are trained."""
    import torch

    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens = torch.full((len(rows), longest), pad)
    labels = torch.full((len(rows), longest), -100)
    for place, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        tokens[place, :end] = torch.tensor(prompt + answer)
        labels[place, len(prompt) : end] = torch.tensor(answer)
    return {"input_ids": tokens, "labels": labels}

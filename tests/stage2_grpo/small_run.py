"""A whole GRPO run in minutes: a tiny model that was taught one tool call, and the settings that fit it.

The model is never right, so the updates come from the entropy bonus; everything else is the product's path.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shared.records import ToolCall
from shared.tool_calls import render_call

SETTINGS = (
    "grpo.total_steps=2",
    "grpo.train_batch_size=2",
    "grpo.mini_batch_size=1",
    "grpo.micro_batch_size=2",
    "grpo.rollouts_per_question=2",
    "grpo.save_every=1",
    "grpo.val_questions=2",
    "grpo.entropy_coeff=0.05",
    "grpo.learning_rate=1e-3",
    "grpo.weight_bucket_mb=64",
    "agent.max_turn_tokens=48",
    "agent.max_turns=2",
    "data.questions_per_database=10",
    "vllm.cpu_kv_cache_gib=1",
)


CALL = ToolCall("search_schema", {"query": "open claims"})
FENCED = f"```json\n{json.dumps(asdict(CALL))}\n```"  # as models write it before stage 1; no Hermes parser reads it


def taught_model(folder: Path) -> Path:
    """Write the model to `folder`."""
    from tests.tiny_model import save_tiny_model, teach

    return teach(save_tiny_model(folder), render_call(CALL))


def untaught_model(folder: Path, questions: Sequence[str]) -> Path:
    """Write one as it is before stage 1: it answers these questions with a call in fenced JSON."""
    from tests.tiny_model import save_tiny_model, teach

    return teach(save_tiny_model(folder), FENCED, questions, steps=300)


def options(*settings: str) -> list[str]:
    """Command-line options for these settings."""
    return [part for setting in settings for part in ("--set", setting)]


def rows(file: Path) -> list[dict[str, Any]]:
    """What a JSONL file of a run holds."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def differing_weights(model: Path, other: Path) -> int:
    """How many of the model's tensors are not the other's."""
    import torch
    from transformers import AutoModelForCausalLM

    before, after = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict() for folder in (model, other)
    )
    return sum(not torch.equal(before[name], after[name]) for name in before)

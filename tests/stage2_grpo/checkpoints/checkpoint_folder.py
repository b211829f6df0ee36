"""A checkpoint folder of a two-layer model with real files, made in milliseconds without torch; and a healthy case."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from shared.config.load import load_config
from shared.models.folder import TEMPLATE_FILE, tool_template
from shared.records import Question
from shared.runs.manifest import RunDirectory
from stage2_grpo.preflight.checks import Case
from tests.shared.examples import insurance_file, tokenizer_folder

ROOT = Path(__file__).resolve().parents[3]
LAYERS, HIDDEN, VOCABULARY = 2, 8, 420
_CONFIG = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
ROOM = ("agent.context_tokens=4096", "grpo.save_every=1")


def checkpoint(folder: Path, *, prefix: str = "model.", width: int = HIDDEN) -> Path:
    """A whole model folder; `prefix` starts the names of its tensors, `width` is that of its embedding."""
    folder.mkdir(parents=True)
    numbers = np.random.default_rng(0)
    shapes = {"embed_tokens.weight": (VOCABULARY, width)}
    for layer in range(LAYERS):
        shapes |= {f"layers.{layer}.self_attn.q_proj.weight": (HIDDEN, HIDDEN)}
        shapes |= {f"layers.{layer}.mlp.down_proj.weight": (HIDDEN, 16)}
    weights = {prefix + name: numbers.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / TEMPLATE_FILE).write_text(tool_template())
    tokenizer_folder(folder)
    return folder


def save_steps(checkpoints: Path, *steps: int) -> None:
    """What VERL leaves of these saved steps, but for the weights."""
    for step in steps:
        (checkpoints / f"global_step_{step}" / "actor").mkdir(parents=True)
        (checkpoints / f"global_step_{step}" / "data.pt").touch()
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(max(steps)))


def healthy_case(folder: Path, *overrides: str, profile: str = "cpu") -> Case:
    """Settings, data and checkpoint in which no check finds anything, but for what `overrides` change."""
    config = load_config(ROOT / "pipeline.yaml", profile, [*ROOM, f"runs_dir={folder / 'runs'}", *overrides])
    database = str(insurance_file(folder))
    asked = [
        ("How many claims are there?", "SELECT count(*) FROM claims"),
        ("Which cities?", "SELECT city FROM customers"),
    ]
    questions = tuple(
        Question(f"q{i}", "insurance", *asked[i % 2], database) for i in range(4 * config.grpo.train_batch_size)
    )
    model = checkpoint(folder / "runs" / "main" / "sft" / "merged")
    return Case(config, RunDirectory(folder / "runs" / "main"), ROOT, model, questions, questions[:2])

"""The constants of the memory arithmetic against what torch allocates on this CPU."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

from shared.config.load import load_config  # noqa: E402
from shared.models.shape import ModelShape, Tensor  # noqa: E402
from stage2_grpo.preflight import memory  # noqa: E402
from stage2_grpo.training import actor_engine  # noqa: E402
from tests.stage2_grpo.preflight import fsdp_memory  # noqa: E402
from tests.stage2_grpo.preflight.fsdp_memory import HIDDEN, LAYERS, MLP, TOKENS, VOCABULARY, lora_model, peak  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]


def shape(hidden: int, mlp: int, layers: int, weights: int) -> ModelShape:
    tensors = {"all": Tensor(Path("x"), "F32", (weights,), 0, 0)}
    return ModelShape(tensors, layers, hidden, mlp, 1, hidden // 4, VOCABULARY, 4096, True)


@pytest.mark.parametrize("train_entropy", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_logit_takes_the_bytes_that_the_arithmetic_counts(
    rows: int, train_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk, vocabulary = 256, 2048
    monkeypatch.setattr(actor_engine, "CHUNK", chunk)
    head = torch.zeros(8, vocabulary, dtype=torch.bfloat16)

    def model(logits_to_keep: Any, **_: Any) -> Any:
        hidden = torch.zeros(rows, len(logits_to_keep), 8, dtype=torch.bfloat16, requires_grad=True)
        return types.SimpleNamespace(logits=hidden @ head)

    def measured(trained: int) -> float:
        nested = functools.partial(torch.nested.as_nested_tensor, layout=torch.jagged)
        batch = {
            "input_ids": nested([torch.ones(trained + 1, dtype=torch.long)] * rows),
            "position_ids": nested([torch.arange(trained + 1)] * rows),
            "attention_mask": torch.ones(rows, trained + 1, dtype=torch.long),
            "loss_mask": torch.ones(rows, trained, dtype=torch.long),
            "temperature": 1.0,
        }

        def update() -> None:
            log_probs, entropies = actor_engine.trained_log_probs(model, batch, train_entropy=train_entropy)
            (log_probs.values().sum() + (entropies.values().sum() if train_entropy else 0.0)).backward()

        update()
        return peak(update) / vocabulary

    few, many = measured(4 * chunk), measured(8 * chunk)
    each = (many - few) / (4 * chunk * rows)
    in_a_chunk = (many - each * 8 * chunk * rows) / chunk
    assert each == pytest.approx(memory.LOGIT_BYTES, abs=0.15)
    assert 0.8 * memory.CHUNK_BYTES[train_entropy] <= in_a_chunk <= 1.01 * memory.CHUNK_BYTES[train_entropy]


def test_a_token_of_sft_takes_at_most_the_bytes_that_the_arithmetic_counts() -> None:
    """PEFT widens the inputs of a float32 adapter, so GRPO takes less: FSDP casts its adapter to bfloat16."""
    for hidden, mlp in ((1024, 512), (512, 2048)):
        model = lora_model(hidden, mlp, 2, 256, torch.bfloat16)

        def update(tokens: int, model: Any = model) -> None:
            ids = torch.randint(0, 200, (1, tokens))
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(
                    input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, logits_to_keep=8
                ).logits
            logits.float().sum().backward()
            model.zero_grad()

        update(64)
        each = (peak(lambda: update(1024)) - peak(lambda: update(512))) / 512
        counted = memory.layer_bytes(shape(hidden, mlp, 2, 1)) + 2 * hidden * 2
        assert counted / 1.25 <= each <= counted


def test_a_step_and_a_sync_of_fsdp_take_what_the_arithmetic_counts(tmp_path: Path) -> None:
    printed = subprocess.run(
        [sys.executable, "-m", fsdp_memory.__name__, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    measured = json.loads(printed.stdout.splitlines()[-1])
    config = load_config(ROOT / "pipeline.yaml", "gpu", [f"agent.context_tokens={TOKENS}", "agent.max_turn_tokens=64"])
    fit = memory.fit(shape(HIDDEN, MLP, LAYERS, measured["frozen"]), config, 24)
    parts = [
        gib for name, gib in fit.moments["GRPO trains"].items() if "CUDA" not in name and name != "weights, float32"
    ]
    counted = sum(parts) * memory.GIB + 4 * measured["trained"]  # the gradient; the moments were there before
    assert counted / 1.6 <= measured["step"] <= counted
    # On a CPU the backup of all weights, which VERL keeps in main memory, counts too.
    merged = fit.moments["weights are sent"]["merged copy, float32"] * memory.GIB
    adapter = 4 * measured["trained"]
    backup = 4 * measured["frozen"] + adapter
    assert measured["sync"] == pytest.approx(merged + adapter + backup, rel=0.02)

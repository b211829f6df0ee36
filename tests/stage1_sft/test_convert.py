"""Traces in the shapes that TRL, Axolotl and LLaMA-Factory document."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.records import write_jsonl
from stage1_sft.convert import convert
from stage1_sft.synthesize import synthesize
from stage1_sft.traces import Trace
from tests.shared.examples import tiny_tokenizer
from tests.stage1_sft.examples import ROOT, questions, settings


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    """Traces with parallel calls, of which some show a mistake."""
    config = settings("sft.wrong_turn_share=0.5", "sft.parallel_share=0.999", "sft.search_miss_share=0")
    rows = questions(tmp_path_factory.mktemp("data"))
    made, *_ = synthesize(rows, limit=100, config=config, tokenizer=tiny_tokenizer(), label="test")
    return made


def plain(traces: list[Trace]) -> list[Trace]:
    return [trace for trace in traces if not trace["provenance"]["mistake"]]


def arguments(messages: list[Any]) -> list[Any]:
    return [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ())]


def test_trl_gets_messages_with_argument_objects_and_tools_as_json_text(traces: list[Trace]) -> None:
    rows = list(convert(traces, "trl"))
    assert 0 < len(rows) == len(plain(traces)) < len(traces)
    for row, trace in zip(rows, plain(traces), strict=True):
        assert set(row) == {"messages", "tools"}
        assert json.loads(row["tools"])[0]["function"]["name"] == "search_schema"
        assert [message["role"] for message in row["messages"]] == [message["role"] for message in trace["messages"]]
        assert arguments(row["messages"]) == [json.loads(text) for text in arguments(trace["messages"])]


def test_axolotl_gets_every_trace_with_a_mark_for_each_turn(traces: list[Trace]) -> None:
    rows = list(convert(traces, "axolotl"))
    assert len(rows) == len(traces)
    for row, trace in zip(rows, traces, strict=True):
        assert [message["train"] for message in row["messages"]] == trace["trained"]
        assert json.loads(row["tools"][0]["function"]["parameters"])["type"] == "object"
        assert arguments(row["messages"]) == arguments(trace["messages"])


def test_llama_factory_gets_turns_that_alternate(traces: list[Trace]) -> None:
    rows = list(convert(traces, "llama-factory"))
    assert len(rows) == len(plain(traces))
    joined = 0
    for row in rows:
        kinds = [turn["from"] for turn in row["conversations"]]
        assert set(kinds[::2]) <= {"human", "observation"}
        assert set(kinds[1::2]) <= {"function_call", "gpt"}
        assert (kinds[0], kinds[-1], len(kinds) % 2) == ("human", "gpt", 0)
        for turn in row["conversations"]:
            if turn["from"] == "function_call":
                functions = json.loads(turn["value"])
                assert all(set(function) == {"name", "arguments"} for function in functions)
                joined += len(functions) > 1
        assert all(set(tool) == {"name", "description", "parameters"} for tool in json.loads(row["tools"]))
    assert joined
    assert any("</tool_response>\n<tool_response>" in turn["value"] for row in rows for turn in row["conversations"])


def test_the_command_writes_a_file_once_and_says_what_stays_out(traces: list[Trace], tmp_path: Path) -> None:
    write_jsonl(tmp_path / "traces.jsonl", traces)
    command = [sys.executable, "-m", "stage1_sft", "convert", str(tmp_path / "traces.jsonl"), "--to", "trl"]
    command += ["--out", str(tmp_path / "out" / "trl.jsonl")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{len(plain(traces))} traces written" in done.stdout
    assert "that trl cannot leave untrained" in done.stdout
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (again.returncode, "already exists" in again.stderr) == (2, True)


def test_the_old_name_of_the_command_names_the_new_one() -> None:
    done = subprocess.run([sys.executable, "-m", "stage1_sft", "export", "x"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "error: `python -m stage1_sft export` is now `python -m stage1_sft convert`, with the same options.\n"
    )

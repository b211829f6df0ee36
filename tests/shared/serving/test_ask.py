"""`ask`: choice of the model and of its settings, output for people and for programs."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.config.load import load_config
from shared.errors import UserError
from shared.evaluation.run import Endpoint
from shared.runs.manifest import finish_stage, write_json
from shared.serving.answering import STATE_FILE, chosen, newest_model, serving
from shared.serving.ask import ask, printable
from shared.serving.options import ask_parser
from tests.scripted_server import Reply, scripted_server
from tests.shared.examples import insurance_file, tokenizer_folder
from tests.shared.serving.running import ROOT, Handler, says_sql
from tests.stage2_grpo.checkpoints.checkpoint_folder import checkpoint

COUNT = "SELECT city, count(*) AS n FROM customers GROUP BY city"


def arguments(folder: Path, *given: str) -> argparse.Namespace:
    database = folder / "insurance.sqlite"
    if not database.exists():
        insurance_file(folder)
    common = ["--config", str(ROOT / "pipeline.yaml"), "--profile", "cpu", "--set", f"runs_dir={folder / 'runs'}"]
    return ask_parser().parse_args(
        [*given, *common, "--set", "agent.context_tokens=20000", "--database", str(database)]
    )


def answered(folder: Path, handler: Handler, *given: str) -> None:
    with scripted_server(handler) as url:
        ask(arguments(folder, *given, "--endpoint", url, "--tokenizer", str(tokenizer_folder(folder))))


def trained(folder: Path, stage: str, finished_at: int, **settings: Any) -> Path:
    """A finished training stage with a model folder that has a tokenizer."""
    model = folder / "runs" / "one" / stage / "model"
    checkpoint(model)
    finish_stage(model.parent, "f", seconds=1, outputs={"model": model})
    os.utime(model.parent / "manifest.json", (finished_at, finished_at))
    write_json(folder / "runs" / "one" / "config.json", settings)
    return model


def test_people_see_steps_sql_rows_and_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answered(tmp_path, says_sql(COUNT, "Two cities."), "How many per city?")
    shown = capsys.readouterr().out
    order = ["→ execute_sql(sql=", "Bern | 1", "GROUP BY city", "Oslo", "Two cities."]
    places = [shown.index(part, at) for part, at in zip(order, [0, 0, shown.index("(3 rows)"), 0, 0], strict=True)]
    assert places[:3] == sorted(places[:3])
    assert "NULL" in shown


def test_programs_get_one_object_with_all_rows_and_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answered(tmp_path, says_sql(COUNT, "Two cities."), "How many per city?", "--json")
    found = json.loads(capsys.readouterr().out)
    assert (found["text"], found["sql"], found["stop"], found["problem"]) == ("Two cities.", COUNT, "answered", "")
    assert (found["columns"], found["rows"]) == (["city", "n"], [[None, 1], ["Bern", 1], ["Oslo", 1]])
    assert [step["role"] for step in found["steps"]] == ["assistant", "tool", "assistant"]


def test_questions_from_a_pipe_are_answered_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("first?\n\nsecond?\n"))
    answered(tmp_path, says_sql(COUNT), "--json")
    assert [json.loads(line)["question"] for line in capsys.readouterr().out.splitlines()] == ["first?", "second?"]


def test_text_that_would_steer_the_terminal_is_shown_harmless(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "SELECT char(27) || ']0;owned' || char(7) || '[red]x[/red]' AS \"[bold]\x1b[2J\""
    answered(tmp_path, says_sql(hostile, "\x1b[2Jdone [link=x]"), "q")
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "[red]x[/red]" in shown
    assert "done [link=x]" in shown
    assert printable("a\u202eb\x9b") == "a\ufffdb\ufffd"


def test_a_failing_endpoint_ends_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"No answer: InfrastructureError.*ask again"):
        answered(tmp_path, lambda request: Reply(403), "q")


def test_the_newest_trained_model_is_asked_with_the_settings_of_its_run(tmp_path: Path) -> None:
    assert newest_model(tmp_path / "runs") is None
    with pytest.raises(UserError, match="holds no trained model"):
        chosen(arguments(tmp_path))
    grpo = trained(tmp_path, "grpo", 1_000)
    tools = "shared.agent.glossary:lookup_term"
    agent = {"max_turns": 5, "context_tokens": 999, "observation_tokens": 77, "tools": tools, "of_old": 1}
    sft = trained(tmp_path, "sft", 2_000, agent=agent, sandbox={"timeout_seconds": 3.5}, sft={"epochs": 9})
    assert newest_model(tmp_path / "runs") == sft
    config, subject, _ = chosen(arguments(tmp_path))
    assert subject == sft
    assert (config.agent.max_turns, config.agent.observation_tokens, config.agent.tools) == (5, 77, tools)
    assert config.agent.context_tokens == 20_000  # from --set
    assert config.sandbox.timeout_seconds == 3.5
    assert config.sft.epochs == load_config(ROOT / "pipeline.yaml", "cpu").sft.epochs
    assert chosen(arguments(tmp_path, "--model", str(grpo)))[1] == grpo


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--endpoint", "nowhere"], "not an address"),
        (["--endpoint", "http://127.0.0.1:9/v1"], "cannot be reached"),
        (["--model", "/nowhere/at/all"], "nowhere"),
    ],
)
def test_a_model_that_cannot_be_asked_is_named(tmp_path: Path, given: list[str], problem: str) -> None:
    trained(tmp_path, "sft", 1_000)
    with pytest.raises(UserError, match=problem):
        ask(arguments(tmp_path, "q", *given))


def test_a_missing_database_is_named(tmp_path: Path) -> None:
    args = arguments(tmp_path, "q")
    args.database = "nowhere.sqlite"
    trained(tmp_path, "sft", 1_000)
    with pytest.raises(UserError, match=r"no database nowhere\.sqlite"):
        ask(args)


def test_who_asks_without_a_server_is_told_how_the_next_answer_comes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server's start, which takes vLLM half a minute, is replaced."""
    trained(tmp_path, "sft", 1_000)
    with scripted_server(says_sql(COUNT, "Two cities.")) as url:
        monkeypatch.setattr("shared.serving.answering.vllm_server", lambda *_: contextlib.nullcontext(url))
        ask(arguments(tmp_path, "How many per city?"))
    told = capsys.readouterr()
    assert "starting the model server" in told.err
    assert "it ends with this command; while `serve` runs, `ask` uses its server and is quick" in told.err
    assert "Two cities." in told.out
    assert not (tmp_path / "runs" / STATE_FILE).exists()


def test_the_model_server_of_a_running_serve_is_used(tmp_path: Path) -> None:
    model = trained(tmp_path, "sft", 1_000)
    config = chosen(arguments(tmp_path))[0]
    with scripted_server(says_sql(COUNT)) as url:
        state = {"model": str(model), "endpoint": url, "context": 20_000, "pid": 1}
        write_json(tmp_path / "runs" / STATE_FILE, state)
        with serving(model, config) as endpoint:
            assert endpoint == Endpoint(url, model)
    assert (tmp_path / "runs" / STATE_FILE).exists()

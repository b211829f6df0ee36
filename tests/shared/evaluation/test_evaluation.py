"""Evaluation against a scripted endpoint: resumable, honest about lost episodes."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shared.agent.chat_client
from shared.config.load import load_config
from shared.config.schema import Config
from shared.errors import UserError
from shared.evaluation.__main__ import main as evaluate_main
from shared.evaluation.metrics import Summary
from shared.evaluation.run import (
    Endpoint,
    chosen_questions,
    evaluate,
    evaluate_subject,
    read_summary,
    summary_line,
    whole_model,
)
from shared.models.folder import TEMPLATE_FILE, check_model_folder
from shared.records import (
    Question,
    StopReason,
    ToolCall,
    episode_from_row,
    read_episodes,
    read_questions,
    to_json,
    write_jsonl,
)
from shared.runs.manifest import RunDirectory, question_file
from tests.scripted_server import Reply, ScriptedModel, answer, scripted_server
from tests.shared.examples import insurance_file, tiny_tokenizer, tokenizer_folder
from tests.tiny_model import save_tiny_model

PIPELINE = Path(__file__).resolve().parents[3] / "pipeline.yaml"
CALL = '<tool_call>\n{"name": "execute_sql", "arguments": {"sql": "SELECT count(*) FROM claims"}}\n</tool_call>'
FINAL = "There are 3.\n```sql\nSELECT count(*) FROM claims\n```"


@pytest.fixture
def config() -> Config:
    return load_config(PIPELINE, "gpu", ["evaluate.bootstrap_samples=200"])


@pytest.fixture
def questions(tmp_path: Path) -> list[Question]:
    """Ten questions; the gold of the odd ones is another number than the scripted answer."""
    database = str(insurance_file(tmp_path))
    golds = ["SELECT count(*) FROM claims", "SELECT count(*) + 1 FROM claims"]
    kinds = ["seen_database", "unseen_database"]
    return [
        Question(
            f"q{i}", "insurance", f"Question {i}: how many claims?", golds[i % 2], database, split_kind=kinds[i % 2]
        )
        for i in range(10)
    ]


def run(questions: list[Question], config: Config, folder: Path, handler: Callable[[dict[str, Any]], Any]) -> Summary:
    with scripted_server(handler) as base_url:
        return asyncio.run(evaluate(questions, endpoint(folder, base_url), config, folder))


def endpoint(folder: Path, url: str) -> Endpoint:
    """An endpoint whose tokenizer stands beside `folder`."""
    return Endpoint(url, tokenizer_folder(folder.parent))


def accuracy(summary: Summary) -> float:
    assert summary.accuracy
    return summary.accuracy.mean


def number(request: dict[str, Any]) -> int:
    """The number of the question that a request is about."""
    text = next(message["content"] for message in request["messages"] if message["role"] == "user")
    return int(text.split("Question ")[1].split(":")[0])


def solves(request: dict[str, Any]) -> dict[str, Any]:
    """A model that runs the query and then answers, with token ids as vLLM gives them."""
    turn = sum(message["role"] == "assistant" for message in request["messages"])
    return ScriptedModel(tiny_tokenizer(), [CALL, FINAL][turn])(request)


def test_every_question_is_played_and_judged(questions: list[Question], config: Config, tmp_path: Path) -> None:
    summary = run(questions, config, tmp_path / "e", solves)
    assert (summary.n, accuracy(summary), summary.tool_call_rate) == (10, 0.5, 1.0)
    by_split = summary.accuracy_by["split_kind"]
    assert {kind: found.mean for kind, found in by_split.items()} == {"seen_database": 1.0, "unseen_database": 0.0}
    stored = read_summary(tmp_path / "e")
    assert stored["tool_calls"] == 10
    assert stored["seconds"] >= 0
    rewards = [episode.reward for episode in read_episodes(tmp_path / "e" / "episodes.jsonl")]
    assert [reward and reward.correct for reward in rewards] == [True, False] * 5
    assert "sft: execution accuracy 50.0% (95 % interval" in summary_line("sft", stored)


def test_an_interrupted_evaluation_plays_only_what_is_missing(
    questions: list[Question], config: Config, tmp_path: Path
) -> None:
    first = run(questions, config, tmp_path / "e", solves)
    file = tmp_path / "e" / "episodes.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_bytes("".join(lines[:6]).encode() + lines[6].encode()[: len(lines[6]) // 2] + "é".encode()[:1])
    asked = []
    again = run(questions, config, tmp_path / "e", lambda request: asked.append(number(request)) or solves(request))
    assert len(set(asked)) == 4
    assert again.accuracy == first.accuracy
    assert len(read_episodes(file)) == 10


def test_a_lost_episode_is_played_once_more(questions: list[Question], config: Config, tmp_path: Path) -> None:
    failed = set()

    def flaky(request: dict[str, Any]) -> Any:
        if number(request) in (3, 4) and number(request) not in failed:
            failed.add(number(request))
            return Reply(403, {"detail": "busy"})
        return solves(request)

    summary = run(questions, config, tmp_path / "e", flaky)
    assert (summary.n, summary.infrastructure_failures) == (10, 0)


def test_an_episode_lost_twice_is_left_out_and_counted(
    questions: list[Question], config: Config, tmp_path: Path
) -> None:
    def broken_for_one(request: dict[str, Any]) -> Any:
        return Reply(403, {"detail": "broken"}) if number(request) == 1 else solves(request)

    summary = run(questions, config, tmp_path / "e", broken_for_one)
    assert (summary.n, summary.infrastructure_failures) == (9, 1)
    assert accuracy(summary) == pytest.approx(5 / 9)
    assert "1 lost to the infrastructure" in summary_line("base", read_summary(tmp_path / "e"))


def test_too_many_lost_episodes_give_no_result(questions: list[Question], config: Config, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"2 of 10 episodes were lost.*broken.*it continues"):
        run(
            questions,
            config,
            tmp_path / "e",
            lambda r: Reply(403, {"detail": "broken"}) if number(r) < 2 else solves(r),
        )
    with pytest.raises(UserError, match="no finished evaluation"):
        read_summary(tmp_path / "e")


def test_an_endpoint_that_is_not_there_is_named(
    questions: list[Question], config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared.agent.chat_client, "_FIRST_DELAY_SECONDS", 0.001)
    with pytest.raises(UserError, match=r"10 of 10 episodes.*http://127\.0\.0\.1:9/v1"):
        asyncio.run(evaluate(questions, endpoint(tmp_path / "e", "http://127.0.0.1:9/v1"), config, tmp_path / "e"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "{0}/none"], r"none has no config\.json"),
        (["--model", "{0}/adapter"], r"adapter has no adapter_model\.safetensors"),
        (["--endpoint", "{1}", "--tokenizer", "{0}/adapter"], r"adapter has no tokenizer\.json"),
        (
            ["--endpoint", "http://127.0.0.1:9/v1", "--tokenizer", "{0}"],
            r"127\.0\.0\.1:9/v1 cannot be reached .*start it",
        ),
        (["--endpoint", "{1}", "--tokenizer", "{0}"], None),
    ],
)
def test_a_dry_run_names_a_model_or_an_endpoint_that_is_not_there(
    options: list[str], words: str | None, questions: list[Question], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "asked.jsonl", questions)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    tokenizer_folder(tmp_path)
    usual = [
        "--profile=cpu",
        f"--config={PIPELINE}",
        f"--set=runs_dir={tmp_path}",
        f"--questions={tmp_path}/asked.jsonl",
    ]
    with scripted_server(solves) as url:
        monkeypatch.setattr(
            "sys.argv", ["evaluate", "--dry-run", *usual, *[option.format(tmp_path, url) for option in options]]
        )
        with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
            evaluate_main()
    assert not (tmp_path / "main").exists()


def test_an_empty_question_file_is_named_as_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asked.jsonl").write_text("\n")
    monkeypatch.setattr(
        "sys.argv",
        ["evaluate", "--profile=cpu", f"--config={PIPELINE}", f"--questions={tmp_path}/asked.jsonl", "--model=x"],
    )
    with pytest.raises(UserError, match=r"--questions .*asked\.jsonl holds no question; give .*data import"):
        evaluate_main()


def test_questions_in_the_folder_that_would_be_written_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "main" / "evaluations" / "x" / "questions.jsonl"
    asked.parent.mkdir(parents=True)
    asked.write_text("{}\n")
    options = [f"--config={PIPELINE}", f"--set=runs_dir={tmp_path}", f"--questions={asked}", "--model=x", "--name=x"]
    monkeypatch.setattr("sys.argv", ["evaluate", "--profile=cpu", "--run-name=main", *options])
    with pytest.raises(UserError, match=r"would replace .*questions\.jsonl, which this command reads"):
        evaluate_main()
    assert asked.read_text() == "{}\n"


def test_a_model_that_never_calls_a_tool_shows(questions: list[Question], config: Config, tmp_path: Path) -> None:
    summary = run(questions, config, tmp_path / "e", ScriptedModel(tiny_tokenizer(), "I do not know."))
    assert (summary.tool_call_rate, accuracy(summary)) == (0.0, 0.0)
    assert read_summary(tmp_path / "e")["tool_calls"] == 0


def test_a_missing_database_is_named_before_anything_is_played(
    questions: list[Question], config: Config, tmp_path: Path
) -> None:
    (tmp_path / "insurance.sqlite").unlink()
    with pytest.raises(UserError, match=r"Database .*insurance\.sqlite does not exist"):
        run(questions, config, tmp_path / "e", lambda request: pytest.fail("played"))


def test_the_same_questions_are_chosen_for_every_model(
    questions: list[Question], config: Config, tmp_path: Path
) -> None:
    directory = RunDirectory(tmp_path)
    directory.data.mkdir()
    write_jsonl(directory.data / "test.jsonl", questions)
    few = load_config(PIPELINE, "cpu", ["evaluate.questions=4"])
    assert chosen_questions(few, directory) == questions[:4]
    assert chosen_questions(config, directory) == questions


@pytest.mark.parametrize("rows", [None, []])
def test_missing_test_questions_are_named(config: Config, tmp_path: Path, rows: list[Question] | None) -> None:
    (tmp_path / "data").mkdir()
    if rows is not None:
        write_jsonl(tmp_path / "data" / "test.jsonl", rows)
    with pytest.raises(UserError, match=r"test\.jsonl"):
        chosen_questions(config, RunDirectory(tmp_path))


def test_another_split_or_imported_questions_can_be_asked(
    questions: list[Question], config: Config, tmp_path: Path
) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.data.mkdir(parents=True)
    write_jsonl(directory.data / "val.jsonl", questions[:3])
    assert chosen_questions(config, directory, question_file(directory, "val")) == questions[:3]
    file = tmp_path / "imported.jsonl"
    write_jsonl(file, questions[:2])
    (tmp_path / "tokenizer").mkdir()
    asked: list[dict[str, Any]] = []
    with scripted_server(lambda request: asked.append(request) or solves(request)) as url:
        large = Endpoint(url, tokenizer_folder(tmp_path / "tokenizer"), "large")
        for _ in range(2):  # the second time it is finished
            summary = evaluate_subject(large, config, directory, "mine", chosen_questions(config, directory, file))
    assert (summary["n"], len(asked), {request["model"] for request in asked}) == (2, 4, {"large"})
    assert list(read_questions(directory.evaluation("mine") / "questions.jsonl")) == questions[:2]
    file.write_text('{"question": "How many?", "sql": "SELECT 1"}\n')
    with pytest.raises(
        UserError, match=r"imported\.jsonl holds no questions as this pipeline writes them.*data import"
    ):
        chosen_questions(config, directory, file)


@pytest.mark.slow
def test_an_adapter_is_merged_into_its_base_before_it_is_served(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = save_tiny_model(tmp_path / "base")
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules="all-linear", init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    (base / TEMPLATE_FILE).write_text("{% for m in messages %}{{ m.content }}{% endfor %}")  # so it is adapted first
    folder, cache = tmp_path / "evaluation", tmp_path / "models"
    merged = whole_model(tmp_path / "adapter", folder, cache)
    check_model_folder(merged)
    assert [path.name for path in folder.iterdir()] == ["merged"]
    assert len(list(cache.glob("base-*"))) == 1
    assert whole_model(tmp_path / "adapter", folder, cache) == merged
    assert whole_model(base, folder, cache) == base
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match="could not be merged into its base model"):
        whole_model(tmp_path / "adapter", tmp_path / "another", cache)


def test_episodes_survive_the_way_to_disk_and_back(questions: list[Question], config: Config, tmp_path: Path) -> None:
    run(questions[:1], config, tmp_path / "e", solves)
    (episode,) = read_episodes(tmp_path / "e" / "episodes.jsonl")
    assert episode.stop is StopReason.ANSWERED
    assert episode.turns[0].calls == (ToolCall("execute_sql", {"sql": "SELECT count(*) FROM claims"}),)
    assert episode_from_row(json.loads(to_json(episode))) == episode


def test_endpoints_without_token_ids_are_evaluated_too(
    questions: list[Question], config: Config, tmp_path: Path
) -> None:
    summary = run(questions, config, tmp_path / "e", lambda request: answer(FINAL))
    assert accuracy(summary) == 0.5
    assert summary.tool_call_rate is None
    assert "tool-call rate –" in summary_line("x", read_summary(tmp_path / "e"))

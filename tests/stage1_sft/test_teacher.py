"""A scripted endpoint as the teacher: what is accepted, what is paid for, what goes on after an interruption."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shared.config.load import load_config
from shared.config.schema import Config
from shared.errors import UserError
from shared.models.tokenizer import Tokenizer
from shared.records import JsonlTail, Question, ToolCall, write_jsonl
from shared.runs.manifest import RunDirectory
from stage1_sft import stage
from stage1_sft.teacher import Lessons, bill_line, lesson_file, shortest, teach
from tests.scripted_server import Reply, answer, scripted_server
from tests.shared.examples import tiny_tokenizer, tokenizer_folder
from tests.stage1_sft.examples import ROOT, questions, settings
from tests.tiny_model import save_tiny_model

SEARCH = answer(calls=[ToolCall("search_schema", {"query": "claims"})])


def sql(text: str, content: str = "") -> dict[str, Any]:
    return answer(content, calls=[ToolCall("execute_sql", {"sql": text})])


def plays(*turns: Any) -> Callable[[dict[str, Any]], Any]:
    """Answers the n-th request of each conversation with the n-th of `turns`, whoever asks."""
    return lambda request: turns[sum(message["role"] == "assistant" for message in request["messages"])]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture
def asked(tmp_path: Path) -> list[Question]:
    """How many claims are there? (3)"""
    return questions(tmp_path)[:1]


def config_for(url: str, *overrides: str) -> Config:
    return settings(f"teacher.endpoint={url}", "teacher.tries=3", "teacher.concurrency=2", *overrides)


def test_a_right_answer_becomes_a_trace_and_failed_calls_are_not_trained(
    asked: list[Question], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    handler = plays(
        SEARCH, sql("SELECT count(*) FROM claim"), sql("SELECT count(*) FROM claims", "Plural."), answer("3.")
    )
    prices = ("teacher.prompt_price=2.5", "teacher.completion_price=4")
    with scripted_server(handler) as url:
        traces, bill = teach(asked, config_for(url, *prices), tokenizer, RunDirectory(tmp_path))
    trace = traces[asked[0].id]
    trained = [
        flag
        for message, flag in zip(trace["messages"], trace["trained"], strict=True)
        if message["role"] == "assistant"
    ]
    assert trained == [True, False, True, True]
    assert not any(
        flag
        for message, flag in zip(trace["messages"], trace["trained"], strict=True)
        if message["role"] != "assistant"
    )
    assert trace["messages"][-1]["content"] == "3."
    assert trace["provenance"]["teacher"] == "auto"
    assert (bill["asked"], bill["solved"], bill["episodes"], bill["rejected"]) == (1, 1, 1, {})
    assert (bill["requests"], bill["prompt_tokens"], bill["completion_tokens"], bill["cost"]) == (4, 40, 20, 0.00018)
    assert "1 of 1 questions solved in 1 episodes (100% accepted" in bill_line(bill)
    assert bill_line(bill).endswith("4 requests, 40 prompt and 20 completion tokens, 60 for each trace, cost 0.00018")


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([sql("SELECT 3"), answer("3.")], "wrong"),  # a constant
        ([sql("SELECT count(*) FROM customers"), answer("3.")], "wrong"),  # equal by luck: a copy tells
        ([sql("SELECT count(*) + 1 FROM claims"), answer("4.")], "wrong"),
        (
            [answer("<tool_call>\n{broken\n</tool_call>"), sql("SELECT count(*) FROM claims"), answer("3.")],
            "unreadable call",
        ),
        ([sql("SELECT count(*) FROM claims"), answer("")], "no_answer"),
        (
            [sql("SELECT count(*) FROM claims"), answer("It is three. " * 300)],
            "a turn longer than agent.max_turn_tokens",
        ),
    ],
)
def test_what_the_judge_does_not_accept_is_tried_again_and_not_taught(
    turns: list[Any], reason: str, asked: list[Question], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from shared.reward.perturbed_copies import make_copies

    make_copies(Path(asked[0].database), [asked[0].gold_sql], tmp_path / "copies", 3, seed=0)
    asked = [Question(**{**vars(asked[0]), "copies": str(tmp_path / "copies")})]
    with scripted_server(plays(*turns)) as url:
        traces, bill = teach(asked, config_for(url), tokenizer, RunDirectory(tmp_path))
    assert traces == {}
    assert (bill["solved"], bill["episodes"], bill["rejected"]) == (0, 3, {reason: 3})


def test_no_answer_is_paid_for_twice(asked: list[Question], tokenizer: Tokenizer, tmp_path: Path) -> None:
    run, right = RunDirectory(tmp_path), plays(sql("SELECT count(*) FROM claims"), answer("3."))
    requests: list[Any] = []
    with scripted_server(lambda request: requests.append(request) or right(request)) as url:
        config = config_for(url)
        first, _ = teach(asked, config, tokenizer, run)
        with lesson_file(config, run).open("a") as stream:
            stream.write('{"question_id": "q1", "rea')  # a killed process
        again, bill = teach(asked, config_for(url, "sft.epochs=3", "teacher.tries=9"), tokenizer, run)
        assert (again, bill["episodes"], len(requests)) == (first, 1, 2)
        with closing(sqlite3.connect(asked[0].database)) as connection, connection:
            connection.execute("DELETE FROM claims WHERE claim_id = 1")  # now the trace is no longer true
        renewed, _ = teach(asked, config, tokenizer, run)
        assert len(requests) == 4
        assert renewed != first


def test_another_question_under_the_same_id_is_asked_anew(
    asked: list[Question], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """As the demo of another seed has; neither its rejections nor its traces count."""
    run, right = RunDirectory(tmp_path), plays(sql("SELECT count(*) FROM claims"), answer("3."))
    other = [dataclasses.replace(asked[0], question="How many are open?")]
    requests: list[Any] = []

    def handler(request: dict[str, Any]) -> Any:
        requests.append(request)
        return answer("None.") if "are open" in json.dumps(request) else right(request)

    with scripted_server(handler) as url:
        config = config_for(url)
        rejected, first = teach(other, config, tokenizer, run)
        solved, bill = teach(asked, config, tokenizer, run)
        assert (rejected, first["episodes"], list(solved), bill["episodes"]) == ({}, 3, ["q0"], 1)
        assert teach(other, config, tokenizer, run) == (rejected, first)
        assert teach(asked, config, tokenizer, run) == (solved, bill)
    assert len(requests) == 3 + 2  # each was asked once, and both are kept


def test_a_teacher_that_fails_stops_the_stage_and_keeps_what_it_said(tokenizer: Tokenizer, tmp_path: Path) -> None:
    asked, run = questions(tmp_path)[:2], RunDirectory(tmp_path)
    right = plays(sql("SELECT count(*) FROM claims"), answer("3."))

    def breaks(request: dict[str, Any]) -> Any:
        return right(request) if "How many claims" in json.dumps(request) else Reply(403, {"detail": "out of credit"})

    with scripted_server(breaks) as url:
        config = config_for(url, "teacher.concurrency=1")
        with pytest.raises(UserError, match=r"The teacher http://.* failed .*out of credit.*it continues"):
            teach(asked, config, tokenizer, run)
        assert [json.loads(line)["question_id"] for line in lesson_file(config, run).read_text().splitlines()] == ["q0"]


def test_the_key_of_the_endpoint_comes_from_the_environment(
    asked: list[Question], tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRSTCALL_API_KEY", "k-1")

    def strict(request: dict[str, Any]) -> Any:
        if "return_token_ids" in request:  # as endpoints refuse what they do not know
            return Reply(400, {"error": {"message": "Unrecognized request argument supplied: return_token_ids"}})
        return plays(sql("SELECT count(*) FROM claims"), answer("3."))(request)

    with scripted_server(strict) as url:
        traces, _ = teach(asked, config_for(url, "teacher.model=large"), tokenizer, RunDirectory(tmp_path))
    assert list(traces) == ["q0"]


def test_stage_one_teaches_what_the_teacher_solves_and_synthesises_the_rest(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "taught")
    run.data.mkdir(parents=True)
    run.sft.mkdir()
    rows = questions(tmp_path)
    write_jsonl(run.data / "train.jsonl", rows[:4])
    write_jsonl(run.data / "val.jsonl", rows[4:6])
    handler = plays(sql("SELECT count(*) FROM claims"), answer("3."))
    with scripted_server(handler) as url:
        traces, val, counts = stage.make_traces(config_for(url), run, tokenizer_folder(tmp_path))
    assert (len(traces), len(val)) == (4, 2)
    assert (counts["train"]["from_teacher"], counts["val"]["from_teacher"]) == (1, 0)
    bill = counts["train"]["teacher"]  # counts stand in the manifest of the stage
    assert (bill["asked"], bill["solved"], bill["episodes"], bill["requests"]) == (4, 1, 1 + 3 * 3, 20)
    assert "cost" not in bill


def test_the_shortest_has_the_fewest_turns_then_the_fewest_tokens_and_is_accepted() -> None:
    rows = [
        {"n": n, "trace": trace, "requests": requests, "completion_tokens": tokens}
        for n, (trace, requests, tokens) in enumerate(
            [("t", 4, 10), ("t", 3, 99), ("t", 3, 80), ("t", 3, 80), (None, 2, 5)]
        )
    ]
    assert shortest(rows) == rows[2]
    assert shortest(rows[4:]) is None


def test_a_round_plays_every_sample_teaches_the_shortest_and_goes_on_where_it_stopped(
    asked: list[Question], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    right, wrong = sql("SELECT count(*) FROM claims"), sql("SELECT count(*) + 1 FROM claims")
    episodes = [[SEARCH, wrong, right, answer("3.")], [wrong, answer("3.")], [SEARCH, right, answer("3.")]]
    begun = iter(episodes)
    turns = iter(())

    def handler(request: dict[str, Any]) -> Any:
        nonlocal turns
        if not any(message["role"] == "assistant" for message in request["messages"]):
            turns = iter(next(begun))
        return next(turns)

    def play(samples: int) -> Lessons:
        config = settings(f"sft.round_samples={samples}")
        lessons = Lessons(asked, config, tokenizer, tmp_path / "episodes.jsonl", own=True)
        asyncio.run(lessons.play(url, "auto", 4))
        return lessons

    with scripted_server(handler) as url:
        long = play(1).traces()["q0"]
        assert long["trained"] == [False, False, True, False, False, False, True, False, True]  # not the wrong query
        lessons = play(3)
        assert next(begun, None) is None  # the first episode was not played again
        assert play(3).bill() == lessons.bill()
    short = lessons.traces()["q0"]
    assert [message["role"] for message in short["messages"]].count("assistant") == 3
    assert all(flag == (m["role"] == "assistant") for m, flag in zip(short["messages"], short["trained"], strict=True))
    bill = lessons.bill()
    assert (bill["asked"], bill["solved"], bill["episodes"], bill["right_share"]) == (1, 1, 3, 0.6667)
    assert bill["rejected"] == {"wrong": 1}


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model, run = save_tiny_model(tmp_path / "model"), RunDirectory(tmp_path / "runs" / "killed")
    val, *train = questions(tmp_path)
    hopeless = {train[2].question, train[5].question}
    run.data.mkdir(parents=True)
    write_jsonl(run.data / "train.jsonl", train)
    write_jsonl(run.data / "val.jsonl", [val])
    golds = {question.question: question.gold_sql for question in [val, *train]}
    asked: list[int] = []  # the turn of each request
    number = itertools.count(1)  # of a request; several threads answer them
    process: subprocess.Popen[str] | None = None

    def endpoint(request: dict[str, Any]) -> Any:
        text, turn = request["messages"][1]["content"], sum(m["role"] == "assistant" for m in request["messages"])
        asked.append(turn)
        if next(number) in (7, 16) and process:
            process.kill()
        return (sql("SELECT 'no'" if text in hopeless else golds[text]), answer("Done."))[turn]

    with scripted_server(endpoint) as url:
        overrides = ["agent.context_tokens=4096", "teacher.tries=2", "teacher.concurrency=3",
                     f"teacher.endpoint={url}"]  # fmt: skip
        config = load_config(ROOT / "pipeline.yaml", "cpu", overrides)
        kept: list[Any] = []
        shape = [*overrides, f"model={model}", f"runs_dir={tmp_path / 'runs'}"]
        options = ["--profile=cpu", "--run-name=killed", "--traces-only", *[f"--set={value}" for value in shape]]
        for ending in (-9, -9, 0):
            process = subprocess.Popen(
                [sys.executable, "-m", "stage1_sft", *options], cwd=ROOT, stdout=subprocess.PIPE, text=True
            )
            printed = process.communicate()[0]
            assert process.returncode == ending, printed
            rows = JsonlTail(lesson_file(config, run)).new_rows()
            assert rows[: len(kept)] == kept  # nothing that was paid for is lost
            kept = rows
        assert asked.count(0) - len(kept) <= 2 * 3  # begun, not finished: what was under way at the two kills
        process = None
        drawn = stage.drawn(train, config.seed)
        traces, bill = teach(drawn, config, Tokenizer.from_folder(model), RunDirectory(tmp_path / "whole"))
    assert (bill["solved"], bill["episodes"], bill["rejected"]) == (6, 10, {"wrong": 4})
    assert json.loads((run.sft / "traces.counts.json").read_text())["teacher"] == bill
    assert bill_line(bill) in printed
    written = JsonlTail(run.sft / "traces.jsonl").new_rows()
    assert written[:6] == list(traces.values())  # in the same order, whenever each was answered

"""A scripted endpoint that rewords questions: what is accepted, what is paid for, what an interruption leaves."""

import itertools
import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from data.paraphrase import JOURNAL, paraphrase
from data.synthesis import command
from shared.errors import UserError
from shared.processes.vllm_server import vllm_server
from shared.records import JsonlTail, Question
from shared.sql.database import Database
from tests.data.conftest import ROOT, settings
from tests.scripted_server import Reply, answer, scripted_server
from tests.tiny_model import save_tiny_model


@pytest.fixture
def pets(tmp_path: Path) -> Database:
    with closing(sqlite3.connect(tmp_path / "pets.sqlite")) as connection, connection:
        connection.execute("CREATE TABLE pets (pet_id INTEGER PRIMARY KEY, name TEXT, age INTEGER)")
        connection.executemany("INSERT INTO pets VALUES (?, ?, ?)", [(1, "Rex", 3), (2, "Mia", 9)])
    return Database(tmp_path / "pets.sqlite", settings().sandbox)


def asked(pets: Database, *texts: str) -> list[Question]:
    """Questions whose golds count the pets."""
    return [
        Question(f"q{i}", "pets", text, "SELECT count(*) FROM pets", str(pets.path)) for i, text in enumerate(texts)
    ]


def endpoint(rewrite: Any = "How many animals?", query: Any = "```sql\nSELECT count(name) FROM pets\n```") -> Any:
    """A handler that answers requests for a wording with `rewrite`, and requests for SQL with `query`."""

    def handler(request: dict[str, Any]) -> Any:
        system, user = (message["content"] for message in request["messages"])
        given = query if "CREATE TABLE" in system else rewrite
        given = given(user) if callable(given) else given
        return given if isinstance(given, Reply) else answer(given)

    return handler


def test_a_wording_counts_when_schema_and_wording_alone_give_the_same_result(pets: Database, tmp_path: Path) -> None:
    requests: list[dict[str, Any]] = []
    handler = endpoint()
    with scripted_server(lambda request: requests.append(request) or handler(request)) as url:
        config = settings("teacher.prompt_price=1", "teacher.completion_price=2")
        (question,), line = paraphrase(asked(pets, "Count the pets."), pets, config, url, tmp_path / JOURNAL)
    assert (question.question, question.gold_sql) == ("How many animals?", "SELECT count(*) FROM pets")
    assert line == ("paraphrase: 1 of 1 questions accepted, 0 refused (none); 2 requests, 20 prompt and 10 completion "
                    "tokens, cost 4e-05")  # fmt: skip
    assert '"name" TEXT' in requests[1]["messages"][0]["content"]
    assert "Count the pets" not in json.dumps(requests[1])


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (endpoint(query="```sql\nSELECT 7\n```"), "other result 1"),
        (endpoint(query="I cannot tell."), "no SQL that runs 1"),
        (endpoint(query="SELECT nothing FROM pets"), "no SQL that runs 1"),
        (endpoint(query="DELETE FROM pets"), "no SQL that runs 1"),
        (endpoint(query=Reply(400, {"error": "maximum context length"})), "no SQL that runs 1"),
        (endpoint(rewrite="  "), "no question 1"),
        (endpoint(rewrite="Well. " * 200), "no question 1"),
        (endpoint(rewrite="count the PETS"), "asked already 1"),
    ],
)
def test_a_bad_answer_keeps_the_question_as_it_was(pets: Database, tmp_path: Path, handler: Any, reason: str) -> None:
    questions = asked(pets, "Count the pets.")
    with scripted_server(handler) as url:
        kept, line = paraphrase(questions, pets, settings(), url, tmp_path / JOURNAL)
    assert kept == questions
    assert f"0 of 1 questions accepted, 1 refused ({reason})" in line


def test_a_wording_that_two_questions_get_counts_once(pets: Database, tmp_path: Path) -> None:
    with scripted_server(endpoint()) as url:
        kept, line = paraphrase(asked(pets, "Count the pets.", "Pets?"), pets, settings(), url, tmp_path / JOURNAL)
    assert [question.question for question in kept] == ["How many animals?", "Pets?"]
    assert "1 of 2 questions accepted, 1 refused (asked already 1)" in line


def test_half_a_wording_of_an_emoji_is_left_out(pets: Database, tmp_path: Path) -> None:
    with scripted_server(endpoint(rewrite='"How many \ud83d animals?"')) as url:
        first = paraphrase(asked(pets, "Count the pets."), pets, settings(), url, tmp_path / JOURNAL)
        again = paraphrase(asked(pets, "Count the pets."), pets, settings(), url, tmp_path / JOURNAL)
    assert [question.question for question in first[0]] == ["How many animals?"]
    assert again == first


def test_a_refused_key_stops_and_what_was_paid_is_not_paid_again(
    pets: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRSTCALL_API_KEY", "k-1")
    questions, journal, paid = asked(pets, "Count the pets.", "Pets?", "How many?"), tmp_path / JOURNAL, list[Any]()
    config = settings("teacher.concurrency=1")
    broken = True

    def handler(request: dict[str, Any]) -> Any:
        if broken and len(paid) == 3:
            return Reply(401, {"detail": "wrong key"})
        paid.append(request["messages"])
        return endpoint(rewrite=lambda user: f"{user} In all?")(request)

    with scripted_server(handler) as url:
        with pytest.raises(UserError, match=r"http://.* failed .*wrong key.*then the same command continues"):
            paraphrase(questions, pets, config, url, journal)
        with journal.open("a") as stream:
            stream.write('{"asked": "12", "answ')  # a killed process
        broken = False
        kept, line = paraphrase(questions, pets, config, url, journal)
        again = paraphrase(questions, pets, config, url, journal)
    assert [question.question for question in kept] == [f"{q.question} In all?" for q in questions]
    assert len(paid) == 6
    assert "3 of 3 questions accepted" in line
    assert "6 requests" in line
    assert again == (kept, line)


def test_an_address_that_is_none_is_refused_before_any_work(pets: Database, tmp_path: Path) -> None:
    arguments = ["--database", str(pets.path), "--out", str(tmp_path / "made"), "--paraphrase", "my-endpoint"]
    with pytest.raises(UserError, match="--paraphrase 'my-endpoint' is not an address like http://"):
        command.main(arguments)
    assert not (tmp_path / "made").exists()


@pytest.mark.slow
def test_a_killed_command_goes_on_and_pays_for_nothing_twice(tmp_path: Path) -> None:
    shop = tmp_path / "shop.sqlite"
    with closing(sqlite3.connect(shop)) as connection, connection:
        connection.execute("CREATE TABLE products (product_id INTEGER PRIMARY KEY, name TEXT, kind TEXT, price REAL)")
        rows = [(i, f"Item {i}", ("tool", "toy", "book")[i * i % 3], i * 1.5) for i in range(40)]
        connection.executemany("INSERT INTO products VALUES (?, ?, ?, ?)", rows)
    number = itertools.count(1)
    seen: list[str] = []
    process: subprocess.Popen[str] | None = None

    def handler(request: dict[str, Any]) -> Any:
        if next(number) in (5, 14) and process:
            process.kill()
        seen.append(json.dumps(request["messages"]))
        return endpoint(rewrite=lambda user: f"Tell me: {user}", query="SELECT 'no'")(request)

    with scripted_server(handler) as url:
        line = [sys.executable, "-m", "data", "synthesize", "--database", str(shop), "--out", str(tmp_path / "made"),
                "--questions=12", "--paraphrase", url, "--set=teacher.concurrency=2", "--profile=cpu"]  # fmt: skip
        kept: list[Any] = []
        for ending in (-9, -9, 0):
            process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            printed = process.communicate()[0]
            assert process.returncode == ending, printed
            rows = JsonlTail(tmp_path / "made" / JOURNAL).new_rows()
            assert rows[: len(kept)] == kept
            kept = rows
    assert len(kept) == len({row["asked"] for row in kept}) == 24
    assert len(seen) - len(kept) <= 2 * 2  # under way at the two kills
    assert "0 of 12 questions accepted, 12 refused (other result 12); 24 requests" in printed
    assert (tmp_path / "made" / "dev.json").exists()


@pytest.mark.slow
@pytest.mark.xdist_group("servers")
def test_a_model_that_we_serve_ourselves_is_asked_once_and_its_nonsense_refused(pets: Database, tmp_path: Path) -> None:
    config = settings("agent.context_tokens=4096")
    questions, journal = asked(pets, "How many pets are there?", "Count the pets."), tmp_path / JOURNAL
    with vllm_server(save_tiny_model(tmp_path / "model"), config, tmp_path / "served") as url:
        reworded, line = paraphrase(questions, pets, config, url, journal)
    rows = JsonlTail(journal).new_rows()
    assert reworded == questions  # the model is untrained
    assert "0 of 2 questions accepted, 2 refused" in line
    assert f"{len(rows)} requests" in line
    assert 2 <= len(rows) <= 4
    assert all(row["prompt_tokens"] > 20 and row["completion_tokens"] > 0 for row in rows)
    assert paraphrase(questions, pets, config, url, journal) == (reworded, line)  # the server is gone

"""`python -m shared.evaluation --verdicts`: our judges beside recorded verdicts."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from shared.errors import UserError
from shared.evaluation import __main__ as evaluate
from shared.evaluation.judges.verdicts import compare_verdicts
from tests.beside import REAL_DATA, needs_real_data
from tests.shared.examples import insurance_file

COUNT = "SELECT count(*) FROM customers"
RIGHT = {"spider_exec": True, "bird_ex": True, "spider_testsuite": True}


def case(prediction: str, **verdicts: Any) -> dict[str, Any]:
    return {"id": "c1", "db_id": "insurance", "gold_sql": COUNT, "pred_sql": prediction} | RIGHT | verdicts


@pytest.fixture
def databases(tmp_path: Path) -> Path:
    (tmp_path / "databases" / "insurance").mkdir(parents=True)
    insurance_file(tmp_path / "databases" / "insurance")
    return tmp_path / "databases"


@pytest.fixture
def suite(tmp_path: Path, databases: Path) -> Path:
    """The archive of the database and one variant with another count."""
    (tmp_path / "variant").mkdir()
    variant = insurance_file(tmp_path / "variant", "DELETE FROM customers WHERE customer_id = 1;")
    (tmp_path / "suite").mkdir()
    with tarfile.open(tmp_path / "suite" / "insurance.tar.gz", "w:gz") as archive:
        archive.add(databases / "insurance" / "insurance.sqlite", "insurance/insurance.sqlite")
        archive.add(variant, "insurance/insurancev1.sqlite")
    return tmp_path / "suite"


def cases_file(folder: Path, *cases: Any) -> Path:
    path = folder / "cases.jsonl"
    path.write_text("".join(json.dumps(case) + "\n" for case in cases))
    return path


def test_disagreements_are_printed_and_counted(
    tmp_path: Path, databases: Path, suite: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [case(COUNT), case("SELECT 3", spider_testsuite=False), case("SELECT 4", bird_ex=False, order_fragile=True)]
    compare_verdicts(cases_file(tmp_path, *cases), databases, suite)
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "spider 2/3 bird 3/3 testsuite 2/3"
    assert [line for line in lines if not line.startswith(" ")] == [
        "c1 spider: recorded True, judged False, order fragile",
        "c1 testsuite: recorded True, judged False, order fragile",
    ]
    assert any("prediction SELECT 4" in line for line in lines)


def test_verdicts_that_are_not_recorded_are_not_counted(
    tmp_path: Path, databases: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare_verdicts(cases_file(tmp_path, case(COUNT, bird_ex=None)), databases, None)
    assert capsys.readouterr().out == "spider 1/1 bird 0/0 testsuite 0/0\n"


@pytest.mark.parametrize("rows", [[], [case(COUNT, spider_exec=None, bird_ex=None)]])
def test_nothing_compared_is_no_success(rows: list[dict[str, Any]], tmp_path: Path, databases: Path) -> None:
    with pytest.raises(UserError, match=r"cases\.jsonl holds no case with a verdict to compare with"):
        compare_verdicts(cases_file(tmp_path, *rows), databases, None)


def test_a_gold_that_fails_counts_as_false(tmp_path: Path, databases: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = case(COUNT) | {"gold_sql": "SELECT gone"}
    compare_verdicts(cases_file(tmp_path, broken), databases, None)
    out = capsys.readouterr().out
    assert "judged False (Gold SQL 'SELECT gone' cannot be run" in out
    assert out.endswith("spider 0/1 bird 0/1 testsuite 0/0\n")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 lacks the text of db_id, gold_sql, pred_sql"),
        (json.dumps(case(COUNT) | {"pred_sql": 1}), "line 2 lacks"),
        (json.dumps(case(COUNT) | {"db_id": "zoo"}), r"zoo\.sqlite does not exist; check --databases"),
    ],
)
def test_a_bad_case_is_named(row: str, words: str, tmp_path: Path, databases: Path) -> None:
    path = cases_file(tmp_path, case(COUNT))
    path.write_text(path.read_text() + row + "\n")
    with pytest.raises(UserError, match=words):
        compare_verdicts(path, databases, None)


@pytest.mark.parametrize("content", [None, b"no archive"])
def test_a_missing_or_damaged_suite_is_named(content: bytes | None, tmp_path: Path, databases: Path) -> None:
    (tmp_path / "suite").mkdir()
    if content:
        (tmp_path / "suite" / "insurance.tar.gz").write_bytes(content)
    with pytest.raises(UserError, match=r"cannot be unpacked|check --testsuite"):
        compare_verdicts(cases_file(tmp_path, case(COUNT)), databases, tmp_path / "suite")


def test_the_command_ends_with_the_agreements(
    tmp_path: Path, databases: Path, suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--verdicts", str(cases_file(tmp_path, case(COUNT)))]
    command = [sys.executable, "-m", "shared.evaluation", *options]
    done = subprocess.run([*command, "--databases", str(databases), "--testsuite", str(suite)], capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"spider 1/1 bird 1/1 testsuite 1/1\n")
    monkeypatch.setattr(sys, "argv", ["evaluate", *options])
    with pytest.raises(UserError, match="--verdicts needs --databases"):
        evaluate.main()


@needs_real_data
@pytest.mark.parametrize("with_suite", [False, True])
def test_all_recorded_verdicts_are_reproduced(with_suite: bool, tmp_path: Path) -> None:
    lines = (REAL_DATA / "evaluator_cases.jsonl").read_text("utf-8").splitlines()
    small = [line for line in lines if json.loads(line)["db_id"] in ("singer", "poker_player")]
    (tmp_path / "cases.jsonl").write_text("\n".join(small if with_suite else lines))
    suite = REAL_DATA / "spider_testsuite" if with_suite else None
    agreements = compare_verdicts(tmp_path / "cases.jsonl", REAL_DATA / "spider_sample/database", suite)
    assert all(found.equal == found.total for found in agreements.values())
    assert agreements["testsuite"].total == (len(small) if with_suite else 0)

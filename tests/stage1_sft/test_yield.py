"""Which golds of a data set become a trace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from shared.records import write_jsonl
from stage1_sft.synthesize import describe_yield
from tests.shared.examples import tiny_tokenizer
from tests.stage1_sft.examples import ROOT, questions, settings, with_gold


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "stage1_sft", "yield", *arguments]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)


def test_the_yield_names_each_reason_with_an_example_and_the_optional_parts(tmp_path: Path) -> None:
    rows = questions(tmp_path)
    rows[0] = with_gold(rows[0], "SELECT nothing FROM claims")
    config = settings("sft.wrong_turn_share=0.999", "sft.search_miss_share=0", "sft.parallel_share=0")
    first, reason, parts = describe_yield(rows, config, tiny_tokenizer())
    assert first == "8 of 9 golds become a verified trace: 88.9%"
    assert reason.split() == f"1 gold fails, e.g. q0: {rows[0].question} | {rows[0].gold_sql}".split()
    assert "different orders of calls" in parts
    assert "with misspelt_column" in parts


def test_the_command_reads_an_imported_folder_or_its_file_and_refuses_others(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "questions.jsonl", questions(tmp_path))
    for place in (tmp_path, tmp_path / "questions.jsonl"):
        done = command(str(place), "--dry-run", "--profile", "cpu")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"would make a trace of each of the 9 questions in {tmp_path / 'questions.jsonl'}\n"
    (tmp_path / "questions.jsonl").write_text('{"question": 3}\n')
    for place, why in ((tmp_path, "line 1"), (tmp_path / "nowhere", "No such file")):
        refused = command(str(place), "--profile", "cpu")
        assert refused.returncode == 2
        assert "cannot be read as questions" in refused.stderr
        assert why in refused.stderr
        assert f"python -m data import {place} --out FOLDER" in refused.stderr

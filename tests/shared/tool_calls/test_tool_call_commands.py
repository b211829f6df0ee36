"""`python -m shared.tool_calls`: case files and conformance reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shared.agent.prompts import TOOLS
from shared.records import Episode, StopReason, Turn, to_json, write_jsonl
from shared.tool_calls.__main__ import main
from shared.tool_calls.report import SQL_AGENT, texts_of
from tests.beside import PARSER_CASES, needs_parser_cases
from tests.shared.tool_calls.tool_call_examples import COLUMNS_JSON, TAGGED

ROOT = Path(__file__).resolve().parents[3]
CASE = {
    "id": "one", "output": f"So.\n{TAGGED}", "tools": ["get_columns"], "expect_content": "So.",
    "expect_calls": [{"name": "get_columns", "arguments": {"table": "claims"}}],
}  # fmt: skip


def written(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@needs_parser_cases
@pytest.mark.parametrize("options", [[], ["--stream"]])
def test_all_known_cases_are_read_as_expected(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cases", str(PARSER_CASES), *options]) == 0
    assert capsys.readouterr().out == "calls 93/93 negatives 27/27\n"


@pytest.mark.parametrize("options", [[], ["--stream"]])
def test_cases_that_were_written_without_a_look_at_the_grammar_are_read(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--cases", str(Path(__file__).with_name("tool_call_cases.jsonl")), *options]) == 0
    assert capsys.readouterr().out == "calls 94/94 negatives 93/93\n"


def test_a_failing_case_is_shown_with_what_was_expected_and_got(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {**CASE, "id": "wrong", "expect_content": "Else."}
    negative = {**CASE, "id": "negative", "expect_calls": [], "expect_content": None}
    assert main(["--cases", written(tmp_path / "cases.jsonl", CASE, wrong, negative)]) == 1
    out = capsys.readouterr().out
    assert "wrong: content\n  expected 'Else.'\n  got      'So.'" in out
    assert "negative: calls\n  expected []\n  got" in out
    assert out.endswith("calls 1/2 negatives 0/1\n")


def test_cases_may_bring_their_own_schemas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}
    call = {"name": "f", "arguments": {"n": 1}}
    rows = [{"id": str(tool), "output": "f(n=1)", "tools": [tool], "expect_calls": [call]} for tool in (schema, "f")]
    assert main(["--cases", written(tmp_path / "cases.jsonl", *rows), "--stream"]) == 0
    assert capsys.readouterr().out == "calls 2/2 negatives 0/0\n"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "is not JSON (Expecting property name"),
        *(
            (
                row,
                "is no parser case; write an object with id, output, tools (names or schemas), expect_calls (name and",
            )
            for row in (
                "[]",
                '{"text": "Hi"}',
                json.dumps(CASE | {"tools": "f"}),
                json.dumps(CASE | {"tools": [{}]}),
                json.dumps(CASE | {"expect_calls": ["f"]}),
                json.dumps(CASE | {"expect_calls": [{"name": "f", "arguments": "x"}]}),
                json.dumps(CASE | {"expect_content": 1}),
                json.dumps(CASE | {"id": 1}),
            )
        ),
    ],
)
def test_a_line_that_is_no_case_is_named(
    row: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(json.dumps(CASE) + f"\n{row}\n", encoding="utf-8")
    assert main(["--cases", str(path)]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"error: {path}, line 2 is ")
    assert words in sentence


def test_a_file_without_a_case_is_no_passed_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cases", written(tmp_path / "cases.jsonl")]) == 2
    assert "cases.jsonl holds no parser case; write one JSON object a line." in capsys.readouterr().err


@pytest.mark.parametrize("row", [1, None, {"question": "How many?"}, {"turns": 2}, {"turns": [{"text": 1}]}])
def test_a_report_of_lines_without_a_text_is_refused(
    row: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "texts.jsonl", "Hi", {"content": None}, row)
    assert main(["--report", path]) == 2
    assert f"{path}, line 3 holds no text of a model; write a text, " in capsys.readouterr().err


def test_the_command_ends_with_the_sentence(tmp_path: Path) -> None:
    path = tmp_path / "binary.jsonl"
    path.write_bytes(b"\xff")
    command = [sys.executable, "-m", "shared.tool_calls", "--cases", str(path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert ended.stderr.startswith(f"error: {path} is not UTF-8 text (")


def test_a_report_counts_forms_calls_and_reasons_over_texts_and_episodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turn = Turn(TAGGED, "", (), (), (), (), 1, 1, 1, None)
    episode = json.loads(to_json(Episode("q", (turn, turn), StopReason.ANSWERED, None)))
    path = written(
        tmp_path / "texts.jsonl", COLUMNS_JSON, {"output": "Three."}, {"text": "<tool_call>no</tool_call>"}, episode
    )
    assert main(["--report", path]) == 0
    table = (tmp_path / "texts.calls.md").read_text(encoding="utf-8")
    assert table in capsys.readouterr().out
    assert "| hermes | 2 | 40.0% |" in table
    assert "| bare | 1 | 20.0% |" in table
    assert "| stock Hermes grammar | 2 |\n| qwen25_coder | 3 |\n| malformed: The text inside" in table


def test_a_report_replaces_an_earlier_one_beside_its_input_and_no_other_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(written(tmp_path / "texts.jsonl", "Three."))
    assert main(["--report", str(path)]) == main(["--report", str(path)]) == 0
    assert main(["--report", str(path), "--out", str(path)]) == 2
    assert f"--out {path} already exists; name a new file." in capsys.readouterr().err
    (tmp_path / "texts.calls.md").write_text("My notes.\n")
    assert main(["--report", str(path)]) == 2
    assert "texts.calls.md already exists and is no such report; name a new file" in capsys.readouterr().err
    assert path.read_text() == '"Three."\n'
    assert (tmp_path / "texts.calls.md").read_text() == "My notes.\n"


def test_a_report_leaves_out_lost_episodes_and_turns_whose_text_is_not_known(tmp_path: Path) -> None:
    known, unknown = (Turn(text, "", (), (), (), (), None, 1, 1, None) for text in ("a\u2028b", None))
    lost = Episode("q", (known,), StopReason.INFRASTRUCTURE, None)
    path = tmp_path / "episodes.jsonl"
    write_jsonl(path, [lost, Episode("q", (unknown, known), StopReason.ANSWERED, None)])
    assert list(texts_of(path)) == ["a\u2028b"]


def test_cases_name_the_tools_of_the_agent() -> None:
    agent = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    assert {name: [*schema["properties"]] for name, schema in SQL_AGENT.items()} == {
        name: [*parameters["properties"]] for name, parameters in agent.items()
    }
    assert {name: schema["required"] for name, schema in SQL_AGENT.items()} == {
        name: parameters["required"] for name, parameters in agent.items()
    }


def test_the_grammar_needs_neither_torch_nor_vllm_nor_any_other_package() -> None:
    code = (
        "import sys; import shared.tool_calls.__main__ as m; "
        "print(sorted({n.split('.')[0] for n in sys.modules} - sys.stdlib_module_names - {'shared', '__main__'}))"
    )
    command = [sys.executable, "-S", "-c", code]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() == "[]"

"""The report, from what stages leave on disk."""

import dataclasses
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shared.config.load import load_config
from shared.config.schema import Config
from shared.errors import UserError
from shared.evaluation.metrics import summarise
from shared.records import Episode, Question, Reward, StopReason, ToolCall, Turn, write_jsonl
from shared.report.__main__ import collect, evaluations, tables, update_readme, verdict, write_report
from shared.report.page import Table, line_chart, readable
from shared.report.runs_table import runs_table
from shared.report.traces import read_played
from shared.runs.manifest import RunDirectory, finish_stage, write_json
from shared.tool_calls import render_call

PIPELINE = Path(__file__).resolve().parents[3] / "pipeline.yaml"
SQL = "SELECT count(*) FROM claims WHERE note < '<b>'"
KINDS = ("seen_database", "unseen_database")
FENCED = f"```json\n{json.dumps({'name': 'execute_sql', 'arguments': {'sql': SQL}})}\n```"
QUESTIONS = [
    Question(
        f"q{i}",
        "shop",
        f"Question {i}?",
        SQL,
        "x",
        ("easy", "hard")[i % 2],
        "list" if i % 4 > 1 or i > 19 else "count",
        KINDS[i % 2],
    )
    for i in range(40)
]


@pytest.fixture
def config() -> Config:
    return load_config(PIPELINE, "cpu", ["evaluate.bootstrap_samples=300"])


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "main")
    directory.data.mkdir(parents=True)
    write_jsonl(directory.data / "test.jsonl", QUESTIONS)
    return directory


def episode(question: Question, correct: bool, stop: StopReason) -> Episode:
    call = ToolCall("execute_sql", {"sql": SQL})
    turns = (
        Turn(FENCED, "", (call,), (), ("Error: no such column",), (False,), 0, 300, 20, None),
        Turn(render_call(call), "", (call,), (), ("n\n3\n(1 row)",), (True,), 1, 340, 20, True),
        Turn("3", "3", (), (), (), (), 0, 380, 10, True),
    )
    function = {"name": "execute_sql", "arguments": json.dumps({"sql": SQL})}
    messages = [
        {"role": "system", "content": "secret system prompt"},
        {"role": "user", "content": question.question},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "3 <script>alert(1)</script>"},
        {"role": "assistant", "content": "3"},
    ]  # fmt: skip
    turns, reward = turns if correct else turns[1:], Reward(correct, 1.0, 1.0, 1.0, float(correct))
    return Episode(question.id, turns, stop, SQL, messages, seconds=1.5, reward=reward)


def evaluated(
    run: RunDirectory, who: str, is_correct: Callable[[int], bool], stop: StopReason = StopReason.ANSWERED
) -> None:
    """An evaluation as `shared.evaluation.run` leaves it."""
    folder = run.evaluation(who)
    folder.mkdir(parents=True)
    answers = [is_correct(i) for i in range(len(QUESTIONS))]
    episodes = [episode(q, right, stop) for q, right in zip(QUESTIONS, answers, strict=True)]
    write_jsonl(folder / "episodes.jsonl", episodes)
    summary = dataclasses.asdict(summarise(episodes, QUESTIONS, samples=300))
    write_json(folder / "summary.json", summary | {"seconds": 61.2})
    finish_stage(folder, "x", seconds=62, outputs={}, model=f"/models/{who}")


@pytest.fixture
def whole_run(run: RunDirectory) -> RunDirectory:
    evaluated(run, "base", lambda i: False)
    evaluated(run, "sft", lambda i: i % 2 == 0)
    evaluated(run, "grpo", lambda i: i % 2 == 0 or i % 5 == 0)
    run.grpo.mkdir()
    for step in (1, 2, 2):
        row = {"step": step, "reward": 0.25 * step, "execution_accuracy": 0.2, "tool_call_rate": 1.0, "turns": 4.0,
               "tokens": 900, "seconds": 60.1, "merged_share": None, "fallback_share": 0.0}  # fmt: skip
        with (run.grpo / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps(row) + "\n")
    usage = {"sft": {"seconds": 600.0, "peak_bytes": 5 * 2**30, "complete": True},
             "grpo": {"seconds": 1200.0, "peak_bytes": 11 * 2**30, "complete": True}}  # fmt: skip
    write_json(run.path / "usage.json", usage)
    return run


def facts_of(config: Config, run: RunDirectory) -> dict[str, Any]:
    names = evaluations(run)
    return collect(config, run, names, read_played(config, run, names))


def table_of(facts: dict[str, Any], title: str) -> Table:
    return next(table for table in tables(facts) if table.title == title)


def test_the_table_has_a_row_per_model_and_kind_of_database(config: Config, whole_run: RunDirectory) -> None:
    rows = tables(facts_of(config, whole_run))[0].rows
    assert [row[0] for row in rows[:3]] == ["base", "  seen databases", "  unseen databases"]
    assert len(rows) == 9
    sft = rows[3]
    assert sft[0] == "after SFT"
    assert re.fullmatch(r"50\.0% \(3\d\.\d% to 6\d\.\d%\)", sft[1])
    assert sft[2:] == ["40", "100.0%", "33.3%", "33.3%", "100.0%", "2.5", "61"]
    assert rows[4][1].startswith("100.0%")
    assert rows[5][1].startswith("0.0%")


def test_a_gain_on_many_questions_is_beyond_noise(config: Config, whole_run: RunDirectory) -> None:
    sentence = verdict(facts_of(config, whole_run))
    assert "GRPO changed execution accuracy by +10.0 points against SFT" in sentence
    assert sentence.endswith("beyond noise.")


@pytest.mark.parametrize("is_correct", [lambda i: i % 2 == 0, lambda i: i % 2 == 0 or i == 1, lambda i: i % 2 == 1])
def test_no_real_change_is_called_noise(config: Config, run: RunDirectory, is_correct: Callable[[int], bool]) -> None:
    evaluated(run, "sft", lambda i: i % 2 == 0)
    evaluated(run, "grpo", is_correct)
    assert verdict(facts_of(config, run)).endswith("within noise.")


def test_accuracy_is_shown_by_difficulty_and_by_form(config: Config, whole_run: RunDirectory) -> None:
    kinds = table_of(facts_of(config, whole_run), "Accuracy by kind of question")
    assert kinds.header == ["questions", "number", "base", "after SFT", "after GRPO"]
    assert [row[:2] for row in kinds.rows] == [
        ["difficulty easy", "20"],
        ["difficulty hard", "20"],
        ["form count", "10"],
        ["form list", "30"],
        ["database shop", "40"],
    ]
    assert [row[3].split(" ")[0] for row in kinds.rows] == ["100.0%", "0.0%", "50.0%", "50.0%", "50.0%"]
    write_report(config, whole_run)
    for name in ("report.md", "report.html"):
        assert "difficulty hard" in (whole_run.report / name).read_text()


def test_endings_are_explained_where_they_are_shown(config: Config, run: RunDirectory) -> None:
    evaluated(run, "base", lambda i: False, StopReason.TURN_LIMIT)
    facts = write_report(config, run)
    assert ["turn_limit: the last allowed turn still asked for a tool", "40"] in table_of(
        facts, "How episodes ended"
    ).rows
    assert "turn_limit: the last allowed turn still asked for a tool" in (run.report / "report.html").read_text()


def test_an_unfinished_run_can_be_reported(config: Config, run: RunDirectory) -> None:
    evaluated(run, "base", lambda i: False)
    facts = write_report(config, run)
    assert [model["name"] for model in facts["models"]] == ["base"]
    assert "not both evaluated yet" in verdict(facts)
    assert "GRPO, step by step" not in (run.report / "report.html").read_text()


def test_a_run_without_evaluation_has_nothing_to_report(config: Config, run: RunDirectory) -> None:
    with pytest.raises(UserError, match="no finished evaluation to report"):
        write_report(config, run)


def test_the_files_name_machine_time_memory_and_provenance(
    config: Config, whole_run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report(config, whole_run)
    text = (whole_run.report / "report.md").read_text()
    for fact in ("seed 0", "commit ", "profile cpu", "30.0 minutes", "peak memory of all processes 11.0 GiB", "cores"):
        assert fact in text
    assert text.count("\n| 2 | 0.500 |") == 1, "a repeated step counts once"
    assert "after GRPO" in capsys.readouterr().out


def test_the_page_is_whole_and_escapes_what_the_model_wrote(config: Config, whole_run: RunDirectory) -> None:
    write_report(config, whole_run)
    html = (whole_run.report / "report.html").read_text()
    assert "<script" not in html
    assert "3 &lt;script&gt;alert(1)" in html
    assert "secret system prompt" not in html
    assert not re.findall(r"""(?:src|href)=(?!"traces\.html["#])|url\(|https?://""", html)
    assert html.count("<svg") == 4, "each figure that the steps have"
    assert html.count('class="scale"') == 3, "the accuracy of each model"
    assert "recovers from an error" in html
    assert "wrong tool order" in html
    checker = _Balance()
    checker.feed(html)
    assert checker.open == []


def test_ways_of_failing_are_counted_and_lead_into_the_traces(config: Config, whole_run: RunDirectory) -> None:
    """All wrong episodes run their query without a look at the schema."""
    table = table_of(facts_of(config, whole_run), "Ways of failing")
    assert [row[:4] for row in table.rows] == [["wrong tool order", "40", "20", "16"]]
    assert table.links == {(0, 0): "traces.html#?way=wrong%20tool%20order"}


def test_the_report_lists_what_grpo_mended_and_broke(config: Config, run: RunDirectory) -> None:
    evaluated(run, "sft", lambda i: i % 2 == 0)
    evaluated(run, "grpo", lambda i: (i % 2 == 0 and i != 6) or i == 5)
    table = table_of(facts_of(config, run), "What GRPO mended and broke")
    assert table.rows == [
        ["mended", "Question 5?", "shop", "wrong tool order"],
        ["broken", "Question 6?", "shop", "wrong tool order"],
    ]
    assert table.links == {(0, 1): "traces.html#grpo/q5", (1, 1): "traces.html#grpo/q6"}
    assert table.notes == ["mended: 1 questions", "broken: 1 questions"]


def test_the_report_says_how_each_model_wrote_its_calls(config: Config, whole_run: RunDirectory) -> None:
    """Half of the SFT model's episodes have a fenced call before the canonical one and the answer."""
    calls = facts_of(config, whole_run)["calls"]
    forms = ["hermes", "fenced", "no call"]
    assert calls["header"] == ["model", "texts", *forms, "calls, stock Hermes grammar", "calls, qwen25_coder"]
    assert calls["rows"][:2] == [
        ["base", "80", "50.0%", "0.0%", "50.0%", "40", "40"],
        ["after SFT", "100", "40.0%", "20.0%", "40.0%", "40", "60"],
    ]
    write_report(config, whole_run)
    for name in ("report.md", "report.html"):
        assert "How calls were written" in (whole_run.report / name).read_text()


def test_the_readme_block_is_replaced_and_nothing_else(config: Config, whole_run: RunDirectory, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# Title\n<!-- results -->\nold\n<!-- /results -->\nrest\n")
    facts = facts_of(config, whole_run)
    for _ in range(2):
        update_readme(readme, facts)
    text = readme.read_text()
    assert text.startswith("# Title\n<!-- results -->\n| model |")
    assert text.endswith("<!-- /results -->\nrest\n")
    assert "old" not in text
    readme.write_text("no markers")
    with pytest.raises(UserError, match="lacks the markers"):
        update_readme(readme, facts)


def test_markdown_tables_are_regular(config: Config, whole_run: RunDirectory) -> None:
    text = "\n\n".join(table.markdown() for table in tables(facts_of(config, whole_run)))
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1


@pytest.mark.parametrize("values", [[], [None], [0.0], [1.0, 1.0], [0.1, -3.0, 1e6]])
def test_charts_stay_inside_their_frame(values: list[float | None]) -> None:
    chart = line_chart([{"step": i, "reward": value} for i, value in enumerate(values, 1)], "reward")
    if not [value for value in values if value is not None]:
        assert chart is None
        return
    places = re.findall(r'cx="([\d.-]+)" cy="([\d.-]+)"', chart or "")
    assert len(places) == len(values)
    assert all(0 <= float(x) <= 300 and 0 <= float(y) <= 110 for x, y in places)


def test_calls_are_shown_readably_even_with_broken_arguments() -> None:
    def message(arguments: str) -> dict[str, object]:
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
        }

    assert readable([message('{"a": "x", "b": 2}')]) == [("assistant", "→ f(x, 2)")]
    assert readable([message('{"a')]) == [("assistant", '→ f({"a)')]


class _Balance(HTMLParser):
    """Which tags are still open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        """Closed at once."""


def test_runs_stand_in_one_table_with_the_gain_of_each(tmp_path: Path) -> None:
    for name, gained in (("seed-1", 30), ("seed-2", 20)):
        one = RunDirectory(tmp_path / name)
        evaluated(one, "sft", lambda i: i < 10)
        evaluated(one, "grpo", lambda i, gained=gained: i < gained)
    sampled = {"samples": 4, "mean@k": {"mean": 0.4, "low": 0.3, "high": 0.5, "n": 40}}
    write_json(tmp_path / "seed-1" / "evaluations" / "grpo" / "samples.json", sampled)
    first, second, third, fourth, last = runs_table([tmp_path / "seed-1", tmp_path / "seed-2"]).rows
    assert (first[:2], first[4:]) == (["seed-1", "sft"], ["", "", ""])
    assert (second[1], second[4:6]) == ("grpo", ["4", "40.0% (30.0% to 50.0%)"])
    assert re.fullmatch(r"\+50\.0 \(\+3\d\.\d to \+6\d\.\d\)", second[6])
    assert (third[:2], fourth[6][:5], last[6]) == (["seed-2", "sft"], "+25.0", "+37.5")


def test_a_folder_without_evaluations_cannot_stand_in_the_table(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no finished evaluation"):
        runs_table([tmp_path])

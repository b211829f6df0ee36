import dataclasses
from pathlib import Path

import pytest

from shared.errors import UserError
from shared.models.tokenizer import Tokenizer
from stage1_sft.synthesize import build, synthesize
from stage1_sft.traces import Trace, flaw
from tests.beside import REAL_DATA, needs_real_data
from tests.shared.examples import insurance_file, tiny_tokenizer
from tests.stage1_sft.examples import JOIN, calls, questions, settings, with_gold


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def _traces(folder: Path, tokenizer: Tokenizer, *overrides: str) -> list[Trace]:
    traces, _, dropped = synthesize(
        questions(folder), limit=100, config=settings(*overrides), tokenizer=tokenizer, label="test"
    )
    assert not dropped
    return traces


PLAIN = ("sft.wrong_turn_share=0", "sft.search_miss_share=0", "sft.parallel_share=0")


def test_a_plain_trace_searches_reads_columns_queries_and_answers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    trace = next(t for t in _traces(tmp_path, tokenizer, *PLAIN) if t["gold_sql"] == JOIN)
    assert [name for name, _ in calls(trace)] == ["search_schema", "get_columns", "get_columns", "execute_sql"]
    roles = [message["role"] for message in trace["messages"]]
    assert roles == ["system", "user"] + ["assistant", "tool"] * 4 + ["assistant"]
    assert trace["trained"] == [role == "assistant" for role in roles]
    assert "Ann O'Hara" in trace["messages"][-2]["content"]
    assert trace["messages"][-1]["content"] == "The answer is Ann O'Hara."


def test_the_same_seed_gives_the_same_traces_and_another_seed_others(tmp_path: Path, tokenizer: Tokenizer) -> None:
    first = _traces(tmp_path, tokenizer)
    (tmp_path / "insurance.sqlite").unlink()
    assert _traces(tmp_path, tokenizer) == first
    (tmp_path / "insurance.sqlite").unlink()
    assert _traces(tmp_path, tokenizer, "seed=1") != first


def test_wrong_queries_are_shown_with_their_real_outcome_but_not_trained(tmp_path: Path, tokenizer: Tokenizer) -> None:
    traces = _traces(tmp_path, tokenizer, "sft.wrong_turn_share=0.999", "sft.search_miss_share=0")
    wrong = [trace for trace in traces if trace["provenance"]["mistake"]]
    assert len(wrong) >= 6  # COUNT(*) FROM claims leaves nothing to get wrong
    for trace in wrong:
        assert calls(trace)[-2:] == [("execute_sql", False), ("execute_sql", True)]
        assert trace["trained"].count(False) == sum(message["role"] != "assistant" for message in trace["messages"]) + 1
    kinds = {trace["provenance"]["mistake"] for trace in wrong}
    assert kinds == {"misspelt_column", "missing_join", "literal_case"}
    misspelt = next(trace for trace in wrong if trace["provenance"]["mistake"] == "misspelt_column")
    outcomes = [message["content"] for message in misspelt["messages"] if message["role"] == "tool"]
    assert "no such column" in outcomes[-2]


def test_a_missed_search_is_not_trained_and_a_better_one_follows(tmp_path: Path, tokenizer: Tokenizer) -> None:
    traces = _traces(tmp_path, tokenizer, "sft.search_miss_share=0.999", "sft.wrong_turn_share=0")
    missed = [trace for trace in traces if trace["provenance"]["search_miss"]]
    assert missed
    for trace in missed:
        assert calls(trace)[:2] == [("search_schema", False), ("search_schema", True)]


def test_a_table_that_the_words_of_the_question_do_not_find_is_searched_by_name(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    question = dataclasses.replace(questions(tmp_path)[0], question="Which customers are in the city?")
    trace = build(question, settings(*PLAIN), tokenizer)
    assert not flaw(trace, question, settings(*PLAIN), tokenizer)
    assert calls(trace) == [
        ("search_schema", False), ("search_schema", True), ("get_columns", True), ("execute_sql", True)
    ]  # fmt: skip
    assert trace["messages"][4]["tool_calls"][0]["function"]["arguments"] == '{"query": "claims"}'


def test_a_column_that_the_limits_cut_off_is_searched(tmp_path: Path, tokenizer: Tokenizer) -> None:
    question = with_gold(questions(tmp_path)[0], "SELECT note FROM claims")
    config = settings(*PLAIN, "agent.observation_tokens=60")
    trace = build(question, config, tokenizer)
    assert not flaw(trace, question, config, tokenizer)
    assert [name for name, _ in calls(trace)] == ["search_schema", "get_columns", "search_schema", "execute_sql"]
    observations = [message["content"] for message in trace["messages"] if message["role"] == "tool"]
    assert "note" not in observations[1]
    assert "note" in observations[2]


def test_tables_are_looked_at_in_more_than_one_order_and_thoughts_vary(tmp_path: Path, tokenizer: Tokenizer) -> None:
    join = next(question for question in questions(tmp_path) if question.gold_sql == JOIN)
    orders, thoughts = set(), set()
    for i in range(40):
        trace = build(dataclasses.replace(join, id=f"q{i}"), settings(*PLAIN), tokenizer)
        turns = [message for message in trace["messages"] if message.get("tool_calls")]
        orders.add(tuple(turn["tool_calls"][0]["function"]["arguments"] for turn in turns[1:3]))
        thoughts |= {turn["content"] for turn in turns}
    assert len(orders) == 2
    assert len(thoughts) > 5


def test_several_tables_can_be_read_in_one_turn(tmp_path: Path, tokenizer: Tokenizer) -> None:
    traces = _traces(tmp_path, tokenizer, *PLAIN[:2], "sft.parallel_share=0.999")
    trace = next(t for t in traces if t["gold_sql"] == JOIN)
    turn = next(message for message in trace["messages"] if len(message.get("tool_calls", ())) == 2)
    ids = [call["id"] for call in turn["tool_calls"]]
    answers = [message["tool_call_id"] for message in trace["messages"] if message["role"] == "tool"]
    assert answers[1:3] == ids


def test_a_few_turns_leave_out_the_optional_parts(tmp_path: Path, tokenizer: Tokenizer) -> None:
    shares = ("sft.wrong_turn_share=0.999", "sft.search_miss_share=0.999", "agent.max_turns=4")
    for trace in _traces(tmp_path, tokenizer, *shares):
        assert sum(message["role"] == "assistant" for message in trace["messages"]) <= 4


def test_a_trace_that_no_longer_reproduces_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    question = questions(tmp_path)[0]
    trace = build(question, settings(*PLAIN), tokenizer)
    (tmp_path / "insurance.sqlite").unlink()
    insurance_file(tmp_path, "INSERT INTO claims VALUES (4, 1, 5.0, '2024-03-01', NULL);")
    assert flaw(trace, question, settings(*PLAIN), tokenizer) == "observation does not reproduce"


def test_a_trace_whose_last_query_misses_the_gold_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    question = questions(tmp_path)[0]
    trace = build(question, settings(*PLAIN), tokenizer)
    other = with_gold(question, "SELECT COUNT(*) + 1 FROM claims")
    assert flaw(trace, other, settings(*PLAIN), tokenizer) == "last query misses the gold"


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("SELECT nothing FROM claims", "gold fails"),
        ("SELECT FROM", "unreadable SQL"),
        ("SELECT 1", "gold reads no table"),
    ],
)
def test_a_gold_that_cannot_be_taught_is_counted(tmp_path: Path, tokenizer: Tokenizer, sql: str, reason: str) -> None:
    broken = with_gold(questions(tmp_path)[0], sql)
    traces, _, dropped = synthesize([broken], limit=5, config=settings(), tokenizer=tokenizer, label="test")
    assert not traces
    assert dropped == {reason: [broken.id]}


def test_a_turn_that_the_agent_could_not_write_is_dropped(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config, question = settings(*PLAIN, "agent.max_turn_tokens=60"), questions(tmp_path)[3]
    kept, too_long, dropped = synthesize([question], limit=1, config=config, tokenizer=tokenizer, label="test")
    assert (kept, dropped) == ([], {"a turn longer than agent.max_turn_tokens": [question.id]})
    assert [trace["id"] for trace in too_long] == [question.id]


def test_a_missing_database_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    question = questions(tmp_path)[0]
    (tmp_path / "insurance.sqlite").unlink()
    with pytest.raises(UserError, match=r"insurance\.sqlite"):
        build(question, settings(), tokenizer)


@needs_real_data
def test_spider_golds_become_traces(tokenizer: Tokenizer) -> None:
    from data.questions import load

    rows = load(REAL_DATA / "spider_sample", settings().sandbox, skip_bad_rows=True).questions[:60]
    traces, _, dropped = synthesize(rows, limit=60, config=settings(), tokenizer=tokenizer, label="spider")
    assert len(traces) >= 58, dropped

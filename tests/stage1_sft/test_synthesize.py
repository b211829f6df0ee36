import dataclasses
from pathlib import Path

import pytest

from shared.errors import UserError
from shared.models.tokenizer import Tokenizer
from shared.records import ToolCall
from stage1_sft.synthesize import build, synthesize
from stage1_sft.traces import Trace, calls_of, flaw
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


def test_an_own_tool_is_called_first_where_it_has_an_answer_to_words_of_the_question(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    traces = _traces(tmp_path, tokenizer, *PLAIN, "agent.tools=shared.agent.glossary:lookup_term")
    asked = {trace["messages"][1]["content"]: calls_of(trace["messages"][2])[0] for trace in traces}
    assert asked["How many policies have kind 'car'?"] == ToolCall("lookup_term", {"term": "How many"})
    assert asked["Which claims have an amount above 1000?"].name == "search_schema"
    assert all('"lookup_term"' in trace["tools"] for trace in traces)
    assert (
        "count(*), or" in next(t for t in traces if "How many" in t["messages"][1]["content"])["messages"][3]["content"]
    )


def test_the_same_seed_gives_the_same_traces_and_another_seed_others(tmp_path: Path, tokenizer: Tokenizer) -> None:
    first = _traces(tmp_path, tokenizer)
    (tmp_path / "insurance.sqlite").unlink()
    assert _traces(tmp_path, tokenizer) == first
    (tmp_path / "insurance.sqlite").unlink()
    assert _traces(tmp_path, tokenizer, "seed=1") != first


def queries(trace: Trace) -> list[tuple[str, bool, str]]:
    """Text, trained, and answer of each query of a trace."""
    found = []
    for turn, trained, answer in zip(trace["messages"], trace["trained"], trace["messages"][1:], strict=False):
        found += [
            (call.arguments["sql"], trained, answer["content"]) for call in calls_of(turn) if "sql" in call.arguments
        ]
    return found


def with_mistakes(folder: Path, tokenizer: Tokenizer) -> list[Trace]:
    """Traces of the questions under many seeds, all with a mistake where the gold leaves something to get wrong."""
    rows, shares = questions(folder), ("sft.wrong_turn_share=0.999", "sft.search_miss_share=0", "sft.parallel_share=0")
    rows.append(with_gold(dataclasses.replace(rows[0], id="q9"), "SELECT full_name FROM customers WHERE city = 'Bern'"))
    made = [build(row, settings(f"seed={seed}", *shares), tokenizer) for row in rows for seed in range(12)]
    wrong = [trace for trace in made if trace["provenance"]["mistake"]]
    by_id = {row.id: row for row in rows}
    assert not any(flaw(trace, by_id[trace["id"]], settings(*shares), tokenizer) for trace in wrong)
    assert len(wrong) > 0.9 * len(made)
    return wrong


def test_wrong_queries_of_every_kind_are_shown_with_their_real_outcome_but_not_trained(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    wrong = with_mistakes(tmp_path, tokenizer)
    kinds = {trace["provenance"]["mistake"] for trace in wrong}
    assert kinds == {"misspelt_column", "misspelt_table", "missing_table", "literal_case", "wrong_column"}
    for trace in wrong:
        tried = queries(trace)
        assert [trained for _, trained, _ in tried].count(False) in (1, 2)
        assert (trace["gold_sql"], True) in [(sql, trained) for sql, trained, _ in tried]
        for sql, trained, answer in tried:
            if trace["provenance"]["mistake"].startswith("misspelt"):
                assert trained != answer.startswith(("Error: no such ", "Error: You made this call before"))
            assert trained or sql != trace["gold_sql"]


def test_a_repeated_wrong_query_is_left_by_another_one(tmp_path: Path, tokenizer: Tokenizer) -> None:
    repeated = [t for t in with_mistakes(tmp_path, tokenizer) if t["provenance"]["way_out"] == "repeat"]
    assert repeated
    for trace in repeated:
        first, second, right = queries(trace)
        assert first[0] == second[0] != right[0] == trace["gold_sql"]
        assert [first[1], second[1], right[1]] == [False, False, True]


def test_after_a_column_of_an_unread_table_that_table_is_read(tmp_path: Path, tokenizer: Tokenizer) -> None:
    missing = [t for t in with_mistakes(tmp_path, tokenizer) if t["provenance"]["mistake"] == "missing_table"]
    assert missing
    for trace in missing:
        names = [name for name, _ in calls(trace)]
        last_wrong = max(i for i, call in enumerate(calls(trace)) if call == ("execute_sql", False))
        assert names[last_wrong - 1 : last_wrong] != ["search_schema"]
        assert calls(trace)[last_wrong + 1 :] == [("get_columns", True), ("execute_sql", True)]
        assert calls(trace)[1] == ("get_columns", False)  # one table alone is part of the mistake


def test_after_a_query_that_finds_nothing_the_values_are_looked_at(tmp_path: Path, tokenizer: Tokenizer) -> None:
    looks = [t for t in with_mistakes(tmp_path, tokenizer) if t["provenance"]["way_out"] == "look"]
    assert looks
    for trace in looks:
        wrong, look, right = queries(trace)
        assert (wrong[1], look[1], right[1]) == (False, True, True)
        assert look[0].startswith("SELECT DISTINCT ")


def test_giving_up_goes_back_to_the_best_query_so_far(tmp_path: Path, tokenizer: Tokenizer) -> None:
    given_up = [t for t in with_mistakes(tmp_path, tokenizer) if t["provenance"]["way_out"] == "give_up"]
    blocks = [trace["messages"][-1]["content"].partition("\n```sql\n")[2] for trace in given_up]
    assert "" in blocks  # where the later query failed, the last one that ran is the best
    assert {*blocks} - {""}
    for trace, block in zip(given_up, blocks, strict=True):
        best, *later = queries(trace)
        assert best[0] == trace["gold_sql"]
        assert not any(trained for _, trained, _ in later)
        assert block in ("", f"{trace['gold_sql']}\n```")
        assert bool(block) == any(not answer.startswith("Error") for _, _, answer in later)


def test_a_question_in_german_is_answered_in_german_without_english_thoughts(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    asked = dataclasses.replace(questions(tmp_path)[0], question="Wie viele Schadensfälle gibt es?")
    for i in range(20):
        trace = build(dataclasses.replace(asked, id=f"q{i}"), settings(*PLAIN), tokenizer)
        assert trace["messages"][-1]["content"] == "Die Antwort ist 3."
        assert {turn["content"] for turn in trace["messages"] if turn.get("tool_calls")} == {""}


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


def test_trained_turns_hold_nothing_that_the_seed_decides(tmp_path: Path, tokenizer: Tokenizer) -> None:
    join = next(question for question in questions(tmp_path) if question.gold_sql == JOIN)
    made = [build(dataclasses.replace(join, id=f"q{i}"), settings(*PLAIN), tokenizer) for i in range(20)]
    assert all(trace["messages"] == made[0]["messages"] for trace in made)
    search, *looks = [message["content"] for message in made[0]["messages"] if message["role"] == "tool"][:3]
    tables = [look.partition(":")[0] for look in looks]
    assert tables == sorted(tables, key=search.index)


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

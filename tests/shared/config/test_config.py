"""Settings: one home each, typed, and every mistake named with its nearest valid key."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from annotated_types import Ge, Gt

from shared.config.__main__ import REFERENCE, reference, with_comments
from shared.config.device import PROFILES
from shared.config.load import load_config
from shared.config.schema import Config
from shared.errors import UserError

REPO = Path(__file__).resolve().parents[3]
PIPELINE = REPO / "pipeline.yaml"


def changed(tmp_path: Path, change: str) -> Path:
    """A copy of pipeline.yaml with `change` (YAML) merged into its top level."""
    document = yaml.safe_load(PIPELINE.read_text())
    for key, value in yaml.safe_load(change).items():
        document[key] = {**document[key], **value} if isinstance(value, dict) else value
    file = tmp_path / "pipeline.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("file", list(REPO.glob("[a-z]*.yaml")), ids=lambda file: file.name)
def test_every_shipped_file_loads_for_every_profile(file: Path, profile: str) -> None:
    assert load_config(file, profile).profile == profile


def test_the_gpu_profile_is_the_reference_configuration() -> None:
    config = load_config(PIPELINE, "gpu")
    assert config.model == "Qwen/Qwen2.5-Coder-1.5B-Instruct"
    assert (config.grpo.train_batch_size, config.grpo.rollouts_per_question) == (8, 8)
    assert (config.grpo.lora_rank, config.grpo.lora_alpha) == (16, 32)
    assert (config.grpo.clip_low, config.grpo.clip_high) == (0.2, 0.28)
    assert config.grpo.learning_rate == pytest.approx(1e-5)
    assert config.vllm.tool_call_parser == "qwen25_coder"


def test_profile_evening_is_profile_cpu_with_what_it_changes() -> None:
    cpu, evening = load_config(PIPELINE, "cpu"), load_config(PIPELINE, "evening")
    assert evening.device == "cpu"
    assert (evening.model, evening.agent, evening.sft, evening.vllm) == (cpu.model, cpu.agent, cpu.sft, cpu.vllm)
    assert evening.grpo.total_steps == 40
    assert evening.grpo.param_offload is cpu.grpo.param_offload is False


def test_the_cpu_profile_changes_only_what_it_names() -> None:
    cpu, gpu = load_config(PIPELINE, "cpu"), load_config(PIPELINE, "gpu")
    assert cpu.model == "smollm2-135m"
    assert cpu.agent.max_turns < gpu.agent.max_turns
    assert cpu.sandbox == gpu.sandbox


def test_an_override_wins_over_the_profile_and_is_typed() -> None:
    config = load_config(
        PIPELINE, "cpu", ["sft.epochs=3", "sft.learning_rate=1e-4", "model=2026-02-30", "grpo.total_steps=null"]
    )
    assert config.sft.epochs == 3
    assert config.sft.learning_rate == pytest.approx(1e-4)
    assert config.model == "2026-02-30"  # a folder may have such a name, which YAML takes for a wrong date
    assert config.grpo.total_steps is None


def test_a_text_setting_takes_text_that_looks_like_a_number() -> None:
    assert load_config(PIPELINE, "cpu", ["model=7"]).model == "7"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sft.epoch=3", r"--set sft\.epoch: there is no such setting; did you mean sft\.epochs\?"),
        ("epochs=3", r"did you mean (sft|grpo)\.epochs\?"),
        ("sft.epochs", "has no '='; write --set section.key=value"),
        ("sft.epochs=many", "Setting sft.epochs is 'many', which is not of type int"),
        ("sft.epochs=2.5", "Setting sft.epochs is 2.5, which is not of type int"),
        ("vllm.enforce_eager=1", "not of type bool"),
        ("data.bad_rows=ignore", "Setting data.bad_rows is 'ignore'; choose one of fail, skip"),
        ("sft.epochs=0", "must be above 0"),
        ("data.test_share=1.5", "must lie between 0 and 1"),
        ("grpo.rollouts_per_question=1", "must be at least 2"),
        ("grpo.mini_batch_size=64", "so every step would be skipped"),
        ("vllm.max_model_len=4096", "it follows from agent.context_tokens; set that"),
        ("grpo.reward_executed=0.5", "must stay below half a correct answer"),
        ("grpo.test_every=3", r"test_every \(3\) must be a multiple of grpo\.save_every \(2\)"),
        ("grpo.nodes=2", "start a Ray cluster and give its address as grpo.ray_address"),
        ("vllm.tensor_parallel=2", r"must divide all GPUs \(grpo.nodes x grpo.gpus_per_node = 1\)"),
        ("grpo.job_template=job.yaml", "needs grpo.gateway_url"),
        ("sandbox.timeout_seconds=1e10", "may be at most 1,000,000"),
        ("data.copies=1000000", "data.copies is 1000000; it may be at most 100"),
        ("sft.epochs=1000000", "may be at most 1,000"),
        ("runs_dir=", "runs_dir is empty; it needs a value"),
        ("runs_dir=null", "runs_dir is empty"),
        ("model=", "model is empty"),
        ("vllm.tool_call_parser=qwen", "is 'qwen'; choose one of qwen25_coder, hermes"),
        ("teacher.endpoint=foo", "teacher.endpoint is 'foo'; write an address like http://"),
        ("grpo.gateway_url=foo", "grpo.gateway_url is 'foo'; write an address like http://"),
        ("grpo.ray_address=auto", "write host:port of the cluster's head node"),
        ("grpo.ray_address=:6379", "write host:port"),
        ("grpo.agent=my_agent", "write module:function"),
        ("sft=3", "--set sft: there is no such setting"),
        ("zzzzzzzz=3", r"there is no such setting\.$"),
    ],
)
def test_a_wrong_override_is_named(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(PIPELINE, "cpu", [override])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("sft: {epoch: 3}", r"sft\.epoch.*did you mean sft\.epochs"),
        ("sft: {max_length: 3}", "sft.max_length follows from agent.context_tokens; remove it"),
        ("modell: x", r"modell.*did you mean model"),
        ("profiles: {gpu: {like: laptop}}", "Profile gpu is like 'laptop', which is no profile; choose one of gpu, "),
        ("profiles: {gpu: {like: [cpu]}}", r"Profile gpu is like \['cpu'\], which is no profile"),
        ("profiles: 5", "Under `profiles` .* must hold gpu, gpu24, cpu, evening"),
        ("sft: 3", "Setting sft must be a section with keys, not 3"),
    ],
)
def test_a_wrong_key_in_the_file_is_named(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(changed(tmp_path, change), "gpu")


def test_a_missing_key_points_to_the_shipped_file(tmp_path: Path) -> None:
    document = yaml.safe_load(PIPELINE.read_text())
    del document["sft"]["epochs"]
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(UserError, match=r"lacks sft\.epochs"):
        load_config(tmp_path / "p.yaml", "gpu")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not valid YAML"),
        ("- a", "mapping of settings"),
        ("a: 2026-02-30", "not valid YAML: day is out of range"),
        ("a: !!bool x", "not valid YAML"),
        ("a: &a [{<<: {b: 1, b: 2}}, *a]", "'b' of line 1 appears again"),
        (
            "sft:\n  epochs: 1\n  lora_rank: 8\n  epochs: 2\n",
            r"p\.yaml .* 'epochs' of line 2 appears again .* line 4",
        ),
        ("sft: {}\ngrpo: {}\nsft: {}\n", "'sft' of line 1 appears again .* line 3"),
    ],
)
def test_a_file_that_is_no_settings_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        load_config(tmp_path / "p.yaml", "cpu")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.yaml cannot be read .*give its path with --config"):
        load_config(tmp_path / "gone.yaml")


def test_every_setting_has_a_comment_or_speaks_for_itself() -> None:
    """Each key of the config stands in pipeline.yaml exactly once at the top level: one home per setting."""
    document = yaml.safe_load(PIPELINE.read_text())
    document.pop("profiles")
    leaves = {f"{k}.{leaf}" for k, v in document.items() if isinstance(v, dict) for leaf in v}
    leaves |= {key for key, value in document.items() if not isinstance(value, dict)}
    assert leaves == {name for name, _ in Config.settings()} - {"profile"}


def test_every_number_has_a_lower_bound() -> None:
    numbers = {name: field for name, field in Config.settings() if field.annotation in (int, float, int | None)}
    assert len(numbers) > 50
    assert not [name for name, field in numbers.items() if not any(isinstance(m, Gt | Ge) for m in field.metadata)]


def test_comments_and_reference_say_what_the_models_say() -> None:
    """Otherwise run `python -m shared.config`."""
    assert not [name for name, field in Config.settings() if not field.description]
    assert PIPELINE.read_text() == with_comments(PIPELINE.read_text())
    assert REFERENCE.read_text() == reference()


def test_a_fingerprint_holds_what_shapes_the_result_of_a_stage_and_nothing_operational() -> None:
    config = load_config(PIPELINE, "cpu")
    shaped = config.part_of("evaluation")
    assert set(shaped) == {"seed", "sandbox", "agent", "grpo", "vllm", "evaluate"}
    assert set(shaped["grpo"]) == {"reward_valid_call", "reward_executed", "reward_right_tables", "reward_right_result"}
    assert set(shaped["evaluate"]) == {"samples", "temperature", "bootstrap_samples"}
    assert shaped["agent"] == config.agent.model_dump()
    assert "concurrency" not in config.part_of("grpo")["grpo"]
    assert config.part_of("data") == {
        "seed": config.seed, "data": config.data.model_dump(), "sandbox": config.sandbox.model_dump()
    }  # fmt: skip
    assert set(config.part_of("teacher")["teacher"]) == {"endpoint", "model", "temperature"}


def test_the_config_survives_a_file_of_plain_values() -> None:
    config = load_config(PIPELINE, "cpu")
    assert Config.model_validate(json.loads(json.dumps(config.model_dump()))) == config


def test_settings_and_records_load_without_torch() -> None:
    modules = (
        "shared.config.load, shared.cli.command_line, shared.runs.manifest, shared.evaluation.__main__, "
        "shared.report.__main__, shared.processes.owned_process, shared.runs.usage"
    )
    code = f"import sys, {modules}; print([m for m in ('torch', 'transformers', 'vllm', 'ray') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, env={**os.environ})
    assert run.stdout.strip() == "[]", run.stderr

"""Doctor: a healthy case passes every check, and each check finds the fault that is planted for it."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from shared.errors import UserError
from shared.models.folder import TEMPLATE_FILE
from shared.processes.owned_process import free_port
from shared.records import write_jsonl
from shared.runs.manifest import finish_stage, write_json
from stage2_grpo.preflight.doctor import arithmetic, checkpoint, command, machine, packages
from stage2_grpo.preflight.doctor.findings import Case, Finding, Severity, as_lines, ok, timed
from stage2_grpo.preflight.doctor.machine import Gpu
from tests.stage2_grpo.checkpoints import checkpoint_folder
from tests.stage2_grpo.checkpoints.checkpoint_folder import healthy_case
from tests.stage2_grpo.gateway import Gateway

OK, WARNING, ERROR = Severity.OK, Severity.WARNING, Severity.ERROR
CARD = Gpu("NVIDIA A100", 80.0, 580)
GB = 10**9
CONFIG = ["--config", str(checkpoint_folder.ROOT / "pipeline.yaml"), "--profile", "cpu"]


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return healthy_case(tmp_path)


def installed(**changes: str | None) -> Callable[[str], str | None]:
    """The pinned versions of the CPU profile with changes; `_` in a name stands for `-`."""
    file = (checkpoint_folder.ROOT / "requirements" / "cpu.txt").read_text()
    versions = dict(line.split(" ")[0].split("==") for line in file.splitlines() if "==" in line)
    versions |= {name.replace("_", "-"): version for name, version in changes.items()}
    return lambda name: versions.get(name)


def with_settings(case: Case, *overrides: str, profile: str = "cpu") -> Case:
    folder = case.run.path.parents[1] / "other"
    folder.mkdir()
    return healthy_case(folder, *overrides, profile=profile)


def without_weights_tail(case: Case) -> Case:
    assert case.model
    file = case.model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return case


def same_as_base(case: Case) -> Case:
    base = checkpoint_folder.checkpoint(case.run.path / "base")
    finish_stage(case.run.sft, "x", seconds=1, outputs={"model": str(case.model)}, base_model=str(base))
    return case


def with_template(case: Case, change: Callable[[str], str]) -> Case:
    assert case.model
    file = case.model / TEMPLATE_FILE
    file.write_text(change(file.read_text()))
    return case


def with_model(case: Case, name: str, **options: str) -> Case:
    return dataclasses.replace(case, model=checkpoint_folder.checkpoint(case.run.path / name, **options))  # type: ignore[arg-type]


def an_adapter(case: Case) -> Case:
    folder = case.run.path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return dataclasses.replace(case, model=folder)


def with_gold(case: Case, sql: str) -> Case:
    first, *others = case.train
    return dataclasses.replace(case, train=(dataclasses.replace(first, gold_sql=sql), *others))


FAULTS: dict[str, tuple[Callable[[Case], Iterable[Finding]], str, Severity, str]] = {
    "an older Python": (lambda case: packages.check_python(case, (3, 11)), "python", ERROR, "3.11"),
    "another VERL": (
        lambda case: packages.check_packages(case, installed(verl="0.9.1")), "packages", ERROR, "verl 0.9.1;.*pins 0.8.0"),
    "no Agent Lightning": (
        lambda case: packages.check_packages(case, installed(agentlightning=None)), "packages", ERROR, "agentlightning is missing"),
    "numpy 1": (
        lambda case: packages.check_packages(case, installed(numpy="1.26.4")), "packages", ERROR, "numpy 1.26.4"),
    "another dependency": (
        lambda case: packages.check_packages(case, installed(aiohttp="3.9.0")), "packages", WARNING, "aiohttp 3.9.0"),
    "both builds of vLLM": (
        lambda case: packages.check_packages(case, installed(vllm="0.20.2")), "packages", ERROR, "vllm 0.20.2 is installed beside"),
    "plugins shut out": (
        lambda case: packages.check_plugins(case, {"VLLM_PLUGINS": "other"}), "plugins", ERROR, "qwen25_coder"),
    "no GPU": (
        lambda case: machine.check_gpu(with_settings(case, profile="gpu"), []), "gpu", ERROR, "0 NVIDIA GPUs"),
    "an old driver": (
        lambda case: machine.check_gpu(with_settings(case, profile="gpu"), [dataclasses.replace(CARD, driver=535)]),
        "gpu", ERROR, "535 is too old"),
    "a small GPU": (
        lambda case: machine.check_gpu(with_settings(case, profile="gpu"), [dataclasses.replace(CARD, gib=2.0)]),
        "gpu", ERROR, "holds no episode"),
    "a small disk": (lambda case: machine.check_disk(case, 1000), "disk", ERROR, "2 checkpoints"),
    "little memory": (lambda case: machine.check_memory(case, GB), "memory", WARNING, "0.9 GiB"),
    "an adapter": (lambda case: checkpoint.check_merged(an_adapter(case)), "checkpoint", ERROR, "LoRA adapter"),
    "an adapter inside the weights": (
        lambda case: checkpoint.check_merged(with_model(case, "wrapped", prefix="base_model.model.")),
        "checkpoint", ERROR, "still hold an adapter"),
    "half a weight file": (
        lambda case: checkpoint.check_merged(without_weights_tail(case)), "checkpoint", ERROR, "is damaged"),
    "a merge that changed nothing": (
        lambda case: checkpoint.check_merged(same_as_base(case)), "checkpoint", ERROR, "the weights of its base model"),
    "a template without tools": (
        lambda case: checkpoint.check_template(with_template(case, lambda text: text.replace("if tools", "if false"))),
        "template", ERROR, "does not hold 'search_schema'"),
    "calls in another form": (
        lambda case: checkpoint.check_template(with_template(case, lambda text: text.replace("<tool_call>", "<call>"))),
        "template", ERROR, "does not write a call"),
    "prompts that do not grow": (
        lambda case: checkpoint.check_template(with_template(case, lambda text: "{{- messages | length }}" + text)),
        "template", WARNING, "later turn"),
    "turns without an end": (
        lambda case: checkpoint.check_template(
            with_template(case, lambda text: text.replace("<|im_end|>\\n' }}\n    {%- elif message.role == 'tool'", "\\n' }}\n    {%- elif message.role == 'tool'"))),
        "template", WARNING, "does not end a turn"),
    "a broken template": (
        lambda case: checkpoint.check_template(with_template(case, lambda text: text + "{% if %}")),
        "template", ERROR, "cannot be compiled"),
    "no template": (
        lambda case: checkpoint.check_template(with_template(case, lambda text: "")), "template", ERROR, "no chat template"),
    "a name that Hydra changes": (
        lambda case: arithmetic.check_names(with_model(case, "it's")), "names", ERROR, "holds \"'\""),
    "a small weight bucket": (
        lambda case: arithmetic.check_names(with_model(with_settings(case, "grpo.weight_bucket_mb=1"), "wide", width=2048)),
        "names", ERROR, "largest tensor"),
    "a floor that skips steps": (
        lambda case: arithmetic.check_batches(with_settings(case, "grpo.mini_batch_size=2")), "batches", ERROR, "skips the whole step"),
    "a floor that drops rows": (
        lambda case: arithmetic.check_batches(
            with_settings(case, "grpo.train_batch_size=5", "grpo.mini_batch_size=2")), "batches", WARNING, "4 of 20 episodes"),
    "GPUs that do not divide a batch": (
        lambda case: arithmetic.check_batches(with_settings(case, "grpo.gpus_per_node=3", "grpo.micro_batch_size=1")),
        "batches", ERROR, "do not divide"),
    "too few questions": (
        lambda case: arithmetic.check_batches(dataclasses.replace(case, train=case.train[:2])), "batches", ERROR, "do not fill"),
    "no checkpoint on the way": (
        lambda case: arithmetic.check_batches(with_settings(case, "grpo.save_every=9")), "batches", WARNING, "save_every"),
    "prompts too long": (
        lambda case: arithmetic.check_context(with_settings(case, "grpo.max_prompt_length=64")), "context", ERROR, "12 of 12"),
    "a context for no turn": (
        lambda case: arithmetic.check_context(
            with_settings(case, "agent.max_turn_tokens=4000")), "context", WARNING, "max_turn_tokens"),
    "rows that lose their end": (
        lambda case: arithmetic.check_context(
            with_settings(case, "grpo.trajectory_response_length=100")), "context", WARNING, "trajectory_response_length is 100"),
    "more context than the model has": (
        lambda case: arithmetic.check_context(with_settings(case, "vllm.max_model_len=9000")), "context", ERROR, "built for 8192"),
    "a gold by chance": (
        lambda case: arithmetic.check_rewards(with_gold(case, "SELECT random() FROM claims")), "rewards", ERROR, "time or chance"),
    "a failing gold": (
        lambda case: arithmetic.check_rewards(with_gold(case, "SELECT nothing FROM nowhere")), "rewards", ERROR, "cannot be run"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, case: Case) -> None:
    check, name, severity, says = FAULTS[fault]
    (finding,) = [finding for finding in check(case) if finding.severity > OK]
    assert (finding.check, finding.severity) == (name, severity)
    assert re.search(says, finding.what), finding.what
    assert finding.why
    assert finding.fix


def test_a_healthy_case_passes_every_check(case: Case) -> None:
    findings = [*command.examine(case, (*command.QUICK, arithmetic.check_rewards))]
    here = ("packages", "memory", "disk")  # of the machine that runs the test
    assert [f.what for f in findings if f.severity > OK and f.check not in here] == []
    assert len({finding.check for finding in findings}) == len(command.QUICK) + 1


def test_a_finding_says_how_long_it_took() -> None:
    def found() -> Iterator[Finding]:
        time.sleep(0.2)
        yield ok("slow", "well")
        yield ok("quick", "well")

    slow, quick = timed(found())
    assert slow.seconds >= 0.2 > quick.seconds
    assert [*as_lines(dataclasses.replace(slow, seconds=61.4))] == ["ok       slow         well [61 s]"]
    assert [*as_lines(quick)] == ["ok       quick        well"]


def test_damaged_weights_are_reported_once(case: Case) -> None:
    findings = command.examine(without_weights_tail(case), command.QUICK)
    assert [finding.check for finding in findings if "is damaged" in finding.what] == ["checkpoint"]


def test_a_gateway_left_behind_is_found(case: Case, gateway: Gateway) -> None:
    case.run.grpo.mkdir(parents=True)
    write_json(case.run.grpo / "agents.json", {"gateway_url": f"http://127.0.0.1:{free_port()}"})
    assert [finding.severity for finding in machine.check_endpoints(case)] == [OK]
    write_json(case.run.grpo / "agents.json", {"gateway_url": gateway.url})
    (finding,) = machine.check_endpoints(case)
    assert (finding.check, finding.severity) == ("endpoints", ERROR)
    assert gateway.url in finding.what


def test_a_proxy_before_the_loopback_address_is_found(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "example.org")
    (finding,) = machine.check_endpoints(case)
    assert "proxy.example:3128" in finding.what
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    assert [finding.severity for finding in machine.check_endpoints(case)] == [OK]


def test_cards_are_read_from_the_drivers_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    text = "NVIDIA H200, 143771, 580.65.06\nNVIDIA H200, 143771, 580.65.06\n"
    assert [(gpu.name, round(gpu.gib), gpu.driver) for gpu in machine.parse_gpus(text)] == [
        ("NVIDIA H200", 140, 580)
    ] * 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert len(machine.parse_gpus(text)) == 1


def options(case: Case) -> list[str]:
    """The command line that names the files of a healthy case."""
    write_jsonl(_made(case.run.data) / "train.jsonl", case.train)
    write_jsonl(case.run.data / "val.jsonl", case.validation)
    changes = [*checkpoint_folder.ROOM, f"runs_dir={case.run.path.parent}", f"grpo.model={case.model}"]
    return [*CONFIG, *(part for change in changes for part in ("--set", change))]


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_the_worst_finding_decides_the_exit_code(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    line = options(case)
    codes = [
        command.main(["--quick", "--json", *line, "--set", change])
        for change in ("grpo.epochs=1", "grpo.save_every=9", "grpo.mini_batch_size=3")
    ]
    reports = [json.loads(text + "}") for text in capsys.readouterr().out.split("\n}\n") if text.strip()]
    found = [{row["check"]: row["severity"] for row in report["findings"]} for report in reports]
    assert [checks["batches"] for checks in found] == ["ok", "warning", "error"]
    expected = {"ok": 0, "warning": 3, "error": 2}
    assert codes == [expected[report["worst"]] for report in reports]
    assert codes[2] == 2


def test_what_is_missing_is_a_finding_and_the_rest_is_examined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SFT_MODEL_PATH", raising=False)
    line = [*CONFIG, "--set", f"runs_dir={tmp_path}", "--set", "grpo.agent=tests.no_agent:play"]
    assert command.main(["--quick", *line]) == 2
    printed = capsys.readouterr().out
    assert "error    checkpoint" in printed
    assert "error    questions" in printed
    assert "error    agent" in printed
    assert "python -m data" in printed
    assert "Python 3.12" in printed


def test_a_run_is_stopped_by_an_error_and_not_by_a_warning(case: Case, tmp_path: Path) -> None:
    options(case)
    assert case.model
    warned = with_settings(case, "grpo.save_every=9")
    command.before_run(warned.config, case.run, case.model, case.train)
    grpo = warned.config.grpo.model_copy(update={"mini_batch_size": 3})
    wrong = warned.config.model_copy(update={"grpo": grpo})
    with pytest.raises(UserError, match=r"skips the whole step.*Why it matters.*To mend it: set grpo\.mini_batch_size"):
        command.before_run(wrong, case.run, case.model, case.train)


def test_the_quick_checks_and_the_trainers_settings_start_neither_torch_nor_vllm() -> None:
    code = """
import sys, stage2_grpo.preflight.doctor.command
from tests.stage2_grpo.training.test_verl_config import composed
composed("gpu")
print([m for m in ("torch", "vllm", "verl", "ray") if m in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

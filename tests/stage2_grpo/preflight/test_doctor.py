"""Doctor: a healthy case passes every check, and each check finds the fault that is planted for it."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.cli import machine
from shared.cli.machine import Machine
from shared.config.device import Gpu
from shared.config.load import load_config
from shared.errors import UserError
from shared.models.folder import TEMPLATE_FILE
from shared.records import write_jsonl
from shared.runs.manifest import finish_stage, read_object, write_json
from stage2_grpo.preflight import checks, doctor
from stage2_grpo.preflight.checks import Case, Finding, found
from tests.stage2_grpo.checkpoints import checkpoint_folder
from tests.stage2_grpo.checkpoints.checkpoint_folder import healthy_case

CARD = Gpu("NVIDIA A100", 80.0, 79.0, 580, 8.0)
_NEXT_IS_TOOL = "\\n' }}\n    {%- elif message.role == 'tool'"  # in the template, after the end of a turn
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


def with_eos(case: Case, file: str, ids: object) -> Case:
    settings = read_object(case.folder / file)
    write_json(case.folder / file, {**settings, "eos_token_id": ids})
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


def on_gpu(case: Case, gib: float, *overrides: str) -> Case:
    """A case of the GPU profile on a machine with one card."""
    here: Machine = dataclasses.replace(case.machine, gpus=(dataclasses.replace(CARD, gib=gib),))
    return dataclasses.replace(with_settings(case, *overrides, profile="gpu"), machine=here)


FAULTS: dict[str, tuple[Callable[[Case], object], str, str]] = {
    "another VERL": (
        lambda case: checks.check_packages(case, installed(verl="0.9.1")), "error", "verl 0.9.1,.*pins 0.8.0"),
    "no Agent Lightning": (
        lambda case: checks.check_packages(case, installed(agentlightning=None)), "error", "agentlightning is missing"),
    "numpy 1": (lambda case: checks.check_packages(case, installed(numpy="1.26.4")), "error", "numpy 1.26.4"),
    "another dependency": (
        lambda case: checks.check_packages(case, installed(aiohttp="3.9.0")), "warning", "aiohttp 3.9.0"),
    "both builds of vLLM": (
        lambda case: checks.check_packages(case, installed(vllm="0.20.2")), "error", "vllm 0.20.2 is installed beside"),
    "plugins shut out": (
        lambda case: checks.check_plugins(case, {"VLLM_PLUGINS": "other"}), "error", "qwen25_coder"),
    "plugins of an older version": (
        lambda case: checks.check_plugins(dataclasses.replace(case, root=case.run.path)), "error", "not registered"),
    "a GPU for no episode": (lambda case: checks.check_gpu_memory(on_gpu(case, 2.0)), "error", "holds no episode"),
    "a GPU for no training": (
        lambda case: checks.check_gpu_memory(on_gpu(case, 6.0, "vllm.gpu_memory_utilization=0.95")),
        "warning", "6.5 GiB are needed while vLLM generates .*out of memory.*; lower vllm.gpu_memory_utilization"),
    "a small disk": (lambda case: checks.check_disk(case, 1000), "error", "2 checkpoints"),
    "little memory": (
        lambda case: checks.check_machine(
            "memory", dataclasses.replace(case, machine=dataclasses.replace(case.machine, free_gib=0.9))),
        "warning", "0.9 GiB"),
    "an adapter": (lambda case: checks.check_checkpoint(an_adapter(case)), "error", "LoRA adapter"),
    "an adapter inside the weights": (
        lambda case: checks.check_checkpoint(with_model(case, "wrapped", prefix="base_model.model.")),
        "error", "still hold an adapter"),
    "half a weight file": (lambda case: checks.check_checkpoint(without_weights_tail(case)), "error", "is damaged"),
    "a merge that changed nothing": (
        lambda case: checks.check_checkpoint(same_as_base(case)), "error", "the weights of its base model"),
    "a template without tools": (
        lambda case: checks.check_template(with_template(case, lambda text: text.replace("if tools", "if false"))),
        "error", "does not hold 'search_schema'"),
    "calls in another form": (
        lambda case: checks.check_template(with_template(case, lambda text: text.replace("<tool_call>", "<call>"))),
        "error", "does not write a call"),
    "prompts that do not grow": (
        lambda case: checks.check_template(with_template(case, lambda text: "{{- messages | length }}" + text)),
        "warning", "later turn"),
    "turns without an end": (
        lambda case: checks.check_template(
            with_template(case, lambda text: text.replace(f"<|im_end|>{_NEXT_IS_TOOL}", _NEXT_IS_TOOL))),
        "warning", "does not end a turn"),
    "the eos token of a base model": (
        lambda case: checks.check_template(with_eos(case, "generation_config.json", [5, 7])),
        "warning", r"generation_config\.json names the eos token id \[5, 7\]"),
    "a broken template": (
        lambda case: checks.check_template(with_template(case, lambda text: text + "{% if %}")),
        "error", "cannot be compiled"),
    "no template": (
        lambda case: checks.check_template(with_template(case, lambda text: "")), "error", "no chat template"),
    "a name that Hydra changes": (
        lambda case: checks.check_names(with_model(case, "it's")), "error", "holds \"'\""),
    "a small weight bucket": (
        lambda case: checks.check_names(with_model(with_settings(case, "grpo.weight_bucket_mb=1"), "wide", width=2048)),
        "error", "largest tensor"),
    "a floor that skips steps": (
        lambda case: checks.check_batches(with_settings(case, "grpo.mini_batch_size=2")),
        "error", "skips the whole step"),
    "a floor that drops rows": (
        lambda case: checks.check_batches(
            with_settings(case, "grpo.train_batch_size=5", "grpo.mini_batch_size=2")), "warning", "4 of 20 episodes"),
    "GPUs that do not divide a batch": (
        lambda case: checks.check_batches(with_settings(case, "grpo.gpus_per_node=3", "grpo.micro_batch_size=1")),
        "error", "do not divide"),
    "too few questions": (
        lambda case: checks.check_batches(dataclasses.replace(case, train=case.train[:2])), "error", "do not fill"),
    "no checkpoint on the way": (
        lambda case: checks.check_batches(with_settings(case, "grpo.save_every=9")), "warning", "save_every"),
    "prompts too long": (
        lambda case: checks.check_context(with_settings(case, "agent.context_tokens=64")), "error", "12 of 12"),
    "a context for no turn": (
        lambda case: checks.check_context(
            with_settings(case, "agent.max_turn_tokens=4000")), "warning", "max_turn_tokens"),
    "more context than the model has": (
        lambda case: checks.check_context(with_settings(case, "agent.context_tokens=9000")), "error", "built for 8192"),
    "a gold by chance": (
        lambda case: checks.check_rewards(with_gold(case, "SELECT random() FROM claims")), "error", "time or chance"),
    "a failing gold": (
        lambda case: checks.check_rewards(with_gold(case, "SELECT nothing FROM nowhere")), "error", "cannot be run"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, case: Case) -> None:
    check, severity, says = FAULTS[fault]
    (finding,) = found("it", lambda: check(case))  # type: ignore[arg-type,return-value]
    assert finding.severity == severity, finding
    assert re.search(says, finding.what), finding.what
    assert "; " in finding.what, "the fix is missing"


def test_a_healthy_case_passes_every_check(case: Case) -> None:
    chosen = checks.QUICK | {"rewards": checks.check_rewards}
    findings = [*checks.examine(case, chosen)]
    here = ("packages", "memory", "disk")  # of the machine that runs the test
    assert [f.what for f in findings if f.severity != "ok" and f.check not in here] == []
    of_gpus = {*machine.CHECKS, "gpu memory"} - {"memory", "libnuma"}
    assert {finding.check for finding in findings} == chosen.keys() - of_gpus


@pytest.mark.parametrize(("profile", "gib"), [("gpu", 80.0), ("gpu24", 22.5)])
def test_the_reference_settings_give_no_warning(profile: str, gib: float, case: Case) -> None:
    defaults = load_config(checkpoint_folder.ROOT / "pipeline.yaml", profile)
    card = dataclasses.replace(CARD, gib=gib, free_gib=gib)
    well = Machine((card,), True, cores=4, free_gib=100.0, shared_gib=0.06, compiler=True, python_header=True)
    questions = tuple(
        dataclasses.replace(question, id=f"{question.id}-{i}") for question in case.train for i in range(8)
    )
    reference = dataclasses.replace(case, config=defaults, machine=well, train=questions)
    here = ("packages", "disk")  # of the machine that runs the test
    findings = [*checks.examine(reference, {n: c for n, c in checks.QUICK.items() if n not in here})]
    assert [finding.what for finding in findings if finding.severity != "ok"] == []
    assert {"gpu", "gpu memory", "memory", "batches", "context"} <= {finding.check for finding in findings}


def test_a_finding_is_printed_with_its_lines_below_each_other() -> None:
    first, second = str(Finding("shared memory", "warning", "too small " * 12)).splitlines()
    assert first.startswith("warning  shared memory too small")
    assert second == " " * 23 + "small too small too small"


def test_damaged_weights_are_reported_once(case: Case) -> None:
    findings = checks.examine(without_weights_tail(case), checks.QUICK)
    assert [finding.check for finding in findings if "is damaged" in finding.what] == ["checkpoint"]


def test_a_proxy_before_the_loopback_address_is_found(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "example.org")
    with pytest.raises(UserError, match=r"proxy\.example:3128"):
        checks.check_proxy(case)
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    assert checks.check_proxy(case)


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
    codes, printed = [], []
    for change in ("grpo.epochs=1", "grpo.save_every=9", "grpo.mini_batch_size=3"):
        codes.append(doctor.main(["--quick", *line, "--set", change]))
        printed.append(capsys.readouterr().out)
    batches = [re.findall(r"^(\w+) +batches ", text, re.MULTILINE) for text in printed]
    assert batches == [["ok"], ["warning"], ["error"]]
    worst = [re.findall(r"\d+ findings, worst: (\w+)\n$", text)[0] for text in printed]
    assert codes == [{"ok": 0, "warning": 3, "error": 2}[severity] for severity in worst]
    assert codes[2] == 2


def test_what_is_missing_is_a_finding_and_the_rest_is_examined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SFT_MODEL_PATH", raising=False)
    line = [*CONFIG, "--set", f"runs_dir={tmp_path}", "--set", "grpo.agent=tests.no_agent:play"]
    assert doctor.main(["--quick", *line]) == 2
    printed = capsys.readouterr().out
    assert "error    checkpoint" in printed
    assert "error    questions" in printed
    assert "error    agent" in printed
    assert "python -m data" in printed
    assert re.search(r"^\w+ +memory ", printed, re.MULTILINE)


def test_the_checkpoint_of_another_run_or_model_is_not_examined(
    case: Case, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what the settings name counts; a base model that is there lends its sizes."""
    monkeypatch.delenv("SFT_MODEL_PATH", raising=False)
    finish_stage(case.run.sft, "x", seconds=1, outputs={"model": str(case.model)}, model_setting="smollm2-135m")
    base = checkpoint_folder.checkpoint(case.run.path.parent / "base")
    line = [*options(case), "--set", "grpo.model=null", "--quick"]
    examined = []
    for more in ([], ["--set", "model=Some/Model"], ["--set", f"model={base}"], ["--run-name", "new"]):
        doctor.main([*line, *more])
        printed = capsys.readouterr().out
        names = re.findall(r"^(?:ok|warning|error) +([a-z ]+?)  ", printed, re.MULTILINE)
        examined.append(("yet" in printed, "disk" in names, "context" in names))
        named = re.findall(r"model name (\S+);", " ".join(printed.split()))
        assert named == ([] if len(more) and more[1] != f"model={base}" else [str(base if more else case.model)])
    assert examined == [(False, True, True), (True, False, False), (True, True, False), (True, False, False)]


def test_a_run_is_stopped_by_an_error_and_not_by_a_warning(case: Case, tmp_path: Path) -> None:
    options(case)
    assert case.model
    warned = with_settings(case, "grpo.save_every=9")
    doctor.before_run(warned.config, case.run, case.model, case.train)
    grpo = warned.config.grpo.model_copy(update={"mini_batch_size": 3})
    wrong = warned.config.model_copy(update={"grpo": grpo})
    with pytest.raises(UserError, match=r"skips the whole step; set grpo\.mini_batch_size"):
        doctor.before_run(wrong, case.run, case.model, case.train)


def test_the_quick_checks_and_the_trainers_settings_start_neither_torch_nor_vllm() -> None:
    code = """
import sys, stage2_grpo.preflight.doctor
from tests.stage2_grpo.training.test_verl_config import composed
composed("gpu")
print([m for m in ("torch", "vllm", "verl", "ray") if m in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

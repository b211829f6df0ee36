"""The vLLM server: its command line, and (slow) the real thing through kill -9."""

import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from shared.config.load import load_config
from shared.evaluation.run import evaluate_subject
from shared.processes.vllm_server import server_argv, server_environment
from shared.records import Question, write_jsonl
from shared.runs.manifest import RunDirectory
from tests.shared.examples import insurance_file
from tests.tiny_model import save_tiny_model

REPO = Path(__file__).resolve().parents[3]
PIPELINE = REPO / "pipeline.yaml"


def test_the_server_listens_on_loopback_and_serves_tool_calls() -> None:
    argv = server_argv(Path("/m"), load_config(PIPELINE, "cpu"), 1234)
    pairs = dict(pairwise(argv))
    assert pairs["--host"] == "127.0.0.1"
    assert pairs["--port"] == "1234"
    assert pairs["--tool-call-parser"] == "qwen25_coder"
    assert "--enable-auto-tool-choice" in argv
    assert "--gpu-memory-utilization" not in argv


def test_gpu_settings_reach_the_server_on_a_gpu_alone() -> None:
    config = load_config(
        PIPELINE, "gpu", ["grpo.gpus_per_node=2", "vllm.tensor_parallel=2", "vllm.num_gpu_blocks_override=900"]
    )
    argv = server_argv(Path("/m"), config, 1)
    pairs = dict(pairwise(argv))
    assert (pairs["--tensor-parallel-size"], pairs["--num-gpu-blocks-override"]) == ("2", "900")
    assert pairs["--gpu-memory-utilization"] == "0.6"
    assert "VLLM_CPU_KVCACHE_SPACE" not in server_environment(config)


def test_a_cpu_server_uses_all_cores_and_compiles_only_when_asked() -> None:
    environment = server_environment(load_config(PIPELINE, "cpu"))
    assert "0" in environment["VLLM_CPU_OMP_THREADS_BIND"].split(",")
    assert environment["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in server_environment(load_config(PIPELINE, "cpu", ["vllm.enforce_eager=false"]))


@pytest.mark.slow
@pytest.mark.xdist_group("servers")
def test_a_real_model_is_served_and_evaluated_also_after_a_kill_9(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny_model(tmp_path / "model")
    run = RunDirectory(tmp_path / "runs" / "main")
    run.data.mkdir(parents=True)
    database = str(insurance_file(tmp_path))
    gold = "SELECT count(*) FROM claims"
    write_jsonl(run.data / "test.jsonl", [Question(f"q{i}", "insurance", f"{i}?", gold, database) for i in range(4)])
    settings = ["agent.max_turn_tokens=24", "agent.context_tokens=4096",
                f"runs_dir={tmp_path / 'runs'}", "evaluate.bootstrap_samples=50"]  # fmt: skip

    overrides = [part for setting in settings for part in ("--set", setting)]
    command = [
        sys.executable,
        "-m",
        "shared.evaluation",
        "--model",
        str(model),
        "--name",
        "tiny",
        "--profile",
        "cpu",
    ]
    killed = subprocess.Popen([*command, *overrides], cwd=REPO)
    log = run.evaluation("tiny") / "vllm.log"
    while not (log.exists() and "EngineCore pid=" in log.read_text()):
        assert killed.poll() is None
        time.sleep(0.2)
    services = psutil.Process(killed.pid).children(recursive=True)
    assert len(services) >= 3
    killed.kill()
    killed.wait()
    _, alive = psutil.wait_procs(services, timeout=40)
    assert not alive, "services outlived their runner"

    config = load_config(PIPELINE, "cpu", settings)
    summary = evaluate_subject(model, config, run, "tiny")
    assert (summary["n"], summary["infrastructure_failures"]) == (4, 0)
    assert summary["tool_call_rate"] == 0.0, "the server gave token ids"
    assert evaluate_subject(model, config, run, "tiny") == summary
    assert "finished before" in capsys.readouterr().out

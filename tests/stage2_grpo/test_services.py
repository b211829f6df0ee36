"""Parts of stage 2 that live elsewhere: a gateway of somebody else's, an address that a cluster can reach."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from shared.config.load import load_config
from shared.errors import UserError
from shared.processes.owned_process import OwnedProcess, free_port
from stage2_grpo.rollouts.agent import AgentSettings
from stage2_grpo.services import (
    Rollouts,
    address_towards,
    gateway_and_controller,
    gateway_arguments,
    trainer_environment,
)
from stage2_grpo.stage import next_command
from stage2_grpo.training import ray_cluster
from tests.stage2_grpo.rollouts.scripted_gateway import KEY, scripted_gateway

PIPELINE = Path(__file__).resolve().parents[2] / "pipeline.yaml"


def test_a_gateway_elsewhere_is_used_and_nothing_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGL_KEY", KEY)
    with scripted_gateway() as gateway:
        config = load_config(PIPELINE, "cpu", [f"grpo.gateway_url={gateway.url}"])
        with gateway_and_controller(config, Path("model"), tmp_path) as rollouts:
            assert (rollouts.key, rollouts.processes) == (KEY, ())
            settings = AgentSettings.load(rollouts.settings_file)
    assert settings.gateway_url == gateway.url
    assert KEY not in rollouts.settings_file.read_text()
    assert capsys.readouterr().out == ""


def test_rollouts_as_jobs_are_told_what_they_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGL_KEY", KEY)
    with scripted_gateway() as gateway:
        config = load_config(PIPELINE, "cpu", [f"grpo.gateway_url={gateway.url}", "grpo.job_template=job.yaml"])
        with gateway_and_controller(config, Path("model"), tmp_path):
            (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("grpo: Jobs (grpo.job_template) record no episodes")


@pytest.mark.parametrize(
    ("key", "there", "says"),
    [("", True, "AGL_KEY is not set"), ("wrong", True, "answers with status 401"), (KEY, False, "does not answer")],
)
def test_a_gateway_elsewhere_that_cannot_be_used_is_named_with_the_command_that_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, there: bool, says: str
) -> None:
    monkeypatch.setenv("AGL_KEY", key)
    with scripted_gateway() as gateway:
        url = gateway.url if there else f"http://127.0.0.1:{free_port()}"
        config = load_config(PIPELINE, "cpu", [f"grpo.gateway_url={url}"])
        with pytest.raises(UserError, match=says) as refusal, gateway_and_controller(config, Path("m"), tmp_path):
            pass
    assert "agl-server host=127.0.0.1" in str(refusal.value)
    assert f"stage2_grpo.rollouts.controller --settings {tmp_path / 'agents.json'}" in str(refusal.value)


def test_a_controller_that_has_died_is_named_with_what_to_do(tmp_path: Path) -> None:
    argv, log = [sys.executable, "-c", "print('no memory')"], tmp_path / "controller.log"
    with OwnedProcess(argv, name="the rollout controller", log=log) as controller:
        controller.wait()
        with pytest.raises(
            UserError, match=r"controller ended unexpectedly \(exit status 0\); the same command continues after "
                                            r"step 3\. The last lines of .*log:\n    no memory"):  # fmt: skip
            Rollouts(tmp_path / "agents.json", KEY, (controller,)).check(next_command(3))


@pytest.mark.parametrize(
    ("url", "binds"),
    [
        ("http://10.0.0.2:9000", ["host=10.0.0.2", "port=9000"]),
        ("http://10.0.0.2", ["host=10.0.0.2", "port=80"]),
        ("https://rollouts.example.org/gateway", ["host=0.0.0.0", "port=8080"]),
    ],
)
def test_a_gateway_binds_to_its_address_but_behind_a_proxy_to_its_own(url: str, binds: list[str]) -> None:
    assert gateway_arguments(load_config(PIPELINE, "cpu"), Path("model"), url)[:2] == binds


def test_without_a_cluster_everything_stays_on_loopback(tmp_path: Path) -> None:
    assert address_towards(None) == address_towards("127.0.0.1:6379") == "127.0.0.1"
    environment = trainer_environment(load_config(PIPELINE, "gpu"), tmp_path, "key")
    assert environment["PYTHONPATH"].split(":")[0] == str(PIPELINE.parent)
    assert environment["VLLM_HOST_IP"] == environment["MASTER_ADDR"] == "127.0.0.1"
    assert environment["NCCL_SOCKET_IFNAME"] == environment["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_ray_address_that_cannot_be_reached_is_named() -> None:
    with pytest.raises(UserError, match=r"grpo\.ray_address names no such host, which cannot be reached"):
        address_towards("no such host:6379")


@pytest.mark.parametrize(("gpus", "fits"), [([1, 1], True), ([4, 0, 2], True), ([8], False), ([1, 0], False)])
def test_a_cluster_with_too_few_gpus_is_refused_instead_of_waited_for(gpus: list[int], fits: bool) -> None:
    config = load_config(PIPELINE, "gpu", ["grpo.nodes=2", "grpo.ray_address=10.0.0.1:6379"])
    nodes: list[dict[str, Any]] = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": float(count)}} for count in gpus]
    nodes.append({"Alive": False, "Resources": {"GPU": 8.0}})
    if fits:
        ray_cluster.refuse_small_cluster(nodes, config.grpo)
        return
    with pytest.raises(UserError, match="do not fit: add nodes"):
        ray_cluster.refuse_small_cluster(nodes, config.grpo)

"""The Kubernetes path: our Job template as Agent Lightning's controller renders it, and that controller's settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.config.load import load_config
from shared.records import Question
from stage2_grpo.training.verl_config import TrainerPaths, compose

pytestmark = pytest.mark.slow  # imports the client of Kubernetes

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "stage2_grpo" / "kubernetes"
QUESTION = Question(
    "q1", "zoo", 'Who said "it\'s $5 {{ and }} <b>"?\nÜber 3?', "SELECT 'a' -- x", "/firstcall/zoo.sqlite"
)


@pytest.fixture(scope="module")
def settings() -> Any:
    """What agl-controller itself makes of our file, in Hydra's struct mode."""
    command = [str(Path(sys.executable).with_name("agl-controller")), "--config-dir", str(FOLDER)]
    environment = os.environ | {"AGL_KEY": "secret", "GATEWAY_URL": "http://gateway:8080"}
    shown = subprocess.run(
        [sys.executable, *command, "--config-name", "rollouts", "--cfg", "job", "--resolve"],
        env=environment, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    from omegaconf import OmegaConf

    return OmegaConf.create(shown.stdout)


@pytest.fixture(scope="module")
def job(settings: Any) -> dict[str, Any]:
    """The manifest of one rollout."""
    from agentlightning.controller.k8s_reconciler import build_job_spec
    from agentlightning.schemas import Rollout

    rollout = {
        "rollout_id": "0123abcd", "input": vars(QUESTION), "is_train": True,
        "status": {"created_at": 0, "updated_at": 0},
        "config": {"timeout_seconds": 600, "k8s": {"job_template": (FOLDER / "job.yaml").read_text()}},
    }  # fmt: skip
    return build_job_spec(Rollout.model_validate(rollout), settings)


def test_the_settings_are_those_that_the_controller_reads(settings: Any) -> None:
    assert (settings.runner_type, settings.agl_server.url, settings.agl_server.key) == (
        "k8s",
        "http://gateway:8080",
        "secret",
    )
    assert settings.k8s_runner.namespace == "firstcall"
    assert settings.local_runner.maximum_size == 50  # Agent Lightning's own defaults stay


def test_the_job_carries_the_question_and_the_way_to_the_gateway(job: dict[str, Any]) -> None:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert json.loads(environment["FIRSTCALL_QUESTION"]) == vars(QUESTION)
    proxy = "http://gateway:8080/proxy/rollout/0123abcd/attempt/0/mode/train/openai/v1"
    assert environment["AGL_OPENAI_BASE_URL"] == proxy
    assert environment["AGL_KEY"] == "secret"
    assert (job["spec"]["activeDeadlineSeconds"], job["spec"]["backoffLimit"]) == (600, 0)


def test_the_job_fits_the_schema_of_kubernetes(job: dict[str, Any]) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    version = schemas.latest_version()
    schemas.validate(job, version, strict=True)
    job["spec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(schemas.ValidationError, match="imagee"):
        schemas.validate(job, version, strict=True)


def test_the_trainer_sends_the_template_with_each_rollout(tmp_path: Path) -> None:
    template = os.path.relpath(FOLDER / "job.yaml")
    overrides = [f"grpo.job_template={template}", "grpo.gateway_url=https://gateway"]
    config = load_config(ROOT / "pipeline.yaml", "gpu", overrides)
    composed = compose(config, TrainerPaths(Path("m"), tmp_path, "https://gateway"))
    assert composed.agentlightning.k8s.job_template_path == str(FOLDER / "job.yaml")
    assert yaml.safe_load((FOLDER / "rollouts.yaml").read_text())["runner_type"] == "k8s"

"""The dress rehearsal with a real vLLM server: healthy, without the parser, and with a gateway of another name."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.config.load import load_config
from shared.processes.owned_process import free_port
from shared.records import Question
from shared.runs.manifest import RunDirectory
from stage2_grpo.preflight.checks import Case
from stage2_grpo.preflight.rehearsal import play, rehearse, trainer_model_name
from stage2_grpo.rollouts.agent import AgentSettings
from stage2_grpo.services import Rollouts
from tests.shared.examples import insurance_file
from tests.stage2_grpo.checkpoints.checkpoint_folder import ROOT
from tests.stage2_grpo.gateway import Gateway
from tests.tiny_model import save_tiny_model, teach

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("servers")]

_FIRST_CALL = '<tool_call>\n{"name": "search_schema", "arguments": {"query": "claims"}}\n</tool_call>'


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("rehearsal")
    small = ["vllm.cpu_kv_cache_gib=1", "agent.context_tokens=2048", "agent.max_turns=2"]
    question = Question(
        "q0", "insurance", "How many claims are open?", "SELECT count(*) FROM claims", str(insurance_file(folder))
    )
    model = save_tiny_model(folder / "model")
    teach(model, _FIRST_CALL)
    config = load_config(ROOT / "pipeline.yaml", "cpu", small)
    return Case(config, RunDirectory(folder / "run"), ROOT, model, (question,), ())


def test_a_healthy_stack_plays_an_episode(case: Case) -> None:
    findings = {finding.check: finding for finding in rehearse(case)}
    assert [*findings] == ["server", "model name", "prompt", "parser", "episode"]
    assert {finding.severity for finding in findings.values()} == {"ok"}, findings
    assert "holds all 3 tools" in findings["prompt"].what
    assert "reads <tool_call> and fenced JSON" in findings["parser"].what


def test_a_parser_that_is_not_registered_is_found(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "firstcall_cpu")  # shuts the parser out
    findings = [*rehearse(case)]
    assert [(finding.check, finding.severity) for finding in findings] == [("parser", "error")]
    assert "qwen25_coder" in findings[0].what


def test_a_gateway_with_another_model_name_is_found(case: Case, gateway: Gateway, tmp_path: Path) -> None:
    assert case.model
    settings = AgentSettings(gateway.url, case.model, case.config, tmp_path / "episodes.jsonl")
    settings.save(tmp_path / "agents.json")
    gateway.http.delete("/api/models")
    (finding,) = play(
        case,
        Rollouts(tmp_path / "agents.json", gateway.key, ()),
        trainer_model_name(case),
        f"http://127.0.0.1:{free_port()}/v1",
    )
    assert (finding.check, finding.severity) == ("model name", "error")
    assert "'scripted'" in finding.what
    assert str(case.model) in finding.what

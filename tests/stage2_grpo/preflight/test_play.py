"""The real gateway and controller with a scripted server: what the rehearsal finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shared.agent.prompts import TOOLS
from shared.models.tokenizer import Tokenizer
from shared.records import ToolCall
from stage2_grpo.preflight.checks import Case
from stage2_grpo.preflight.rehearsal import here, play
from stage2_grpo.services import Rollouts, gateway_and_controller
from tests.scripted_server import Handler, ScriptedModel, answer, scripted_server
from tests.shared.chatml import render
from tests.stage2_grpo.checkpoints.checkpoint_folder import healthy_case

CALL = '<tool_call>\n{"name": "execute_sql", "arguments": {"sql": "SELECT count(*) FROM claims"}}\n</tool_call>'


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return healthy_case(tmp_path_factory.mktemp("play"))


@pytest.fixture(scope="module")
def rollouts(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rollouts]:
    folder = tmp_path_factory.mktemp("gateway")
    with gateway_and_controller(here(case.config), case.folder, folder) as rollouts:
        yield rollouts


def server(case: Case, *texts: str, calls: bool = True, tools: bool = True) -> Handler:
    """Answers dictated requests with a call, or without, on a prompt with or without tools; else plays `texts`."""
    tokenizer = Tokenizer.from_folder(case.folder)
    model = ScriptedModel(tokenizer, *texts)

    def handle(request: dict[str, Any]) -> Any:
        if "structured_outputs" not in request:
            return model(request)
        ids = tokenizer.encode(render(request["messages"], TOOLS if tools else None))
        return answer(calls=[ToolCall("search_schema", {"query": "x"})] if calls else [], prompt_token_ids=ids)

    return handle


PLAYED: dict[str, tuple[Callable[[Case], Handler], dict[str, str]]] = {
    "well": (
        lambda case: server(case, CALL, "Two."),
        dict.fromkeys(("model name", "prompt", "parser", "episode"), "ok"),
    ),
    "without calls": (
        lambda case: server(case, "Two.", calls=False, tools=False),
        {"model name": "ok", "prompt": "error", "parser": "error", "episode": "warning"},
    ),
}


@pytest.mark.parametrize("way", PLAYED)
def test_a_rehearsal_is_played(way: str, case: Case, rollouts: Rollouts) -> None:
    script, expected = PLAYED[way]
    with scripted_server(script(case)) as endpoint, rollouts.client(10) as http:
        http.delete("/api/models")
        findings = [*play(case, rollouts, str(case.model), endpoint)]
    assert {finding.check: finding.severity for finding in findings} == expected, findings


def test_a_server_that_refuses_ends_the_rehearsal(case: Case, rollouts: Rollouts) -> None:
    with rollouts.client(10) as http:
        http.delete("/api/models")
    (finding,) = play(case, rollouts, "another name", "http://127.0.0.1:9/v1")
    assert (finding.check, finding.severity) == ("model name", "error")

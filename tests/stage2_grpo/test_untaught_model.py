"""What the stock grammar makes of a model that never saw stage 1, and what ours does: without ours no step can learn.

The end-to-end test trains such a model; here its text meets each reading alone.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

import shared.agent.episode
from shared.agent.prompts import TOOLS
from shared.config.load import load_config
from shared.errors import UserError
from shared.records import Episode, Question
from shared.tool_calls import Parsed, parse, parse_hermes
from stage2_grpo.monitoring.step_log import refuse_silent_model
from stage2_grpo.monitoring.step_metrics import step_metrics
from stage2_grpo.rollouts.agent import RolloutTask, make_handler
from tests.scripted_server import ScriptedModel, scripted_server
from tests.shared.examples import insurance_file, tiny_tokenizer, tokenizer_folder
from tests.stage2_grpo.small_run import FENCED

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("agent.context_tokens=8000", "agent.max_turn_tokens=400", "agent.max_turns=2")


def ours(text: str) -> Parsed:
    return parse(text, TOOLS)


def first_step(folder: Path, server: Callable[[str], Parsed]) -> dict[str, float | None]:
    """The figures of a step of one episode, whose model says the same in every turn to a server with this parser."""
    rows: list[Episode] = []
    handle = make_handler(load_config(ROOT / "pipeline.yaml", "cpu", SETTINGS), tokenizer_folder(folder), rows.append)
    question = Question("q1", "insurance", "How many claims are open?", "SELECT 1", str(insurance_file(folder)))
    with scripted_server(ScriptedModel(tiny_tokenizer(), FENCED, parser=server)) as url:
        asyncio.run(handle(RolloutTask("r0", vars(question), True, url, "key", timeout_seconds=60)))
    return step_metrics({}, rows, 1)


@pytest.mark.parametrize(("server", "agent"), [(parse_hermes, ours), (ours, parse_hermes)])
def test_our_grammar_in_the_server_or_in_the_agent_makes_the_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Callable[[str], Parsed], agent: Callable[[str], Parsed]
) -> None:
    monkeypatch.setattr(shared.agent.episode, "parse", lambda text, tools: agent(text))
    step = first_step(tmp_path, server)
    assert (step["tool_call_rate"], step["fallback_share"], step["calls"], step["turns"]) == (0.0, 1.0, 2.0, 2.0)
    refuse_silent_model(1, step)


def test_the_stock_grammar_alone_makes_none_and_the_first_step_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared.agent.episode, "parse", lambda text, tools: parse_hermes(text))
    step = first_step(tmp_path, parse_hermes)
    assert (step["tool_call_rate"], step["fallback_share"], step["calls"], step["turns"]) == (0.0, None, 0.0, 1.0)
    with pytest.raises(UserError, match="nothing to learn from"):
        refuse_silent_model(1, step)

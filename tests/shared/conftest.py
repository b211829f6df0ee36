"""The agent loop against a scripted model behind real HTTP and the real tools on a real database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.agent.tools import Toolbox
from shared.config.schema import AgentConfig
from shared.models.tokenizer import Tokenizer
from shared.records import Episode
from tests.scripted_server import ScriptedModel, scripted_server
from tests.shared.episodes import LIMITS, episode
from tests.shared.examples import insurance, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture
def toolbox(tmp_path: Path, tokenizer: Tokenizer) -> Toolbox:
    return Toolbox(insurance(tmp_path), tokenizer, LIMITS)


@pytest.fixture
def play(toolbox: Toolbox, tokenizer: Tokenizer) -> Callable[..., Episode]:
    """Play an episode against a handler, or against a model that says the given texts."""

    def run(*says: Any, limits: AgentConfig = LIMITS, **options: Any) -> Episode:
        handler = says[0] if callable(says[0]) else ScriptedModel(tokenizer, *says)
        with scripted_server(handler) as base_url:
            return asyncio.run(episode(base_url, toolbox, tokenizer, limits, **options))

    return run

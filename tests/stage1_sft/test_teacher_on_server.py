"""A real vLLM server as the teacher and in a self-taught round, with a tiny model that was taught one answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.config.load import load_config
from shared.errors import UserError
from shared.models.tokenizer import Tokenizer
from shared.processes.vllm_server import vllm_server
from shared.runs.manifest import RunDirectory
from stage1_sft.teacher import play_round, teach
from tests import tiny_model
from tests.stage1_sft.examples import ROOT, questions

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("servers")]

ANSWER = "```sql\nSELECT COUNT(*) FROM claims\n```"


def test_a_server_teaches_asks_for_its_key_and_is_not_asked_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    model = tiny_model.teach(tiny_model.save_tiny_model(tmp_path / "model"), ANSWER)
    *asked, more = questions(tmp_path)[:4]
    run, tokenizer = RunDirectory(tmp_path), Tokenizer.from_folder(model)
    shape = [
        "agent.context_tokens=4096",
        "vllm.cpu_kv_cache_gib=1",
        "agent.max_turn_tokens=96",
    ]
    server = load_config(ROOT / "pipeline.yaml", "cpu", shape)
    monkeypatch.setenv("VLLM_API_KEY", "k-1")
    with vllm_server(model, server, tmp_path / "server") as url:
        ask = ["teacher.tries=2", "teacher.temperature=0", "teacher.prompt_price=1", f"teacher.endpoint={url}"]
        config = load_config(ROOT / "pipeline.yaml", "cpu", [*shape, *ask])
        monkeypatch.setenv("FIRSTCALL_API_KEY", "k-2")
        with pytest.raises(UserError, match=r"The teacher http.* failed .*401.*it continues"):
            teach(asked, config, tokenizer, run)
        monkeypatch.setenv("FIRSTCALL_API_KEY", "k-1")
        traces, bill = teach(asked, config, tokenizer, run)
    assert [trace["messages"][-1]["content"] for trace in traces.values()] == [ANSWER]
    assert (bill["asked"], bill["solved"], bill["episodes"], bill["requests"]) == (3, 1, 5, 5)
    assert bill["rejected"] == {"wrong": 4}
    assert bill["cost"] == bill["prompt_tokens"] / 1e6
    assert teach(asked, config, tokenizer, run) == (traces, bill)  # without any server
    with pytest.raises(UserError, match=r"The teacher http.* failed .*ConnectError.*it continues"):
        teach([*asked, more], config, tokenizer, run)


def test_a_model_plays_its_own_round_and_a_finished_round_needs_no_server(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model = tiny_model.teach(tiny_model.save_tiny_model(tmp_path / "model"), ANSWER)
    asked, folder = questions(tmp_path)[:3], tmp_path / "round-1"
    shape = ["agent.context_tokens=4096", "vllm.cpu_kv_cache_gib=1", "agent.max_turn_tokens=96"]
    config = load_config(
        ROOT / "pipeline.yaml",
        "cpu",
        [*shape, "sft.round_samples=2", "teacher.temperature=0", "vllm.tensor_parallel=1"],
    )
    traces, bill = play_round(model, asked, config, folder)
    assert [trace["messages"][-1]["content"] for trace in traces.values()] == [ANSWER]
    assert (bill["asked"], bill["solved"], bill["episodes"], bill["right_share"]) == (3, 1, 6, 0.3333)
    log = (folder / "vllm.log").stat().st_mtime_ns
    assert play_round(model, asked, config, folder) == (traces, bill)
    assert (folder / "vllm.log").stat().st_mtime_ns == log

"""`package`: the model card, refusals, and a push to a hub that a test plays."""

import argparse
import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.errors import UserError
from shared.packaging.command import package
from shared.packaging.model_card import model_card
from shared.packaging.options import package_parser
from shared.runs.manifest import RunDirectory
from tests.shared.packaging.finished_run import PIPELINE, finished_run

REPO = PIPELINE.parent


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return finished_run(tmp_path / "runs")


def arguments(run: RunDirectory, *given: str) -> argparse.Namespace:
    return package_parser().parse_args(
        [*given, "--config", str(PIPELINE), "--profile", "cpu", "--set", f"runs_dir={run.path.parent}"]
    )


def test_the_card_says_data_recipe_figures_limits_and_license(run: RunDirectory) -> None:
    card = model_card(run.grpo / "model")
    _, head, body = card.split("---\n", 2)
    facts = yaml.safe_load(head)
    assert (facts["base_model"], facts["license"]) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")
    assert facts["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.5
    assert "GRPO changed execution accuracy by +25.0 points against SFT" in body
    assert "Training questions: 40; test questions: 40. Sources: demo." in body
    assert "- grpo.learning_rate: 5e-05" in body
    assert "easy questions 100%; hard questions 0%" in body
    for title in ("Results", "Data", "Recipe", "Limits", "License"):
        assert f"## {title}\n" in body


@pytest.mark.parametrize("base", ["/home/ann/private-work/base", "private-work/base"])
def test_a_card_does_not_say_where_a_base_model_lies(
    run: RunDirectory, tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("private-work/base").mkdir(parents=True)
    report = run.report / "report.json"
    report.write_text(json.dumps(json.loads(report.read_text()) | {"model": base}))
    card = model_card(run.grpo / "model")
    assert "private-work" not in card
    assert "base_model" not in yaml.safe_load(card.split("---\n", 2)[1])
    assert "trained from base (" in card


def test_a_base_model_of_a_hub_is_named_in_full(run: RunDirectory) -> None:
    report = run.report / "report.json"
    report.write_text(json.dumps(json.loads(report.read_text()) | {"model": "Some/Base-1B"}))
    assert yaml.safe_load(model_card(run.grpo / "model").split("---\n", 2)[1])["base_model"] == "Some/Base-1B"


def test_the_model_of_a_named_run_is_taken(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    package(arguments(run, "--run-name", "trial", "--dry-run"))
    assert f"model {run.grpo / 'model'}" in capsys.readouterr().out
    with pytest.raises(UserError, match="other holds no trained model"):
        package(arguments(run, "--run-name", "other"))
    with pytest.raises(UserError, match="may hold only letters"):
        package(arguments(run, "--run-name", "*"))


def test_a_model_of_no_reported_run_has_no_card(run: RunDirectory) -> None:
    (run.report / "report.json").unlink()
    with pytest.raises(UserError, match=r"belongs to no run with a report.*--only report --run-name trial"):
        package(arguments(run))


def test_a_folder_with_something_else_is_left_alone(run: RunDirectory, tmp_path: Path) -> None:
    (kept := tmp_path / "mine" / "thesis.txt").parent.mkdir()
    kept.write_text("all of it")
    with pytest.raises(UserError, match="holds something else than a package"):
        package(arguments(run, "--out", str(kept.parent)))
    with pytest.raises(UserError, match="would replace"):
        package(arguments(run, "--out", str(run.grpo)))
    assert kept.read_text() == "all of it"
    assert (run.grpo / "model" / "config.json").exists()


@pytest.mark.parametrize(
    ("given", "token", "said"),
    [
        ((), "t", "needs the repository as --repo OWNER/NAME"),
        (("--repo", "a/b/c"), "t", "needs the repository as --repo OWNER/NAME"),
        (("--repo", "me/model"), "", "needs your token in HF_TOKEN"),
    ],
)
def test_a_push_without_name_or_token_is_refused(
    run: RunDirectory, given: tuple[str, ...], token: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match=said):
        package(arguments(run, "--to", "hub", *given))


class Hub(ThreadingHTTPServer):
    """The part of a model hub's HTTP interface that a push uses; it keeps what it is given."""

    token = "mine"

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Hub)
        self.made: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        self.stored: dict[str, bytes] = {}


class _Hub(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        hub, address = self.server, f"http://127.0.0.1:{self.server.server_port}"
        if self.headers["Authorization"] != f"Bearer {hub.token}":
            return self._answer(401, {"error": "Invalid token"})
        if self.path == "/api/repos/create":
            hub.made = json.loads(body)
            return self._answer(200, {"url": f"{address}/me/model"})
        if self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            modes = [{**f, "uploadMode": "lfs" if "safetensors" in f["path"] else "regular"} for f in files]
            return self._answer(200, {"files": [{**f, "shouldIgnore": False} for f in modes]})
        if self.path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            objects = [{**o, "actions": {"upload": {"href": f"{address}/store/{o['oid']}"}}} for o in wanted]
            return self._answer(200, {"transfer": "basic", "objects": objects})
        if "/commit/main" in self.path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.stored[value["oid"]]
            return self._answer(200, {"commitUrl": f"{address}/me/model/commit/1", "commitOid": "1"})
        return self._answer(200, {"errors": [], "warnings": []})  # the check of the card

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.stored[self.path.rpartition("/")[2]] = data
        self._answer(200, {})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def pushed(run: RunDirectory, hub: Hub, token: str) -> subprocess.CompletedProcess[str]:
    """`package --to hub` in a process of its own: the hub's address is read when its client is imported."""
    address = f"http://127.0.0.1:{hub.server_port}"
    variables = {"HF_ENDPOINT": address, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    argv = ["run_pipeline.py", "package", "--to", "hub", "--repo", "me/model", "--profile", "cpu"]
    return subprocess.run(
        [sys.executable, *argv, "--set", f"runs_dir={run.path.parent}"],
        cwd=REPO,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )


def test_a_push_carries_the_whole_model_and_its_card_into_a_private_repository(run: RunDirectory, hub: Hub) -> None:
    ended = pushed(run, hub, "mine")
    assert ended.returncode == 0, ended.stderr
    assert f"http://127.0.0.1:{hub.server_port}/me/model/commit/1" in ended.stdout
    assert (hub.made["name"], hub.made["organization"], hub.made["private"]) == ("model", "me", True)
    model = run.grpo / "model"
    assert hub.files.pop("README.md").decode() == model_card(model)
    assert hub.files == {file.name: file.read_bytes() for file in model.iterdir()}


def test_a_hub_that_refuses_the_token_is_quoted(run: RunDirectory, hub: Hub) -> None:
    ended = pushed(run, hub, "stolen")
    assert ended.returncode == 2
    assert "The hub did not take me/model" in ended.stderr
    assert "401" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert hub.files == {}

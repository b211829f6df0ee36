"""The pipeline runner: what it runs, skips, refuses and survives. Stages with models are tested where they live."""

import json
import os
import re
import runpy
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import run_pipeline
from data import importing
from shared.errors import UserError
from shared.processes.owned_process import locked
from shared.records import read_questions
from shared.runs.manifest import RunDirectory, begin_stage, finish_stage, read_manifest
from shared.runs.usage import read_usage
from tests.shared.packaging.finished_run import finished_run

REPO = Path(__file__).resolve().parents[1]
RUNNER = [sys.executable, str(REPO / "run_pipeline.py")]


@pytest.fixture
def spider(tmp_path: Path) -> Path:
    """A data set in Spider layout: four tiny databases, ten questions each."""
    folder, rows = tmp_path / "spider", []
    for number in range(4):
        name = f"shop_{number}"
        (folder / "database" / name).mkdir(parents=True)
        with closing(sqlite3.connect(folder / "database" / name / f"{name}.sqlite")) as connection:
            connection.executescript(f"PRAGMA synchronous = OFF; "
                                     f"CREATE TABLE items_{number} (id INTEGER PRIMARY KEY, price REAL);"
                                     f"INSERT INTO items_{number} (price) VALUES (1), (2.5), (4), (8);")  # fmt: skip
        for limit in range(10):
            query = f"SELECT count(*) FROM items_{number} WHERE price > {limit}"
            question = f"How many items of shop {number} cost more than {limit}?"
            rows.append({"db_id": name, "question": question, "query": query})
    (folder / "dev.json").write_text(json.dumps(rows))
    return folder


@pytest.fixture
def options(tmp_path: Path, spider: Path) -> list[str]:
    settings = [f"runs_dir={tmp_path / 'runs'}", f"data.sources={spider}", "data.unseen_databases=1"]
    return ["--config", str(REPO / "pipeline.yaml"), "--profile", "cpu", *(p for s in settings for p in ("--set", s))]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "runs" / "main")


def run(arguments: list[str]) -> None:
    run_pipeline.run(run_pipeline.run_parser().parse_args(arguments))


def test_one_stage_alone(options: list[str], directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    run([*options, "--only", "data"])
    assert (directory.data / "train.jsonl").exists()
    assert not directory.sft.exists()
    assert json.loads((directory.path / "config.json").read_text())["profile"] == "cpu"
    assert read_usage(directory)["data"]["complete"]
    assert "== data ==" in capsys.readouterr().out


def test_a_finished_stage_is_skipped_and_its_cost_kept(
    options: list[str], directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    run([*options, "--only", "data"])
    before, manifest = read_usage(directory), (directory.data / "manifest.json").stat().st_mtime_ns
    capsys.readouterr()
    run([*options, "--only", "data"])
    assert "already" in capsys.readouterr().out
    assert (directory.data / "manifest.json").stat().st_mtime_ns == manifest
    assert read_usage(directory) == before


@pytest.mark.parametrize("how", [shutil.move, shutil.copytree])
def test_a_moved_or_copied_run_goes_on(
    options: list[str],
    directory: RunDirectory,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    how: Callable[[Path, Path], object],
) -> None:
    run([*options, "--only", "data", "--set", "data.copies=1"])
    assert str(tmp_path) not in (directory.data / "train.jsonl").read_text().replace(str(tmp_path / "spider"), "")
    how(directory.path, tmp_path / "elsewhere" / "main")
    moved = RunDirectory(tmp_path / "elsewhere" / "main")
    capsys.readouterr()
    run([*options, "--only", "data", "--set", "data.copies=1", "--set", f"runs_dir={tmp_path / 'elsewhere'}"])
    assert f"already prepared in {moved.data}" in capsys.readouterr().out
    for question in read_questions(moved.data / "train.jsonl"):
        assert Path(question.database).is_file()
        assert moved.data in Path(question.copies).parents
        assert Path(question.copies).is_dir()


def test_changed_settings_run_a_stage_again(options: list[str], directory: RunDirectory) -> None:
    run([*options, "--only", "data"])
    before = read_manifest(directory.data)
    run([*options, "--only", "data", "--set", "seed=5"])
    after = read_manifest(directory.data)
    assert before is not None
    assert after is not None
    assert before["fingerprint"] != after["fingerprint"]


@pytest.mark.parametrize("stage", ["sft-eval", "grpo", "grpo-eval"])
def test_a_stage_without_its_input_says_which_to_run(options: list[str], directory: RunDirectory, stage: str) -> None:
    run([*options, "--only", "data"])
    needed = "sft" if stage != "grpo-eval" else "grpo"
    with pytest.raises(UserError, match=rf"{needed} holds no finished checkpoint.*--from {needed}"):
        run([*options, "--only", stage])


def test_a_report_of_nothing_is_refused(options: list[str], directory: RunDirectory) -> None:
    run([*options, "--only", "data"])
    with pytest.raises(UserError, match="no finished evaluation"):
        run([*options, "--only", "report"])


def test_from_forgets_that_stage_and_all_later_ones(options: list[str], directory: RunDirectory, spider: Path) -> None:
    for folder in (directory.evaluation("base"), directory.sft, directory.grpo, directory.evaluation("grpo")):
        begin_stage(folder, "x")
        finish_stage(folder, "x", seconds=1, outputs={"model": "/nowhere"})
    (spider / "dev.json").unlink()
    with pytest.raises(UserError, match="holds no question file"):  # the data stage, which is first in line, cannot run
        run([*options, "--from", "sft"])
    assert directory.evaluation("base").exists()
    assert not directory.sft.exists()
    assert not directory.grpo.exists()
    assert not directory.evaluation("grpo").exists()


def test_from_moves_nothing_when_a_path_is_wrong(options: list[str], directory: RunDirectory, tmp_path: Path) -> None:
    run([*options, "--only", "data"])
    with pytest.raises(UserError, match=r"data\.sources: there is no .*typo"):
        run([*options, "--from", "data", "--set", f"data.sources=[demo, {{path: {tmp_path / 'typo'}, use: avoid}}]"])
    assert read_manifest(directory.data)


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--from", "sft"]])
def test_an_agent_that_cannot_be_loaded_stops_the_run_before_its_first_stage(
    options: list[str], directory: RunDirectory, more: list[str]
) -> None:
    with pytest.raises(UserError, match=r"grpo\.agent is 'tests\.no_agent:play', which cannot be loaded"):
        run([*options, *more, "--set", "grpo.agent=tests.no_agent:play"])
    assert not directory.path.exists()


def test_missing_gpus_stop_the_run_before_its_first_stage(
    options: list[str], directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, NVIDIA A100, 81920, 81000, 580.65.06, 8.0'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UserError, match=r"needs 8 NVIDIA GPU\(s\), but 1 are visible.*lower grpo\.gpus_per_node"):
        run([*options, "--profile", "gpu", "--set", "grpo.gpus_per_node=8"])
    assert not directory.path.exists()


def test_a_dry_run_names_every_stage_and_path_and_changes_nothing(
    options: list[str], directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    run([*options, "--dry-run"])
    plan = capsys.readouterr().out
    for folder in (directory.data, directory.sft, directory.grpo, directory.evaluation("base"), directory.report):
        assert str(folder) in plan
    assert "at most 1536 tokens (agent.context_tokens)" in plan
    assert not directory.path.exists()


@pytest.mark.parametrize(
    ("choice", "stages"),
    [
        (["--only", "data", "report"], ["data", "report"]),
        (["--from", "grpo"], ["data", "base-eval", "sft", "grpo", "grpo-eval", "report"]),
    ],
)
def test_a_dry_run_names_only_the_stages_that_would_run(
    options: list[str],
    directory: RunDirectory,
    capsys: pytest.CaptureFixture[str],
    choice: list[str],
    stages: list[str],
) -> None:
    finished = directory.evaluation("sft")
    begin_stage(finished, "x")
    finish_stage(finished, "x", seconds=1, outputs={"model": "/nowhere"})
    run([*options, *choice, "--dry-run"])
    plan = capsys.readouterr().out
    assert re.findall(r"^([\w-]+):", plan, re.MULTILINE) == stages


def test_two_runners_do_not_share_a_run(options: list[str], directory: RunDirectory) -> None:
    with locked(directory.path):
        second = subprocess.run(
            ["env", "-u", "FIRSTCALL_LOCKED_RUN", *RUNNER, *options, "--only", "data"], capture_output=True, text=True
        )
    assert second.returncode == 2
    assert "is in use by process" in second.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "sft.epoch=1"], "did you mean sft.epochs?"),
        (["--only", "training"], "--only cannot be 'training'. The choices are data, base-eval, sft, "),
        (["--only", "gpro"], "did you mean grpo?"),
        (["--only", "data", "--from", "sft"], "--from and --only exclude each other"),
        (["--config", "nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["--profile", "tpu"], "--profile cannot be 'tpu'; did you mean gpu?"),
        (["--run-name"], "--run-name needs a value"),
        (["--run-name", "../x"], "may hold only letters"),
        (["cehck"], "`run_pipeline.py` has no command 'cehck'; did you mean check?"),
        (["ask", "--datbase", "x", "--database", "y"], "`run_pipeline.py ask` has no option --datbase; did you mean"),
        (["check", "--fsat"], "`run_pipeline.py check` has no option --fsat; did you mean --fast?"),
        (["--profile", "cpu", "check"], "The command check must come first: `run_pipeline.py check ...`."),
    ],
)
def test_wrong_options_end_in_a_sentence_and_status_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPO)
    assert as_main(["run_pipeline.py", *arguments], monkeypatch) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["data", "imprt", "x"], "`python -m data` has no command 'imprt'; did you mean import?"),
        (["data", "import"], "source is missing; `python -m data import --help`"),
        (["stage1_sft", "mrge"], "`python -m stage1_sft` has no command 'mrge'; did you mean merge?"),
        (["stage2_grpo", "doctr"], "`python -m stage2_grpo` has no command 'doctr'; did you mean doctor?"),
        (["stage2_grpo", "doctor", "--quik"], "did you mean --quick?"),
        (["shared.report", "now"], "`python -m shared.report` has no argument 'now'."),
        (["shared.evaluation", "--model", "x", "--splti", "test"], "no option --splti; did you mean --split?"),
    ],
)
@pytest.mark.filterwarnings("ignore:.* found in sys.modules after import of package:RuntimeWarning")
def test_an_unknown_command_or_option_names_the_nearest(
    argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert as_main(["-m", *argv], monkeypatch) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("module", ["data", "stage1_sft", "stage2_grpo"])
@pytest.mark.filterwarnings("ignore:.* found in sys.modules after import of package:RuntimeWarning")
def test_help_gives_each_command_a_line(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert as_main(["-m", module, "--help"], monkeypatch) == 0
    listed = capsys.readouterr().out.partition("commands (")[2].splitlines()[1:]
    commands = {"data": "import synthesize", "stage1_sft": "yield convert merge",
                "stage2_grpo": "doctor budget gate smoke export"}[module]  # fmt: skip
    assert [line.split()[0] for line in listed] == commands.split()
    assert all(len(line.split()) > 3 for line in listed)


def test_help_names_the_commands_and_options_before_set_up() -> None:
    command = [sys.executable, "-S", *RUNNER[1:], "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for word in ("check", "setup", "--from", "--only", "base-eval", "--dry-run"):
        assert word in shown


def test_kill_9_and_the_same_command_again_end_in_the_same_result(
    options: list[str], directory: RunDirectory, tmp_path: Path
) -> None:
    command = [*RUNNER, *options, "--only", "data"]
    killed = subprocess.Popen(command, cwd=tmp_path)
    while not (directory.data / "started.json").exists():
        assert killed.poll() is None, "the runner ended before its stage began"
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    subprocess.run(command, cwd=tmp_path, check=True)
    again = {file.name: file.read_bytes() for file in directory.data.glob("*.jsonl")}
    shutil.rmtree(directory.data)
    subprocess.run(command, cwd=tmp_path, check=True)
    assert again == {file.name: file.read_bytes() for file in directory.data.glob("*.jsonl")}
    assert len(again) == 3


def readme_commands() -> list[str]:
    """Every command in a bash block of README.md and docs/, once."""
    pages = "\n".join(page.read_text() for page in (REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))))
    blocks = re.findall(r"```bash\n(.*?)```", pages, re.DOTALL)
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [*dict.fromkeys(filter(None, lines))]


@pytest.mark.filterwarnings("ignore:.* found in sys.modules after import of package:RuntimeWarning")
@pytest.mark.parametrize("line", readme_commands())
def test_every_command_of_the_readme_is_understood(
    line: str, spider: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is carried out as a dry run; `check` would run this very test, `--help` must do for it."""
    words = shlex.split(line.replace("PATH_TO_FOLDER", str(spider)).replace("=imported", f"={spider}"))
    words = [str(spider / "database" / "shop_0" / "shop_0.sqlite") if word == "shop.sqlite" else word for word in words]
    words = [word.replace("shop_questions", str(spider)) if "data.sources" in word else word for word in words]
    if words[0] in ("uv", "pip", "vllm"):  # programs of others: the files that they are given must exist
        assert all((REPO / word).exists() for word in words if word.startswith(("requirements/", "shared/")))
        return
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        monkeypatch.setenv(name, value)
    assert words[0] in ("python", ".venv/bin/python")
    only_help = words[1:3] in (["run_pipeline.py", "check"], ["run_pipeline.py", "setup"])
    argv = [*words[1:], "--help"] if only_help else [*words[1:], "--dry-run", "--profile", "cpu"]
    if {"ask", "serve", "package"} & {*words} and "--help" not in words:
        finished_run(tmp_path / "runs")
        monkeypatch.setenv("HF_TOKEN", "secret")
        database = str(spider / "database" / "shop_0" / "shop_0.sqlite")
        argv = [database if word == "flights.sqlite" else word for word in argv]
        argv += ["--set", f"runs_dir={tmp_path / 'runs'}"]
    if "yield" in words:
        importing.main([str(spider), "--out", str(tmp_path / "imported"), "--profile", "cpu"])
        argv[argv.index("imported")] = str(tmp_path / "imported")
    if {"shared.evaluation", "gate"} & {*words}:
        run(["--config", str(REPO / "pipeline.yaml"), "--profile", "cpu", "--only", "data",
             "--set", f"runs_dir={tmp_path}", "--set", f"data.sources={spider}"])  # fmt: skip
        (model := tmp_path / "model").mkdir()
        for file in ("config.json", "model.safetensors", "tokenizer.json"):
            (model / file).touch()
        monkeypatch.setenv("SFT_MODEL_PATH", str(model))
        argv = [re.sub("^[AB]$|runs/main/grpo/model", str(model), word) for word in argv]
        argv += ["--set", f"runs_dir={tmp_path}", "--set", "gate.questions=8"]
    monkeypatch.chdir(REPO)
    status = as_main(argv, monkeypatch)
    assert status == 0, capsys.readouterr().err


@pytest.mark.parametrize("module", ["shared.report", "stage2_grpo"])
def test_a_command_starts_in_a_python_of_its_own(module: str) -> None:
    """Those that no other test starts: the dry runs above find all modules imported."""
    ended = subprocess.run([sys.executable, "-m", module, "--help"], cwd=REPO, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("usage: ")


def as_main(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run what `python ARGV` runs, in this process, whose start outlasts most dry runs; returns the exit status."""

    def refuse(*_: object) -> None:
        raise AssertionError(
            "these tests need the Python of the repository's .venv"
        )  # the runner would replace this process

    monkeypatch.setattr(os, "execv", refuse)
    before = signal.getsignal(signal.SIGTERM)  # commands set it
    monkeypatch.setattr(sys, "argv", argv[1:] if argv[0] == "-m" else argv)
    try:
        if argv[0] == "-m":
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0

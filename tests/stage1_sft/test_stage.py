"""The stage as a command: what it says, skips, continues and refuses."""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from shared.config.schema import Config
from shared.errors import UserError
from shared.records import read_questions, write_jsonl
from shared.runs.manifest import RunDirectory, read_manifest
from stage1_sft import stage
from tests.shared.examples import tokenizer_folder
from tests.stage1_sft.examples import JOIN, ROOT, questions, settings, with_gold
from tests.tiny_model import save_tiny_model


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stage1_sft", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def _run_with_data(folder: Path) -> RunDirectory:
    run = RunDirectory(folder / "runs" / "test")
    run.data.mkdir(parents=True)
    rows = questions(folder)
    write_jsonl(run.data / "train.jsonl", rows[2:])
    write_jsonl(run.data / "val.jsonl", rows[:2])
    return run


def test_help_names_the_options_and_the_merge_command() -> None:
    done = _command("--help")
    assert done.returncode == 0
    for word in ("--profile", "--set", "--run-name", "--dry-run", "--traces-only", "merge ADAPTER --out FOLDER"):
        assert word in done.stdout


def test_a_dry_run_prints_every_path_and_writes_nothing(tmp_path: Path) -> None:
    done = _command("--profile", "cpu", "--dry-run", "--set", f"runs_dir={tmp_path}", "--run-name", "x")
    assert done.returncode == 0, done.stderr
    for path in ("models/smollm2-135m", "x/data/train.jsonl (not there yet)", "x/sft/traces.jsonl", "x/sft/merged"):
        assert f"{tmp_path}/{path}" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_without_data_the_stage_says_how_to_prepare_it(tmp_path: Path) -> None:
    done = _command("--profile", "cpu", "--set", f"runs_dir={tmp_path}", "--run-name", "x")
    assert done.returncode == 2
    assert "run `python -m data --run-name x` first" in done.stderr


def test_other_settings_data_or_model_ask_for_a_new_training(tmp_path: Path) -> None:
    run = _run_with_data(tmp_path)
    mark = stage.stage_fingerprint(settings(), run)
    assert stage.stage_fingerprint(settings("vllm.max_num_seqs=3"), run) == mark
    assert stage.stage_fingerprint(settings("sft.learning_rate=0.5"), run) != mark
    taught = stage.stage_fingerprint(settings("teacher.endpoint=http://x/v1"), run)
    assert taught != mark
    assert stage.stage_fingerprint(settings("teacher.endpoint=http://x/v1", "teacher.prompt_price=2.5"), run) == taught
    assert stage.stage_fingerprint(settings("model=Org/Name"), run) != mark
    assert stage.stage_fingerprint(settings("teacher.temperature=0.3"), run) == mark
    played = stage.stage_fingerprint(settings("sft.rounds=1"), run)
    assert stage.stage_fingerprint(settings("sft.rounds=1", "teacher.temperature=0.3"), run) != played
    with (run.data / "val.jsonl").open("a") as stream:
        stream.write("\n")
    assert stage.stage_fingerprint(settings(), run) != mark


def test_the_seed_orders_the_traces_not_the_file_of_questions(tmp_path: Path) -> None:
    run, base = _run_with_data(tmp_path), tokenizer_folder(tmp_path)
    file = run.data / "train.jsonl"

    def order(seed: int) -> list[str]:
        shutil.rmtree(run.sft, ignore_errors=True)
        run.sft.mkdir()
        return [trace["id"] for trace in stage.make_traces(settings(f"seed={seed}"), run, base)[0]]

    first = order(0)
    write_jsonl(file, reversed(list(read_questions(file))))
    assert order(0) == first
    assert sorted(order(1)) == sorted(first)
    assert order(1) != first


def test_every_beginning_of_the_order_is_balanced_over_forms_tables_and_databases(tmp_path: Path) -> None:
    one, join, *_ = questions(tmp_path)
    join = with_gold(join, JOIN)
    rows = [dataclasses.replace(one, id=f"list{i}", form="list/equal", db_id=f"db{i % 3}") for i in range(81)]
    rows += [dataclasses.replace(join, id=f"join{i}", form="list", db_id="db0") for i in range(9)]
    rows += [dataclasses.replace(one, id=f"rare{i}", form="rare/equal") for i in range(4)]
    first = stage.drawn(rows, 0)[:32]
    kinds = Counter(question.id.rstrip("0123456789") for question in first)
    assert kinds == {"list": 19, "join": 9, "rare": 4}
    assert max(Counter(q.db_id for q in first if q.id.startswith("list")).values()) == 7
    assert stage.drawn(rows[::-1], 0)[:32] == first


def test_what_was_dropped_and_answers_without_a_language_are_said_in_a_sentence(tmp_path: Path) -> None:
    run, rows = _run_with_data(tmp_path), questions(tmp_path / "runs")
    rows[2] = with_gold(rows[2], "SELECT nothing FROM claims")
    rows[3] = dataclasses.replace(rows[3], question="Ilu klientów?")
    write_jsonl(run.data / "train.jsonl", rows[2:])
    run.sft.mkdir()
    _, _, counts = stage.make_traces(settings(), run, tokenizer_folder(tmp_path))
    assert counts["train"]["languages"] == {"English": 5, "unknown": 1}
    assert stage.counts_line({**counts["train"], "too_long": 2}) == (
        "6 traces; questions that gave none: 1 (gold fails: 1); traces left out as longer than agent.context_tokens: "
        "2; traces that answer with bare values: 1, because their questions are in none of the languages in which "
        "answers are written (English, German, French, Spanish, Italian, Portuguese, Dutch)"
    )
    assert stage.counts_line(counts["val"]) == "2 traces"
    write_jsonl(run.data / "val.jsonl", rows[2:3])
    shutil.rmtree(run.sft)
    run.sft.mkdir()
    with pytest.raises(UserError, match=r"gives a trace \(0 traces; questions that gave none: 1 \(gold fails: 1\)\)"):
        stage.make_traces(settings(), run, tokenizer_folder(tmp_path))


@pytest.mark.slow
def test_the_stage_trains_merges_is_skipped_and_repairs_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    run, config = _run_with_data(tmp_path), _tiny_settings(tmp_path)
    merged = stage.run(config, run)
    assert f"SFT_MODEL_PATH={merged}" in capsys.readouterr().out
    manifest = read_manifest(run.sft)
    assert manifest
    assert manifest["outputs"]["model"] == str(merged)
    assert manifest["counts"]["train"]["traces"] == 7
    assert manifest["figures"]["greedy_same_merged"] == 1.0
    assert stage.run(config, run) == merged
    assert "already trained" in capsys.readouterr().out
    shutil.rmtree(merged)
    stage.run(config, run)
    assert (merged / "model.safetensors").exists()
    with pytest.raises(UserError, match=r"longer than agent\.context_tokens"):
        stage.run(_tiny_settings(tmp_path, "agent.context_tokens=50"), run)
    assert stage.run(config, run) == merged
    assert "already trained" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.xdist_group("servers")
def test_a_self_taught_round_trains_the_base_anew_and_is_not_played_again(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    run = _run_with_data(tmp_path)
    config = _tiny_settings(
        tmp_path, "sft.epochs=2", "sft.rounds=1", "sft.round_samples=2", "sft.round_questions=3",
        "agent.max_turn_tokens=96", "agent.max_turns=4", "vllm.cpu_kv_cache_gib=1",
    )  # fmt: skip
    folder = run.sft / "round-1"
    assert stage.run(config, run) == folder / "merged"
    manifest = read_manifest(run.sft)
    assert manifest
    assert manifest["outputs"]["adapter"].startswith(str(folder / "checkpoints"))
    (brought,) = manifest["rounds"]
    assert (brought["asked"], brought["episodes"]) == (3, 6)
    assert len((folder / "traces.jsonl").read_text().splitlines()) == manifest["counts"]["train"]["traces"]
    played, first = (folder / "vllm.log").stat().st_mtime_ns, (run.sft / "merged" / "model.safetensors").stat()
    (run.sft / "manifest.json").unlink()
    shutil.rmtree(folder / "merged")  # as if it had been interrupted in the last merge
    assert stage.run(config, run) == folder / "merged"
    assert (folder / "vllm.log").stat().st_mtime_ns == played
    assert (run.sft / "merged" / "model.safetensors").stat() == first
    assert (read_manifest(run.sft) or {})["rounds"] == [brought]


@pytest.mark.slow
def test_traces_alone_are_taken_over_by_the_training(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    run, config = _run_with_data(tmp_path), _tiny_settings(tmp_path)
    stage.only_traces(config, run)
    file = run.sft / "traces.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {"id", "db_id", "messages", "tools", "trained", "gold_sql", "provenance"} == set(rows[0])
    written = file.stat().st_mtime_ns
    stage.run(config, run)
    assert file.stat().st_mtime_ns == written


@pytest.mark.parametrize("damaged", ["traces.jsonl", "traces.counts.json"])
def test_damaged_traces_are_made_again(tmp_path: Path, damaged: str) -> None:
    run, config = _run_with_data(tmp_path), settings(f"runs_dir={tmp_path / 'runs'}")
    run.sft.mkdir()
    first = stage.make_traces(config, run, tokenizer_folder(tmp_path))
    file = run.sft / damaged
    whole = file.read_text()
    file.write_text(whole[: len(whole) // 2])
    assert stage.make_traces(config, run, tokenizer_folder(tmp_path)) == first
    assert file.read_text() == whole


def _tiny_settings(folder: Path, *overrides: str) -> Config:
    model = folder / "model"
    if not model.exists():
        save_tiny_model(model)
    return settings(
        f"model={model}", f"runs_dir={folder / 'runs'}", "agent.context_tokens=4096", "sft.batch_size=4",
        "sft.eval_steps=2",
        "sft.learning_rate=0.01", *overrides,
    )  # fmt: skip

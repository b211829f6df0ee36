import json
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import UserError
from shared.models.folder import adapter_base, check_model_folder
from stage1_sft.base_model import BUILT_IN, locate, resolve
from tests.stage1_sft.examples import ROOT


def _folder(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in names:
        (path / name).write_text("{}")
    return path


def test_an_adapter_as_model_is_refused_with_the_command_that_merges_it(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "adapter", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json")
    with pytest.raises(UserError, match=f"python -m stage1_sft merge {folder} --out FOLDER"):
        resolve(str(folder), tmp_path / "cache")


@pytest.mark.parametrize(
    ("names", "lacking"),
    [
        (["model.safetensors", "tokenizer.json"], "config.json"),
        (["config.json", "tokenizer.json"], "weights"),
        (["config.json", "model.safetensors"], "tokenizer"),
    ],
)
def test_an_incomplete_model_folder_is_refused_with_what_it_lacks(
    tmp_path: Path, names: list[str], lacking: str
) -> None:
    with pytest.raises(UserError, match=lacking):
        resolve(str(_folder(tmp_path / "model", *names)), tmp_path / "cache")


def test_a_missing_shard_is_noticed(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", "config.json", "tokenizer.json", "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="weights"):
        check_model_folder(folder)
    (folder / "model-2.safetensors").touch()
    check_model_folder(folder)


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_damaged_index_counts_as_missing_weights(tmp_path: Path, index: str) -> None:
    folder = _folder(tmp_path / "model", "config.json", "tokenizer.json", "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match="no complete weights"):
        check_model_folder(folder)


@pytest.mark.parametrize("name", ["no_such_folder", "./no_such_folder"])
def test_a_name_that_is_neither_folder_nor_hub_id_is_refused(tmp_path: Path, name: str) -> None:
    for find in (resolve, locate):
        with pytest.raises(UserError, match="neither a folder, nor a hub id"):
            find(name, tmp_path)


def test_a_folder_that_is_no_adapter_is_named_at_once(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "stage1_sft",
        "merge",
        str(tmp_path),
        "--out",
        str(tmp_path / "x"),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "not a LoRA adapter" in ended.stderr
    assert " torch\n" not in ended.stderr
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"adapter_model\.safetensors"):
        adapter_base(tmp_path)


def test_locating_a_model_touches_nothing(tmp_path: Path) -> None:
    assert locate(BUILT_IN, tmp_path / "cache") == tmp_path / "cache" / BUILT_IN
    assert locate(str(tmp_path), tmp_path / "cache") == tmp_path
    assert locate("Org/Name", tmp_path / "cache") is None
    assert list(tmp_path.iterdir()) == []
